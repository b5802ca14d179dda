"""A loaded engine changes its way to speculate: the same text, and nothing carried over."""

from __future__ import annotations

from pathlib import Path

import pytest

from headway.config import EngineConfig, SpeculativeConfig
from headway.engine.engine import Engine
from headway.sampling_params import SamplingParams
from headway.types import Forecast, Request
from tests.tiny import tiny_model_dir

PROMPT = [5, 6, 7, 8] * 10


def generate(engine: Engine) -> list[int]:
    engine.add(Request("r", list(PROMPT), SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)))
    tokens: list[int] = []
    while engine.has_work():
        for delta in engine.step():
            tokens += delta.token_ids
    engine.check()
    return tokens


def test_each_configuration_writes_the_same_from_a_clean_start(tmp_path: Path) -> None:
    engine = Engine(EngineConfig(model=str(tiny_model_dir(tmp_path)), dtype="float32", kv_cache_memory_bytes=1 << 22, block_size=16))
    plain = generate(engine)
    assert engine.metrics.mean_k == 0.0
    for config in ({"method": "ngram", "policy": "static", "num_speculative_tokens": 3}, {"method": "suffix", "policy": "static"}):
        engine.speculate(SpeculativeConfig.parse(config))
        before = engine.metrics.num_steps
        assert generate(engine) == plain
        assert engine.metrics.num_steps - before < 40
        assert engine.scheduler.pool.num_hit_tokens == 0
        assert set(engine.metrics.speculation()) >= {config["method"]}
    engine.speculate(None)
    before = engine.metrics.num_steps
    assert generate(engine) == plain
    assert engine.metrics.num_steps - before == 40


def test_each_request_is_told_what_its_steps_took_against_plain_ones(tmp_path: Path) -> None:
    engine = Engine(EngineConfig(
        model=str(tiny_model_dir(tmp_path)), dtype="float32", kv_cache_memory_bytes=1 << 22,
        speculative=SpeculativeConfig.parse({"method": "ngram", "policy": "static"}),
    ))  # fmt: skip
    engine.policy.forecast = Forecast(step_ms=1.0, num_tokens=1.0, plain_ms=250.0)
    engine.add(Request("r", list(PROMPT), SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)))
    [last] = [delta for _ in range(60) if engine.has_work() for delta in engine.step() if delta.finished]
    assert last.stats is not None
    assert last.stats.num_accepted_tokens > 0
    # The first token comes with the prompt, which is compared with nothing; accepted beyond the last token counts for nothing.
    assert last.stats.plain_equivalent_ms == 250.0 * 39
    assert 0.0 < last.stats.compared_ms < last.stats.plain_equivalent_ms


def test_not_while_something_runs(tmp_path: Path) -> None:
    engine = Engine(EngineConfig(model=str(tiny_model_dir(tmp_path)), dtype="float32", kv_cache_memory_bytes=1 << 22))
    engine.add(Request("r", list(PROMPT), SamplingParams(max_tokens=4)))
    with pytest.raises(AssertionError, match="while nothing runs"):
        engine.speculate(None)
