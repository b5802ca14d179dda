"""EAGLE checkpoints load as published, compute what the `speculators` package computes, and fail with the name of what is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from headway.drafters.core.eagle_network import load_eagle
from headway.drafters.core.feature_network import FeatureNetwork
from headway.errors import ModelError
from headway.models.attention import KVCache
from headway.models.decoder import Decoder
from headway.models.loader import load_model
from tests import speculators_reference
from tests.heads import eagle1_dir, eagle3_dir
from tests.speculators_reference import FIXTURE, NUM_TOKENS, VARIANTS, inputs, make_directories
from tests.tiny import tiny_model_dir


def load_target(directory: Path) -> Decoder:
    return load_model(str(directory), dtype="float32", device="cpu", progress=False)


def logits_of_both_steps(network: FeatureNetwork, tokens: torch.Tensor, hidden: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """As `speculators_reference.ask_speculators` returns them; the last two rows of step 1 have no token and stay out."""
    cache = KVCache(network.shape, 2, 16, network.dtype, network.device)
    positions = torch.arange(NUM_TOKENS)
    x = network.forward(tokens[1:], positions, network.fuse(hidden), cache.plan([([0, 1], 0, NUM_TOKENS)]), cache)
    first, features = network.predict(x)
    second = []
    for i in reversed(range(NUM_TOKENS - 1)):   # a draft at i + 1 overwrites only what the smaller ones do not read
        plan = cache.plan([([0, 1], i + 1, 1)])
        after = network.forward(tokens[i + 2 : i + 3], positions[i + 1 : i + 2], features[i : i + 1], plan, cache)
        second.append(network.predict(after)[0])
    return first, torch.cat(second[::-1])


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_the_speculators_package(variant: str, tmp_path: Path) -> None:
    target, directory = make_directories(tmp_path, variant)
    network = load_eagle(directory, load_target(target))
    first, second = logits_of_both_steps(network, *inputs(target))
    recorded = [torch.tensor(step) for step in json.loads(FIXTURE.read_text())[variant]]
    torch.testing.assert_close(first[:, ::5], recorded[0], atol=5e-5, rtol=1e-5)
    torch.testing.assert_close(second[:, ::5], recorded[1][: NUM_TOKENS - 1], atol=5e-5, rtol=1e-5)


@pytest.mark.skipif(not speculators_reference.INSTALLED, reason="the package `speculators` is not installed")
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_recorded_numbers_are_those_of_the_package(variant: str) -> None:
    live = [torch.tensor(step)[:, ::5] for step in speculators_reference.ask_speculators(variant)]
    for step, recorded in zip(live, json.loads(FIXTURE.read_text())[variant], strict=True):
        torch.testing.assert_close(step, torch.tensor(recorded), atol=2e-5, rtol=0)


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_dir(tmp_path_factory.mktemp("target"), "llama", seed=3)


@pytest.fixture(scope="module")
def target(target_dir: Path) -> Decoder:
    return load_target(target_dir)


def test_both_layouts_of_eagle3_are_one_network(target_dir: Path, target: Decoder, tmp_path: Path) -> None:
    one = load_eagle(eagle3_dir(tmp_path / "a", target_dir, layer_ids=(1, 2)), target)
    other = load_eagle(eagle3_dir(tmp_path / "b", target_dir, layer_ids=(1, 2), layout="eagle"), target)
    tokens, hidden = torch.arange(10, 10 + NUM_TOKENS + 1), [torch.randn(NUM_TOKENS, 64), torch.randn(NUM_TOKENS, 64)]
    for a, b in zip(logits_of_both_steps(one, tokens, hidden), logits_of_both_steps(other, tokens, hidden), strict=True):
        torch.testing.assert_close(a, b)
    assert one.hidden_layers == (0, 1)
    assert one.embedding is target.embedding


@pytest.mark.parametrize("file", ["pytorch_model.bin", "model.safetensors"])
def test_eagle1_is_its_formula(target_dir: Path, target: Decoder, tmp_path: Path, file: str) -> None:
    """Position 0 attends to itself alone, so its attention is its own value."""
    network = load_eagle(eagle1_dir(tmp_path / "e1", target_dir, file=file), target)
    weights = torch.load(tmp_path / "e1" / file) if file.endswith("bin") else load_file(tmp_path / "e1" / file)
    hidden = torch.randn(1, 64)
    x = torch.cat([target.embedding[[7]], hidden], -1) @ weights["fc.weight"].T + weights["fc.bias"]
    value = (x @ weights["layers.0.self_attn.v_proj.weight"].T).view(2, 16).repeat_interleave(2, 0).view(1, 64)
    x = x + value @ weights["layers.0.self_attn.o_proj.weight"].T
    normed = torch.nn.functional.rms_norm(x, (64,), weights["layers.0.post_attention_layernorm.weight"], 1e-5)
    gate, up = (normed @ weights[f"layers.0.mlp.{name}_proj.weight"].T for name in ("gate", "up"))
    x = x + (torch.nn.functional.silu(gate) * up) @ weights["layers.0.mlp.down_proj.weight"].T
    cache = KVCache(network.shape, 1, 16, network.dtype, network.device)
    found = network.forward(torch.tensor([7]), torch.tensor([0]), network.fuse([hidden]), cache.plan([([0], 0, 1)]), cache)
    logits, features = network.predict(found)
    torch.testing.assert_close(features, x, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(logits, target.logits(x), atol=1e-4, rtol=1e-5)
    assert network.hidden_layers == (-1,)


@pytest.mark.parametrize("num_layers", [1, 2])
def test_filling_writes_the_same_keys_and_values(target_dir: Path, target: Decoder, tmp_path: Path, num_layers: int) -> None:
    network = load_eagle(eagle3_dir(tmp_path / "e", target_dir, num_layers=num_layers), target)
    tokens, hidden = torch.arange(40, 40 + NUM_TOKENS), [torch.randn(NUM_TOKENS, 64), torch.randn(NUM_TOKENS, 64)]
    caches = []
    for fill in (False, True):
        cache = KVCache(network.shape, 1, 16, network.dtype, network.device)
        for pages in cache.layers:
            pages.zero_()   # slots that no token is in hold anything
        plan = cache.plan([([0], 0, NUM_TOKENS)])
        network.forward(tokens, torch.arange(NUM_TOKENS), network.fuse(hidden), plan, cache, fill=fill)
        caches.append(torch.stack(cache.layers))
    assert torch.equal(*caches)


def change(directory: Path, *, config: dict[str, object] | None = None, drop: str | None = None, **tensors: torch.Tensor) -> None:
    written = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**written, **(config or {})}))
    state = {k: v for k, v in load_file(directory / "model.safetensors").items() if k != drop}
    save_file({**state, **{name.replace("__", "."): tensor for name, tensor in tensors.items()}}, directory / "model.safetensors")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"drop": "norm.weight"}, "the weights lack norm.weight"),
        ({"drop": "d2t"}, "the weights lack d2t"),
        ({"drop": "lm_head.weight"}, r"lack lm_head.weight.*\[200, 64\]"),
        ({"fc__weight": torch.zeros(64, 192)}, r"fc.weight has shape \(64, 192\), expected \(64, 128\)"),
        ({"d2t": torch.full((200,), 10**6)}, "d2t does not map"),
        ({"d2t": torch.zeros(200)}, "expected a tensor of kind int"),
        ({"t2d": torch.zeros(320, dtype=torch.bool)}, "t2d and d2t"),
        ({"surprise__weight": torch.zeros(2)}, "surprise.weight would be ignored"),
        ({"config": {"speculators_model_type": "dflash"}}, "of type 'dflash'"),
        ({"config": {"target_hidden_size": 128}}, "hidden size 128, the target's is 64"),
        ({"config": {"eagle_aux_hidden_state_layer_ids": [1, 9]}}, "layers 1..2 of the target"),
        ({"config": {"eagle_aux_hidden_state_layer_ids": None}}, "must be given for a target of 2 layers"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_errors_name_what_is_wrong(target_dir: Path, target: Decoder, tmp_path: Path, changes: dict[str, object], message: str) -> None:
    directory = eagle3_dir(tmp_path / "e", target_dir)
    change(directory, **changes)   # type: ignore[arg-type]
    with pytest.raises(ModelError, match=message):
        load_eagle(directory, target)


def test_a_checkpoint_for_another_vocabulary(target: Decoder, tmp_path: Path) -> None:
    other = tiny_model_dir(tmp_path, "llama", vocab_size=400)
    with pytest.raises(ModelError, match="vocabulary of 400 tokens, the target's has 320"):
        load_eagle(eagle3_dir(tmp_path / "e", other), target)


@pytest.mark.parametrize("layout", ["speculators", "eagle"])
def test_truncated_files(target_dir: Path, target: Decoder, tmp_path: Path, layout: str) -> None:
    directory = eagle3_dir(tmp_path / "e", target_dir, layout=layout)
    file = next(path for path in directory.iterdir() if path.name != "config.json")
    file.write_bytes(file.read_bytes()[:2000])
    with pytest.raises(ModelError, match=rf"{file.name} is not a readable"):
        load_eagle(directory, target)


def test_a_checkpoint_never_runs_code(target_dir: Path, target: Decoder, tmp_path: Path) -> None:
    directory = eagle1_dir(tmp_path / "e", target_dir)
    torch.save({"fc.weight": Path}, directory / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"pytorch_model.bin is not a readable file of plain tensors"):
        load_eagle(directory, target)


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors"])
def test_missing_files(target_dir: Path, target: Decoder, tmp_path: Path, missing: str) -> None:
    directory = eagle3_dir(tmp_path / "e", target_dir)
    (directory / missing).unlink()
    with pytest.raises(ModelError, match="does not exist" if missing == "config.json" else "has no weights"):
        load_eagle(directory, target)
    with pytest.raises(ModelError, match="not a directory"):
        load_eagle(tmp_path / "nowhere", target)


def test_the_networks_say_what_they_are(target_dir: Path, target: Decoder, tmp_path: Path) -> None:
    network = load_eagle(eagle3_dir(tmp_path / "e", target_dir, norm_output=True), target)
    assert network.wiring.norm_output
    assert network.target_ids is not None
    assert len(network.target_ids) == 200
    assert len(network.target_ids.unique()) == 200
