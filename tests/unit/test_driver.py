"""The driver with a small host: real drafters that copy, sequences whose text is known, a clock that counts what it is asked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.control.driver import NOBODY, DraftCall, Driver, OpenStep, Proposals, RowOutcome, StepOutcome
from headway.control.policies.static import Static
from headway.control.policy import AdaptivePolicy, BatchView, DrafterView, DraftView, Policy, SequenceView
from headway.control.shadows import Shadows
from headway.drafters.drafter import Drafter, DraftRequest, never_stop
from headway.drafters.ngram import Ngram
from headway.drafters.suffix import Suffix
from headway.types import Choice, Feedback, LookupFeedback

K = 4
PROMPT = 24
TEXTS = ([1, 2, 3, 4, 5, 6, 7, 8] * 12, [1, 2, 3, 9, 1, 2, 4, 9] * 12, list(range(100, 196)))


@dataclass
class Written:
    token_ids: list[int]


@dataclass
class Host:
    """Writes `TEXTS`, one of them per sequence, as fast as drafts are right."""

    policy: Policy
    max_drafts: int = K
    now: float = 0.0
    step: int = 0
    calls: list[DraftCall] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.drafters: dict[str, Drafter] = {"suffix": Suffix(), "ngram": Ngram()}
        self.sequences = {i: Written(text[:PROMPT]) for i, text in enumerate(TEXTS)}
        views = [DrafterView(name, True) for name in self.drafters]
        self.driver = Driver(self.policy, views, Shadows(self.sequences), clock=self.clock)

    def clock(self) -> float:
        self.now += 0.001
        return self.now

    def propose(self, call: DraftCall) -> Proposals:
        self.calls.append(call)
        drafter = self.drafters[call.drafter]

        def made(ks: Mapping[int, int], continue_drafting: Any) -> dict[int, Any]:
            requests = [DraftRequest(i, self.sequences[i].token_ids, PROMPT, k, True) for i, k in ks.items()]
            return dict(zip(ks, drafter.propose(requests, continue_drafting), strict=True))

        return Proposals(made(call.ks, call.continue_drafting), made(call.shadow_ks, never_stop), draft_ms=1.0)

    def view(self) -> BatchView:
        sequences = tuple(
            SequenceView(i, len(seq.token_ids), len(seq.token_ids) - PROMPT, True, self.max_drafts, True, 0, 0, 0)
            for i, seq in self.sequences.items()
        )
        return BatchView(self.step, sequences, 0, 100, 512, tuple(self.drafters), K)

    def run(self, *, seen: bool = True) -> tuple[OpenStep, Feedback]:
        """One step; `seen`: whether the policy is shown it."""
        self.calls.clear()
        step = self.driver.plan(self.view())
        self.driver.draft(step, {i: step.wishes.get(i, NOBODY) for i in self.sequences}, self.propose)
        drafts = self.driver.select(step)
        rows = []
        for i, seq in self.sequences.items():
            known, draft = len(seq.token_ids), drafts[i].tokens if i in drafts else []
            right = 0
            while right < len(draft) and draft[right] == TEXTS[i][known + right]:
                right += 1
            seq.token_ids += TEXTS[i][known : known + right + 1]
            rows.append(RowOutcome(i, known, len(draft), right))
        self.step += 1
        outcome = StepOutcome(self.step, rows, 3 + sum(row.num_drafts for row in rows), 0, 0, 3, 0, 1.0, 8.0, 10.0)
        return step, self.driver.observe(step if seen else None, outcome)


class Everything(AdaptivePolicy):
    """Uses every hook and notes its call: the suffix drafter is looked up for the first sequence, watched for the last."""

    def __init__(self, chosen: str | None = None) -> None:
        self.said: list[str] = []
        self.asked: list[tuple[int, ...]] = []
        self.seen: list[Feedback] = []
        self.chosen = chosen

    def plan(self, view: BatchView) -> Mapping[int, Choice]:
        self.said = ["plan"]
        return {0: Choice("ngram", K, (Choice("suffix", 3),)), 1: Choice("ngram", K)}

    def shadow(self, view: BatchView) -> Mapping[int, Choice]:
        self.said.append("shadow")
        return {0: Choice("suffix", K), 1: Choice("ngram", K), 2: Choice("suffix", K)}

    def choose_lookup(self, drafts: Sequence[DraftView], view: BatchView) -> Mapping[int, str]:
        self.said.append("choose_lookup")
        return {} if self.chosen is None else {0: self.chosen}

    def stops_early(self, drafter: str) -> bool:
        return drafter == "ngram"

    def continue_drafting(self, seq_ids: Sequence[int], position: int, confidence: NDArray[np.float64]) -> NDArray[np.bool_]:
        self.said.append("continue_drafting")
        self.asked.append((*seq_ids, position))
        return np.full(len(seq_ids), position < 2)

    def select(self, drafts: Sequence[DraftView], view: BatchView) -> Mapping[int, int]:
        self.said.append("select")
        return {draft.seq_id: 1 for draft in drafts}

    def observe(self, feedback: Feedback) -> None:
        self.said.append("observe")
        self.seen.append(feedback)


def test_every_hook_is_called_in_the_order_of_the_step() -> None:
    host = Host(policy := Everything())
    step, feedback = host.run()
    assert list(dict.fromkeys(policy.said)) == ["plan", "shadow", "choose_lookup", "continue_drafting", "select", "observe"]
    assert policy.seen == [feedback]
    assert {position for *_, position in policy.asked} == {0, 1, 2}
    assert [(call.drafter, dict(call.ks), dict(call.shadow_ks), call.is_lookup) for call in host.calls] == [
        ("suffix", {0: 3}, {}, True),
        ("suffix", {}, {2: K}, False),    # not for the one that was looked up, nor for who drafts anyway
        ("ngram", {0: K, 1: K}, {}, False),
    ]
    asked = [(part.drafter, part.num_rows, part.num_steps) for part in feedback.drafters]
    assert asked == [("suffix", 1, 3), ("suffix", 1, K), ("ngram", 2, K)]
    assert feedback.lookups == (LookupFeedback(0, "suffix", 3, 3),)
    assert [(seq.drafter, seq.k, seq.num_proposed, seq.num_drafts) for seq in feedback.sequences] == [
        ("ngram", K, 3, 1), ("ngram", K, 3, 1), ("none", 0, 0, 0),
    ]
    assert {seq_id: len(draft) for seq_id, draft in step.drafts.items()} == {0: 3, 1: 3}


def test_a_lookup_that_is_chosen_drafts_and_nobody_else_is_asked() -> None:
    host = Host(Everything("suffix"))
    _, feedback = host.run()
    assert [(seq.drafter, seq.k) for seq in feedback.sequences] == [("suffix", 3), ("ngram", K), ("none", 0)]
    assert feedback.lookups == ()
    assert [dict(call.ks) for call in host.calls if call.drafter == "ngram"] == [{1: K}]


def test_a_lookup_that_is_chosen_may_be_empty_then_nobody_drafts() -> None:
    class Unknown(Everything):
        def plan(self, view: BatchView) -> Mapping[int, Choice]:
            return {2: Choice("ngram", K, (Choice("suffix", 3),))}   # a text without a repetition

        def choose_lookup(self, drafts: Sequence[DraftView], view: BatchView) -> Mapping[int, str]:
            assert not drafts
            return {2: "suffix"}

    host = Host(Unknown())
    _, feedback = host.run()
    assert not [call for call in host.calls if call.drafter == "ngram" and call.ks]
    assert [(seq.drafter, seq.k, seq.num_proposed) for seq in feedback.sequences][2] == ("suffix", 3, 0)


def test_shadows_say_what_the_text_says() -> None:
    """Each one that was judged, against the text: where it began, how many of its tokens stand there."""
    host = Host(policy := Everything())
    for _ in range(12):
        host.run()
    judged = [shadow for feedback in policy.seen for shadow in feedback.shadows]
    assert {(shadow.seq_id, shadow.drafter) for shadow in judged} >= {(0, "suffix"), (0, "ngram"), (1, "ngram"), (2, "suffix")}
    assert any(shadow.num_confirmed for shadow in judged if shadow.seq_id == 0)
    for shadow in judged:
        if shadow.seq_id == 0 and shadow.num_drafts:   # eight tokens again and again: every copy is right
            assert shadow.num_confirmed == shadow.num_drafts - shadow.num_verified
        if shadow.seq_id == 2:
            assert (shadow.num_drafts, shadow.num_confirmed) == (0, 0)


def test_a_step_that_the_policy_is_not_shown_keeps_its_evidence_for_the_next() -> None:
    host = Host(policy := Everything())
    _, hidden = host.run(seen=False)
    assert (policy.seen, hidden.shadows, hidden.forecast, hidden.policy_ms) == ([], (), None, 0.0)
    assert [(seq.drafter, seq.k, seq.num_drafts) for seq in hidden.sequences] == [("suffix", 1, 1), ("suffix", 1, 1), ("none", 0, 0)]
    _, shown = host.run()
    assert any(shadow.num_context == PROMPT for shadow in shown.shadows)


def test_the_policy_s_own_time_is_that_of_this_step_and_of_learning_from_the_one_before() -> None:
    host = Host(Everything())
    times = [host.run()[1].policy_ms for _ in range(3)]
    assert np.allclose(times, [3.0, 4.0, 4.0])   # a millisecond for plan, choose_lookup and select each; then for observe


def test_a_policy_of_one_method_gets_the_defaults() -> None:
    host = Host(policy := Static())
    step, feedback = host.run()
    assert not host.driver.rests(1)
    assert step.shadow_wishes == {}
    assert all(call.continue_drafting is never_stop for call in host.calls)
    assert [seq.num_drafts for seq in feedback.sequences] == [K, K, 0]
    assert policy is host.driver.policy


def test_of_a_policy_of_one_method_the_first_lookup_that_found_something_drafts() -> None:
    class Lookups(Static):
        def plan(self, view: BatchView) -> Mapping[int, Choice]:
            return {seq.seq_id: Choice("none", 0, (Choice("suffix", K), Choice("ngram", 2))) for seq in view.sequences}

    _, feedback = Host(Lookups()).run()
    assert [seq.drafter for seq in feedback.sequences] == ["suffix", "suffix", "none"]


def test_who_ended_is_forgotten() -> None:
    host = Host(Everything())
    host.run()
    shadows = host.driver.shadows
    assert shadows.waits(0, "ngram")
    assert shadows.waits(1, "ngram")
    host.driver.stop(0)
    host.driver.stop(77)   # never seen
    assert not shadows.waits(0, "ngram")
    assert shadows.waits(1, "ngram")
