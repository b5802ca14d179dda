"""Trees through the engine: whatever their shape and order, and wherever the accepted path lies, the text is that of plain decoding."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest

from headway import native
from headway.config import EngineConfig, SpeculativeConfig
from headway.drafters.drafter import ContinueDrafting, Drafter, DraftRequest
from headway.engine.engine import Engine
from headway.engine.runner import Runner
from headway.errors import ConfigError
from headway.models import attention_native
from headway.sampling_params import SamplingParams
from headway.types import Draft, Request
from tests.tiny import tiny_model_dir

NUM_REQUESTS, OUTPUT_LEN, SIZE = 5, 30, 20
PROMPTS = [[5 + i, 6, 7, 8 + i, 9] * (4 + i) for i in range(NUM_REQUESTS)]
TRUTH: dict[tuple[int, ...], list[int]] = {}   # prompt -> what follows it


class Knowing(Drafter):
    """Hides the truth in bushy trees, so that accepted paths are long and lie in all kinds of slots; some drafts are chains, some empty."""

    tree_size = SIZE

    def propose(self, requests: Sequence[DraftRequest], continue_drafting: ContinueDrafting) -> list[Draft]:
        return [self._tree(request) for request in requests]

    def _tree(self, request: DraftRequest) -> Draft:
        known, prompt = len(request.token_ids), tuple(request.token_ids[: request.num_prompt_tokens])
        choose = random.Random(known * 7 + len(prompt))
        truth = TRUTH[prompt][known - len(prompt) :][: request.k]
        if choose.random() < 0.2:
            return Draft(truth[: choose.randint(0, request.k)])
        nodes: list[tuple[int, int]] = []
        last, depths = -1, {-1: 0}
        for token in truth[: choose.randint(0, request.k)]:
            for _ in range(choose.randint(0, 4)):
                parent = choose.choice([node for node in depths if depths[node] < request.k])
                if (parent, other := choose.randrange(320)) not in nodes and (parent, other) != (last, token):
                    depths[len(nodes)] = depths[parent] + 1
                    nodes.append((parent, other))
            if len(nodes) < request.room:
                depths[len(nodes)] = depths[last] + 1
                nodes.append((last, token))
                last = len(nodes) - 1
        nodes = nodes[: request.room]
        return Draft([token for _, token in nodes], parents=tuple(parent for parent, _ in nodes))


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_dir(tmp_path_factory.mktemp("tiny"), "llama", seed=3)


@pytest.fixture(params=["tiles", "native"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "tiles":
        monkeypatch.setattr(attention_native, "fits", lambda *_: False)
    elif native.library() is None:
        pytest.skip(f"no compiled kernels: {native.choose().reason}")
    return str(request.param)


def build(directory: Path, speculative: SpeculativeConfig | None, dtype: str = "float32") -> Engine:
    return Engine(EngineConfig(
        model=str(directory), dtype=dtype, device="cpu", max_model_len=256, block_size=16, profile=False, speculative=speculative,
    ))  # fmt: skip


def speculating(directory: Path, policy: str = "static", dtype: str = "float32") -> Engine:
    method = f"{__name__}:Knowing"
    return build(directory, SpeculativeConfig.parse({"method": method, "num_speculative_tokens": 5, "policy": policy}), dtype)


def make_requests(temperature: float, num: int = NUM_REQUESTS) -> list[Request]:
    params = [SamplingParams(temperature=temperature, seed=i, max_tokens=OUTPUT_LEN, ignore_eos=True, logprobs=1) for i in range(num)]
    return [Request(f"r{i}", list(PROMPTS[i]), param) for i, param in enumerate(params)]


def write(engine: Engine, requests: list[Request], *, check: bool = True) -> dict[str, list[int]]:
    written: dict[str, list[int]] = {request.request_id: [] for request in requests}
    for request in requests:
        engine.add(request)
    while engine.has_work():
        for delta in engine.step():
            written[delta.request_id] += delta.token_ids
        if check:
            engine.check()
    return written


@cache
def plain(directory: Path, temperature: float, dtype: str, backend: str) -> dict[str, list[int]]:
    engine, written = build(directory, None, dtype), {}
    for request in make_requests(temperature):
        written |= write(engine, [request])
    return written


@pytest.fixture(params=[0.0, 0.8], ids=["greedy", "sampled"])
def expected(request: pytest.FixtureRequest, directory: Path, backend: str) -> tuple[float, dict[str, list[int]]]:
    found = plain(directory, request.param, "float32", backend)
    TRUTH.update((tuple(PROMPTS[i]), found[f"r{i}"]) for i in range(NUM_REQUESTS))
    return request.param, found


Expected = tuple[float, dict[str, list[int]]]


def accepted(engine: Engine) -> float:
    """Drafts accepted per sequence and step."""
    counts = engine.metrics.verified.items()
    return sum(accepted * rows for (_, _, accepted, _), rows in counts) / max(1, sum(rows for _, rows in counts))


@pytest.mark.parametrize("policy", ["static", "goodput"])
def test_alone_and_batched(directory: Path, expected: Expected, policy: str) -> None:
    engine = speculating(directory, policy)
    alone: dict[str, list[int]] = {}
    for request in make_requests(expected[0]):
        alone |= write(engine, [request])
    assert alone == expected[1]
    assert write(engine, make_requests(expected[0])) == expected[1]
    assert policy != "static" or accepted(engine) > 1.0
    assert engine.scheduler.pool.num_free == engine.scheduler.pool.num_blocks


def test_preempted(directory: Path, expected: Expected) -> None:
    engine = speculating(directory)
    pool = engine.scheduler.pool
    hogs = pool.allocate(pool.num_free - 11)
    assert write(engine, make_requests(expected[0]), check=False) == expected[1]
    assert engine.scheduler.num_preemptions > 0
    pool.release(hogs)
    assert pool.num_free == pool.num_blocks


def test_in_bf16_with_the_kernels_not_one_token_differs(directory: Path) -> None:
    """A node's sums are those of its path as a chain, so there is nothing for rounding to turn."""
    library = native.library()
    if library is None or not library.linear_panel:
        pytest.skip("needs compiled matrix products")
    for temperature in (0.0, 0.8):
        found = plain(directory, temperature, "bfloat16", "native")
        TRUTH.update((tuple(PROMPTS[i]), found[f"r{i}"]) for i in range(NUM_REQUESTS))
        engine = speculating(directory, dtype="bfloat16")
        assert write(engine, make_requests(temperature)) == found
        assert accepted(engine) > 1.0


def test_forgetting_to_move_the_path_is_seen(directory: Path, expected: Expected, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Runner, "compact", lambda *_: None)
    assert write(speculating(directory), make_requests(expected[0])) != expected[1]


def test_trees_are_bounded_by_the_room_there_is(directory: Path, expected: Expected) -> None:
    """Nodes count in the token budget and need blocks; the depth is what the request has left."""
    engine = speculating(directory)
    engine.scheduler.token_budget = 12
    assert write(engine, make_requests(expected[0])) == expected[1]
    assert max(num_drafts for _, num_drafts, _, _ in engine.metrics.verified) <= 12
    assert max(depth for *_, depth in engine.metrics.verified) <= 5
    total = engine.metrics.speculation()[f"{__name__}:Knowing"]
    assert total.num_accepted_tokens <= total.num_draft_tokens
    assert len(total.num_drafts_per_pos) <= 5


def test_methods_that_judge_chains_refuse_trees(directory: Path) -> None:
    config = {"method": f"{__name__}:Knowing", "num_speculative_tokens": 5, "rejection_sample_method": "block"}
    with pytest.raises(ConfigError, match="'block' judges chains"):
        build(directory, SpeculativeConfig.parse(config))
