"""Self-speculation: what an early exit drafts, how evidence about exits is gathered, and which exit and length it leads to."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headway.config import EngineConfig, SpeculativeConfig
from headway.drafters import layer_skip
from headway.drafters.drafter import Committed, DraftRequest, never_stop
from headway.drafters.layer_skip import LayerSkip
from headway.engine.drafting import bind_drafters
from headway.engine.engine import Engine
from headway.errors import ConfigError
from headway.models.attention import KVCache
from headway.models.decoder import Decoder
from headway.models.layers import Linear
from headway.sampling_params import SamplingParams
from headway.types import Draft, Request
from tests.tiny import tiny_model_dir

K, NUM_LAYERS = 4, 6


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_dir(tmp_path_factory.mktemp("tiny"), "llama", seed=3, num_hidden_layers=NUM_LAYERS)


def build(target: Path, speculative: Any, **options: Any) -> Engine:
    settings = {"max_model_len": 256, "block_size": 16, **options}
    if isinstance(speculative, dict):
        speculative = {"policy": "static", **speculative}
    return Engine(EngineConfig(
        model=str(target), dtype="float32", device="cpu", speculative=SpeculativeConfig.parse(speculative), **settings,
    ))  # fmt: skip


@torch.inference_mode()
def scale(linear: Linear, factor: float) -> None:
    weight = linear.packed.weight if linear.packed is not None else linear.weight
    assert weight is not None
    weight *= factor


def make_early(engine: Engine, useful: int, strength: float = 0.02) -> None:
    """Layers from `useful` on add hardly anything, so exits from there on are mostly right."""
    for layer in engine.model.layers[useful:]:
        scale(layer.o, strength)
        scale(layer.mlp.down, strength)


def drafter_of(engine: Engine) -> LayerSkip:
    (drafter,) = engine.drafters.values()
    assert isinstance(drafter, LayerSkip)
    return drafter


def requests(count: int = 3, max_tokens: int = 40, temperature: float = 0.0) -> list[Request]:
    return [
        Request(f"r{i}", [3 + (7 * i + 11 * j + j * j) % 250 for j in range(20 + 9 * i)],
                SamplingParams(temperature=temperature, seed=i, max_tokens=max_tokens, ignore_eos=True))
        for i in range(count)
    ]


def write(engine: Engine, asked: list[Request]) -> dict[str, list[int]]:
    for each in asked:
        engine.add(each)
    written: dict[str, list[int]] = {}
    while engine.has_work():
        for delta in engine.step():
            written.setdefault(delta.request_id, []).extend(delta.token_ids)
        engine.check()
    return written


def early_draft(model: Decoder, token_ids: list[int], exit: int, k: int) -> list[int]:
    """Every token from a pass of the first `exit` layers over the whole text."""
    text, cache = list(token_ids), KVCache(model.config, 32, 16, model.dtype, model.device)
    for _ in range(k):
        plan = cache.plan([(list(range(32)), 0, len(text))])
        hidden, _ = model.forward(torch.tensor(text), torch.arange(len(text)), plan, cache, num_layers=exit)
        text.append(int(model.logits(hidden[-1:]).argmax()))
    return text[len(token_ids) :]


def test_the_first_layers_alone_are_a_smaller_model(target: Path) -> None:
    model = build(target, None).model
    config = dataclasses.replace(model.config, num_layers=2)
    small = Decoder(config, model.embedding, model.layers[:2], model.norm, model.lm_head, model.directory, 0)
    ids, cache = torch.arange(5, 30), KVCache(model.config, 4, 16, model.dtype, model.device)
    plan = cache.plan([([0, 1], 0, 25)])
    whole, (kept,) = model.forward(ids, torch.arange(25), plan, cache, (1,))
    part, (also,) = model.forward(ids, torch.arange(25), cache.plan([([2, 3], 0, 25)]), cache, (0,), num_layers=2)
    own = KVCache(config, 4, 16, model.dtype, model.device)
    torch.testing.assert_close(part, small.forward(ids, torch.arange(25), own.plan([([0, 1], 0, 25)]), own)[0])
    torch.testing.assert_close(part, model.norm(kept))
    assert also.shape == part.shape
    assert not torch.allclose(part, whole)


@pytest.mark.parametrize("exit", [1, 4])
def test_drafts_are_what_the_exit_says_and_the_text_stays_the_target_s(target: Path, exit: int) -> None:
    engine, plain = build(target, {"method": "layer_skip", "num_speculative_tokens": K, "layer_skip_exit": exit}), build(target, None)
    for each in (engine, plain):
        make_early(each, 4)
    drafter, num_drafts = drafter_of(engine), 0
    propose = drafter.propose

    def check(asked: list[DraftRequest], continue_drafting: Any) -> list[Draft]:
        nonlocal num_drafts
        drafts = propose(asked, continue_drafting)
        for request, draft in zip(asked, drafts, strict=True):
            assert draft.tokens == early_draft(engine.model, request.token_ids, exit, len(draft))
            num_drafts += len(draft)
        return drafts

    drafter.propose = check  # type: ignore[method-assign, assignment]
    assert write(engine, requests()) == write(plain, requests())
    assert num_drafts > 20
    rate = engine.metrics.speculation()["layer_skip"].draft_acceptance_rate
    assert rate > 0.5 if exit == 4 else rate < 0.5


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_by_context_it_takes_the_first_exit_that_is_mostly_right(target: Path, temperature: float) -> None:
    speculative = {"method": "layer_skip", "num_speculative_tokens": K, "draft_sample_method": "greedy"}
    engine, plain = build(target, speculative), build(target, None)
    for each in (engine, plain):
        make_early(each, 2, strength=0.005)
    drafter = drafter_of(engine)
    assert drafter.exits.tolist() == [1, 2, 3, 4, 5]
    assert write(engine, requests(temperature=temperature)) == write(plain, requests(temperature=temperature))
    assert engine.metrics.speculation()["layer_skip"].num_draft_tokens > 50
    if temperature == 0.0:
        assert drafter.exit == 2
        assert engine.metrics.speculation()["layer_skip"].draft_acceptance_rate > 0.6


def test_a_target_no_exit_of_which_is_right_is_left_alone(target: Path) -> None:
    engine, plain = build(target, {"method": "layer_skip", "num_speculative_tokens": K}), build(target, None)
    for each in (engine, plain):
        scale(each.model.layers[-1].mlp.down, 50.0)   # all is decided in the last layer
    assert write(engine, requests(max_tokens=60)) == write(plain, requests(max_tokens=60))
    found = engine.metrics.speculation().get("layer_skip")
    assert found is None or found.num_draft_tokens < 10


def test_shadow_tokens_count_what_each_exit_would_have_drafted(target: Path) -> None:
    engine = build(target, {"method": "layer_skip", "num_speculative_tokens": K})
    make_early(engine, 3, strength=0.05)
    drafter, model = drafter_of(engine), engine.model
    text = [3 + (11 * j + j * j) % 250 for j in range(40)]
    cache = KVCache(model.config, 4, 16, model.dtype, model.device)
    _, layers = model.forward(torch.tensor(text[:-1]), torch.arange(39), cache.plan([([0, 1, 2], 0, 39)]), cache, drafter.hidden_layers)
    positions = range(39 - layer_skip.SHADOW_ROWS, 39)

    def right(followed: list[int]) -> list[int]:
        says = [[early_draft(model, text[: p + 1], int(exit), 1)[0] for p in positions] for exit in drafter.exits]
        return [sum(a == b for a, b in zip(row, followed, strict=True)) for row in says]

    # Of a prompt, what the target would have written counts; of its own text, what it wrote.
    drafter.commit([Committed(7, text, 39, 1, 0, 0, layers, [0, 1, 2])])
    context = drafter._contexts[7]
    drafter._look([context])
    expected = right([early_draft(model, text[: p + 1], NUM_LAYERS, 1)[0] for p in positions])
    assert context.hits.tolist() == expected
    assert max(expected) > 2
    assert context.total == layer_skip.SHADOW_ROWS
    context.due = 0
    drafter.commit([Committed(7, text, 20, 3, 2, 0, layers, [0, 1, 2])])
    drafter._look([context])
    np.testing.assert_allclose(context.hits, np.array(expected) * layer_skip.FORGET + right([text[p + 1] for p in positions]))
    assert context.seen is None


def test_the_choice_maximises_tokens_per_layer(target: Path) -> None:
    engine = build(target, None)
    config = SpeculativeConfig.parse({"method": "layer_skip", "num_speculative_tokens": 8})
    bound, memory = bind_drafters(config, engine.config, engine.model)
    (drafter,) = bound.values()
    assert isinstance(drafter, LayerSkip)
    assert (memory["layer_skip"].weight_bytes, memory["layer_skip"].kv_bytes_per_block) == (0, 0)
    rates = np.array([0.1, 0.6, 0.85, 0.9, 0.95])
    found = drafter._tokens_per_layer(rates, 8)
    h = drafter.head_cost
    for row, (exit, a) in zip(found, zip(drafter.exits, rates, strict=True), strict=True):
        expected = [(1 - a ** (d + 1)) / (1 - a) / (d * (exit + h) + NUM_LAYERS + h) for d in range(9)]
        np.testing.assert_allclose(row, expected)


def test_a_pause_and_unknown_sequences_change_nothing(target: Path) -> None:
    engine = build(target, {"method": "layer_skip", "num_speculative_tokens": K})
    drafter = drafter_of(engine)
    drafter.stop(99)
    assert drafter.propose([], never_stop) == []
    write(engine, requests(1))
    assert not drafter._contexts


def test_an_exit_must_be_before_the_last_layer(target: Path) -> None:
    with pytest.raises(ConfigError, match="before the last of the target's 6 layers, got 6"):
        build(target, {"method": "layer_skip", "layer_skip_exit": 6})
    with pytest.raises(ConfigError, match="layer_skip_exit must be >= 1"):
        SpeculativeConfig.parse({"method": "layer_skip", "layer_skip_exit": 0})
