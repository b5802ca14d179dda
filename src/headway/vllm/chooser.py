"""How many drafts to verify for each request, with vLLM's classes left out: views in, lengths out, outcomes back.

vLLM drafts at the end of a step what the next step verifies. Two ways to decide follow from that:

    trim    (sync scheduling) the drafts are there when the next step is scheduled. The policy plans and selects over them as it does in
            the embedded engine; what it does not verify is compared with what the target writes later, at no cost.
    place   (async scheduling) the drafts stay on the device and only their number is chosen, before they are drawn. Steps overlap: a
            choice is held until its outcome is known, and only that outcome is shown to the policy.

In both, whether a draft is verified depends on what was known before it was drawn, or the draft is a function of its prefix: lossless by
the rule of control/policy.py.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from headway.control.costs import CostModel
from headway.control.policy import BatchView, DrafterView, DraftView, Policy, SequenceView, Setup, hooks_of
from headway.control.shadows import Shadows
from headway.types import NO_DRAFT, Choice, Draft, Feedback, SequenceFeedback, ShadowFeedback

PROBE_EVERY = 16     # choices between two requests that are drafted for although speculation is off (place)
QUIET = 16           # choices in a row without a draft worth verifying, after which drafts are made in one step of REST only (trim)
REST = 4
SHADOWS = 16         # drafts compared per step, in turns: a large batch has more evidence than the policy takes


@dataclass(slots=True)
class Tracked:
    """One request, as far as speculation is concerned. `token_ids` is live."""

    seq_id: int
    token_ids: Sequence[int]
    num_drafts: int = 0
    num_accepted: int = 0


@dataclass(frozen=True, slots=True)
class Load:
    """What a policy sees of the batch beside its sequences."""

    num_waiting: int
    num_free_blocks: int
    token_budget: int


@dataclass(frozen=True, slots=True)
class RowOutcome:
    """What one row of a step did: `num_drafts` were verified. Rows that wrote nothing (prefill chunks) are left out."""

    tracked: Tracked
    num_drafts: int
    num_accepted: int
    num_context: int


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """One step, from the end of the step before to its own end."""

    rows: tuple[RowOutcome, ...]
    step_ms: float
    num_tokens: int
    num_prefill_tokens: int
    num_context_tokens: int
    num_rows: int
    num_waiting: int


@dataclass(slots=True)
class Decision:
    """What was chosen for one step, kept until its outcome is known."""

    view: BatchView
    lengths: dict[int, int]                     # seq_id -> drafts to verify
    planned: Mapping[int, Choice] = field(default_factory=dict)
    proposed: dict[int, Draft] = field(default_factory=dict)
    probed: int | None = None                   # verified although the policy wished for a shadow draft only


class Chooser:
    """One policy and what it has to be told. Not thread-safe: the scheduler's thread owns it."""

    def __init__(
        self, policy: Policy, drafter: str, max_k: int, costs: CostModel, *,
        deterministic: bool = True, drafts_ahead: bool = True, learned: Mapping[str, Any] | None = None,
    ) -> None:
        """`drafts_ahead`: drafts are made before they are chosen from (trim), as in `DrafterView`."""
        self.policy, self.drafter, self.max_k = policy, drafter, max_k
        policy.start(Setup((DrafterView(drafter, deterministic, drafts_ahead),), max_k, costs, learned))
        self._hooks = hooks_of(policy)
        self.shadows = Shadows()
        self._deterministic = deterministic
        self._step = 0
        self._num_quiet = 0
        self._num_placed = 0
        self._policy_s = 0.0
        self._held: Decision | None = None      # place: in force, its outcome not known yet

    # -- sync: the drafts are there ----------------------------------------------------------------------------------

    @property
    def wants_drafts(self) -> bool:
        """Whether drafts made at the end of this step may be worth their time."""
        return (self._num_quiet < QUIET or self._step % REST == 0) and not self._hooks.rests(self._step + 1)

    def rest(self) -> None:
        """A step for which nothing was drafted, and nothing is to be decided: its outcome is only counted."""
        self._step += 1

    def trim(self, sequences: Sequence[SequenceView], drafts: Mapping[int, Draft], load: Load, *, drafted: bool = True) -> Decision:
        """Which of `drafts` (seq_id -> Draft, not empty) to verify. `drafted`: whether they were asked for at all."""
        began = time.perf_counter()
        if not drafted:   # the policy must not take it for an answer that there are none
            sequences = [replace(seq, max_k=0) for seq in sequences]
        view = self._view(sequences, load)
        planned = _clamped(self.policy.plan(view), view)
        proposed = {seq_id: drafts[seq_id].truncated(choice.k) for seq_id, choice in planned.items() if choice.k and seq_id in drafts}
        lengths = self._select(view, proposed)
        self._policy_s += time.perf_counter() - began
        self._num_quiet = 0 if any(lengths.values()) else self._num_quiet + bool(drafts)
        return Decision(view, lengths, planned, proposed)

    def shadow(self, decision: Decision, tracked: Mapping[int, Tracked], drafts: Mapping[int, Draft]) -> None:
        """What was drafted and will not be verified is compared with what the target writes."""
        if not self._deterministic:
            return
        unverified = [seq_id for seq_id, draft in drafts.items() if decision.lengths.get(seq_id, 0) < len(draft)]
        first = self._step * SHADOWS % max(1, len(unverified))
        for seq_id in (unverified[first:] + unverified[:first])[:SHADOWS]:
            self.shadows.compare(tracked[seq_id])   # not done while it rested
            self.shadows.add(tracked[seq_id], self.drafter, drafts[seq_id], decision.lengths.get(seq_id, 0))
        for seq_id in self._hooks.shadow(decision.view):
            if seq_id not in drafts and seq_id in tracked:
                self.shadows.add(tracked[seq_id], self.drafter, Draft([]), 0)

    # -- async: only their number is chosen --------------------------------------------------------------------------

    def place(self, sequences: Sequence[SequenceView], load: Load) -> tuple[Decision, bool]:
        """How many drafts to make and verify for each request in the next step; whether this is a new decision (else: the held one)."""
        if self._held is not None:
            held = self._held.lengths
            usual = max(held.values(), default=0)
            most = {seq.seq_id: seq.max_k for seq in sequences if seq.decoding}
            return Decision(self._held.view, {seq_id: min(held.get(seq_id, usual), k) for seq_id, k in most.items()}), False
        began = time.perf_counter()
        view = self._view(sequences, load)
        planned, wished = _clamped(self.policy.plan(view), view), _clamped(self._hooks.shadow(view), view)
        # Every draft is as long as it is asked to be, and nothing is known about it yet but statistics.
        proposed = {seq_id: Draft([-1] * choice.k) for seq_id, choice in planned.items() if choice.k > 0}
        decision = Decision(view, self._select(view, proposed), planned, proposed)
        self._num_placed += 1
        probe = next((item for item in wished.items() if item[0] not in proposed), None)
        if probe is not None and probe[1].k and self._num_placed % PROBE_EVERY == 0:
            decision.probed = probe[0]
            decision.lengths[probe[0]] = probe[1].k
        self._policy_s += time.perf_counter() - began
        self._held = decision
        return decision, True

    # -- afterwards ----------------------------------------------------------------------------------------------------

    def observe(self, decision: Decision | None, outcome: StepOutcome) -> Feedback:
        """A step ended; `decision` None: it was not decided here (held, or nothing to decide), so the policy is not shown it."""
        if decision is not None and decision is self._held:
            self._held = None
        feedback = self._feedback(decision, outcome)
        if decision is not None:
            began = time.perf_counter()
            self.policy.observe(feedback)
            self._policy_s = time.perf_counter() - began
        for row in outcome.rows:
            row.tracked.num_drafts += row.num_drafts
            row.tracked.num_accepted += row.num_accepted
        return feedback

    def compare(self, tracked: Iterable[Tracked]) -> None:
        """The target wrote tokens of these requests."""
        for one in tracked:
            self.shadows.compare(one)

    def forget(self, seq_id: int) -> None:
        self.shadows.stop(seq_id)

    # -- inside --------------------------------------------------------------------------------------------------------

    def _view(self, sequences: Sequence[SequenceView], load: Load) -> BatchView:
        self._step += 1
        return BatchView(
            self._step, tuple(sequences), load.num_waiting, load.num_free_blocks, load.token_budget, (self.drafter,), self.max_k
        )

    def _select(self, view: BatchView, proposed: Mapping[int, Draft]) -> dict[int, int]:
        if not proposed:
            return {}
        # Placed drafts are not drawn yet: statistics may decide about each of them.
        views = [
            DraftView(seq_id, self.drafter, len(draft), True, tuple(draft.confidence) if draft.confidence else None)
            for seq_id, draft in proposed.items()
        ]
        lengths = self.policy.select(views, view)
        return {seq_id: max(0, min(lengths.get(seq_id, len(draft)), len(draft))) for seq_id, draft in proposed.items()}

    def _feedback(self, decision: Decision | None, outcome: StepOutcome) -> Feedback:
        shadows = self.shadows.resolved() if decision is not None else ()   # they wait for a step that the policy is shown
        if decision is not None and decision.probed is not None:
            shadows += tuple(
                ShadowFeedback(row.tracked.seq_id, self.drafter, 0, row.num_drafts, row.num_accepted)
                for row in outcome.rows
                if row.tracked.seq_id == decision.probed and row.num_drafts
            )
        return Feedback(
            step=decision.view.step if decision else self._step,
            sequences=tuple(self._row(decision, row) for row in outcome.rows),
            num_prefill_tokens=outcome.num_prefill_tokens,
            num_tokens=outcome.num_tokens,
            num_context_tokens=outcome.num_context_tokens,
            draft_ms=0.0,    # part of the step, and vLLM does not tell it apart
            verify_ms=outcome.step_ms,
            step_ms=outcome.step_ms,
            num_rows=outcome.num_rows,
            num_waiting=outcome.num_waiting,
            policy_ms=self._policy_s * 1e3 if decision else 0.0,
            shadows=shadows,
            forecast=self.policy.forecast if decision else None,
            reason=self.policy.reason,
        )

    def _row(self, decision: Decision | None, row: RowOutcome) -> SequenceFeedback:
        seq_id = row.tracked.seq_id
        choice = decision.planned.get(seq_id) if decision else None
        draft = decision.proposed.get(seq_id) if decision else None
        confidence = tuple(draft.confidence) if draft and draft.confidence else None
        if decision is not None and seq_id == decision.probed:   # told as a shadow draft
            return SequenceFeedback(seq_id, NO_DRAFT, 0, 0, 0, 0, row.num_context)
        if choice is None:
            name = self.drafter if row.num_drafts else NO_DRAFT
            return SequenceFeedback(seq_id, name, row.num_drafts, row.num_drafts, row.num_drafts, row.num_accepted, row.num_context)
        num_proposed = max(len(draft) if draft else 0, row.num_drafts)
        return SequenceFeedback(
            seq_id, self.drafter, max(choice.k, num_proposed), num_proposed, row.num_drafts, row.num_accepted, row.num_context, confidence
        )


def _clamped(wishes: Mapping[int, Choice], view: BatchView) -> dict[int, Choice]:
    """A plan may be older than this step: what each request allows now."""
    most = {seq.seq_id: seq.max_k for seq in view.sequences if seq.decoding}
    return {
        seq_id: choice if choice.k <= most[seq_id] else Choice(choice.drafter, most[seq_id])
        for seq_id, choice in wishes.items()
        if seq_id in most
    }
