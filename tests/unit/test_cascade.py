"""A cascade drafts what its draft model drafts, in fewer passes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from headway.config import EngineConfig, SpeculativeConfig
from headway.drafters.core.model_chain import ChainDrafter
from headway.drafters.drafter import ContinueDrafting, Drafter, DraftRequest, never_stop
from headway.drafters.ngram import Ngram
from headway.engine.engine import Engine
from headway.sampling_params import SamplingParams
from headway.types import Draft, Request
from tests.drafter_models import noisy_copy
from tests.tiny import tiny_model_dir


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("tiny")
    target = tiny_model_dir(folder, "llama", seed=3)
    return target, noisy_copy(folder, target, 0.05)


Run = tuple[dict[str, list[int]], list[tuple[list[int], Draft]], int]
"""What was written, every (history, draft) in order, passes of the draft network."""


class Oracle(Drafter):
    """Knows the drafts to come, and spoils every third guess."""

    def __init__(self, known: Run) -> None:
        self.table = {tuple(history): draft.tokens for history, draft in known[1]}

    def propose(self, requests: Sequence[DraftRequest], continue_drafting: ContinueDrafting) -> list[Draft]:
        drafts = []
        for asked in requests:
            t = asked.num_tentative
            guesses = list(self.table[tuple(asked.token_ids[: len(asked.token_ids) - t])][t : t + asked.k])
            if len(asked.token_ids) % 3 == 0 and guesses:
                guesses[-1] = (guesses[-1] + 1) % 300
            drafts.append(Draft(guesses))
        return drafts


def run(models: tuple[Path, Path], speculative: dict[str, Any], temperature: float, oracle: Run | None = None) -> Run:
    target, draft = models
    config = SpeculativeConfig.parse({"model": str(draft), "num_speculative_tokens": 6, "policy": "static", **speculative})
    engine = Engine(EngineConfig(model=str(target), dtype="float32", device="cpu", block_size=16, max_model_len=256, speculative=config))
    (drafter,) = engine.drafters.values()
    assert isinstance(drafter, ChainDrafter)
    if oracle is not None:
        drafter.helper = Oracle(oracle)
    made: list[tuple[list[int], Draft]] = []
    passes = 0
    propose, forward = drafter.propose, drafter.forward

    def spy(requests: Sequence[DraftRequest], continue_drafting: ContinueDrafting) -> list[Draft]:
        drafts = propose(requests, continue_drafting)
        made.extend((list(asked.token_ids), draft) for asked, draft in zip(requests, drafts, strict=True))
        return drafts

    def count(*args: Any) -> torch.Tensor:
        nonlocal passes
        passes += 1
        return forward(*args)

    drafter.propose, drafter.forward = spy, count  # type: ignore[method-assign]
    for i in range(3):
        params = SamplingParams(temperature=temperature, seed=i, max_tokens=50, ignore_eos=True)
        engine.add(Request(f"r{i}", ([5 + i, 6, 7, 8 + i, 9] * 9)[: 20 + 5 * i], params))
    written: dict[str, list[int]] = {}
    while engine.has_work():
        for delta in engine.step():
            written.setdefault(delta.request_id, []).extend(delta.token_ids)
        engine.check()
    return written, made, passes


@pytest.mark.parametrize("helper", ["suffix", "ngram"])
@pytest.mark.parametrize(("temperature", "method"), [(0.0, "greedy"), (0.4, "probabilistic")])
def test_the_same_drafts_in_fewer_passes(models: tuple[Path, Path], helper: str, temperature: float, method: str) -> None:
    alone = run(models, {"method": "draft_model", "draft_sample_method": method}, temperature)
    cascaded = run(models, {"method": "cascade", "draft_sample_method": method, "cascade_helper": helper}, temperature)
    assert_same(cascaded, alone)
    assert cascaded[2] <= alone[2]
    oracle = run(models, {"method": "cascade", "draft_sample_method": method, "cascade_helper": helper}, temperature, alone)
    assert_same(oracle, alone)
    assert oracle[2] < 0.6 * alone[2]


def assert_same(cascaded: Run, alone: Run) -> None:
    assert cascaded[0] == alone[0]
    assert [(history, draft.tokens) for history, draft in cascaded[1]] == [(history, draft.tokens) for history, draft in alone[1]]
    for (_, one), (_, two) in zip(alone[1], cascaded[1], strict=True):
        assert two.confidence == pytest.approx(one.confidence or [], abs=1e-4)
        assert (one.probs is None) == (two.probs is None)
        if one.probs is not None:
            torch.testing.assert_close(two.probs, one.probs, atol=1e-4, rtol=1e-3)


def test_tentative_tokens_are_continued_and_not_remembered() -> None:
    drafter, history = Ngram(Ngram.Options(prompt_lookup_max=2, prompt_lookup_min=2)), [1, 2, 3, 4, 5, 9, 9, 9]
    (draft,) = drafter.propose([DraftRequest(0, [*history, 2, 3], 1, 2, True, num_tentative=2)], never_stop)
    assert draft.tokens == [4, 5]
    assert drafter._indices[0].end == len(history)
    (draft,) = drafter.propose([DraftRequest(0, [*history, 3, 4], 1, 1, True)], never_stop)
    assert draft.tokens == [5]
    assert drafter._indices[0].end == len(history) + 2
