"""Medusa heads and MLP speculators: published layouts are their formulas, drafts follow the last hidden state, errors name the cause."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from headway.drafters.core.hidden_heads import HiddenHeads
from headway.drafters.drafter import Committed, DraftRequest, never_stop
from headway.drafters.medusa import Medusa, MedusaFile, MedusaNetwork
from headway.drafters.mlp_speculator import MLPSpeculator, MLPSpeculatorFile
from headway.errors import ModelError
from headway.models.decoder import Decoder
from headway.models.loader import load_model
from tests.heads import medusa_dir, mlp_speculator_dir
from tests.tiny import tiny_model_dir
from tests.unit.test_feature_chain import Argmax

Weights = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    directory = tiny_model_dir(tmp_path_factory.mktemp("target"), "llama", seed=3)
    return load_model(str(directory), dtype="float32", device="cpu", progress=False)


def weights_in(directory: Path) -> Weights:
    [file] = [path for path in directory.iterdir() if path.name != "config.json"]
    return load_file(file) if file.suffix == ".safetensors" else torch.load(file, weights_only=True)


def linear(weights: Weights, name: str, x: torch.Tensor) -> torch.Tensor:
    return F.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))


@pytest.mark.parametrize("num_layers", [1, 2])
@pytest.mark.parametrize(
    ("layout", "file"), [("repository", "medusa_lm_head.pt"), ("repository", "medusa_lm_head.safetensors"), ("converted", "")]
)
def test_medusa_is_its_formula(target: Decoder, tmp_path: Path, layout: str, file: str, num_layers: int) -> None:
    directory = medusa_dir(tmp_path / "m", target.directory, layout=layout, num_layers=num_layers, file=file)
    network, weights = MedusaFile(directory, target.config).load(target), weights_in(directory)
    hidden = torch.randn(4, 64)
    assert network.num_heads == 3
    for head in range(3):
        x = hidden
        for layer in range(num_layers):
            name = f"{head}.{layer}.linear" if layout == "repository" else f"blocks.{head}.layers.{layer}"
            x = x + F.silu(linear(weights, name, x))
        expected = linear(weights, f"{head}.{num_layers}" if layout == "repository" else f"lm_heads.{head}", x)
        torch.testing.assert_close(network.step(head, network.begin(hidden), torch.zeros(4))[0], expected)


def test_medusa_with_fewer_tokens_and_one_output_layer(target: Decoder, tmp_path: Path) -> None:
    reduced = MedusaFile(medusa_dir(tmp_path / "m", target.directory, layout="converted", draft_vocab=50), target.config).load(target)
    assert reduced.target_ids is not None
    assert len(reduced.target_ids) == 50
    assert reduced.step(1, torch.randn(2, 64), torch.zeros(2))[0].shape == (2, 50)
    directory = medusa_dir(tmp_path / "n", target.directory, layout="converted")
    weights = load_file(directory / "model.safetensors")
    shared = {name: tensor for name, tensor in weights.items() if not name.startswith("lm_heads")}
    save_file({**shared, "lm_head.weight": weights["lm_heads.0.weight"].clone()}, directory / "model.safetensors")
    network = MedusaFile(directory, target.config).load(target)
    assert isinstance(network, MedusaNetwork)
    assert network.outputs[0] is network.outputs[2]


@pytest.mark.parametrize("layout", ["repository", "converted"])
def test_medusa_uses_the_heads_that_are_there(target: Decoder, tmp_path: Path, layout: str, caplog: pytest.LogCaptureFixture) -> None:
    """As published: FasterDecoding/medusa-vicuna-7b-v1.3 has 0.0.linear.weight ... 4.1.weight beside a config that says 2."""
    directory = medusa_dir(tmp_path / "m", target.directory, layout=layout, num_heads=5)
    key = "medusa_num_heads" if layout == "repository" else "num_heads"
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, key: 2}))
    with caplog.at_level("WARNING", "headway.medusa"):
        network = MedusaFile(directory, target.config).load(target)
    assert network.num_heads == 5
    assert network.step(4, torch.randn(2, 64), torch.zeros(2))[0].shape == (2, 320)
    assert "config.json names 2 heads, the weights have 5: all are used" in caplog.text


@pytest.mark.parametrize("scale_input", [False, True])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("prefix", "file"), [("speculator.", "model.safetensors"), ("", "pytorch_model.bin")])
def test_an_mlp_speculator_is_its_formula(target: Decoder, tmp_path: Path, tied: bool, scale_input: bool, prefix: str, file: str) -> None:
    directory = mlp_speculator_dir(tmp_path / "s", target.directory, tied=tied, scale_input=scale_input, prefix=prefix, file=file)
    network = MLPSpeculatorFile(directory, target.config).load(target)
    weights = {name.removeprefix(prefix): tensor for name, tensor in weights_in(directory).items()}

    def norm(x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)

    hidden, tokens = torch.randn(4, 64), torch.tensor([5, 6, 7, 300])
    state = norm(hidden) / 2**0.5 if scale_input else hidden
    found = network.begin(hidden)
    state_weight = 0.5 ** (0.5 / 3)
    token_weight = math.sqrt((1 - state_weight**2) * (48 / 2))
    for head in range(3):
        first = 0 if tied else head
        z = weights[f"emb.{first}.weight"][tokens]
        state = linear(weights, f"proj.{min(head, 1) if tied else head}", state) + token_weight / state_weight * z
        state = F.gelu(norm(state) * weights[f"ln.{first}.weight"] + weights[f"ln.{first}.bias"])
        logits, found = network.step(head, found, tokens)
        torch.testing.assert_close(found, state, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(logits, state @ weights[f"head.{first}.weight"].T, atol=1e-4, rtol=1e-5)
        tokens = logits.argmax(-1)


def start(drafter: HiddenHeads, directory: Path, target: Decoder) -> HiddenHeads:
    drafter.start(drafter.read(directory, target.config).load(target), Argmax())
    return drafter


@pytest.fixture(params=["medusa", "mlp"])
def drafter(request: pytest.FixtureRequest, target: Decoder, tmp_path: Path) -> HiddenHeads:
    if request.param == "medusa":
        return start(Medusa(), medusa_dir(tmp_path / "m", target.directory), target)
    return start(MLPSpeculator(), mlp_speculator_dir(tmp_path / "s", target.directory), target)


def test_drafts_follow_the_last_hidden_state(drafter: HiddenHeads) -> None:
    """Whatever came before, batched or alone, k capped by the number of heads."""
    hidden = torch.randn(9, 64)
    drafter.commit([Committed(1, list(range(8)), 4, 1, 0, 0, (hidden[:4],)), Committed(1, list(range(10)), 4, 1, 0, 4, (hidden[4:],))])
    drafter.commit([Committed(2, [3, 4], 1, 1, 0, 0, (hidden[:1],))])
    first, second = DraftRequest(1, list(range(10)), 4, 8, True), DraftRequest(2, [3, 4], 1, 2, True)
    both = drafter.propose([first, second], never_stop)
    assert [len(draft) for draft in both] == [3, 2]
    assert [drafter.propose([r], never_stop)[0].tokens for r in (first, second)] == [draft.tokens for draft in both]
    state = drafter.network.begin(hidden[8:])
    tokens = torch.tensor([9])
    for head, token in enumerate(both[0].tokens):
        logits, state = drafter.network.step(head, state, tokens)
        tokens = logits.argmax(-1)
        assert int(tokens) == token
        assert both[0].confidence is not None
        assert both[0].confidence[head] == pytest.approx(float(logits.softmax(-1).max()), rel=1e-4)


def test_without_the_last_hidden_state_there_is_no_draft(drafter: HiddenHeads) -> None:
    request = DraftRequest(5, [1, 2, 3, 4], 1, 3, True)
    assert len(drafter.propose([request], never_stop)[0]) == 0
    drafter.commit([Committed(5, [1, 2, 3, 4], 1, 0, 0, 0, (torch.randn(2, 64),))])   # half of the prompt
    assert len(drafter.propose([request], never_stop)[0]) == 0
    drafter.commit([Committed(5, [1, 2, 3, 4], 1, 1, 0, 2, (torch.randn(1, 64),))])
    assert len(drafter.propose([request], never_stop)[0]) == 3
    drafter.stop(5)
    drafter.stop(5)
    assert len(drafter.propose([request], never_stop)[0]) == 0
    assert drafter.propose([], never_stop) == []


def spoil(directory: Path, config: dict[str, object], drop: str, tensors: Weights) -> None:
    [file] = [path for path in directory.iterdir() if path.name != "config.json"]
    weights = {name: tensor for name, tensor in weights_in(directory).items() if name != drop}
    weights |= tensors
    if file.suffix == ".safetensors":
        save_file(weights, file)
    else:
        torch.save(weights, file)
    (directory / "config.json").write_text(json.dumps({**json.loads((directory / "config.json").read_text()), **config}))


Maker = Callable[..., Path]


@pytest.mark.parametrize(
    ("make", "config", "drop", "tensors", "message"),
    [
        (medusa_dir, {"hidden_size": 128}, "", {}, "hidden_size 128, the target's is 64"),
        (medusa_dir, {"speculators_model_type": "eagle3"}, "", {}, "of type 'eagle3'; medusa reads"),
        (mlp_speculator_dir, {"speculators_model_type": "eagle3"}, "", {}, "of type 'eagle3'; mlp_speculator reads"),
        (medusa_dir, {"vocab_size": 400}, "", {}, "vocab_size 400, the target's is 320"),
        (medusa_dir, {}, "1.1.weight", {}, "lack 1.1.weight"),
        (medusa_dir, {}, "", {"0.0.linear.weight": torch.zeros(64, 32)}, r"0.0.linear.weight has shape \(64, 32\), expected \(64, 64\)"),
        (medusa_dir, {"medusa_num_heads": 4}, "", {}, "config.json names 4 heads, the weights have 3"),
        (medusa_dir, {}, "", {"extra": torch.zeros(2)}, "would be ignored"),
        (medusa_dir, {"medusa_num_heads": "x"}, "", {}, "medusa_num_heads must be a positive integer"),
        (mlp_speculator_dir, {"emb_dim": 128}, "", {}, "hidden size 128, the target's is 64"),
        (mlp_speculator_dir, {"vocab_size": 400}, "", {}, "vocabulary of 400 tokens, the target's has 320"),
        (mlp_speculator_dir, {"inner_dim": 50}, "", {}, r"emb.0.weight has shape \(320, 48\), expected \(320, 50\)"),
        (mlp_speculator_dir, {}, "speculator.ln.2.bias", {}, "lack ln.2.bias"),
        (mlp_speculator_dir, {"n_predict": 0}, "", {}, "n_predict must be a positive integer"),
    ],
)
def test_errors_name_what_is_wrong(
    target: Decoder, tmp_path: Path, make: Maker, config: dict[str, object], drop: str, tensors: Weights, message: str
) -> None:
    directory = make(tmp_path / "x", target.directory)
    spoil(directory, config, drop, tensors)
    with pytest.raises(ModelError, match=message):
        (MedusaFile if make is medusa_dir else MLPSpeculatorFile)(directory, target.config).load(target)


@pytest.mark.parametrize("make", [medusa_dir, mlp_speculator_dir])
def test_truncated_files(target: Decoder, tmp_path: Path, make: Maker) -> None:
    directory = make(tmp_path / "x", target.directory)
    [file] = [path for path in directory.iterdir() if path.name != "config.json"]
    file.write_bytes(file.read_bytes()[:3000])
    with pytest.raises(ModelError, match=f"{file.name} is not a readable"):
        (MedusaFile if make is medusa_dir else MLPSpeculatorFile)(directory, target.config)
