"""What the engine promises drafters that have a network: a context, memory, hidden states, block tables, a sampler."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from headway.config import EngineConfig, SpeculativeConfig
from headway.drafters.drafter import Committed, ContinueDrafting, Drafter, DrafterContext, DrafterMemory, DraftRequest, Target
from headway.engine.engine import Engine
from headway.engine.memory import plan_memory
from headway.errors import ConfigError
from headway.sampling_params import SamplingParams
from headway.types import Draft, Request
from tests.tiny import tiny_model_dir


class Low(Drafter):
    """Takes note of everything; drafts what the target's own output layer says after the last known hidden state."""

    takes_model = True
    layers: ClassVar[tuple[int, ...]] = (0,)

    def bind(self, context: DrafterContext) -> DrafterMemory:
        self.context = context
        self.hidden_layers = self.layers
        return DrafterMemory(weight_bytes=1000, kv_bytes_per_block=64)

    def load(self, target: Target) -> None:
        self.target = target
        self.committed: list[Committed] = []
        self.room: list[int] = []

    def propose(self, requests: Sequence[DraftRequest], continue_drafting: ContinueDrafting) -> list[Draft]:
        self.room += [len(r.block_table) * self.target.cache.block_size - len(r.token_ids) - r.k for r in requests]
        logits = torch.zeros(len(requests), self.target.model.config.vocab_size)
        logits[:, 7] = 20.0
        drafted: list[list[int]] = [[] for _ in requests]
        return [Draft([token]) for token in self.target.sampler.likely(logits, requests, drafted)]

    def commit(self, committed: Sequence[Committed]) -> None:
        self.committed += committed


class High(Low):
    takes_model = False
    layers = (-1, 1)


class Needs(Low):
    needs_model = True


HERE = __name__


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_dir(tmp_path_factory.mktemp("tiny"), "llama", seed=3)


def engine_with(model_dir: Path, speculative: object, **options: object) -> Engine:
    config = EngineConfig(
        model=str(model_dir), dtype="float32", device="cpu", block_size=16, speculative=SpeculativeConfig.parse(speculative),  # type: ignore[arg-type]
        **options,  # type: ignore[arg-type]
    )
    return Engine(config)


def test_each_drafter_gets_its_own_hidden_states_of_one_pass(model_dir: Path) -> None:
    method = [f"{HERE}:Low", f"{HERE}:High"]
    engine = engine_with(model_dir, {"method": method, "num_speculative_tokens": 3, "model": "somewhere"})
    low, high = engine.drafters.values()
    assert isinstance(low, Low)
    assert isinstance(high, High)
    assert (low.context.model, high.context.model) == ("somewhere", "somewhere")
    assert low.context.directory == model_dir
    prompt = list(range(5, 45))
    engine.add(Request("r", list(prompt), SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)))
    while engine.has_work():
        engine.step()
        engine.check()
    for one, two in zip(low.committed, high.committed, strict=True):
        assert one.hidden is not None
        assert two.hidden is not None
        assert len(one.hidden) == 1
        assert len(two.hidden) == 2
        assert [layer.shape for layer in two.hidden] == [one.hidden[0].shape] * 2
    ids = low.committed[-1].token_ids[:-1]
    assert sum(len(c.hidden[0]) for c in low.committed if c.hidden) == len(ids)
    assert [c.start for c in low.committed][:2] == [0, 40]
    # What every drafter saw, put together, is what one pass over the text computes.
    plan = engine.runner.cache.plan([(list(range(4)), 0, len(ids))])
    final, (first, second) = engine.model.forward(torch.tensor(ids), torch.arange(len(ids)), plan, engine.runner.cache, (0, 1))
    for drafter, number, expected in ((low, 0, first), (high, 0, final), (high, 1, second)):
        torch.testing.assert_close(torch.cat([c.hidden[number] for c in drafter.committed if c.hidden]), expected, rtol=1e-3, atol=1e-3)


def test_blocks_for_drafts_are_there_before_drafting_and_come_back(model_dir: Path) -> None:
    engine = engine_with(model_dir, {"method": f"{HERE}:Low", "num_speculative_tokens": 20, "policy": "static"})
    engine.add(Request("r", list(range(5, 40)), SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)))
    while engine.has_work():
        engine.step()
        engine.check()
    (low,) = engine.drafters.values()
    assert isinstance(low, Low)
    assert low.room
    assert min(low.room) >= 0
    assert engine.scheduler.pool.num_free == engine.scheduler.pool.num_blocks


def test_drafters_share_the_budget_of_the_cache(model_dir: Path) -> None:
    plain = engine_with(model_dir, None, kv_cache_memory_bytes=1 << 20, max_model_len=256)
    shared = engine_with(model_dir, f"{HERE}:Low", kv_cache_memory_bytes=1 << 20, max_model_len=256)
    per_block = plain.memory.kv_cache_bytes // plain.memory.num_blocks
    assert shared.memory.num_blocks == (1 << 20) // (per_block + 64)
    assert shared.memory.drafter_kv_bytes == {f"{HERE}:Low": 64 * shared.memory.num_blocks}
    assert shared.memory.target_kv_bytes == per_block * shared.memory.num_blocks
    assert "takes" in str(shared.memory)
    assert "takes" not in str(plain.memory)
    shared.speculate(None)
    assert shared.memory == plain.memory
    with pytest.raises(ConfigError, match="max_model_len 256 needs"):
        plan_memory(plain.config, plain.model, {"greedy": DrafterMemory(0, 1 << 17)})


def test_a_drafter_may_be_given_its_own_model() -> None:
    method = [{"name": f"{HERE}:Low", "model": "here"}, {"name": f"{HERE}:Needs", "model": "there"}]
    config = SpeculativeConfig.parse({"method": method})
    assert config is not None
    assert [config.model_of(name) for name in config.methods] == ["here", "there"]
    config.build_drafter(config.methods[0])
    with pytest.raises(ConfigError, match=r'needs "model"'):
        SpeculativeConfig.parse(f"{HERE}:Needs")
    with pytest.raises(ConfigError, match="unknown option of drafter"):
        SpeculativeConfig.parse({"method": [{"name": f"{HERE}:High", "model": "here"}]})
    with pytest.raises(ConfigError, match="model must be a string"):
        SpeculativeConfig.parse({"method": [{"name": f"{HERE}:Low", "model": 3}]})
