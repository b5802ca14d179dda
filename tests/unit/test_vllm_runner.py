"""The short cuts of a model runner, on an object that has what they look for. The real runner is in tests/vllm."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from headway.vllm.runner import lighten

OURS, PROPOSER = "headway.vllm.Scheduler", "headway.vllm.Proposer"


class Runner:
    """Answers with what it was called with."""

    def __init__(self, method: str = "ngram", scheduler: object = OURS, model: str | None = None) -> None:
        spec = SimpleNamespace(method=method, model=model)
        self.vllm_config = SimpleNamespace(speculative_config=spec, scheduler_config=SimpleNamespace(scheduler_cls=scheduler))

    def _sample(self, logits: Any, spec_decode_metadata: Any) -> Any:
        return logits, spec_decode_metadata

    def propose_draft_token_ids(self, scheduler_output: Any, sampled_token_ids: Any, sampling_metadata: Any) -> Any:
        return [[7] for _ in sampled_token_ids]


def metadata(*num_drafts: int) -> SimpleNamespace:
    return SimpleNamespace(num_draft_tokens=list(num_drafts), max_spec_len=max(num_drafts))


def test_steps_without_drafts_are_sampled_as_without_speculation() -> None:
    runner = Runner()
    assert lighten(runner)
    some = metadata(0, 2)
    assert runner._sample("logits", metadata(0, 0)) == ("logits", None)
    assert runner._sample("logits", some) == ("logits", some)
    assert runner._sample("logits", None) == ("logits", None)


def test_no_drafter_is_asked_for_nothing() -> None:
    for runner in (Runner("ngram"), Runner("custom_class", None, PROPOSER)):
        assert lighten(runner)
        for k, drafts in ((0, [[], []]), (4, [[7], [7]])):
            assert runner.propose_draft_token_ids(SimpleNamespace(num_spec_tokens_to_schedule=k), [[1], []], None) == drafts


def test_drafters_that_keep_state_are_always_asked() -> None:
    assert lighten(runner := Runner("suffix"))
    assert runner.propose_draft_token_ids(SimpleNamespace(num_spec_tokens_to_schedule=0), [[1]], None) == [[7]]


@pytest.mark.parametrize("runner", [Runner(scheduler=None), Runner(scheduler=dict), Runner(scheduler="my.Scheduler", model="my.Proposer")])
def test_others_are_left_alone(runner: Runner) -> None:
    assert not lighten(runner)
    assert runner._sample("logits", step := metadata(0)) == ("logits", step)


def test_what_is_not_as_expected_is_left_alone() -> None:
    class Renamed(Runner):
        def _sample(self, values: Any, spec_decode_metadata: Any) -> Any:   # type: ignore[override]
            return spec_decode_metadata

    runner = Renamed()
    assert not lighten(runner)
    assert runner._sample(None, step := metadata(0)) is step
    assert not lighten(SimpleNamespace(vllm_config=runner.vllm_config))
    assert not lighten(None)
