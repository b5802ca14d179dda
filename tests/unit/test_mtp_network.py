"""Multi-token prediction modules load as published and compute what the `speculators` package computes."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from headway.config import EngineConfig, SpeculativeConfig
from headway.drafters.core.feature_network import FeatureNetwork
from headway.drafters.core.mtp_network import MTPFile
from headway.engine.engine import Engine
from headway.errors import ModelError
from headway.models.attention import KVCache
from headway.models.decoder import Decoder
from headway.models.loader import load_model
from headway.sampling_params import SamplingParams
from headway.types import Request
from tests import speculators_reference
from tests.heads import eagle3_dir, mtp_dir
from tests.speculators_reference import MTP_FIXTURE, inputs, make_mtp_directories
from tests.tiny import random_weights, tiny_model_dir

ROWS = 5
STEPS = 4


def load_target(directory: Path) -> Decoder:
    return load_model(str(directory), dtype="float32", device="cpu", progress=False)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return load_target(tiny_model_dir(tmp_path_factory.mktemp("target"), "llama", seed=3))


def logits_of(network: FeatureNetwork, tokens: torch.Tensor, hidden: torch.Tensor, steps: int = 1) -> torch.Tensor:
    """[ROWS + steps - 1, vocab]: of the pass over the first positions, and of those that continue it on the network's own output."""
    cache = KVCache(network.shape, 1, 16, network.dtype, network.device)
    found, features, start, num = [], network.fuse([hidden[:ROWS]]), 0, ROWS
    for _ in range(steps):
        plan = cache.plan([([0], start, num)])
        x = network.forward(tokens[start + 1 : start + num + 1], torch.arange(start, start + num), features, plan, cache)
        logits, features = network.predict(x)
        found.append(logits)
        features, start, num = features[-1:], start + num, 1
    return torch.cat(found)


def test_logits_equal_the_speculators_package(tmp_path: Path) -> None:
    directory, module = make_mtp_directories(tmp_path)
    target = load_target(directory)
    tokens, hidden = inputs(directory)
    found = logits_of(MTPFile(module, target.config).load(target), tokens, hidden[0])
    torch.testing.assert_close(found[:, ::20], torch.tensor(json.loads(MTP_FIXTURE.read_text())), atol=5e-5, rtol=1e-5)


@pytest.mark.skipif(not speculators_reference.INSTALLED, reason="the package `speculators` is not installed")
def test_the_recorded_numbers_are_those_of_the_package() -> None:
    live = torch.tensor(speculators_reference.ask_speculators_mtp())[:, ::20]
    torch.testing.assert_close(live, torch.tensor(json.loads(MTP_FIXTURE.read_text())), atol=2e-5, rtol=0)


@pytest.mark.parametrize("layout", ["qwen", "mimo", "deepseek"])
def test_every_layout_is_the_same_module(target: Decoder, tmp_path: Path, layout: str) -> None:
    """From the same tensors, but for what a layout does otherwise: MiMo's projection reads the hidden state first, MiMo and DeepSeek
    leave position 0 without a token, DeepSeek has an output layer of its own."""
    one = MTPFile(mtp_dir(tmp_path / "a", target.directory), target.config).load(target)
    other = MTPFile(mtp_dir(tmp_path / "b", target.directory, layout=layout), target.config).load(target)
    if layout == "mimo":
        halves = load_file(tmp_path / "b" / "model.safetensors")
        name = "model.mtp_layers.0.input_proj.weight"
        save_file({**halves, name: torch.cat(halves[name].chunk(2, -1)[::-1], -1)}, tmp_path / "b" / "model.safetensors")
        other = MTPFile(tmp_path / "b", target.config).load(target)
    tokens, hidden = torch.arange(20, 30), torch.randn(9, 64)
    assert other.wiring.mask_first == (layout != "qwen")
    own_head = other.lm_head
    if layout == "deepseek":
        assert own_head is not target.lm_head
        other.lm_head = target.lm_head
    if other.wiring.mask_first:
        assert not torch.allclose(logits_of(one, tokens, hidden), logits_of(other, tokens, hidden), atol=1e-3)
        other.wiring = dataclasses.replace(other.wiring, mask_first=False)
    assert len(logits_of(one, tokens, hidden, STEPS)) == ROWS + STEPS - 1
    expected, found = (logits_of(network, tokens, hidden, STEPS) for network in (one, other))
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=2e-4)   # the chain amplifies rounding


@pytest.mark.parametrize("layout", ["speculators", "qwen", "mimo", "deepseek"])
def test_the_next_step_reads_the_normed_output(target: Decoder, tmp_path: Path, layout: str) -> None:
    """As vLLM 0.31 and 0.32 do for every layout (deepseek_mtp.py, mimo_mtp.py, qwen3_next_mtp.py)."""
    directory = mtp_dir(tmp_path / "m", target.directory, layout=layout)
    file = MTPFile(directory, target.config)
    name = {"speculators": "mtp_layers.0.final_layernorm", "qwen": "mtp.norm", "mimo": "model.mtp_layers.0.final_layernorm",
            "deepseek": f"model.layers.{target.config.num_layers}.shared_head.norm"}[layout]
    weight = load_file(directory / "model.safetensors")[f"{name}.weight"]
    x = torch.randn(3, 64) * 5
    normed = x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    network = file.load(target)
    torch.testing.assert_close(network.predict(x)[1], normed, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(network.handed_on(x), normed, atol=1e-5, rtol=1e-5)


GLM = {"num_hidden_layers": 2, "num_nextn_predict_layers": 2, "tie_word_embeddings": False}


@pytest.fixture
def glm_dir(tmp_path: Path) -> Path:
    """GLM-4.5 as it is published: two modules behind the target's layers, with mixtures of experts and the target's tables once more."""
    directory = tiny_model_dir(tmp_path, "glm4_moe", seed=5, **GLM)
    config = json.loads((directory / "config.json").read_text())
    state = load_file(directory / "model.safetensors")
    more = random_weights({**config, "num_hidden_layers": 4}, 6, torch.float32)
    random = torch.Generator().manual_seed(7)
    for layer in ("model.layers.2", "model.layers.3"):
        state |= {name: tensor for name, tensor in more.items() if name.startswith(f"{layer}.")}
        state[f"{layer}.eh_proj.weight"] = torch.randn(64, 128, generator=random) / 8
        for name in ("enorm", "hnorm", "shared_head.norm"):
            state[f"{layer}.{name}.weight"] = 1.0 + 0.2 * torch.randn(64, generator=random)
        state[f"{layer}.embed_tokens.weight"] = state["model.embed_tokens.weight"].clone()
        state[f"{layer}.shared_head.head.weight"] = state["lm_head.weight"].clone()
    save_file(state, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def test_glm_s_modules_are_those_of_transformers(glm_dir: Path) -> None:
    """Both modules over a text, the second on what the first hands on; positions begin behind the first, whose token we leave out."""
    from transformers import AutoModelForCausalLM
    from transformers.cache_utils import MtpCache
    from transformers.modeling_layers import MtpModel

    tokens = torch.randint(0, 320, (14,), generator=torch.Generator().manual_seed(0))
    main = AutoModelForCausalLM.from_pretrained(glm_dir, dtype=torch.float32, attn_implementation="eager")
    main._keys_to_ignore_on_load_unexpected = [r"model\.layers\.2\.", r"model\.layers\.3\."]   # it knows those of the published sizes
    mtp = MtpModel.from_pretrained(main)
    target = load_target(glm_dir)
    file = MTPFile(glm_dir, target.config)
    modules = [file.load(target), *file.load_further(target)]
    assert len(modules) == 2
    with torch.inference_mode():
        theirs = hidden = main.model(tokens[None]).last_hidden_state
        ours, cache = hidden[0], MtpCache(config=main.config.get_mtp_config())
        for index, module in enumerate(modules):
            num = len(tokens) - 1 - index
            positions = torch.arange(1, num + 1)
            theirs = mtp.forward_layer(index, theirs[:, :num], positions[None], cache, input_ids=tokens[None, index + 1 :])
            own = KVCache(module.shape, 1, 16, module.dtype, module.device)
            x = module.forward(tokens[index + 1 :], positions, ours[:num], own.plan([([0], 0, num)]), own)
            logits, ours = module.predict(x)
            torch.testing.assert_close(ours, theirs[0], atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(logits, mtp._project_to_logits(theirs)[0], atol=1e-4, rtol=1e-4)


def test_glm_drafts_for_itself(glm_dir: Path) -> None:
    speculative = SpeculativeConfig.parse({"method": "mtp", "policy": "static", "num_speculative_tokens": 3})
    texts = []
    for config in (None, speculative):
        engine = Engine(EngineConfig(model=str(glm_dir), dtype="float32", device="cpu", speculative=config, profile=False))
        engine.add(Request("r", [5, 6, 7] * 5, SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)))
        texts.append([token for _ in iter(engine.has_work, False) for delta in engine.step() for token in delta.token_ids])
    assert texts[0] == texts[1]
    assert sum(engine.metrics.verified.values()) > 0


def test_the_module_inside_the_target_needs_no_name(target: Decoder, tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    shutil.copytree(target.directory, whole)
    module = load_file(mtp_dir(tmp_path / "m", target.directory, layout="qwen", model_type="llama") / "model.safetensors")
    save_file({**load_file(whole / "model.safetensors"), **module}, whole / "model.safetensors")
    config = json.loads((whole / "config.json").read_text())
    (whole / "config.json").write_text(json.dumps({**config, "intermediate_size": 96}))
    speculative = SpeculativeConfig.parse({"method": "mtp", "policy": "static", "num_speculative_tokens": 2})
    with pytest.raises(ModelError, match=r"mlp.gate_proj.weight has shape"):   # the tiny module is narrower than the target's layers
        Engine(EngineConfig(model=str(whole), dtype="float32", device="cpu", speculative=speculative))
    wide = {name: torch.nn.functional.pad(t, (0, 0, 0, 16)) if "gate_proj" in name or "up_proj" in name else
            torch.nn.functional.pad(t, (0, 16)) if "down_proj" in name else t for name, t in module.items()}  # fmt: skip
    save_file({**load_file(target.directory / "model.safetensors"), **wide}, whole / "model.safetensors")
    engine = Engine(EngineConfig(model=str(whole), dtype="float32", device="cpu", speculative=speculative))
    engine.add(Request("r", [5, 6, 7], SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)))
    while engine.has_work():
        engine.step()
    assert sum(engine.metrics.verified.values()) > 0


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"mtp.layers.0.mlp.experts.0.gate_proj.weight": torch.zeros(2)}, "a mixture of experts"),
        ({"mtp.layers.0.self_attn.kv_a_proj_with_mqa.weight": torch.zeros(2)}, "latent attention"),
        ({"mtp.norm.weight": torch.zeros(3)}, r"mtp.norm.weight has shape \(3,\), expected \(64,\)"),
    ],
)
def test_errors_name_what_is_wrong(target: Decoder, tmp_path: Path, extra: dict[str, torch.Tensor], message: str) -> None:
    directory = mtp_dir(tmp_path / "m", target.directory, layout="qwen")
    save_file({**load_file(directory / "model.safetensors"), **extra}, directory / "model.safetensors")
    with pytest.raises(ModelError, match=message):
        MTPFile(directory, target.config).load(target)


def test_a_speculator_of_another_kind(target: Decoder, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="of type 'eagle3'; mtp reads: mtp"):
        MTPFile(eagle3_dir(tmp_path / "eagle3", target.directory), target.config)


def test_a_directory_without_a_module(target: Decoder) -> None:
    with pytest.raises(ModelError, match=r"no multi-token prediction module.*mtp.fc.weight.*model.layers.2.eh_proj.weight"):
        MTPFile(target.directory, target.config)
    with pytest.raises(ModelError, match="no multi-token prediction module"):
        Engine(EngineConfig(model=str(target.directory), device="cpu", speculative=SpeculativeConfig.parse("mtp")))
