"""Who drafts in a step: first the drafters that a policy wants to look at, then those whose turn it is when no look was taken.

Each drafter gets its rows in one batch; nobody runs when every k is 0.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from headway.control.policy import AdaptivePolicy, BatchView, DraftView, Policy, hooks_of
from headway.control.shadows import Shadows
from headway.drafters.drafter import ContinueDrafting, Drafter, DraftRequest, never_stop
from headway.engine.scheduler import Scheduler
from headway.types import Choice, Draft, DrafterFeedback, LookupFeedback, Row
from headway.types import Sequence as Written


@dataclass(slots=True)
class Proposed:
    """One step's drafts, by row, and what they took. `deciding_s`: of it in the policy, in seconds."""

    drafts: list[Draft | None]
    drafting: list[DrafterFeedback] = field(default_factory=list)
    lookups: list[LookupFeedback] = field(default_factory=list)
    deciding_s: float = 0.0


class Proposer:
    def __init__(self, drafters: Mapping[str, Drafter], scheduler: Scheduler, shadows: Shadows) -> None:
        self._drafters, self._scheduler, self._shadows = drafters, scheduler, shadows

    def propose(self, rows: Sequence[Row], policy: Policy | None, view: BatchView, shadow_wishes: Mapping[int, Choice]) -> Proposed:
        """Of a row that stays with a look, `drafter` and `k` are those of the look afterwards."""
        found = Proposed([None] * len(rows))
        if policy is None:
            return found
        hooks = hooks_of(policy)
        settled = self._lookup(rows, hooks, view, found) if any(row.lookups for row in rows) else set()
        for name, drafter in self._drafters.items():
            mine = [i for i, row in enumerate(rows) if row.k > 0 and row.drafter == name and i not in settled]
            shadowed = self._shadowed(rows, name, shadow_wishes)
            if not (mine or shadowed):
                continue
            began = time.perf_counter()
            requests = [_request(rows[i].seq, rows[i].k, rows[i].room) for i in mine]
            continuing = _continuing(hooks, name)
            made = drafter.propose(requests, continuing) if mine else []
            for i, request, draft in zip(mine, requests, made, strict=True):
                found.drafts[i] = draft.truncated(request.k if draft.parents is None else request.room) if draft.tokens else None
            unseen = self._unseen(name, requests)
            if shadowed:
                for seq, k in shadowed:
                    self._scheduler.reserve_scratch(seq, k)
                requests = [_request(seq, k, max(k, drafter.tree_size)) for seq, k in shadowed]
                unseen += self._unseen(name, requests)
                for (seq, k), draft in zip(shadowed, drafter.propose(requests, never_stop), strict=True):
                    self._shadows.add(seq, name, draft.spine().truncated(k), 0)
            asked = continuing is not never_stop and drafter.stepwise
            longest = [len(draft.tokens) for draft in made] if asked else [rows[i].k for i in mine]
            found.drafting.append(DrafterFeedback(
                name, len(mine) + len(shadowed), max([1, *longest, *(k for _, k in shadowed)]), unseen,
                sum(len(found.drafts[i] or ()) for i in mine), (time.perf_counter() - began) * 1e3,
            ))  # fmt: skip
        return found

    def _lookup(self, rows: Sequence[Row], hooks: AdaptivePolicy, view: BatchView, found: Proposed) -> set[int]:
        """Drafts of those that come first; returns the rows that are settled. What is not taken is compared with what the target writes."""
        looks: list[dict[str, Draft]] = [{} for _ in rows]
        for name, drafter in self._drafters.items():
            mine = [(i, look.k) for i, row in enumerate(rows) for look in row.lookups if look.drafter == name]
            if not mine:
                continue
            began = time.perf_counter()
            requests = [_request(rows[i].seq, k, k) for i, k in mine]
            for (i, k), draft in zip(mine, drafter.propose(requests, _continuing(hooks, name)), strict=True):
                looks[i][name] = draft.truncated(k)
            drafted = sum([len(looks[i][name]) for i, _ in mine])
            found.drafting.append(DrafterFeedback(
                name, len(mine), max([k for _, k in mine]), self._unseen(name, requests), drafted, (time.perf_counter() - began) * 1e3
            ))  # fmt: skip
        began = time.perf_counter()
        chosen = hooks.choose_lookup(
            [view_of(rows[i], name, draft) for i, each in enumerate(looks) for name, draft in each.items() if draft.tokens], view
        )
        found.deciding_s = time.perf_counter() - began
        settled = set()
        for i, row in enumerate(rows):
            name = chosen.get(row.seq.seq_id, "")
            for look in row.lookups:
                draft = looks[i][look.drafter]
                if look.drafter == name:
                    row.drafter, row.k = look.drafter, look.k
                    found.drafts[i] = draft if draft.tokens else None
                    settled.add(i)
                    continue
                found.lookups.append(LookupFeedback(row.seq.seq_id, look.drafter, look.k, len(draft)))
                if draft.tokens:
                    self._shadows.add(row.seq, look.drafter, draft, 0)
        return settled

    def _shadowed(self, rows: Sequence[Row], name: str, wishes: Mapping[int, Choice]) -> list[tuple[Written, int]]:
        """Decoding sequences for which the drafter `name` drafts without being verified."""
        if not wishes:
            return []
        return [
            (row.seq, wish.k)
            for row in rows
            if row.seq.is_decoding and (wish := wishes.get(row.seq.seq_id)) is not None and wish.drafter == name and wish.k > 0
            if not (row.k > 0 and row.drafter == name) and not any(look.drafter == name for look in row.lookups)
            if not self._shadows.waits(row.seq.seq_id, name)
        ]

    def _unseen(self, name: str, requests: Sequence[DraftRequest]) -> int:
        return sum([self._shadows.catch_up(name, request.seq_id, len(request.token_ids)) for request in requests])


def view_of(row: Row, drafter: str, draft: Draft) -> DraftView:
    """What a policy may know of a draft."""
    confidence = tuple(draft.confidence) if draft.confidence else None
    return DraftView(row.seq.seq_id, drafter, len(draft), draft.probs is None, confidence, draft.parents)


def _continuing(hooks: AdaptivePolicy, drafter: str) -> ContinueDrafting:
    return hooks.continue_drafting if hooks.stops_early(drafter) else never_stop


def _request(seq: Written, k: int, room: int) -> DraftRequest:
    return DraftRequest(
        seq.seq_id, seq.token_ids, seq.num_prompt_tokens, k, seq.params.greedy, seq.block_table, room=room, salt=seq.salt
    )
