"""A draft model: its drafts are what its network alone would write, whatever happened to the sequence before."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from headway.cli.main import main
from headway.config import EngineConfig, SpeculativeConfig
from headway.control.policies.static import Static
from headway.control.policy import AdaptivePolicy, BatchView
from headway.drafters.core.chain import FEW_ROWS
from headway.drafters.draft_model import DraftModel
from headway.drafters.drafter import ContinueDrafting, DraftRequest
from headway.engine.engine import Engine
from headway.errors import ConfigError
from headway.models.attention import KVCache
from headway.models.config import ModelConfig
from headway.models.decoder import Decoder
from headway.models.loader import load_model
from headway.sampling_params import SamplingParams
from headway.types import Choice, Draft, Request
from tests.drafter_models import noisy_copy
from tests.tiny import tiny_model_dir

K = 4


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_dir(tmp_path_factory.mktemp("tiny"), "llama", seed=3)


@pytest.fixture(scope="module")
def noisy(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return noisy_copy(tmp_path_factory.mktemp("noisy"), target, 0.05)


def build(target: Path, speculative: Mapping[str, Any] | None, **options: Any) -> Engine:
    settings = {"max_model_len": 256, "block_size": 16, **options}
    speculative = SpeculativeConfig.parse(speculative and {"policy": "static", **speculative})
    config = EngineConfig(model=str(target), dtype="float32", device="cpu", speculative=speculative, **settings)
    return Engine(config)


def with_draft(target: Path, draft: Path, method: str = "greedy", **options: Any) -> Engine:
    speculative = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": K, "draft_sample_method": method}
    return build(target, speculative, **options)


def request(i: int, num_prompt: int = 30, temperature: float = 0.0, max_tokens: int = 30) -> Request:
    prompt = [3 + (7 * i + 11 * j + j * j) % 250 for j in range(num_prompt)]
    return Request(f"r{i}", prompt, SamplingParams(temperature=temperature, seed=i, max_tokens=max_tokens, ignore_eos=True))


def finish(engine: Engine) -> dict[str, list[int]]:
    written: dict[str, list[int]] = {}
    while engine.has_work():
        for delta in engine.step():
            written.setdefault(delta.request_id, []).extend(delta.token_ids)
        engine.check()
    return written


def write(engine: Engine, requests: Sequence[Request]) -> dict[str, list[int]]:
    for each in requests:
        engine.add(each)
    return finish(engine)


def dense_draft(model: Decoder, token_ids: list[int], k: int) -> tuple[list[int], list[float]]:
    """The likeliest continuation and its probabilities, every token from a pass over the whole text."""
    text, sure = list(token_ids), []
    cache = KVCache(model.config, 32, 16, model.dtype, model.device)
    for _ in range(k):
        plan = cache.plan([(list(range(32)), 0, len(text))])
        hidden, _ = model.forward(torch.tensor(text), torch.arange(len(text)), plan, cache)
        probs = torch.softmax(model.logits(hidden[-1:])[0], -1)
        text.append(int(probs.argmax()))
        sure.append(float(probs.max()))
    return text[-k:], sure


class Witness:
    """Compares every draft with `dense_draft`."""

    def __init__(self, engine: Engine) -> None:
        (drafter,) = engine.drafters.values()
        assert isinstance(drafter, DraftModel)
        self.drafter, self.propose, self.num_drafts, self.passes = drafter, drafter.propose, 0, 0
        drafter.propose = self.check  # type: ignore[method-assign]
        self.forward = drafter.forward
        drafter.forward = self.count  # type: ignore[method-assign]

    def count(self, *args: Any) -> torch.Tensor:
        self.passes += 1
        return self.forward(*args)

    def check(self, requests: Sequence[DraftRequest], continue_drafting: ContinueDrafting) -> list[Draft]:
        drafts = self.propose(requests, continue_drafting)
        for asked, draft in zip(requests, drafts, strict=True):
            tokens, sure = dense_draft(self.drafter.model, asked.token_ids, len(draft)) if len(draft) else ([], [])
            assert draft.tokens == tokens
            assert draft.confidence == pytest.approx(sure, abs=1e-4) if tokens else not draft.tokens
            self.num_drafts += len(draft)
        return drafts


class Pauses(Static):
    """k = 0 for seven steps of ten, at another time for each sequence."""

    def plan(self, view: BatchView) -> Mapping[int, Choice]:
        return {i: choice for i, choice in super().plan(view).items() if (view.step + 5 * i) % 10 < 3}


def test_drafts_are_the_network_s_own_batched_and_with_different_lengths(target: Path, noisy: Path) -> None:
    engine, plain = with_draft(target, noisy), build(target, None)
    witness = Witness(engine)
    requests = [request(i, num_prompt=20 + 17 * i) for i in range(5)]
    assert write(engine, requests) == write(plain, requests)
    stats = engine.metrics.speculation()["draft_model"]
    assert 0.2 < stats.draft_acceptance_rate < 0.95, "some are accepted and some are not"
    assert witness.num_drafts >= stats.num_draft_tokens


def test_after_pauses(target: Path, noisy: Path) -> None:
    engine, plain = with_draft(target, noisy), build(target, None)
    engine.drive(Pauses())
    witness = Witness(engine)
    requests = [request(i, max_tokens=60) for i in range(3)]
    assert write(engine, requests) == write(plain, requests)
    assert witness.num_drafts > 50


def test_after_preemption_and_abort(target: Path, noisy: Path) -> None:
    engine, plain = with_draft(target, noisy, kv_cache_memory_bytes=10 << 14, max_model_len=160), build(target, None)
    witness = Witness(engine)
    requests = [request(i, num_prompt=40) for i in range(4)]
    for each in requests:
        engine.add(each)
    for _ in range(6):
        engine.step()
    engine.abort("r2")
    written = finish(engine)
    assert engine.scheduler.num_preemptions > 0
    assert witness.num_drafts > 50
    expected = write(plain, requests)
    for name in ("r0", "r1", "r3"):
        assert expected[name][-len(written[name]) :] == written[name]


def test_a_prefix_hit_needs_no_second_reading(target: Path, noisy: Path) -> None:
    engine = with_draft(target, noisy)
    witness = Witness(engine)
    prompt = request(0, num_prompt=36, max_tokens=3)
    first = write(engine, [prompt])
    assert len(prompt.prompt_token_ids) > FEW_ROWS
    assert witness.passes == 2, "all of the prompt but its end, then the end with the first draft token"
    prompt.request_id = "again"
    assert write(engine, [prompt])["again"] == first["r0"]
    assert engine.scheduler.pool.num_hit_tokens == 32
    assert witness.passes - 2 == 1
    assert witness.num_drafts == 2


def test_a_long_history_is_read_in_pieces(target: Path, noisy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headway.drafters.core.chain.CATCH_UP_ROWS", 24)
    engine = with_draft(target, noisy)
    witness = Witness(engine)
    write(engine, [request(i, num_prompt=60 + 20 * i, max_tokens=8) for i in range(3)])
    assert witness.num_drafts > 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_target_as_its_own_draft_model_is_always_accepted(target: Path, temperature: float) -> None:
    engine = with_draft(target, target, "probabilistic")
    write(engine, [request(i, temperature=temperature) for i in range(4)])
    stats = engine.metrics.speculation()["draft_model"]
    assert stats.num_draft_tokens > 60
    assert stats.draft_acceptance_rate == 1.0


def test_drawn_drafts_are_accepted_more_often_than_the_likeliest(target: Path, noisy: Path) -> None:
    rates = {}
    for method in ("greedy", "probabilistic"):
        engine = with_draft(target, noisy, method)
        write(engine, [request(i, temperature=1.0, max_tokens=60) for i in range(8)])
        rates[method] = engine.metrics.speculation()["draft_model"].draft_acceptance_rate
    assert rates["probabilistic"] > rates["greedy"] + 0.1


def test_a_seeded_request_writes_the_same_alone_and_in_a_batch(target: Path, noisy: Path) -> None:
    requests = [request(i, temperature=0.8) for i in range(4)]
    together = write(with_draft(target, noisy, "probabilistic"), requests)
    engine = with_draft(target, noisy, "probabilistic")
    alone: dict[str, list[int]] = {}
    for each in requests:
        alone |= write(engine, [each])
    assert alone == together


def test_the_policy_is_asked_position_by_position_and_honoured(target: Path, noisy: Path) -> None:
    engine = with_draft(target, noisy)
    asked: list[tuple[int, list[int]]] = []

    class Stops(Static, AdaptivePolicy):
        def stops_early(self, drafter: str) -> bool:
            return True

        def continue_drafting(self, seq_ids: Sequence[int], position: int, confidence: NDArray[np.float64]) -> NDArray[np.bool_]:
            asked.append((position, list(seq_ids)))
            assert ((confidence > 0.0) & (confidence <= 1.0)).all()
            return np.array([position < seq_id for seq_id in seq_ids])

    engine.drive(Stops())
    witness = Witness(engine)
    write(engine, [request(i, max_tokens=12) for i in range(3)])
    assert asked[:3] == [(0, [0, 1, 2]), (1, [1, 2]), (2, [2])]
    assert witness.num_drafts > 0
    assert max(position for position, _ in asked) == 2


def test_a_draft_model_of_a_shorter_context_stops_where_it_ends(target: Path, noisy: Path, tmp_path: Path) -> None:
    short = noisy_copy(tmp_path, target, 0.05)
    config = json.loads((short / "config.json").read_text())
    (short / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 48}))
    engine, plain = with_draft(target, short), build(target, None)
    drafted: list[int] = []
    (drafter,) = engine.drafters.values()
    propose = drafter.propose

    def spy(requests: Sequence[DraftRequest], continue_drafting: ContinueDrafting) -> list[Draft]:
        drafts = propose(requests, continue_drafting)
        drafted.extend(len(r.token_ids) + len(d) for r, d in zip(requests, drafts, strict=True) if len(d))
        return drafts

    drafter.propose = spy  # type: ignore[method-assign]
    assert write(engine, [request(0)]) == write(plain, [request(0)])
    assert 0 < max(drafted) <= 49


def test_another_vocabulary_is_refused_with_the_first_difference(target: Path, tmp_path: Path) -> None:
    other = tiny_model_dir(tmp_path, "llama", vocab_size=300)
    with pytest.raises(ConfigError, match=r"token 300 is '<extra_41>' in the target, missing in the draft model.*and 17 more"):
        with_draft(target, other)
    bare = tiny_model_dir(tmp_path, "llama", vocab_size=64)
    with pytest.raises(ConfigError, match=r"no tokenizer\.json"):
        with_draft(target, bare)


def test_an_output_layer_padded_to_another_size_fits(target: Path, noisy: Path, tmp_path: Path) -> None:
    for vocab_size in (384, 352):
        padded = tiny_model_dir(tmp_path, "llama", vocab_size=vocab_size, seed=3)
        for file in ("tokenizer.json", "tokenizer_config.json"):
            (padded / file).write_text((target / file).read_text())
        for one, two in ((target, padded), (padded, target)):
            engine, plain = with_draft(one, two), build(one, None)
            assert write(engine, [request(0)]) == write(plain, [request(0)])


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
def test_memory_is_known_before_loading(family: str, target: Path, tmp_path: Path) -> None:
    draft = tiny_model_dir(tmp_path, family, num_hidden_layers=1, tie_word_embeddings=family == "llama")
    assert ModelConfig.from_directory(draft).num_parameters * 4 == load_model(str(draft), dtype="float32", device="cpu").weight_bytes
    engine, plain = with_draft(target, draft, kv_cache_memory_bytes=1 << 20), build(target, None, kv_cache_memory_bytes=1 << 20)
    # One layer beside two of the same shape.
    assert engine.memory.drafter_kv_bytes["draft_model"] == engine.memory.target_kv_bytes / 2
    assert engine.memory.num_blocks == plain.memory.num_blocks * 2 // 3


def test_config_prints_what_target_and_draft_model_take(target: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--kv-cache-memory-bytes", "1000000", "--dtype", "float32", "--json"]
    assert main(["config", str(target), "--spec-method", "draft_model", "--spec-model", str(target), *flags]) == 0
    shown = {name: entry["value"] for name, entry in json.loads(capsys.readouterr().out).items() if name.startswith("memory.")}
    assert shown["memory.draft_model.weight_bytes"] == ModelConfig.from_directory(target).num_parameters * 4
    assert shown["memory.draft_model.kv_cache_bytes"] == shown["memory.target.kv_cache_bytes"]
    assert 900_000 < 2 * shown["memory.target.kv_cache_bytes"] <= 1_000_000
    assert main(["config", str(target), "--spec-method", "suffix", "--json"]) == 0
    assert "memory." not in capsys.readouterr().out


def test_a_draft_model_must_be_named() -> None:
    with pytest.raises(ConfigError, match="needs \"model\""):
        SpeculativeConfig.parse("draft_model")
    with pytest.raises(ConfigError, match="draft_sample_method must be 'greedy' or 'probabilistic'"):
        SpeculativeConfig.parse({"method": "draft_model", "model": "x", "draft_sample_method": "beam"})
