"""The asynchronous scheduler with vLLM's own around it and nothing behind it: steps overlap, drafts are placeholders, outputs are made up.

vLLM schedules asynchronously on a GPU only; its scheduler itself needs none. Its assertions about placeholders are what is tested here.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
from vllm import SamplingParams, __version__
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from headway.vllm.scheduler import HeadwayAsyncScheduler, Scheduler
from tests.vllm.conftest import NGRAM, scheduler_of

MAX_K = NGRAM["num_speculative_tokens"]


class Loop:
    """vLLM's engine core with two steps in flight. A draft is accepted with probability `rate`."""

    def __init__(self, scheduler: Any, rate: float) -> None:
        self.scheduler, self.rate, self.rng = scheduler, rate, random.Random(4)
        self.flying: deque[tuple[Any, set[str]]] = deque()
        self.written: dict[str, int] = {}
        self.drafted: list[int] = []

    def turn(self) -> None:
        output = self.scheduler.schedule()
        writes = {name for name in output.num_scheduled_tokens if not self.scheduler.requests[name].is_prefill_chunk}
        if output.total_num_scheduled_tokens:
            self.flying.append((output, writes))
            self.drafted += map(len, output.scheduled_spec_decode_tokens.values())
        if len(self.flying) == 2 or (self.flying and not output.total_num_scheduled_tokens):
            self.land()

    def land(self) -> None:
        output, writes = self.flying.popleft()
        names = list(output.num_scheduled_tokens)
        sampled = [self._sample(len(output.scheduled_spec_decode_tokens.get(name, ()))) if name in writes else [] for name in names]
        for name, tokens in zip(names, sampled, strict=True):
            request = self.scheduler.requests.get(name)
            if request is not None and not request.is_finished():
                self.written[name] = self.written.get(name, 0) + min(len(tokens), request.max_tokens - request.num_output_tokens)
        self.scheduler.update_from_output(
            output, ModelRunnerOutput(req_ids=names, req_id_to_index={name: i for i, name in enumerate(names)}, sampled_token_ids=sampled)
        )

    def _sample(self, num_drafts: int) -> list[int]:
        accepted = 0
        while accepted < num_drafts and self.rng.random() < self.rate:
            accepted += 1
        return [self.rng.randrange(10, 100) for _ in range(accepted + 1)]

    def drain(self) -> None:
        for _ in range(3000):
            if not self.scheduler.has_unfinished_requests():
                break
            self.turn()
        while self.flying:
            self.land()
        assert not self.scheduler.has_unfinished_requests()


@pytest.fixture
def loop(offline: Callable[..., Any], request: pytest.FixtureRequest) -> Loop:
    """The scheduler is made as vLLM would make it, from the configuration of a real engine that is told to be asynchronous."""
    options = {"block_size": 32, "num_gpu_blocks_override": 24, "max_model_len": 512, "max_num_batched_tokens": 64}
    llm = offline(speculative_config=NGRAM, enable_prefix_caching=False, additional_config={"headway": {"costs": "off"}}, **options)
    sync = scheduler_of(llm)
    config = sync.vllm_config
    config.scheduler_config.async_scheduling = True
    made = Scheduler(
        vllm_config=config, kv_cache_config=sync.kv_cache_config, structured_output_manager=sync.structured_output_manager,
        block_size=sync.block_size, log_stats=True,
    )  # fmt: skip
    assert isinstance(made, HeadwayAsyncScheduler)
    return Loop(made, request.param)


def make(name: str, length: int, max_tokens: int, **xargs: Any) -> Request:
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, extra_args=xargs or None)
    return Request(name, list(range(10, 10 + length)), params, None, arrival_time=0.0)


@pytest.mark.parametrize("loop", [0.9, 0.05], indirect=True)
def test_overlapping_steps_with_preemption_and_aborts(loop: Loop) -> None:
    rng, scheduler = random.Random(1), loop.scheduler
    counters = scheduler._parts.counters
    names = []
    for i in range(40):
        names.append(f"r{i}")
        wishes = {"headway_max_tokens": 2} if i % 7 == 3 else {"headway_enabled": 0} if i % 7 == 5 else {}
        scheduler.add_request(make(names[-1], rng.randrange(5, 150), rng.randrange(1, 120), **wishes))
        for _ in range(rng.randrange(4)):
            loop.turn()
        if i % 9 == 8:
            scheduler.finish_requests(rng.choice(names), RequestStatus.FINISHED_ABORTED)
    loop.drain()
    assert (counters.off, counters.num_errors, counters.num_fallback_steps) == ("", 0, 0)
    assert counters.num_stale_outputs > 0, f"vLLM {__version__} preempted nothing: the test proves nothing"
    assert loop.drafted
    assert max(loop.drafted) <= MAX_K
    assert counters.num_verified_drafts > 100
    assert not scheduler._adapter._flights
    assert len(scheduler._adapter._requests) <= 1
    mean_k = counters.num_verified_drafts / counters.num_sampling_rows
    assert mean_k > 2.0 if loop.rate > 0.5 else mean_k < 2.0


@pytest.mark.parametrize("loop", [0.8], indirect=True)
def test_an_error_in_the_controller_leaves_vllm_at_work(loop: Loop) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("on purpose")

    for i in range(6):
        loop.scheduler.add_request(make(f"r{i}", 40, 60))
        loop.turn()
    loop.scheduler._adapter.driver.plan = fail
    loop.drain()
    assert loop.scheduler._parts.counters.num_errors == 1
    assert sum(loop.written.values()) == 6 * 60
