"""Between vLLM's scheduler and the chooser: requests become views, lengths become spec_token_ids, outputs become outcomes.

Knows vLLM's records by their attributes only and imports none of it. One step, as vLLM's engine core runs it:

    before_schedule()                 sync: trims each request's drafts to what is worth verifying
    after_schedule(output)            notes what runs
    note_drafts(drafts)               sync: what they took
    place(output)                     async: how many drafts to make now and verify in the next step
    read_output(output, sampled)      what each row did, before vLLM changes the requests
    after_output()                    after it did: the policy learns. A second call does nothing
"""

from __future__ import annotations

import itertools
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from headway.control.policy import SequenceView
from headway.control.trace import TraceWriter
from headway.errors import InvalidRequestError
from headway.types import Draft
from headway.vllm.chooser import Chooser, Decision, Load, RowOutcome, StepOutcome, Tracked
from headway.vllm.counters import Counters
from headway.vllm.evidence import History
from headway.vllm.settings import RequestSettings

logger = logging.getLogger("vllm.headway")

GREEDY = 1e-5    # temperature below which vLLM samples greedily


@dataclass(slots=True)
class _Flight:
    """A step that was scheduled and whose output is not there yet."""

    output: Any
    decision: Decision | None
    rested: bool = False      # nothing was drafted for it, nothing decided


@dataclass(slots=True)
class _Request(Tracked):
    settings: RequestSettings = field(default_factory=RequestSettings)
    history: History | None = None


class Adapter:
    """`scheduler` is vLLM's, with our hooks. `copies`: drafts are copied from the request's own text. `clock` in seconds."""

    def __init__(
        self, scheduler: Any, chooser: Chooser, counters: Counters, *, trace: TraceWriter | None = None,
        copies: bool = False, clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._scheduler, self.chooser, self.counters = scheduler, chooser, counters
        self._trace, self._copies, self._clock = trace, copies, clock
        self._requests: dict[str, _Request] = {}
        self._seq_ids = itertools.count()
        self._flights: deque[_Flight] = deque()
        self._decision: Decision | None = None      # for the step about to be scheduled
        self._rests = False                         # that step
        self._lengths: dict[int, int] = {}          # of the latest decision
        self._outcome: tuple[_Flight, StepOutcome] | None = None
        self._mark: float | None = None             # when the step before ended; None: nothing ran
        self._drafted = False                       # at the end of the step scheduled last

    # -- the hooks -----------------------------------------------------------------------------------------------------

    def num_to_draft(self) -> int:
        """Sync: drafts per request to make at the end of the step that is being scheduled."""
        self._drafted = self.chooser.wants_drafts
        return self.chooser.max_k if self._drafted else 0

    def note_drafts(self, drafts: Any) -> None:
        """Drafts arrived; those of our proposer say what they took. It is part of the step that has just ended."""
        draft_ms = sum(getattr(draft, "draft_ms", 0.0) for draft in drafts.draft_token_ids[:1])
        self.counters.draft_ms += draft_ms
        self.counters.verify_ms -= draft_ms

    def before_schedule(self) -> None:
        scheduler, self._decision, self._rests = self._scheduler, None, False
        if not (scheduler.running or len(scheduler.waiting)):
            self._mark = None
            self._prune()
            return
        if self._mark is None:
            self._mark = self._clock()
        if not (self._drafted or self._trace or self._flights or self.chooser.wants_drafts):
            self._rests = True
            self.chooser.rest()
            return
        running = [(request, self._of(request)) for request in scheduler.running]
        held = [(request, tracked) for request, tracked in running if request.spec_token_ids]
        drafts = {tracked.seq_id: self._draft(request, tracked) for request, tracked in held}
        if any(flight.decision for flight in self._flights):   # pipeline parallel: another batch is under way
            usual = max(self._lengths.values(), default=0)
            lengths = {seq_id: min(self._lengths.get(seq_id, usual), len(draft)) for seq_id, draft in drafts.items()}
        else:
            views = [self._view(request, tracked) for request, tracked in running]
            views += [self._view(request, self._of(request)) for request in self._to_admit()]
            self._decision = self.chooser.trim(views, drafts, self._load(), drafted=self._drafted)
            self._lengths = lengths = self._decision.lengths
            self.chooser.shadow(self._decision, {tracked.seq_id: tracked for _, tracked in running}, drafts)
        for request, tracked in held:
            request.spec_token_ids = request.spec_token_ids[: lengths.get(tracked.seq_id, 0)]   # a plain list, whatever it was

    def place(self, output: Any) -> Callable[[], None]:
        """Sets the number of drafts to make in `output`; what it returns gives each request its placeholders, after vLLM did."""
        scheduler = self._scheduler
        requests = [scheduler.requests[req_id] for req_id in output.num_scheduled_tokens]
        ending = [request for request in requests if self._writes(request, output.num_scheduled_tokens[request.request_id])]
        views = [self._view(request, self._of(request), decoding=True) for request in ending]
        views += [self._view(request, self._of(request)) for request in self._to_admit()]
        decision, is_new = self.chooser.place(views, self._load())
        self._decision = decision if is_new else None
        output.num_spec_tokens_to_schedule = max(decision.lengths.values(), default=0)

        def give_placeholders() -> None:
            for request in ending:
                if not request.is_prefill_chunk:
                    request.spec_token_ids = [-1] * decision.lengths.get(self._of(request).seq_id, 0)

        return give_placeholders

    def after_schedule(self, output: Any, *, decided_before: Decision | None = None) -> None:
        """`decided_before`: async, what the step before chose for this one."""
        if output.total_num_scheduled_tokens > 0:
            if self._mark is None:
                self._mark = self._clock()
            self._flights.append(_Flight(output, decided_before or self._decision, self._rests))

    def take_decision(self) -> Decision | None:
        """Async: what was placed, to be handed to `after_schedule` of the next step."""
        decision, self._decision = self._decision, None
        return decision

    def read_output(self, output: Any, model_output: Any) -> None:
        self._outcome = None
        flight = self._landed(output)
        if flight is None:
            return
        now = self._clock()
        began, self._mark = now if self._mark is None else self._mark, now
        if flight.rested:
            self._count(output, model_output, (now - began) * 1e3)
            return
        rows: list[RowOutcome] = []
        num_prefill = num_context = 0
        invalid = getattr(output, "num_invalid_spec_tokens", None) or {}
        for req_id, num_tokens in output.num_scheduled_tokens.items():
            request = self._scheduler.requests.get(req_id)
            if request is None or request.is_finished():
                continue
            if getattr(request, "num_stale_output_tokens", 0) > 0:
                self.counters.num_stale_outputs += 1
                continue
            scheduled = len(output.scheduled_spec_decode_tokens.get(req_id, ()))
            decodes = num_tokens == 1 + scheduled and request.num_output_tokens > 0
            num_prefill += 0 if decodes else num_tokens
            num_context += request.num_computed_tokens - scheduled
            index = model_output.req_id_to_index[req_id]
            written = model_output.sampled_token_ids[index] if model_output.sampled_token_ids else ()
            if len(written):
                num_drafts = max(0, scheduled - invalid.get(req_id, 0))
                rows.append(RowOutcome(self._of(request), num_drafts, min(len(written) - 1, num_drafts), request.num_tokens))
        num_rows, waiting = len(output.num_scheduled_tokens), len(self._scheduler.waiting)
        self._outcome = flight, StepOutcome(
            tuple(rows), (now - began) * 1e3, output.total_num_scheduled_tokens, num_prefill, num_context, num_rows, waiting
        )

    def _count(self, output: Any, model_output: Any, step_ms: float) -> None:
        """A step in which Headway rested: counted, and nothing is learned."""
        requests, known, written = self._scheduler.requests, self._requests, model_output.sampled_token_ids
        num_rows = 0
        for req_id, index in model_output.req_id_to_index.items():
            request = requests.get(req_id)
            if request is not None and written and written[index] and not request.is_finished():
                num_rows += 1
                if req_id not in known:
                    self._of(request)
        self.counters.observe_plain(num_rows, output.total_num_scheduled_tokens, step_ms)

    def after_output(self) -> None:
        if self._outcome is not None:
            (flight, outcome), self._outcome = self._outcome, None
            self.chooser.compare([row.tracked for row in outcome.rows])
            feedback = self.chooser.observe(flight.decision, outcome)
            self.counters.observe_feedback(feedback)
            if self._trace and flight.decision:
                self._trace.write(flight.decision.view, feedback)
        self._prune()
        if not (self._scheduler.running or len(self._scheduler.waiting) or self._flights):
            self._mark = None
            if self._trace:
                self._trace.flush()   # the next step may be long in coming

    def close(self) -> None:
        if self._trace:
            self._trace.close()

    # -- vLLM's records ------------------------------------------------------------------------------------------------

    def _of(self, request: Any) -> _Request:
        found = self._requests.get(request.request_id)
        if found is None:
            params = request.sampling_params
            try:
                settings = RequestSettings.parse(params.extra_args if params else None)
            except InvalidRequestError as error:
                self.counters.num_invalid_requests += 1
                logger.warning("request %s: %s. It is served without these wishes", request.request_id, error)
                settings = RequestSettings()
            found = _Request(next(self._seq_ids), request.all_token_ids, settings=settings)
            self._requests[request.request_id] = found
        return found

    def _view(self, request: Any, tracked: _Request, decoding: bool | None = None) -> SequenceView:
        params = request.sampling_params
        placeholders = getattr(request, "num_output_placeholders", 0)
        num_context, num_output = request.num_tokens + placeholders, request.num_output_tokens + placeholders
        pending = max(1, num_context - request.num_computed_tokens)
        if decoding is None:
            decoding = pending == 1 and num_output > 0
        return SequenceView(
            seq_id=tracked.seq_id,
            num_context=num_context,
            num_output=num_output,
            decoding=decoding,
            max_k=self._max_k(request, tracked.settings, num_context, num_output) if decoding else 0,
            greedy=params is None or params.temperature < GREEDY,
            priority=request.priority,
            num_drafts=tracked.num_drafts,
            num_accepted=tracked.num_accepted,
            num_pending=pending,
            tpot_slo_ms=tracked.settings.tpot_slo_ms,
        )

    def _max_k(self, request: Any, settings: RequestSettings, num_context: int, num_output: int) -> int:
        """What the request, its remaining tokens and the context limit allow."""
        if not settings.enabled:
            return 0
        most = self.chooser.max_k if settings.max_tokens is None else min(self.chooser.max_k, settings.max_tokens)
        return max(0, min(most, int(request.max_tokens) - num_output - 1, int(self._scheduler.max_model_len) - num_context - 1))

    def _to_admit(self) -> Iterable[Any]:
        """Waiting requests that the step to come has room for: their prompts are part of its price."""
        room = self._scheduler.max_num_running_reqs - len(self._scheduler.running)
        budget = self._scheduler.max_num_scheduled_tokens
        for request in itertools.islice(self._scheduler.waiting, max(0, room)):
            if budget <= 0:
                return
            budget -= request.num_tokens
            yield request

    def _load(self) -> Load:
        scheduler = self._scheduler
        return Load(
            len(scheduler.waiting), scheduler.kv_cache_manager.block_pool.get_num_free_blocks(), scheduler.max_num_scheduled_tokens
        )

    def _draft(self, request: Any, tracked: _Request) -> Draft:
        """Its confidence is the proposer's (`ScoredDraft`) or, of a copy, what the text says."""
        tokens = request.spec_token_ids
        confidence: Sequence[float] | None = getattr(tokens, "confidence", None)
        if self._copies:
            tracked.history = tracked.history or History(request.all_token_ids)
            confidence = tracked.history.confidence(tokens)
        return Draft(list(tokens), confidence=list(confidence[: len(tokens)]) if confidence else None)

    def _writes(self, request: Any, num_tokens: int) -> bool:
        """Whether the step that is being scheduled reaches the end of what is known of the request."""
        return bool(request.num_computed_tokens + num_tokens >= request.num_tokens + getattr(request, "num_output_placeholders", 0))

    def _landed(self, output: Any) -> _Flight | None:
        while self._flights:
            flight = self._flights.popleft()
            if flight.output is output:
                return flight
        return None

    def _prune(self) -> None:
        live = self._scheduler.requests
        if len(self._requests) > len(live):
            for req_id in self._requests.keys() - live.keys():
                self.chooser.forget(self._requests.pop(req_id).seq_id)
