"""Lossless means lossless: on the real model, greedy output with speculation equals output without.

In fp32 always; in bf16 as well where the compiled kernels multiply: what they compute for a token does not depend on its company.
64 varied prompts; both token drafters, k in {1, 4, 8}, static and batch_table, alone and batched, with preemption forced. The
quick half runs in `make test`, all of it in `make test-heavy`.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from headway import native
from headway.bench import workloads
from headway.config import EngineConfig, SpeculativeConfig
from headway.engine.engine import Engine
from headway.sampling_params import SamplingParams
from headway.types import Request

NUM_PROMPTS = 64
OUTPUT_LEN = 32
POLICIES = {
    "static": {"name": "static"},
    "batch_table": {"name": "batch_table", "num_speculative_tokens_per_batch_size": [[1, 8, 8], [9, 40, 3], [41, 64, 1]]},
}
Prompts = list[list[int]]
Outputs = dict[int, list[int]]
SAMPLED = SamplingParams(temperature=0.9, top_p=0.95, seed=11, max_tokens=OUTPUT_LEN, presence_penalty=0.3, ignore_eos=True)
GREEDY = SamplingParams(temperature=0.0, max_tokens=OUTPUT_LEN)


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> str:
    library = native.library()
    if request.param == "bfloat16" and (library is None or not library.linear_panel):
        pytest.skip(f"bf16 products depend on the batch without the compiled kernels ({native.choose().reason})")
    return str(request.param)


def build(dtype: str, speculative: SpeculativeConfig | None = None) -> Engine:
    config = EngineConfig(
        dtype=dtype, device="cpu", max_model_len=1024, block_size=16, kv_cache_memory_bytes=1 << 30, speculative=speculative
    )
    return Engine(config)


@pytest.fixture(scope="module")
def plain(dtype: str) -> Engine:
    return build(dtype)


@pytest.fixture(scope="module")
def prompts(plain: Engine) -> list[list[int]]:
    """Code edits, passages and chat, cut to their last tokens so that the suite stays quick."""
    return [prompt.encode(plain.tokenizer)[-96:] for prompt in workloads.load("mixed", NUM_PROMPTS, seed=5)]


@pytest.fixture(scope="module")
def expected(plain: Engine, prompts: list[list[int]]) -> dict[int, list[int]]:
    return write(plain, prompts, GREEDY)


def write(engine: Engine, prompts: list[list[int]], params: SamplingParams, batch: int = NUM_PROMPTS) -> dict[int, list[int]]:
    """Continues the prompts `batch` at a time."""
    written: dict[int, list[int]] = {i: [] for i in range(len(prompts))}
    for first in range(0, len(prompts), batch):
        for i in range(first, min(first + batch, len(prompts))):
            engine.add(Request(str(i), prompts[i], params))
        for delta in drain(engine):
            written[int(delta.request_id)] += delta.token_ids
    return written


def write_preempted(engine: Engine, prompts: list[list[int]]) -> dict[int, list[int]]:
    """All prompts at once, with blocks for a few of them only."""
    pool = engine.scheduler.pool
    hogs = pool.allocate(pool.num_free - 1100 // pool.block_size)
    written: dict[int, list[int]] = {i: [] for i in range(len(prompts))}
    for i, prompt in enumerate(prompts):
        engine.add(Request(str(i), prompt, GREEDY))
    while engine.has_work():
        for delta in engine.step():
            written[int(delta.request_id)] += delta.token_ids
    pool.release(hogs)
    engine.check()
    assert engine.scheduler.num_preemptions > 0
    return written


def drain(engine: Engine) -> Iterator:
    while engine.has_work():
        yield from engine.step()
    engine.check()
    assert engine.scheduler.pool.num_free == engine.scheduler.pool.num_blocks


def speculating(dtype: str, method: str, k: int, policy: str) -> Engine:
    options = {"prompt_lookup_min": 1, "prompt_lookup_max": 4} if method == "ngram" else {}   # drafts often, and often wrongly
    return build(dtype, SpeculativeConfig.parse({"method": method, "num_speculative_tokens": k, "policy": POLICIES[policy], **options}))


def assert_equal(written: dict[int, list[int]], expected: dict[int, list[int]]) -> None:
    different = [i for i in written if written[i] != expected[i]]
    assert not different, f"{len(different)} of {len(written)} outputs differ: {different}"


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_greedy_batched(dtype: str, method: str, prompts: list[list[int]], expected: dict[int, list[int]]) -> None:
    engine = speculating(dtype, method, 4, "static")
    assert_equal(write(engine, prompts, GREEDY), expected)
    verified = engine.metrics.verified.items()
    assert sum(accepted * rows for (_, _, accepted, _), rows in verified) > 100
    assert sum((drafted - accepted) * rows for (_, drafted, accepted, _), rows in verified) > 100


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_greedy_alone(dtype: str, method: str, prompts: list[list[int]], expected: dict[int, list[int]]) -> None:
    engine = speculating(dtype, method, 8, "static")
    some = list(range(0, NUM_PROMPTS, 8))
    written = write(engine, [prompts[i] for i in some], GREEDY, batch=1)
    assert_equal(written, {n: expected[i] for n, i in enumerate(some)})


def test_greedy_with_preemption(dtype: str, prompts: list[list[int]], expected: dict[int, list[int]]) -> None:
    assert_equal(write_preempted(speculating(dtype, "suffix", 8, "batch_table"), prompts), expected)


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_a_seeded_request_writes_the_same_alone_in_a_batch_and_with_speculation(
    dtype: str, method: str, plain: Engine, prompts: list[list[int]]
) -> None:
    some = prompts[:12]
    alone = write(plain, some, SAMPLED, batch=1)
    assert_equal(write(plain, some, SAMPLED), alone)
    assert_equal(write(speculating(dtype, method, 4, "static"), some, SAMPLED), alone)


@pytest.mark.heavy
@pytest.mark.parametrize("policy", list(POLICIES))
@pytest.mark.parametrize("k", [1, 4, 8])
@pytest.mark.parametrize("method", ["ngram", "suffix"])
class TestTheWholeMatrix:
    def test_batched(self, dtype: str, method: str, k: int, policy: str, prompts: Prompts, expected: Outputs) -> None:
        assert_equal(write(speculating(dtype, method, k, policy), prompts, GREEDY), expected)

    def test_alone(self, dtype: str, method: str, k: int, policy: str, prompts: Prompts, expected: Outputs) -> None:
        assert_equal(write(speculating(dtype, method, k, policy), prompts, GREEDY, batch=1), expected)

    def test_preempted(self, dtype: str, method: str, k: int, policy: str, prompts: Prompts, expected: Outputs) -> None:
        assert_equal(write_preempted(speculating(dtype, method, k, policy), prompts), expected)
