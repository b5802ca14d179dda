"""vLLM's requests as a policy sees them. Knows vLLM's records by their attributes only and imports none of it."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from headway.control.policy import BatchView, SequenceView
from headway.errors import InvalidRequestError
from headway.types import Draft
from headway.vllm.copy_confidence import History
from headway.vllm.scheduler_counters import Counters
from headway.vllm.settings import RequestSettings

logger = logging.getLogger("vllm.headway")

GREEDY = 1e-5    # temperature below which vLLM samples greedily


@dataclass(slots=True)
class Tracked:
    """One request, as far as speculation is concerned. `token_ids` is live."""

    seq_id: int
    token_ids: Sequence[int]
    settings: RequestSettings = field(default_factory=RequestSettings)
    history: History | None = None      # of a drafter that copies from the request's own text
    num_drafts: int = 0
    num_accepted: int = 0

    def count(self, num_drafts: int, num_accepted: int) -> None:
        self.num_drafts += num_drafts
        self.num_accepted += num_accepted


class Requests:
    """`scheduler` is vLLM's. `copies`: drafts are copied from the request's own text. `by_seq_id` is live."""

    def __init__(self, scheduler: Any, drafter: str, max_k: int, counters: Counters, copies: bool) -> None:
        self._scheduler, self._counters, self._copies = scheduler, counters, copies
        self._drafters, self._max_k = (drafter,), max_k
        self._by_name: dict[str, Tracked] = {}
        self._seq_ids = itertools.count()
        self.by_seq_id: dict[int, Tracked] = {}

    def __len__(self) -> int:
        return len(self._by_name)

    def __contains__(self, req_id: str) -> bool:
        return req_id in self._by_name

    def of(self, request: Any) -> Tracked:
        found = self._by_name.get(request.request_id)
        if found is None:
            params = request.sampling_params
            try:
                settings = RequestSettings.parse(params.extra_args if params else None)
            except InvalidRequestError as error:
                self._counters.observe_invalid_request()
                logger.warning("request %s: %s. It is served without these wishes", request.request_id, error)
                settings = RequestSettings()
            history = History(request.all_token_ids) if self._copies else None
            found = Tracked(next(self._seq_ids), request.all_token_ids, settings, history)
            self._by_name[request.request_id] = self.by_seq_id[found.seq_id] = found
        return found

    def forget_ended(self) -> list[int]:
        """Drops the requests that vLLM dropped: their seq_ids."""
        live = self._scheduler.requests
        if len(self._by_name) <= len(live):
            return []
        ended = [self._by_name.pop(req_id).seq_id for req_id in self._by_name.keys() - live.keys()]
        for seq_id in ended:
            del self.by_seq_id[seq_id]
        return ended

    def view(self, request: Any, decoding: bool | None = None) -> SequenceView:
        """`decoding`: whether its next row samples from one known token; None: as its records say."""
        params, tracked = request.sampling_params, self.of(request)
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
            max_k=self._most(request, tracked.settings, num_context, num_output) if decoding else 0,
            greedy=params is None or params.temperature < GREEDY,
            priority=request.priority,
            num_drafts=tracked.num_drafts,
            num_accepted=tracked.num_accepted,
            num_pending=pending,
            tpot_slo_ms=tracked.settings.tpot_slo_ms,
        )

    def batch(self, step: int, views: Iterable[SequenceView]) -> BatchView:
        """`views` of those that run; with the waiting requests that the step to come has room for: their prompts are part of its price."""
        scheduler = self._scheduler
        free = scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        sequences = (*views, *[self.view(request) for request in self._to_admit()])
        budget = scheduler.max_num_scheduled_tokens
        return BatchView(step, sequences, len(scheduler.waiting), free, budget, self._drafters, self._max_k)

    def draft(self, request: Any) -> Draft:
        """What vLLM's drafter made. Its confidence is the proposer's (`ScoredDraft`) or, of a copy, what the text says."""
        tokens, history = request.spec_token_ids, self.of(request).history
        confidence: Sequence[float] | None = history.confidence(tokens) if history else getattr(tokens, "confidence", None)
        return Draft(list(tokens), confidence=list(confidence[: len(tokens)]) if confidence else None)

    def _most(self, request: Any, settings: RequestSettings, num_context: int, num_output: int) -> int:
        """Drafts that the request, its remaining tokens and the context limit allow."""
        if not settings.enabled:
            return 0
        most = self._max_k if settings.max_tokens is None else min(self._max_k, settings.max_tokens)
        return max(0, min(most, int(request.max_tokens) - num_output - 1, int(self._scheduler.max_model_len) - num_context - 1))

    def _to_admit(self) -> Iterable[Any]:
        scheduler = self._scheduler
        budget = scheduler.max_num_scheduled_tokens
        for request in itertools.islice(scheduler.waiting, max(0, scheduler.max_num_running_reqs - len(scheduler.running))):
            if budget <= 0:
                return
            budget -= request.num_tokens
            yield request
