"""What a plan says a device holds, against what our engine allocates and what vLLM has printed elsewhere."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from headway.config import EngineConfig, SpeculativeConfig
from headway.engine.engine import Engine
from headway.errors import ConfigError, ModelError
from headway.json_object import JsonObject
from headway.models import hub
from headway.models.config import ModelConfig
from headway.plan import configs, device, drafting, families, memory
from headway.plan.device import GIB
from headway.plan.network import NetworkShape
from headway.plan.quantization import named
from tests import published_models as models
from tests.heads import eagle1_dir, eagle3_dir, medusa_dir
from tests.tiny import tiny_model_dir

ROOT = Path(__file__).parents[2]
HEAD = ROOT / "speculators" / "smollm2-135m-eagle3"
H100 = memory.Deployment(device.find("H100"))


def network(values: dict[str, Any], name: str = "small") -> NetworkShape:
    return families.read(JsonObject(values, "config.json", ModelError), name)


def read(directory: Path, dtype: str = "float32") -> NetworkShape:
    return families.read(configs.find(str(directory)), directory.name, dtype)


# -- our engine ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
@pytest.mark.parametrize("method", [None, "draft_model", "eagle3", "eagle", "medusa"])
def test_the_engine_allocates_what_is_planned(method: str | None, model_type: str, tmp_path: Path) -> None:
    directory = tiny_model_dir(tmp_path, model_type)
    make = {"draft_model": tiny_model_dir, "eagle3": eagle3_dir, "eagle": eagle1_dir, "medusa": medusa_dir}
    speculative, draft = None, None
    if method is not None:
        (tmp_path / "draft").mkdir()
        given = (tmp_path / "draft", "llama") if method == "draft_model" else (tmp_path / "draft", directory)
        draft = make[method](*given)   # type: ignore[operator]
        spelled = "eagle" if method == "eagle3" else method
        speculative = SpeculativeConfig.parse({"method": spelled, "model": str(draft), "num_speculative_tokens": 2})
    num_bytes = 1 << 20
    engine = Engine(EngineConfig(str(directory), dtype="float32", device="cpu", kv_cache_memory_bytes=num_bytes, speculative=speculative))
    target = read(directory)
    deployment = replace(H100, block_size=engine.config.block_size)
    drafts = None
    if method is not None:
        raw = configs.find(str(draft))
        drafts = drafting.build(method, target, raw, str(draft), read(draft) if method == "draft_model" else None, 2)
    [planned] = memory.measure(target, drafts, None, deployment, 2, 64).devices
    assert planned.weights == engine.model.weight_bytes
    found = engine.memory
    extra = 0
    if drafts is not None:
        [(name, weight_bytes)] = found.drafter_weight_bytes.items()
        tables = 4 * (200 + target.vocab_size) if method == "eagle3" else 0   # which token each draft token is: numbers, not weights
        assert planned.draft_weights == weight_bytes - tables
        # Headway keeps the target's hidden states beside the K/V of a head that reads them; the servers planned for do not.
        extra = len(engine.drafters[name].hidden_layers) * target.hidden_size * 4 if method in ("eagle", "eagle3") else 0
    per_token = planned.kv_per_token + planned.draft_kv_per_token + extra
    assert found.num_blocks == num_bytes // (per_token * deployment.block_size)


def test_smollm2_and_its_head() -> None:
    directory = hub.resolve("smollm2-135m")
    target = read(directory, "auto")
    assert target.num_parameters == ModelConfig.from_directory(directory).num_parameters == 134_515_008
    raw = configs.find(str(HEAD))
    assert drafting.method_of(raw) == "eagle3"
    head = drafting.build("eagle3", target, raw, str(HEAD), None, 4).network
    assert head is not None
    with safe_open(HEAD / "model.safetensors", "pt") as file:
        sizes = {name: math.prod(file.get_slice(name).get_shape()) for name in file.keys()}   # noqa: SIM118
    assert head.num_parameters == sum(size for name, size in sizes.items() if name not in ("d2t", "t2d", "embed_tokens.weight"))


# -- vLLM's logs --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Weights:
    """ "Model loading took N GiB", one device of `tp`."""

    config: dict[str, Any]
    tp: int
    gib: float
    source: str
    quantization: str | None = None


LOADED = [
    Weights(models.LLAMA_8B, 1, 14.96, "https://github.com/vllm-project/vllm/pull/10511"),
    Weights(models.LLAMA_8B, 2, 7.48, "https://github.com/vllm-project/vllm/pull/10511"),
    Weights(models.LLAMA_70B, 1, 67.7229, "https://github.com/vllm-project/vllm/pull/12569", "int8"),
    Weights(models.QWEN3_30B, 4, 14.2474, "https://github.com/vllm-project/vllm/issues/17327"),
]


@pytest.mark.parametrize("log", LOADED, ids=lambda log: f"{log.gib}")
def test_weights_are_what_vllm_prints(log: Weights) -> None:
    target = network(log.config)
    stored = named(log.quantization) if log.quantization else None
    assert target.stage(0, 1).weight_bytes(log.tp, stored) / GIB == pytest.approx(log.gib, rel=0.002)


def test_weights_of_a_checkpoint_that_keeps_its_attention() -> None:
    """Llama-3.1-405B-Instruct-FP8 on eight devices: https://github.com/vllm-project/vllm/issues/6746 (its first and last MLP are kept,
    too, which is not read)."""
    config = {"quant_method": "fbgemm_fp8", "modules_to_not_convert": ["model.layers.0.self_attn.q_proj"]}
    target = network({**models.LLAMA_405B, "quantization_config": config})
    assert target.stage(0, 1).weight_bytes(8, target.quantization) / GIB == pytest.approx(57.752, rel=0.03)


@pytest.mark.parametrize(
    ("config", "gib", "num_blocks", "source"),
    [
        (models.LLAMA_8B, 11.12, 5691, "https://github.com/vllm-project/vllm/issues/12330"),
        (models.LLAMA_8B, 4.60, 2356, "a log of an L4: 19.86 GiB to use, 14.99 of weights, 0.05 and 0.22 of the rest"),
    ],
)
def test_blocks_are_what_vllm_prints(config: dict[str, Any], gib: float, num_blocks: int, source: str) -> None:
    [planned] = memory.measure(network(config), None, None, H100, 0, 1024).devices
    assert gib * GIB / (planned.kv_per_token * 16) == pytest.approx(num_blocks, rel=0.002)


@pytest.mark.parametrize(
    ("device_name", "max_num_batched_tokens", "kv_gib", "source"),
    [
        ("H100", 8192, 53.29, "https://github.com/vllm-project/vllm/pull/10511"),
        ("L4", 512, 4.60, "the L4 above; vLLM 0.8 counted no graphs"),
    ],
)
def test_what_is_left_for_the_cache_is_within_two_gibibytes(
    device_name: str, max_num_batched_tokens: int, kv_gib: float, source: str
) -> None:
    deployment = replace(H100, device=device.find(device_name), max_num_batched_tokens=max_num_batched_tokens)
    [planned] = memory.measure(network(models.LLAMA_8B), None, None, deployment, 0, 1024).devices
    assert (planned.kv_room + planned.graphs) / GIB == pytest.approx(kv_gib, abs=2.0)


def test_deepseek_keeps_one_latent_vector_on_every_device() -> None:
    """576 values per token and layer, whatever the tensor parallelism (https://arxiv.org/abs/2412.19437, section 2.1.1)."""
    target = network(models.DEEPSEEK_V3)
    for tp in (1, 8):
        assert target.stage(0, 1).kv_values_per_token(tp) == 61 * 576


def test_kv_heads_are_copied_where_there_are_more_devices() -> None:
    target = network(models.LLAMA_8B)
    assert [target.stage(0, 1).kv_values_per_token(tp) // 32 for tp in (1, 4, 8, 16)] == [2048, 512, 256, 256]


# -- several devices ----------------------------------------------------------------------------------------------------


def with_draft(**changes: Any) -> memory.Capacity:
    target, draft = network(models.LLAMA_70B, "70b"), network(models.LLAMA_1B, "1b")
    return memory.measure(target, drafting.build("draft_model", target, None, "1b", draft, 4), None, replace(H100, **changes), 4, 1152)


def test_a_draft_on_one_device_of_four_leaves_the_others_with_memory_that_nobody_can_use() -> None:
    plain = memory.measure(network(models.LLAMA_70B, "70b"), None, None, replace(H100, tp=4), 4, 1152)
    alone, shared = with_draft(tp=4, draft_tp=1), with_draft(tp=4, draft_tp=4)
    assert [(entry.name, entry.count) for entry in alone.devices] == [("device 0", 1), ("devices 1 to 3", 3)]
    assert [(entry.name, entry.count) for entry in shared.devices] == [("devices 0 to 3", 4)]
    assert alone.num_blocks < shared.num_blocks < plain.num_blocks
    assert alone.tightest.name == "device 0"
    used = alone.num_blocks * 16 * alone.devices[1].kv_per_token
    assert alone.idle(alone.devices[1], 16) == pytest.approx(alone.devices[1].kv_room - used)
    assert alone.idle(alone.devices[1], 16) > 10 * alone.idle(alone.devices[0], 16)
    weights = network(models.LLAMA_1B).num_parameters * 2
    assert alone.devices[0].draft_weights == weights
    assert shared.devices[0].draft_weights == pytest.approx(weights / 4, rel=0.01)


def test_the_draft_is_on_the_last_stage() -> None:
    found = with_draft(tp=2, pp=2, draft_tp=2)
    assert [entry.name for entry in found.devices] == ["devices 0 to 1", "devices 2 to 3"]
    assert [entry.draft_weights > 0 for entry in found.devices] == [False, True]
    assert found.tightest.name == "devices 2 to 3"


def test_a_smaller_type_of_the_cache_holds_more() -> None:
    target = network(models.LLAMA_8B)
    wide = memory.measure(target, None, None, H100, 0, 1024)
    narrow = memory.measure(target, None, None, replace(H100, kv_dtype="fp8"), 0, 1024)
    assert narrow.num_blocks == pytest.approx(2 * wide.num_blocks, abs=1)
    assert wide.num_requests == wide.num_blocks // 64


def test_layers_with_a_window_leave_room_for_more_long_requests() -> None:
    base = {**models.LLAMA_8B, "model_type": "gemma3_text", "num_hidden_layers": 36, "head_dim": 128, "tie_word_embeddings": True}
    windowed = memory.measure(network({**base, "sliding_window": 1024}), None, None, H100, 0, 65536)
    whole = memory.measure(network({**base, "sliding_window": None}), None, None, H100, 0, 65536)
    assert windowed.num_blocks == whole.num_blocks
    # 6 of 36 layers keep 65,536 tokens, 30 keep 1,023 and the 8,192 of a step, and a block more.
    [planned] = windowed.devices
    kept = 6 * 65536 + 30 * 9232
    assert windowed.num_requests == int(planned.kv_room / (kept * planned.kv_per_token / 36))
    assert windowed.num_requests > 3 * whole.num_requests


def test_requests_with_windows_are_those_that_vllm_admits() -> None:
    """results/plan/zen5.json has the run: 256 MiB, blocks of 128 tokens, at most 2,048 tokens a request."""
    rows = json.loads((ROOT / "results" / "plan" / "zen5.json").read_text())["rows"]
    assert len(rows) == 6
    for row in rows:
        assert row["plan"]["num_tokens"] == pytest.approx(row["vllm"]["num_tokens"], rel=0.03), row["case"]


def test_what_would_make_it_fit() -> None:
    target = network(models.LLAMA_70B)
    assert memory.measure(target, None, None, H100, 0, 1152).num_requests == 0
    assert memory.smallest_changes(target, None, None, H100, 0, 1152) == ["--tp 2", "--quantization fp8"]
    long = replace(H100, tp=2, max_model_len=120_000)
    for change in memory.smallest_changes(target, None, None, replace(long, utilization=0.95), 0, 120_000):
        assert change.startswith("--")


def test_what_cannot_be_divided_is_said() -> None:
    with pytest.raises(ConfigError, match="--draft-tp 3 must divide --tp 4"):
        with_draft(tp=4, draft_tp=3)
    with pytest.raises(ConfigError, match="--pp 81 is more than the 80 layers"):
        with_draft(pp=81)


def test_every_device_has_a_source_and_reaches_what_it_must() -> None:
    rows = json.loads((Path(device.__file__).parent / "devices.json").read_text())
    assert {"H100", "H200", "A100-40", "A100-80", "L40S", "L4", "B200", "MI300X", "RTX4090"} <= rows.keys()
    for name, row in rows.items():
        assert row["source"].count("https://") >= 1, name
        assert device.find(name).peak("bf16") > 0
    assert device.find("nvidia a100 80gb").name == "A100-80"
    assert device.find("rtx 4090").name == "RTX4090"
    assert device.find("L4").peak("fp4") == device.find("L4").peak("bf16")
    with pytest.raises(ConfigError, match=r"unknown device 'H10'.*Did you mean 'H100'.*this-machine"):
        device.find("H10")
