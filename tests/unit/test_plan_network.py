"""The shape that a config.json describes, against the modules that are made of it and against published counts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from headway.errors import ConfigError, ModelError
from headway.json_object import JsonObject
from headway.models import families as engine_families
from headway.plan import families
from headway.plan.network import NetworkShape
from tests.published_models import PUBLISHED

SMALL: dict[str, Any] = {
    "hidden_size": 96, "intermediate_size": 144, "num_hidden_layers": 4, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16,
    "vocab_size": 500, "max_position_embeddings": 512, "pad_token_id": 0,
}  # fmt: skip
EXPERTS = {"moe_intermediate_size": 40, "num_experts_per_tok": 2}
LATENT = {
    **EXPERTS, "n_routed_experts": 8, "n_shared_experts": 2, "first_k_dense_replace": 1, "kv_lora_rank": 32, "q_lora_rank": 24,
    "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12, "n_group": 2, "topk_group": 1, "num_key_value_heads": 6,
}  # fmt: skip
OWN: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 8},
    "qwen2_moe": {**EXPERTS, "num_experts": 6, "shared_expert_intermediate_size": 70, "mlp_only_layers": [1]},
    "qwen3_moe": {**EXPERTS, "num_experts": 6, "decoder_sparse_step": 2},
    "olmoe": {"num_experts": 8, "num_experts_per_tok": 2},
    "gpt_oss": {"num_local_experts": 8, "num_experts_per_tok": 2, "attention_bias": True},
    "glm4_moe": {**EXPERTS, "n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 1, "use_qk_norm": True, "n_group": 1},
    "deepseek_v2": {**LATENT, "topk_method": "greedy"},
    "deepseek_v3": LATENT,
}
NO_MODULES = {"kimi_k2", "mimo", "gemma3"}   # deepseek_v3 and qwen2 under other names; gemma3 is gemma3_text within a larger model


def network(values: dict[str, Any], name: str = "small") -> NetworkShape:
    return families.read(JsonObject(values, "config.json", ModelError), name)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("model_type", sorted(families.FAMILIES.keys() - NO_MODULES))
def test_every_parameter_is_counted(model_type: str, tied: bool) -> None:
    values = {**SMALL, **OWN.get(model_type, {}), "model_type": model_type, "tie_word_embeddings": tied}
    hf = AutoConfig.for_model(**values)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(hf)
    assert network(values).num_parameters == sum(weight.numel() for weight in model.parameters())


@pytest.mark.parametrize("flags", [{"attention_bias": True}, {"attention_bias": True, "mlp_bias": True}])
def test_biases_are_counted(flags: dict[str, bool]) -> None:
    values = {**SMALL, **flags, "model_type": "llama", "tie_word_embeddings": False}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**values))
    assert network(values).num_parameters == sum(weight.numel() for weight in model.parameters())


def test_every_family_of_the_engine_can_be_planned() -> None:
    assert set(engine_families.names()) <= families.FAMILIES.keys()


@pytest.mark.parametrize("published", PUBLISHED, ids=lambda published: published.name)
def test_published_counts(published: Any) -> None:
    found = network(published.config, published.name)
    assert found.num_parameters == pytest.approx(published.num_parameters, rel=published.within)
    assert found.num_active_parameters == pytest.approx(published.num_active, rel=0.03)
    assert sum(layer.kv.values_per_token(1) for layer in found.layers) * 2 == published.kv_bytes_per_token


def test_experts_are_read_as_tokens_choose_them() -> None:
    [experts] = [part for part in network({**SMALL, **OWN["mixtral"], "model_type": "mixtral"}).layers[0].parts if part.num_experts]
    assert experts.used(0) == 0.0
    assert experts.used(1) == pytest.approx(2 / 8)
    assert experts.used(2) == pytest.approx(1 - (6 / 8) ** 2)
    assert experts.used(1000) == pytest.approx(1.0)


def test_windows_of_a_layer() -> None:
    values = {**SMALL, "model_type": "gemma3_text", "num_hidden_layers": 12, "sliding_window": 64}
    assert [layer.kv.window for layer in network(values).layers] == [64, 64, 64, 64, 64, None] * 2
    listed = {**values, "model_type": "gpt_oss", **OWN["gpt_oss"], "layer_types": ["full_attention"] * 6 + ["sliding_attention"] * 6}
    assert [layer.kv.window for layer in network(listed).layers] == [None] * 6 + [64] * 6


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "lama"}, "unknown model_type 'lama'. Did you mean 'llama'?"),
        ({"model_type": None}, "unknown model_type ''"),
        ({"hidden_size": None}, "hidden_size must be a whole number"),
        ({"num_hidden_layers": -1}, "num_hidden_layers must be a whole number"),
        ({"vocab_size": "many"}, "vocab_size must be a whole number"),
        ({"num_key_value_heads": 4}, "num_key_value_heads must be a divisor of the 6 attention heads"),
        ({"quantization_config": {"quant_method": "magic"}}, "quant_method must be one of awq"),
    ],
)
def test_what_is_wrong_with_a_configuration_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=r"^config\.json"):
        network({**SMALL, "model_type": "llama", **change})
    with pytest.raises(ModelError) as caught:
        network({**SMALL, "model_type": "llama", **change})
    assert message in str(caught.value)


def test_layer_types_must_fit() -> None:
    with pytest.raises(ModelError, match="layer_types must be a list of 4 entries"):
        network({**SMALL, "model_type": "gemma3_text", "sliding_window": 8, "layer_types": ["full_attention"]})


def test_devices_must_divide_the_heads() -> None:
    found = network({**SMALL, "model_type": "llama"})
    found.check_split(2, "--tp")
    with pytest.raises(ConfigError, match="--tp 4 does not divide the 6 attention heads of small; possible: 1, 2, 3, 6"):
        found.check_split(4, "--tp")
    with pytest.raises(ConfigError, match="--draft-tp 3 and the 2 K/V heads"):
        found.check_split(3, "--draft-tp")


@pytest.mark.parametrize(
    ("config", "bits"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, 8),
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, 4 + 20 / 128),
        ({"quant_method": "gptq", "bits": 8, "group_size": -1}, 8),
        ({"quant_method": "mxfp4"}, 4.25),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, 4.5),
        ({"quant_method": "compressed-tensors", "config_groups": {"group_0": {
            "weights": {"num_bits": 8, "type": "int"}, "input_activations": {"num_bits": 8}}}}, 8),
    ],
)  # fmt: skip
def test_what_a_quantised_weight_takes(config: dict[str, Any], bits: float) -> None:
    found = network({**SMALL, "model_type": "llama", "quantization_config": config})
    assert found.quantization is not None
    assert found.quantization.bits == pytest.approx(bits)


@pytest.mark.parametrize("num_stages", [1, 2, 3])
def test_stages_hold_the_network_once(num_stages: int) -> None:
    """But for a tied table, which both ends need."""
    found = network({**SMALL, "model_type": "llama", "tie_word_embeddings": True})
    stages = [found.stage(index, num_stages) for index in range(num_stages)]
    twice = 500 * 96 if num_stages > 1 else 0
    assert sum(stage.weight_bytes(1, None) for stage in stages) == 2 * (found.num_parameters + twice)
    assert [len(stage.layers) for stage in stages] == {1: [4], 2: [2, 2], 3: [1, 2, 1]}[num_stages]
