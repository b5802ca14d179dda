"""vLLM's scheduler as a host of the driver: its requests become views, lengths become spec_token_ids, its outputs become outcomes.

vLLM drafts at the end of a step what the next step verifies. Two ways to decide follow from that:

    trim    (sync scheduling) the drafts are there when the next step is scheduled. The policy plans and selects over them as it does in
            the embedded engine; what it does not verify is compared with what the target writes later, at no cost.
    place   (async scheduling) the drafts stay on the device and only their number is chosen, before they are drawn. Steps overlap: a
            choice is held until its outcome is known, and only that outcome is shown to the policy.

In both, whether a draft is verified depends on what was known before it was drawn, or the draft is a function of its prefix: lossless by
the rule of control/policy.py. One step, as vLLM's engine core runs it:

    before_schedule()                 sync: trims each request's drafts to what is worth verifying
    after_schedule(output)            notes what runs
    note_drafts(drafts)               sync: what they took
    place(output)                     async: how many drafts to make now and verify in the next step
    read_output(output, sampled)      what each row did, before vLLM changes the requests
    after_output()                    after it did: the policy learns. A second call does nothing
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from headway.control.driver import NOBODY, DraftCall, Driver, OpenStep, Proposals, RowOutcome, StepOutcome
from headway.control.policy import BatchView, DrafterView, Policy, SequenceView
from headway.control.shadows import Shadows
from headway.telemetry.trace import TraceWriter
from headway.types import Choice, Draft, ShadowFeedback
from headway.vllm.requests import Requests
from headway.vllm.scheduler_counters import Counters

PROBE_EVERY = 16     # choices between two requests that are drafted for although speculation is off (place)
QUIET = 16           # choices in a row without a draft worth verifying, after which drafts are made in one step of REST only (trim)
REST = 4
SHADOWS = 16         # drafts compared per step, in turns: a large batch has more evidence than the policy takes


@dataclass(slots=True)
class Decision:
    """What was chosen for one step, until its outcome is known. lengths: seq_id -> drafts to verify."""

    step: OpenStep
    lengths: dict[int, int]
    probed: int | None = None   # verified although the policy wished for a shadow draft only


@dataclass(slots=True)
class _Flight:
    """A step that was scheduled and whose output is not there yet."""

    output: Any
    decision: Decision | None
    rested: bool = False      # nothing was drafted for it, nothing decided


class Adapter:
    """One policy for one scheduler of vLLM, whose thread owns this. `copies`: drafts are copied from the request's own text."""

    def __init__(
        self, scheduler: Any, policy: Policy, drafter: DrafterView, max_k: int, counters: Counters, *,
        trace: TraceWriter | None = None, copies: bool = False, clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`policy`: started for this drafter and `max_k`."""
        self.requests = Requests(scheduler, drafter.name, max_k, counters, copies)
        self.shadows = _AheadShadows(self.requests.by_seq_id)
        self.driver = Driver(policy, (drafter,), self.shadows)
        self.drafter, self.max_k, self.counters = drafter.name, max_k, counters
        self._scheduler, self._trace, self._clock = scheduler, trace, clock
        self._flights: deque[_Flight] = deque()
        self._step = 0
        self._num_quiet = self._num_placed = 0
        self._decision: Decision | None = None      # for the step about to be scheduled
        self._held: Decision | None = None          # place: in force, its outcome not known yet
        self._rests = False                         # the step about to be scheduled
        self._lengths: dict[int, int] = {}          # of the latest decision
        self._outcome: tuple[_Flight, StepOutcome] | None = None
        self._mark: float | None = None             # when the step before ended; None: nothing ran
        self._drafted = False                       # at the end of the step scheduled last

    # -- the hooks -----------------------------------------------------------------------------------------------------

    def num_to_draft(self) -> int:
        """Sync: drafts per request to make at the end of the step that is being scheduled."""
        self._drafted = self._wants_drafts
        return self.max_k if self._drafted else 0

    def note_drafts(self, drafts: Any) -> None:
        """Drafts arrived; those of our proposer say what they took. It is part of the step that has just ended."""
        draft_ms = sum(getattr(draft, "draft_ms", 0.0) for draft in drafts.draft_token_ids[:1])
        self.counters.observe_draft(draft_ms)

    def before_schedule(self) -> None:
        scheduler, self._decision, self._rests = self._scheduler, None, False
        if not (scheduler.running or len(scheduler.waiting)):
            self._mark = None
            self._forget_ended()
            return
        if self._mark is None:
            self._mark = self._clock()
        if not (self._drafted or self._trace or self._flights or self._wants_drafts):
            self._rests = True
            self._step += 1
            return
        running = [(request, self.requests.of(request).seq_id) for request in scheduler.running]
        held = [(request, seq_id) for request, seq_id in running if request.spec_token_ids]
        drafts = {seq_id: self.requests.draft(request) for request, seq_id in held}
        if any(flight.decision for flight in self._flights):   # pipeline parallel: another batch is under way
            usual = max(self._lengths.values(), default=0)
            lengths = {seq_id: min(self._lengths.get(seq_id, usual), len(draft)) for seq_id, draft in drafts.items()}
        else:
            self._decision = self._trim([self.requests.view(request) for request, _ in running], drafts)
            self._lengths = lengths = self._decision.lengths
            self.shadows.compare_unverified(self._step, self.drafter, drafts, lengths)
        for request, seq_id in held:
            request.spec_token_ids = request.spec_token_ids[: lengths.get(seq_id, 0)]   # a plain list, whatever it was

    def place(self, output: Any) -> Callable[[], None]:
        """Sets the number of drafts to make in `output`; what it returns gives each request its placeholders, after vLLM did."""
        scheduler = self._scheduler
        requests = [scheduler.requests[req_id] for req_id in output.num_scheduled_tokens]
        ending = [request for request in requests if _writes(request, output.num_scheduled_tokens[request.request_id])]
        views = [self.requests.view(request, decoding=True) for request in ending]
        if self._held is None:
            self._held = self._decision = self._place(views)
            lengths = self._held.lengths
        else:
            self._decision, held = None, self._held.lengths
            usual = max(held.values(), default=0)
            lengths = {seq.seq_id: min(held.get(seq.seq_id, usual), seq.max_k) for seq in views}
        output.num_spec_tokens_to_schedule = max(lengths.values(), default=0)

        def give_placeholders() -> None:
            for request in ending:
                if not request.is_prefill_chunk:
                    request.spec_token_ids = [-1] * lengths.get(self.requests.of(request).seq_id, 0)

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
        self._outcome = flight, self._read(flight, model_output, (now - began) * 1e3)

    def after_output(self) -> None:
        if self._outcome is not None:
            (flight, outcome), self._outcome = self._outcome, None
            self._observe(flight.decision, outcome)
        self._forget_ended()
        if not (self._scheduler.running or len(self._scheduler.waiting) or self._flights):
            self._mark = None
            if self._trace:
                self._trace.flush()   # the next step may be long in coming

    def close(self) -> None:
        if self._trace:
            self._trace.close()

    # -- decisions -----------------------------------------------------------------------------------------------------

    @property
    def _wants_drafts(self) -> bool:
        """Whether drafts made at the end of this step may be worth their time."""
        return (self._num_quiet < QUIET or self._step % REST == 0) and not self.driver.rests(self._step + 1)

    def _trim(self, views: Sequence[SequenceView], drafts: Mapping[int, Draft]) -> Decision:
        """Which of `drafts` (seq_id -> Draft, not empty) to verify."""
        if not self._drafted:   # the policy must not take it for an answer that there are none
            views = [replace(seq, max_k=0) for seq in views]
        decision = self._decide(views, partial(_made_ahead, drafts, {seq.seq_id for seq in views}))
        self._num_quiet = 0 if any(decision.lengths.values()) else self._num_quiet + bool(drafts)
        return decision

    def _place(self, views: Sequence[SequenceView]) -> Decision:
        """How many drafts to make and verify for each request in the next step."""
        decision = self._decide(views, _placeholders)
        step, self._num_placed = decision.step, self._num_placed + 1
        wished = _clamped(step.shadow_wishes, step.view)
        probe = next((item for item in wished.items() if item[0] not in step.drafts), None)
        if probe is not None and probe[1].k and self._num_placed % PROBE_EVERY == 0:
            decision.probed = probe[0]
            decision.lengths[probe[0]] = probe[1].k
        return decision

    def _decide(self, views: Sequence[SequenceView], propose: Callable[[DraftCall], Proposals]) -> Decision:
        self._step += 1
        view = self.requests.batch(self._step, views)
        step = self.driver.plan(view)
        granted = {seq.seq_id: NOBODY for seq in view.sequences if seq.decoding} | _clamped(step.wishes, view)
        self.driver.draft(step, granted, propose)
        self.driver.select(step)
        return Decision(step, dict(step.lengths))

    def _observe(self, decision: Decision | None, outcome: StepOutcome) -> None:
        """A step ended; `decision` None: it was not decided here (held, or nothing to decide), so the policy is not shown it."""
        if decision is not None and decision is self._held:
            self._held = None
        rows = [self._told(decision, row) for row in outcome.rows]
        step = decision.step if decision is not None else None
        feedback = self.driver.observe(step, replace(outcome, rows=rows, step=step.view.step if step else self._step))
        for row in outcome.rows:
            self.requests.by_seq_id[row.seq_id].count(row.num_drafts, row.num_accepted)
        self.counters.observe_feedback(feedback)
        if self._trace and step is not None:
            self._trace.write(step.view, feedback)

    def _told(self, decision: Decision | None, row: RowOutcome) -> RowOutcome:
        """A probe is told as a shadow draft that was judged."""
        if decision is None or row.seq_id != decision.probed:
            return row
        if row.num_drafts:
            self.shadows.tell(ShadowFeedback(row.seq_id, self.drafter, 0, row.num_drafts, row.num_accepted))
        return row._replace(num_drafts=0, num_accepted=0)

    # -- vLLM's records ------------------------------------------------------------------------------------------------

    def _read(self, flight: _Flight, model_output: Any, step_ms: float) -> StepOutcome:
        output = flight.output
        rows: list[RowOutcome] = []
        num_prefill = num_context = 0
        invalid = getattr(output, "num_invalid_spec_tokens", None) or {}
        for req_id, num_tokens in output.num_scheduled_tokens.items():
            request = self._scheduler.requests.get(req_id)
            if request is None or request.is_finished():
                continue
            if getattr(request, "num_stale_output_tokens", 0) > 0:
                self.counters.observe_stale_output()
                continue
            scheduled = len(output.scheduled_spec_decode_tokens.get(req_id, ()))
            decodes = num_tokens == 1 + scheduled and request.num_output_tokens > 0
            num_prefill += 0 if decodes else num_tokens
            num_context += request.num_computed_tokens - scheduled
            index = model_output.req_id_to_index[req_id]
            written = model_output.sampled_token_ids[index] if model_output.sampled_token_ids else ()
            if len(written):
                num_drafts = max(0, scheduled - invalid.get(req_id, 0))
                num_accepted = min(len(written) - 1, num_drafts)
                rows.append(RowOutcome(self.requests.of(request).seq_id, request.num_tokens, num_drafts, num_accepted))
        # vLLM does not tell drafting apart.
        return StepOutcome(
            self._step, rows, output.total_num_scheduled_tokens, num_prefill, num_context, len(output.num_scheduled_tokens),
            len(self._scheduler.waiting), 0.0, step_ms, step_ms,
        )  # fmt: skip

    def _count(self, output: Any, model_output: Any, step_ms: float) -> None:
        """A step in which Headway rested: counted, and nothing is learned."""
        requests, written = self._scheduler.requests, model_output.sampled_token_ids
        num_rows = 0
        for req_id, index in model_output.req_id_to_index.items():
            request = requests.get(req_id)
            if request is not None and written and written[index] and not request.is_finished():
                num_rows += 1
                if req_id not in self.requests:
                    self.requests.of(request)
        self.counters.observe_plain(num_rows, output.total_num_scheduled_tokens, step_ms)

    def _landed(self, output: Any) -> _Flight | None:
        while self._flights:
            flight = self._flights.popleft()
            if flight.output is output:
                return flight
        return None

    def _forget_ended(self) -> None:
        for seq_id in self.requests.forget_ended():
            self.driver.stop(seq_id)


class _AheadShadows(Shadows):
    """Shadow drafts of a drafter that has drafted for everybody before anything was planned."""

    def add(self, seq_id: int, drafter: str, draft: Draft, num_verified: int) -> None:
        """Only that there was nothing to propose: what is trimmed is seen by `compare_unverified`, and a placeholder is no draft."""
        if not draft.tokens:
            super().add(seq_id, drafter, draft, num_verified)

    def compare_unverified(self, step: int, drafter: str, drafts: Mapping[int, Draft], lengths: Mapping[int, int]) -> None:
        """What was drafted and will not be verified is compared with what the target writes, SHADOWS of them in turns."""
        unverified = [seq_id for seq_id, draft in drafts.items() if lengths.get(seq_id, 0) < len(draft)]
        first = step * SHADOWS % max(1, len(unverified))
        for seq_id in (unverified[first:] + unverified[:first])[:SHADOWS]:
            self.compare(seq_id)   # not done while the policy rested
            super().add(seq_id, drafter, drafts[seq_id], lengths.get(seq_id, 0))


def _made_ahead(drafts: Mapping[int, Draft], running: set[int], call: DraftCall) -> Proposals:
    """Trim: what was drafted at the end of the step before. A shadow draft that is there is compared anyway."""
    nothing = Draft([])
    return Proposals(
        {seq_id: drafts.get(seq_id, nothing).truncated(k) for seq_id, k in call.ks.items()},
        {seq_id: nothing for seq_id in call.shadow_ks if seq_id not in drafts and seq_id in running},
        draft_ms=None,
    )


def _placeholders(call: DraftCall) -> Proposals:
    """Place: every draft is as long as it is asked to be, and nothing is known about it yet but statistics."""
    return Proposals({seq_id: Draft([-1] * k) for seq_id, k in call.ks.items()}, {}, draft_ms=None)


def _writes(request: Any, num_tokens: int) -> bool:
    """Whether the step that is being scheduled reaches the end of what is known of the request."""
    return bool(request.num_computed_tokens + num_tokens >= request.num_tokens + getattr(request, "num_output_placeholders", 0))


def _clamped(wishes: Mapping[int, Choice], view: BatchView) -> dict[int, Choice]:
    """A plan may be older than this step: what each request allows now."""
    most = {seq.seq_id: seq.max_k for seq in view.sequences if seq.decoding}
    return {
        seq_id: choice if choice.k <= most[seq_id] else Choice(choice.drafter, most[seq_id])
        for seq_id, choice in wishes.items()
        if seq_id in most
    }
