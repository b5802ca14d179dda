"""The engine's drafters, asked by the driver: sequences become requests, each drafter gets its rows in one batch."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence

from headway.control.driver import DraftCall, Proposals
from headway.control.policy import DrafterView
from headway.drafters.drafter import Drafter, DraftRequest, never_stop
from headway.drafters.grammar import with_forced
from headway.engine.scheduler import Scheduler
from headway.types import Draft, Row

logger = logging.getLogger(__name__)


class DrafterRunner:
    def __init__(self, drafters: Mapping[str, Drafter], scheduler: Scheduler) -> None:
        self._drafters, self._scheduler = drafters, scheduler
        self._asked: dict[int, dict[str, int]] = {}   # seq_id -> drafter -> known tokens when it was last asked

    @property
    def views(self) -> tuple[DrafterView, ...]:
        """The drafters as a policy sees them."""
        return tuple(DrafterView(name, each.deterministic, stepwise=each.stepwise) for name, each in self._drafters.items())

    def propose(self, rows: Mapping[int, Row], call: DraftCall) -> Proposals:
        """`rows`: of the step, by seq_id. A tree may have as many nodes as its row has room for."""
        began = time.perf_counter()
        drafter = self._drafters[call.drafter]
        requests = [_request(rows[seq_id], k, k if call.is_lookup else rows[seq_id].room) for seq_id, k in call.ks.items()]
        drafts = {
            request.seq_id: _kept_to(request, draft.truncated(request.k if draft.parents is None else request.room))
            for request, draft in zip(requests, drafter.propose(requests, call.continue_drafting) if requests else (), strict=True)
        }
        num_catch_up = self._catch_up(call.drafter, requests)
        shadows: dict[int, Draft] = {}
        if call.shadow_ks:
            for seq_id, k in call.shadow_ks.items():
                self._scheduler.reserve_scratch(rows[seq_id].seq, k)
            requests = [_request(rows[seq_id], k, max(k, drafter.tree_size)) for seq_id, k in call.shadow_ks.items()]
            num_catch_up += self._catch_up(call.drafter, requests)
            for request, draft in zip(requests, drafter.propose(requests, never_stop), strict=True):
                shadows[request.seq_id] = _kept_to(request, draft.spine().truncated(request.k))
        return Proposals(drafts, shadows, (time.perf_counter() - began) * 1e3, num_catch_up)

    def stop(self, seq_id: int) -> None:
        """The sequence ended. Unknown ids are fine."""
        self._asked.pop(seq_id, None)
        for name, drafter in self._drafters.items():
            try:
                drafter.stop(seq_id)
            except Exception:   # what a drafter remembers of one sequence is nobody else's loss
                logger.exception("the drafter %s did not let go of a sequence", name)

    def _catch_up(self, drafter: str, requests: Sequence[DraftRequest]) -> int:
        """Tokens the drafter has not been asked about before, the newest of each sequence not counted; from now on it has."""
        unseen = 0
        for request in requests:
            asked, num_tokens = self._asked.setdefault(request.seq_id, {}), len(request.token_ids)
            unseen += max(0, num_tokens - 1 - asked.get(drafter, 0))
            asked[drafter] = num_tokens
        return unseen


def _request(row: Row, k: int, room: int) -> DraftRequest:
    seq = row.seq
    return DraftRequest(
        seq.seq_id, seq.token_ids, seq.num_prompt_tokens, k, seq.params.greedy, seq.block_table, room=room, salt=seq.salt,
        matcher=seq.matcher,
    )   # fmt: skip


def _kept_to(request: DraftRequest, draft: Draft) -> Draft:
    """Without what the request's grammar forbids and all that follows it, but with what it forces at the end of a chain. Tokens that were
    drawn stay: they were drawn from what it allows, or are refused in verification, and which of them are verified must not depend on
    what they are."""
    matcher = request.matcher
    if matcher is None or draft.probs is not None:
        return draft
    if draft.parents is None:
        return with_forced(draft.truncated(matcher.num_legal((), draft.tokens)), request)
    paths: dict[int, list[int]] = {-1: []}   # of the nodes that stay
    for node, (token, parent) in enumerate(zip(draft.tokens, draft.parents, strict=True)):
        if parent in paths and matcher.num_legal(paths[parent], [token]):
            paths[node] = [*paths[parent], token]
    return draft.pruned([node for node in paths if node >= 0])
