"""One policy through one step, for whoever runs the steps: the engine, vLLM's scheduler, a replayed trace, the computed world of the tests.

    step = driver.plan(view)                         what the policy wishes
           the host grants what fits                 seq_id -> Choice
           driver.draft(step, granted, propose)      lookups, drafts, drafts that are only compared
    drafts = driver.select(step)                     what pays to verify
           the host verifies and commits
           driver.observe(step, outcome)             what happened, reported to the policy

A host brings three things: `propose` makes drafts, a `StepOutcome` says what a step did, a clock tells seconds. Every hook of a policy is
called here and nowhere else.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from headway.control.policy import BatchView, ContinueDrafting, DrafterView, DraftView, Policy, hooks_of, never_stop
from headway.control.shadows import Shadows
from headway.types import NO_DRAFT, Choice, Draft, DrafterFeedback, Feedback, LookupFeedback, SequenceFeedback

NOBODY = Choice(NO_DRAFT, 0)


@dataclass(frozen=True, slots=True)
class DraftCall:
    """What one drafter is asked for in one step: seq_id -> at most so many tokens.

    ks         drafts to verify, or, in a lookup, to choose from
    shadow_ks  drafts that are only compared with what the target writes; nobody stops these early
    """

    drafter: str
    ks: Mapping[int, int]
    shadow_ks: Mapping[int, int]
    continue_drafting: ContinueDrafting
    is_lookup: bool = False


@dataclass(frozen=True, slots=True)
class Proposals:
    """What became of a `DraftCall`: a draft, which may be empty, per sequence. A shadow draft may be left out.

    draft_ms      None: the host cannot tell it from the rest of the step
    num_catch_up  known tokens that the drafter had not been asked about before, the newest of each sequence not counted
    """

    drafts: Mapping[int, Draft]
    shadows: Mapping[int, Draft]
    draft_ms: float | None
    num_catch_up: int = 0


Propose = Callable[[DraftCall], Proposals]


class RowOutcome(NamedTuple):
    """What one row of a step did. Rows that wrote nothing (prefill chunks) are left out.

    num_context   known tokens of the sequence before the step wrote
    num_drafts    drafts verified
    path          of a tree: the accepted nodes, from the top down
    """

    seq_id: int
    num_context: int
    num_drafts: int
    num_accepted: int
    path: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What a step did, in the numbers of `Feedback`. finished: sequences that ended in it."""

    step: int
    rows: Sequence[RowOutcome]
    num_tokens: int
    num_prefill_tokens: int
    num_context_tokens: int
    num_rows: int
    num_waiting: int
    draft_ms: float
    verify_ms: float
    step_ms: float
    finished: Collection[int] = ()


@dataclass(slots=True)
class OpenStep:
    """A step from its plan to its feedback. By seq_id; `drafts` as proposed, none of them empty; `lengths`: of these to verify."""

    view: BatchView
    wishes: Mapping[int, Choice]
    shadow_wishes: Mapping[int, Choice]
    choices: dict[int, Choice] = field(default_factory=dict)   # who drafts in the end
    drafts: dict[int, Draft] = field(default_factory=dict)
    lengths: dict[int, int] = field(default_factory=dict)
    drafters: list[DrafterFeedback] = field(default_factory=list)
    lookups: list[LookupFeedback] = field(default_factory=list)
    deciding_s: float = 0.0                                     # spent in the policy

    def spend(self, seconds: float) -> None:
        """In the policy."""
        self.deciding_s += seconds


def now() -> float:
    """Seconds, by this machine's clock."""
    return time.perf_counter()


class Driver:
    """Not thread-safe: one thread drives. The policy is started already; `drafters` are those of its `Setup`."""

    def __init__(
        self, policy: Policy, drafters: Sequence[DrafterView], shadows: Shadows, clock: Callable[[], float] = now
    ) -> None:
        self.policy, self.shadows = policy, shadows
        self._hooks, self._clock = hooks_of(policy), clock
        self._drafter = drafters[0].name if drafters else NO_DRAFT
        self._stepwise = {view.name for view in drafters if view.stepwise}
        self._observe_s = 0.0   # the policy's time after the step before

    def rests(self, step: int) -> bool:
        """Whether nobody need draft for this step to come."""
        return self._hooks.rests(step)

    def plan(self, view: BatchView) -> OpenStep:
        """Begins a step with what the policy wishes of it."""
        began = self._clock()
        wishes, shadow_wishes = self.policy.plan(view), self._hooks.shadow(view)
        return OpenStep(view, wishes, shadow_wishes, deciding_s=self._clock() - began)

    def draft(self, step: OpenStep, granted: Mapping[int, Choice], propose: Propose) -> None:
        """Asks each drafter once for all of its sequences; nobody runs when every k is 0.

        granted  what the host allows of the wishes, for every sequence that may draft (k = 0: nobody drafts for it, it may be watched)
        """
        settled = self._look_up(step, granted, propose) if any(choice.lookups for choice in granted.values()) else {}
        step.choices.update({seq_id: choice for seq_id, choice in granted.items() if choice.k > 0} | settled)
        for name in step.view.drafters:
            ks = {
                seq_id: choice.k for seq_id, choice in granted.items()
                if choice.k > 0 and choice.drafter == name and seq_id not in settled
            }  # fmt: skip
            shadow_ks = self._shadowed(step, granted, name)
            if not (ks or shadow_ks):
                continue
            call = DraftCall(name, ks, shadow_ks, self._continuing(name))
            found = propose(call)
            step.drafts.update((seq_id, draft) for seq_id, draft in found.drafts.items() if draft.tokens)
            for seq_id, draft in found.shadows.items():
                self.shadows.add(seq_id, name, draft, 0)
            stopped = name in self._stepwise and call.continue_drafting is not never_stop
            longest = [len(draft) for draft in found.drafts.values()] if stopped else ks.values()
            self._record(step, call, found, max([1, *longest, *shadow_ks.values()]))

    def select(self, step: OpenStep) -> dict[int, Draft]:
        """The policy's batch-wide trim to what pays to verify: seq_id -> draft. What it trims is compared with what is written."""
        if not step.drafts:
            return {}
        views = [_view(seq_id, step.choices[seq_id].drafter, draft) for seq_id, draft in step.drafts.items()]
        began = self._clock()
        lengths = self.policy.select(views, step.view)
        step.spend(self._clock() - began)
        for seq_id in [seq.seq_id for seq in step.view.sequences if seq.seq_id in step.drafts]:
            draft = step.drafts[seq_id]
            step.lengths[seq_id] = length = max(0, min(lengths.get(seq_id, len(draft)), len(draft)))
            if length < len(draft):
                self.shadows.add(seq_id, step.choices[seq_id].drafter, draft, length)
        return {seq_id: step.drafts[seq_id].truncated(length) for seq_id, length in step.lengths.items() if length}

    def observe(self, step: OpenStep | None, outcome: StepOutcome) -> Feedback:
        """The step ended, and its tokens are written. `step` None: it was not decided here, and the policy is not shown it."""
        for row in outcome.rows:
            self.shadows.compare(row.seq_id)
        for seq_id in outcome.finished:
            self.stop(seq_id)
        feedback = self._feedback(step, outcome)
        if step is not None:
            began = self._clock()
            self.policy.observe(feedback)
            self._observe_s = self._clock() - began
        return feedback

    def stop(self, seq_id: int) -> None:
        """The sequence ended or was aborted. Unknown ids are fine."""
        self.shadows.stop(seq_id)

    # -- inside ---------------------------------------------------------------------------------------------------

    def _look_up(self, step: OpenStep, granted: Mapping[int, Choice], propose: Propose) -> dict[int, Choice]:
        """Drafts of those that are asked before the others; returns who drafts where one was chosen. The rest is only compared."""
        looked: dict[int, dict[str, tuple[Choice, Draft]]] = {}
        for name in step.view.drafters:
            mine = {seq_id: look for seq_id, choice in granted.items() for look in choice.lookups if look.drafter == name}
            if not mine:
                continue
            ks = {seq_id: look.k for seq_id, look in mine.items()}
            call = DraftCall(name, ks, {}, self._continuing(name), is_lookup=True)
            found = propose(call)
            for seq_id, look in mine.items():
                looked.setdefault(seq_id, {})[name] = look, found.drafts[seq_id]
            self._record(step, call, found, max(ks.values()))
        views = [_view(seq_id, name, draft) for seq_id, each in looked.items() for name, (_, draft) in each.items() if draft.tokens]
        began = self._clock()
        chosen = self._hooks.choose_lookup(views, step.view)
        step.spend(self._clock() - began)
        settled = {}
        for seq_id, each in looked.items():
            for name, (look, draft) in each.items():
                if name == chosen.get(seq_id):
                    settled[seq_id] = look
                    if draft.tokens:
                        step.drafts[seq_id] = draft
                    continue
                step.lookups.append(LookupFeedback(seq_id, name, look.k, len(draft)))
                if draft.tokens:
                    self.shadows.add(seq_id, name, draft, 0)
        return settled

    def _continuing(self, drafter: str) -> ContinueDrafting:
        return self._hooks.continue_drafting if self._hooks.stops_early(drafter) else never_stop

    def _shadowed(self, step: OpenStep, granted: Mapping[int, Choice], name: str) -> dict[int, int]:
        """Sequences for which the drafter `name` drafts without being verified."""
        return {
            seq_id: wish.k for seq_id, wish in step.shadow_wishes.items()
            if wish.drafter == name and wish.k > 0 and seq_id in granted and step.choices.get(seq_id, NOBODY).drafter != name
            if not any(look.drafter == name for look in granted[seq_id].lookups) and not self.shadows.waits(seq_id, name)
        }  # fmt: skip

    def _record(self, step: OpenStep, call: DraftCall, found: Proposals, num_steps: int) -> None:
        if found.draft_ms is not None:
            num_proposed = sum([len(draft) for draft in found.drafts.values()])
            step.drafters.append(DrafterFeedback(
                call.drafter, len(call.ks) + len(call.shadow_ks), num_steps, found.num_catch_up, num_proposed, found.draft_ms
            ))  # fmt: skip

    def _feedback(self, step: OpenStep | None, outcome: StepOutcome) -> Feedback:
        return Feedback(
            step=outcome.step,
            sequences=tuple([self._row(step, row) for row in outcome.rows]),
            num_prefill_tokens=outcome.num_prefill_tokens,
            num_tokens=outcome.num_tokens,
            num_context_tokens=outcome.num_context_tokens,
            draft_ms=outcome.draft_ms,
            verify_ms=outcome.verify_ms,
            step_ms=outcome.step_ms,
            num_rows=outcome.num_rows,
            num_waiting=outcome.num_waiting,
            policy_ms=(step.deciding_s + self._observe_s) * 1e3 if step else 0.0,
            drafters=tuple(step.drafters) if step else (),
            shadows=self.shadows.resolved() if step else (),   # they wait for a step that the policy is shown
            lookups=tuple(step.lookups) if step else (),
            forecast=self.policy.forecast if step else None,
            reason=self.policy.reason,
        )

    def _row(self, step: OpenStep | None, row: RowOutcome) -> SequenceFeedback:
        choice = step.choices.get(row.seq_id, NOBODY) if step else NOBODY
        draft = step.drafts.get(row.seq_id) if step else None
        num_drafts = row.num_drafts
        if draft is None:
            if num_drafts and choice is NOBODY:   # drafted without the driver, as the only drafter of a host may be
                choice = Choice(self._drafter, num_drafts)
            return SequenceFeedback(row.seq_id, choice.drafter, choice.k, num_drafts, num_drafts, row.num_accepted, row.num_context)
        confidence = tuple(draft.confidence[:num_drafts]) if draft.confidence and num_drafts else None
        parents = draft.parents[:num_drafts] if draft.parents is not None and num_drafts else None
        return SequenceFeedback(
            row.seq_id, choice.drafter, choice.k, len(draft), num_drafts, row.num_accepted, row.num_context, confidence, parents, row.path
        )


def _view(seq_id: int, drafter: str, draft: Draft) -> DraftView:
    """What a policy may know of a draft."""
    return DraftView(seq_id, drafter, len(draft), draft.probs is None, tuple(draft.confidence) if draft.confidence else None, draft.parents)
