"""Drafts that are not verified: what is compared, when it is judged, and that the engine's feedback says so."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
import torch

from headway.config import EngineConfig, SpeculativeConfig
from headway.control.policy import AdaptivePolicy, BatchView, DraftView, Policy
from headway.control.shadows import Shadows
from headway.engine.engine import Engine
from headway.sampling_params import SamplingParams
from headway.types import Choice, Draft, Feedback, Request, ShadowFeedback
from headway.types import Sequence as Seq
from tests.tiny import tiny_model_dir


def make(tokens: list[int]) -> Seq:
    return Seq(7, Request("r", [1], SamplingParams()), 0, 0, frozenset(), frozenset(), (), 99, list(tokens), 1)


def begin(tokens: list[int]) -> tuple[Shadows, Seq]:
    seq = make(tokens)
    return Shadows({7: seq}), seq


def write(shadows: Shadows, seq: Seq, *tokens: int) -> tuple[ShadowFeedback, ...]:
    seq.token_ids += tokens
    shadows.compare(7)
    return shadows.resolved()


def test_judged_where_the_target_differs() -> None:
    shadows, seq = begin([1, 2, 3])
    shadows.add(7, "ngram", Draft([4, 5, 6, 7], confidence=[0.9, 0.8, 0.7, 0.6]), 0)
    assert shadows.waits(7, "ngram")
    assert write(shadows, seq, 4) == ()
    assert write(shadows, seq, 5, 9) == (ShadowFeedback(7, "ngram", 0, 4, 2, (0.9, 0.8, 0.7, 0.6), 3),)
    assert not shadows.waits(7, "ngram")
    assert write(shadows, seq, 6) == ()


def test_a_draft_that_held_to_its_end() -> None:
    shadows, seq = begin([1])
    shadows.add(7, "ngram", Draft([4, 5]), 0)
    assert write(shadows, seq, 4, 5, 6) == (ShadowFeedback(7, "ngram", 0, 2, 2, num_context=1),)


def test_the_tail_counts_only_after_its_head_was_accepted() -> None:
    shadows, seq = begin([1])
    shadows.add(7, "ngram", Draft([4, 5, 6]), 1)
    assert write(shadows, seq, 4, 5) == ()
    assert write(shadows, seq, 9) == (ShadowFeedback(7, "ngram", 1, 3, 1, num_context=1),)
    shadows.add(7, "ngram", Draft([4, 5, 6]), 1)
    assert write(shadows, seq, 8) == ()
    assert not shadows.waits(7, "ngram")


def test_an_ended_sequence_cuts_the_draft() -> None:
    shadows, seq = begin([1])
    shadows.add(7, "ngram", Draft([4, 5, 6]), 0)
    shadows.add(7, "suffix", Draft([9]), 0)
    assert write(shadows, seq, 4) == (ShadowFeedback(7, "suffix", 0, 1, 0, num_context=1),)
    shadows.stop(7)
    assert shadows.resolved() == (ShadowFeedback(7, "ngram", 0, 1, 1, num_context=1),)
    shadows.add(7, "ngram", Draft([4]), 0)
    shadows.stop(7)   # nothing was written: nothing to say
    assert shadows.resolved() == ()


def test_nothing_to_propose_is_an_answer() -> None:
    shadows, _ = begin([1])
    shadows.add(7, "ngram", Draft([]), 0)
    assert not shadows.waits(7, "ngram")
    assert shadows.resolved() == (ShadowFeedback(7, "ngram", 0, 0, 0, num_context=1),)


def test_sampled_drafts_are_not_shadowed() -> None:
    shadows, seq = begin([1])
    shadows.add(7, "eagle", Draft([4], probs=torch.ones(1, 8) / 8), 0)
    assert write(shadows, seq, 4) == ()


class Watch(AdaptivePolicy):
    """Verifies half of each of the first drafter's drafts and only watches the second drafter."""

    def __init__(self) -> None:
        self.seen: list[Feedback] = []
        self.reason = "watching"

    def plan(self, view: BatchView) -> Mapping[int, Choice]:
        return {seq.seq_id: Choice("suffix", 4) for seq in view.sequences if seq.decoding}

    def shadow(self, view: BatchView) -> Mapping[int, Choice]:
        return {seq.seq_id: Choice("ngram", 3) for seq in view.sequences if seq.decoding}

    def select(self, drafts: Sequence[DraftView], view: BatchView) -> Mapping[int, int]:
        return {draft.seq_id: draft.length // 2 for draft in drafts}

    def observe(self, feedback: Feedback) -> None:
        self.seen.append(feedback)


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> list[Feedback]:
    directory = tiny_model_dir(tmp_path_factory.mktemp("tiny"), "llama", seed=3)
    watch = "tests.unit.test_shadows:Watch"
    config = SpeculativeConfig.parse({"method": ["suffix", "ngram"], "policy": watch, "num_speculative_tokens": 4})
    engine = Engine(EngineConfig(str(directory), dtype="float32", device="cpu", max_model_len=256, speculative=config))
    policy = engine.policy
    assert isinstance(policy, Policy)
    engine.add(Request("r", [5, 6, 7, 8, 9] * 6, SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)))
    while engine.has_work():
        engine.step()
        engine.check()
    return policy.seen   # type: ignore[attr-defined, no-any-return]


def test_the_engine_reports_shadows(seen: list[Feedback]) -> None:
    shadows = [shadow for feedback in seen for shadow in feedback.shadows]
    assert {shadow.drafter for shadow in shadows} == {"suffix", "ngram"}
    assert all(shadow.num_verified > 0 for shadow in shadows if shadow.drafter == "suffix" and shadow.num_drafts > 3)
    for shadow in shadows:
        assert 0 <= shadow.num_confirmed <= shadow.num_drafts - shadow.num_verified
        assert len(shadow.confidence or ()) == shadow.num_drafts


def test_the_engine_reports_each_drafter(seen: list[Feedback]) -> None:
    both = [feedback for feedback in seen if len(feedback.drafters) == 2]
    assert both
    for feedback in both:
        suffix, ngram = feedback.drafters
        assert (suffix.drafter, suffix.num_rows) == ("suffix", 1)
        assert 1 <= suffix.num_steps <= 4
        assert (ngram.drafter, ngram.num_rows, ngram.num_steps) == ("ngram", 1, 3)
        assert 0.0 < suffix.draft_ms + ngram.draft_ms <= feedback.draft_ms
    first = both[0].drafters[0]
    assert first.num_catch_up == 30
    assert sum(feedback.drafters[0].num_catch_up for feedback in seen[2:-1] if feedback.drafters) < 40


def test_the_engine_reports_the_policy(seen: list[Feedback]) -> None:
    assert all(feedback.reason == "watching" and feedback.num_rows == 1 and feedback.policy_ms > 0.0 for feedback in seen)
    assert all(feedback.num_waiting == 0 and feedback.forecast is None for feedback in seen)
