"""Lookups, drafters that are asked before another one: who drafts, what is told about it, and that the text stays the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from headway.config import EngineConfig, SpeculativeConfig
from headway.control.policy import AdaptivePolicy, BatchView, DraftView
from headway.engine.engine import Engine
from headway.sampling_params import SamplingParams
from headway.types import Choice, Feedback, Request
from tests.drafter_models import drafter_config
from tests.tiny import tiny_model_dir

OUTPUT_LEN = 24


class Lookups(AdaptivePolicy):
    """`lookups`, then `dear`, for every request."""

    def __init__(self, dear: str, k: int = 4, lookups: Sequence[str] = ("suffix", "ngram")) -> None:
        self.dear, self.k, self.lookups = dear, k, lookups
        self.feedback: list[Feedback] = []
        self.offered: list[DraftView] = []

    def plan(self, view: BatchView) -> Mapping[int, Choice]:
        lookups = tuple(Choice(name, 4) for name in self.lookups)
        return {seq.seq_id: Choice(self.dear, self.k, lookups) for seq in view.sequences if seq.decoding}

    def choose_lookup(self, drafts: Sequence[DraftView], view: BatchView) -> Mapping[int, str]:
        """All, some of them, or none of what was found, in turn; now and then nobody drafts."""
        self.offered += drafts
        if view.step % 7 == 3:
            return {seq.seq_id: "ngram" for seq in view.sequences}
        return {draft.seq_id: draft.drafter for draft in drafts if (draft.seq_id + view.step) % 3}

    def observe(self, feedback: Feedback) -> None:
        self.feedback.append(feedback)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_dir(tmp_path_factory.mktemp("tiny"), "llama", seed=3)


def build(model_dir: Path, methods: list[Any] | None, **more: Any) -> Engine:
    speculative = None
    if methods:
        speculative = SpeculativeConfig.parse({"method": methods, "num_speculative_tokens": 4, "policy": "static", **more})
    shape = {"max_model_len": 256, "block_size": 16, "profile": False}
    return Engine(EngineConfig(model=str(model_dir), dtype="float32", device="cpu", speculative=speculative, **shape))


def requests(sampled: bool) -> list[Request]:
    prompts = [([5 + i, 6, 7, 8 + i, 9] * 9)[: 20 + 5 * i] for i in range(5)]
    params = [SamplingParams(temperature=0.7 if sampled else 0.0, seed=i, max_tokens=OUTPUT_LEN, ignore_eos=True) for i in range(5)]
    return [Request(f"r{i}", prompt, param) for i, (prompt, param) in enumerate(zip(prompts, params, strict=True))]


def write(engine: Engine, sampled: bool, hog: int = 0) -> dict[str, list[int]]:
    held = engine.scheduler.pool.allocate(engine.scheduler.pool.num_free - hog) if hog else []
    written: dict[str, list[int]] = {}
    for request in requests(sampled):
        engine.add(request)
    while engine.has_work():
        for delta in engine.step():
            written.setdefault(delta.request_id, []).extend(delta.token_ids)
        if not held:
            engine.check()
    engine.scheduler.pool.release(held)
    return written


@pytest.fixture(scope="module", params=["eagle", "draft_model", "eagle tree"])
def engine(request: pytest.FixtureRequest, model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    config = drafter_config(request.param, tmp_path_factory.mktemp("dear"), model_dir)
    config["name"] = config.pop("method")
    return build(model_dir, [{**config, "draft_sample_method": "greedy"}, "suffix", {"name": "ngram", "prompt_lookup_min": 2}])


@pytest.mark.parametrize("hog", [0, 11], ids=["roomy", "preempted"])
@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
def test_the_text_is_that_of_plain_decoding(engine: Engine, model_dir: Path, sampled: bool, hog: int) -> None:
    policy = Lookups(next(iter(engine.drafters)))
    engine.drive(policy)
    assert write(engine, sampled, hog) == write(build(model_dir, None), sampled)
    verified = {seq.drafter for feedback in policy.feedback for seq in feedback.sequences if seq.num_drafts}
    assert verified >= {policy.dear, "suffix"}
    assert any(shadow.drafter in policy.lookups and shadow.num_verified == 0 for feedback in policy.feedback for shadow in feedback.shadows)


def test_each_step_tells_who_drafted_for_whom(engine: Engine) -> None:
    dear = next(iter(engine.drafters))
    policy = Lookups(dear)
    engine.drive(policy)
    write(engine, sampled=False)
    for feedback in policy.feedback:
        asked = {part.drafter: part.num_rows for part in feedback.drafters}
        decoding = [seq for seq in feedback.sequences if seq.k]
        assert {seq.drafter for seq in decoding} <= set(asked)
        assert asked.get(dear, 0) == sum(seq.drafter == dear for seq in decoding)
        assert all(asked[name] == len(decoding) for name in policy.lookups if decoding and name in asked)
        # Each look that was not taken is told, with what it found.
        assert {(seq_id, name) for seq_id, name, _, _ in feedback.lookups} == {
            (seq.seq_id, name) for seq in decoding for name in policy.lookups if name != seq.drafter and name in asked
        }
    assert all(draft.deterministic and draft.length for draft in policy.offered)


class Halting(Lookups):
    """Nobody is asked before, and drafts end behind the second token."""

    def __init__(self, dear: str, stops_early: bool) -> None:
        super().__init__(dear, lookups=())
        self.says = stops_early
        self.asked: list[int] = []

    def stops_early(self, drafter: str) -> bool:
        return self.says

    def continue_drafting(self, seq_ids: Sequence[int], position: int, confidence: NDArray[np.float64]) -> NDArray[np.bool_]:
        self.asked.append(position)
        return np.full(len(seq_ids), position < 1)


@pytest.mark.parametrize("stops_early", [False, True])
def test_a_policy_that_stops_early_is_asked_and_pays_for_what_was_drafted(engine: Engine, model_dir: Path, stops_early: bool) -> None:
    drafter = next(iter(engine.drafters.values()))
    policy = Halting(drafter.name, stops_early)
    engine.drive(policy)
    assert write(engine, sampled=False) == write(build(model_dir, None), sampled=False)
    assert set(policy.asked) == ({0, 1} if stops_early else set())
    passes = {part.num_steps for feedback in policy.feedback for part in feedback.drafters}
    assert max(passes) == (2 if stops_early and drafter.stepwise else 4)
    assert drafter.stepwise == (drafter.tree_size == 0)


def test_lookups_alone(model_dir: Path) -> None:
    engine = build(model_dir, ["suffix", "ngram"])
    policy = Lookups("none", 0)
    engine.drive(policy)
    assert write(engine, sampled=False) == write(build(model_dir, None), sampled=False)
    assert {seq.drafter for feedback in policy.feedback for seq in feedback.sequences} == {"suffix", "ngram", "none"}


def test_by_default_the_first_draft_that_is_there_is_chosen() -> None:
    views = [DraftView(1, "suffix", 2, True, None), DraftView(1, "ngram", 4, True, None), DraftView(2, "ngram", 4, True, None)]
    assert AdaptivePolicy.choose_lookup(Lookups("x"), views, BatchView(0, (), 0, 0, 0, (), 4)) == {1: "suffix", 2: "ngram"}
