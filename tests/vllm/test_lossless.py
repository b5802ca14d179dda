"""Text through the plugin is vLLM's own, token for token, in whatever vLLM does at the same time; and the counters add up."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.core.sched.scheduler import Scheduler as VllmScheduler

from headway.bench import workloads
from tests.vllm.conftest import NGRAM, SCHEDULER, scheduler_of

CUSTOM = {"method": "custom_class", "model": "headway.vllm.Proposer", "num_speculative_tokens": 8}
QUIET = {"headway": {"costs": "off"}}
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
Offline = Callable[..., Any]


def prompts() -> list[str]:
    """16 that repeat themselves, 16 that do not."""
    words = ["red", "green", "blue", "yellow", "black", "white"]
    rng = random.Random(5)
    repeating = []
    for _ in range(16):
        line = " ".join(rng.sample(words, 4))
        repeating.append(f"Repeat: {line}. {line}. {line}. {line}.")
    return repeating + [str((prompt.messages or ({},))[-1]["content"]) for prompt in workloads.load("chat", 16, 1)]


def written(llm: Any, asked: list[str], params: SamplingParams | list[SamplingParams] = GREEDY) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in llm.generate(asked, params, use_tqdm=False)]


def with_headway(offline: Offline, speculative: dict[str, Any] = NGRAM, **kwargs: Any) -> Any:
    return offline(speculative_config=speculative, scheduler_cls=SCHEDULER, additional_config=QUIET, **kwargs)


def check_counters(llm: Any, num_tokens: int) -> None:
    """Every token is a row's own or an accepted draft; nothing went wrong; nothing is left."""
    scheduler = scheduler_of(llm)
    counters, adapter = scheduler._parts.counters, scheduler._adapter
    assert (counters.off, counters.num_errors, counters.num_fallback_steps) == ("", 0, 0)
    accepted = sum(accepted * rows for (_, _, accepted, _), rows in counters.verified.items())
    assert counters.num_sampling_rows + accepted == num_tokens
    assert counters.num_verified_drafts == sum(drafts * rows for (_, drafts, _, _), rows in counters.verified.items())
    assert accepted > 0, "nothing was ever accepted: the test proves nothing"
    assert not adapter._flights
    assert len(adapter.requests) <= len(scheduler.requests) + 1


@pytest.fixture(scope="module")
def plain(offline: Offline) -> list[list[int]]:
    return written(offline(), prompts())


@pytest.mark.parametrize("speculative", [NGRAM, CUSTOM], ids=["ngram", "proposer"])
@pytest.mark.parametrize("max_num_seqs", [16, 1])
def test_greedy_text_is_the_same(offline: Offline, plain: list[list[int]], speculative: dict[str, Any], max_num_seqs: int) -> None:
    llm = with_headway(offline, speculative, max_num_seqs=max_num_seqs)
    assert written(llm, prompts()) == plain
    check_counters(llm, sum(map(len, plain)))


@pytest.mark.parametrize("speculative", [NGRAM, CUSTOM], ids=["ngram", "proposer"])
def test_a_step_without_drafts_is_a_plain_step(offline: Offline, plain: list[list[int]], speculative: dict[str, Any]) -> None:
    """No rejection sampler, and after a while hardly a drafter: vLLM's plugin loader has found headway.vllm.runner."""
    llm = with_headway(offline, speculative)
    runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    calls: Counter[str] = Counter()

    def count(owner: Any, name: str) -> None:
        method = getattr(owner, name)
        setattr(owner, name, lambda *args, **kwargs: (calls.update([name]), method(*args, **kwargs))[1])

    count(runner.rejection_sampler, "forward")
    count(runner.drafter, "propose")
    off = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=2, extra_args={"headway_enabled": 0})
    found = llm.generate(prompts(), off, use_tqdm=False)
    assert [list(output.outputs[0].token_ids) for output in found] == plain
    first = [output.outputs[0] for output in found]
    assert all(token in step for one in first for token, step in zip(one.token_ids, one.logprobs, strict=True))
    assert calls["forward"] == 0
    assert 0 < calls["propose"] < 0.8 * scheduler_of(llm)._parts.counters.num_steps
    assert written(llm, prompts()) == plain
    assert calls["forward"] > 0


def test_the_proposer_alone(offline: Offline, plain: list[list[int]]) -> None:
    assert written(offline(speculative_config=CUSTOM), prompts()) == plain


def test_preemption_chunked_prefill_and_prefix_cache(offline: Offline) -> None:
    """Few blocks, small chunks, shared prefixes, two rounds of the same prompts."""
    shared = "The quick brown fox jumps over the lazy dog. " * 8
    asked = [shared + prompt for prompt in prompts()[:8]]
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    small = {"max_num_batched_tokens": 64, "block_size": 32, "num_gpu_blocks_override": 22, "max_model_len": 512}
    expected = written(offline(), asked, params)
    llm = with_headway(offline, **small)
    scheduler, preempted = scheduler_of(llm), []
    preempt = scheduler._preempt_request
    scheduler._preempt_request = lambda request, *args, **kwargs: (preempted.append(request), preempt(request, *args, **kwargs))[1]
    for _ in range(2):
        assert written(llm, asked, params) == expected
    assert preempted, "nothing was preempted: the test proves nothing"
    check_counters(llm, 2 * sum(map(len, expected)))


def test_structured_output_stop_strings_and_wishes(offline: Offline) -> None:
    """In one batch: a grammar, stop strings, stop tokens, requests that do not want drafts, sampled ones."""
    line = "red green blue yellow. " * 6
    params = [
        SamplingParams(temperature=0.0, max_tokens=24, structured_outputs=StructuredOutputsParams(regex="(red|green|blue| ){20,60}")),
        SamplingParams(temperature=0.0, max_tokens=40, structured_outputs=StructuredOutputsParams(json={"type": "array", "items": {
            "type": "integer"}})),
        SamplingParams(temperature=0.0, max_tokens=40, stop=["blue yellow"]),
        SamplingParams(temperature=0.0, max_tokens=40, stop=["yellow"], include_stop_str_in_output=True),
        SamplingParams(temperature=0.0, max_tokens=24, extra_args={"headway_enabled": 0}),
        SamplingParams(temperature=0.0, max_tokens=24, extra_args={"headway_max_tokens": 1}),
        SamplingParams(temperature=0.0, max_tokens=24, extra_args={"headway_max_tokens": "many"}),
        SamplingParams(temperature=0.0, max_tokens=24, min_tokens=4, repetition_penalty=1.2, bad_words=["purple"]),
    ]  # fmt: skip
    asked = [line] * len(params)

    def texts(llm: Any) -> list[tuple[str, str | None]]:
        return [(output.outputs[0].text, output.outputs[0].finish_reason) for output in llm.generate(asked, params, use_tqdm=False)]

    expected = texts(offline())
    llm = with_headway(offline)
    assert texts(llm) == expected
    counters = scheduler_of(llm)._parts.counters
    assert (counters.num_errors, counters.num_invalid_requests) == (0, 1)
    assert len(written(llm, [line] * 4, SamplingParams(temperature=1.0, seed=3, max_tokens=24))) == 4


def test_aborts_between_steps(offline: Offline) -> None:
    llm = with_headway(offline)
    engine, rng = llm.llm_engine, random.Random(2)
    for turn in range(4):
        names = [f"{turn}-{i}" for i in range(12)]
        for name, prompt in zip(names, rng.sample(prompts(), 12), strict=True):
            engine.add_request(name, prompt, SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True))
        for name in names:
            engine.step()
            if rng.random() < 0.6:
                engine.abort_request([name])
        while engine.has_unfinished_requests():
            engine.step()
    scheduler = scheduler_of(llm)
    assert (scheduler._parts.counters.num_errors, scheduler._parts.counters.off) == (0, "")
    assert written(llm, ["One, two,"])
    assert len(scheduler._adapter.requests) <= 1
    assert len(scheduler._adapter.shadows._live) <= 1


@pytest.mark.parametrize("broken", ["plan", "observe"])
def test_an_error_in_the_controller_costs_speed_and_not_text(
    offline: Offline, plain: list[list[int]], broken: str, caplog: pytest.LogCaptureFixture
) -> None:
    llm = with_headway(offline)
    scheduler = scheduler_of(llm)
    calls = []

    def fail(*args: Any, **kwargs: Any) -> None:
        calls.append(args)
        raise RuntimeError("on purpose")

    setattr(scheduler._adapter.driver, broken, fail)
    assert written(llm, prompts()) == plain
    counters = scheduler._parts.counters
    assert len(calls) == counters.num_errors == 1
    assert counters.off
    assert counters.num_fallback_steps > 5


def test_a_vllm_that_is_not_understood_keeps_its_own_scheduler(offline: Offline, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headway.vllm.compat.problems", lambda version, scheduler: ["its scheduler is another one"])
    llm = with_headway(offline)
    assert type(scheduler_of(llm)) is VllmScheduler
    assert written(llm, ["One, two, three, one, two, three,"])
