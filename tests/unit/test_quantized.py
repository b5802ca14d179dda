"""Quantised checkpoints and adapters: a model read from one equals the model of the weights that they stand for.

The packing here follows the formats' documents, which `models/quantized.py` names; where transformers can undo one, it is the judge.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from headway.errors import ModelError
from headway.models.loader import load_model
from headway.models.quantized import Scheme
from tests.tiny import tiny_model_dir
from tests.unit.test_models import change_config, our_logits, random_ids, reference_logits

Pack = Callable[[torch.Tensor], tuple[dict[str, torch.Tensor], torch.Tensor]]
"""weight [out, in] -> (tensors by what follows the layer's name, the weight they stand for)"""


def words(numbers: torch.Tensor, bits: int) -> torch.Tensor:
    """int [n, m] of unsigned numbers -> int32 [n, m * bits / 32], the first in the lowest bits."""
    per_word = 32 // bits
    shifted = numbers.long().view(len(numbers), -1, per_word) << torch.arange(0, 32, bits)
    total = shifted.sum(-1)
    return torch.where(total >= 1 << 31, total - (1 << 32), total).to(torch.int32)


def by_group(weight: torch.Tensor, bits: int, group: int, order: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
    """Numbers [out, in] 0 ... 2^bits - 1, scales and zero points [out, groups] (in 1 ... 2^bits - 1), the weight they stand for."""
    groups = torch.arange(weight.shape[1]) // group if order is None else order
    count = int(groups.max()) + 1
    scales, zeros = torch.empty(len(weight), count), torch.empty(len(weight), count)
    for g in range(count):
        part = weight[:, groups == g]
        scales[:, g] = ((part.amax(1) - part.amin(1)) / (2**bits - 1)).half().float()
        zeros[:, g] = (-part.amin(1) / scales[:, g]).round().clamp(1, 2**bits - 1)
    numbers = (weight / scales[:, groups] + zeros[:, groups]).round().clamp(0, 2**bits - 1)
    return numbers.int(), scales, zeros.int(), (numbers - zeros[:, groups]) * scales[:, groups]


def fp8_blocks(weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    rows, columns = -(-weight.shape[0] // 48), -(-weight.shape[1] // 48)
    scales, back, stored = torch.empty(rows, columns), torch.empty_like(weight), torch.empty_like(weight)
    for i in range(rows):
        for j in range(columns):
            where = (slice(48 * i, 48 * i + 48), slice(48 * j, 48 * j + 48))
            scales[i, j] = weight[where].abs().max() / 448
            stored[where] = (weight[where] / scales[i, j]).to(torch.float8_e4m3fn).float()
            back[where] = stored[where] * scales[i, j]
    return {"weight": stored.to(torch.float8_e4m3fn), "weight_scale_inv": scales}, back


def fp8_whole(weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    scale = weight.abs().max() / 448
    stored = (weight / scale).to(torch.float8_e4m3fn)
    return {"weight": stored, "weight_scale": scale, "input_scale": torch.tensor(1.0)}, stored.float() * scale


def by_output(dtype: torch.dtype, largest: float) -> Pack:
    def pack(weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        scale = weight.abs().amax(1, keepdim=True) / largest
        stored = weight / scale
        stored = (stored if dtype.is_floating_point else stored.round()).to(dtype)
        return {"weight": stored, "weight_scale": scale}, stored.float() * scale

    return pack


def packed(bits: int, symmetric: bool, order: bool = False) -> Pack:
    """compressed-tensors' pack-quantized, groups of 32 inputs."""

    def pack(weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        groups = torch.arange(weight.shape[1]) // 32
        groups = groups[torch.randperm(len(groups), generator=torch.Generator().manual_seed(0))] if order else groups
        numbers, scales, zeros, back = by_group(weight, bits, 32, groups)
        if symmetric:
            half = 2 ** (bits - 1)
            numbers = (weight / scales[:, groups] + half).round().clamp(0, 2 * half - 1).int()
            back = (numbers - half) * scales[:, groups]
        tensors = {"weight_packed": words(numbers, bits), "weight_scale": scales, "weight_shape": torch.tensor(weight.shape)}
        if not symmetric:
            tensors["weight_zero_point"] = words(zeros.T.contiguous(), bits).T.contiguous()
        if order:
            tensors["weight_g_idx"] = groups.int()
        return tensors, back

    return pack


def gptq(bits: int, offset: int, order: bool) -> Pack:
    def pack(weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        groups = torch.arange(weight.shape[1]) // 32
        groups = groups[torch.randperm(len(groups), generator=torch.Generator().manual_seed(0))] if order else groups
        numbers, scales, zeros, back = by_group(weight, bits, 32, groups)
        return {
            "qweight": words(numbers, bits).T.contiguous(), "qzeros": words((zeros - offset).T.contiguous(), bits),
            "scales": scales.T.half().contiguous(), "g_idx": groups.int(),
        }, back

    return pack


def awq(weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    numbers, scales, zeros, back = by_group(weight, 4, 32)

    def in_words(values: torch.Tensor) -> torch.Tensor:
        """[n, out], the outputs 0 2 4 6 1 3 5 7 in a word."""
        return words(values.view(len(values), -1, 8)[..., [0, 2, 4, 6, 1, 3, 5, 7]].flatten(1), 4)

    numbers, zeros, scales = (each.T.contiguous() for each in (numbers, zeros, scales))
    return {"qweight": in_words(numbers), "qzeros": in_words(zeros), "scales": scales.half()}, back


def compressed(form: str, bits: int, kind: str = "int") -> dict[str, Any]:
    weights = {"num_bits": bits, "type": kind, "strategy": "group", "group_size": 32}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}}


SCHEMES: dict[str, tuple[dict[str, Any], Pack]] = {
    "fp8-blocks": ({"quant_method": "fp8", "weight_block_size": [48, 48], "activation_scheme": "dynamic"}, fp8_blocks),
    "fp8-whole": ({"quant_method": "fp8", "activation_scheme": "static"}, fp8_whole),
    "ct-float8": (compressed("float-quantized", 8, "float"), by_output(torch.float8_e4m3fn, 448)),
    "ct-int8": (compressed("int-quantized", 8), by_output(torch.int8, 127)),
    "ct-int4": (compressed("pack-quantized", 4), packed(4, symmetric=True)),
    "ct-int4-zero-points": (compressed("pack-quantized", 4), packed(4, symmetric=False)),
    "ct-int8-order": (compressed("pack-quantized", 8), packed(8, symmetric=True, order=True)),
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": 32}, gptq(4, 1, order=False)),
    "gptq-order": ({"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True}, gptq(4, 1, order=True)),
    "gptq-8-bits-v2": ({"quant_method": "gptq", "bits": 8, "group_size": 32, "checkpoint_format": "gptq_v2"}, gptq(8, 0, order=False)),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}, awq),
}


def quantise(directory: Path, config: dict[str, Any], pack: Pack) -> dict[str, torch.Tensor]:
    """Rewrites the model with the products of its layers quantised; returns the weights that stand for them, all of the model's."""
    stored, plain = {}, {}
    for name, tensor in load_file(directory / "model.safetensors").items():
        stored[name] = plain[name] = tensor
        if name.endswith("_proj.weight"):
            del stored[name]
            parts, plain[name] = pack(tensor)
            stored.update({f"{name.removesuffix('weight')}{part}": value for part, value in parts.items()})
    save_file(stored, directory / "model.safetensors")
    change_config(directory, quantization_config=config)
    return plain


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_a_quantised_model_is_the_model_of_its_weights(tmp_path: Path, family: str, scheme: str) -> None:
    directory, other = (tiny_model_dir(tmp_path, family) for _ in range(2))
    plain = quantise(directory, *SCHEMES[scheme])
    save_file({name: tensor.contiguous() for name, tensor in plain.items()}, other / "model.safetensors", metadata={"format": "pt"})
    token_ids = random_ids(40, 320)
    found, expected = (our_logits(load_model(str(path), dtype="float32", device="cpu"), token_ids) for path in (directory, other))
    assert (found - expected).abs().max() < 1e-4
    original = our_logits(load_model(str(tiny_model_dir(tmp_path, family)), dtype="float32", device="cpu"), token_ids)
    assert 1e-3 < (found - original).abs().mean() < 1.5


def test_gpt_oss_s_4_bit_floats_are_what_transformers_reads(tmp_path: Path) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    random = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (3, 24, 2, 16), generator=random).to(torch.uint8)
    scales = torch.randint(118, 132, (3, 24, 2), generator=random).to(torch.uint8)
    scheme = Scheme("mxfp4")
    tensors = {"mlp.experts.gate_up_proj_blocks": blocks, "mlp.experts.gate_up_proj_scales": scales}
    found = scheme.weight("mlp.experts.gate_up_proj", tensors.get)
    assert found is not None
    assert torch.equal(found, convert_moe_packed_tensors(blocks, scales, dtype=torch.float32))
    directory = tiny_model_dir(tmp_path, "gpt_oss")
    state = load_file(directory / "model.safetensors")
    for name in [name for name in state if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, size_in, size_out = state[name].shape
        blocks = torch.randint(0, 256, (experts, size_out, size_in // 32, 16), generator=random).to(torch.uint8)
        scales = torch.randint(122, 126, (experts, size_out, size_in // 32), generator=random).to(torch.uint8)
        state[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).contiguous()
        state |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    stacked = [name for name in state if f"{name}_blocks" in state]
    unpacked = {name: tensor for name, tensor in state.items() if not name.endswith(("_blocks", "_scales"))}
    save_file(unpacked, directory / "model.safetensors")
    token_ids = random_ids(40, 320)
    expected = our_logits(load_model(str(directory), dtype="float32", device="cpu"), token_ids)
    save_file({name: tensor for name, tensor in state.items() if name not in stacked}, directory / "model.safetensors")
    change_config(directory, quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
    assert torch.equal(our_logits(load_model(str(directory), dtype="float32", device="cpu"), token_ids), expected)


@pytest.mark.parametrize(("config", "message"), [
    ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes weights are not supported. Supported: awq, .* a GGUF file"),
    ({"quant_method": "gptq", "bits": 3}, "gptq weights of 3 bits are not supported. Give the model as it was before"),
    ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "awq weights of version gemv are not supported. Supported: gemm"),
    (compressed("nvfp4-pack-quantized", 4, "float"), "format nvfp4-pack-quantized are not supported. Supported: float-quantized"),
    ({**compressed("pack-quantized", 4), "sparsity_config": {"format": "sparse-24-bitmask"}}, "that are sparse are not supported"),
    ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size must be two whole numbers"),
    ({"quant_method": "gptq", "bits": "4"}, "bits must be a whole number"),
])
def test_what_is_not_supported_is_refused_by_name(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    directory = tiny_model_dir(tmp_path)
    change_config(directory, quantization_config=config)
    with pytest.raises(ModelError, match=message):
        load_model(str(directory), device="cpu")


def test_parts_that_do_not_belong_together(tmp_path: Path) -> None:
    directory = tiny_model_dir(tmp_path)
    quantise(directory, *SCHEMES["gptq"])
    state = load_file(directory / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj.scales"
    save_file({**state, name: state[name][:, :-1].contiguous()}, directory / "model.safetensors")
    with pytest.raises(ModelError, match=r"q_proj\.weight cannot be dequantised"):
        load_model(str(directory), device="cpu")
    del state[name]
    save_file(state, directory / "model.safetensors")
    with pytest.raises(ModelError, match=f"the weights lack {name}"):
        load_model(str(directory), device="cpu")


# ---------------------------------------------------------------------------------------------------------------- adapters


def adapter_dir(directory: Path, shapes: dict[str, tuple[int, int]], **config: Any) -> dict[str, torch.Tensor]:
    """Writes an adapter of rank 4 for modules of these [out, in]; returns B A by module."""
    directory.mkdir()
    random, tensors, products = torch.Generator().manual_seed(1), {}, {}
    for module, (size_out, size_in) in shapes.items():
        a, b = torch.randn(4, size_in, generator=random) * 0.2, torch.randn(size_out, 4, generator=random) * 0.2
        tensors |= {f"base_model.model.{module}.lora_A.weight": a, f"base_model.model.{module}.lora_B.weight": b}
        products[module] = b @ a
    save_file(tensors, directory / "adapter_model.safetensors")
    (directory / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 16, **config}))
    return products


SHAPES = {"model.layers.0.self_attn.q_proj": (64, 64), "model.layers.1.mlp.down_proj": (64, 96)}


@pytest.mark.parametrize(("config", "scales"), [
    ({}, (4.0, 4.0)), ({"use_rslora": True}, (8.0, 8.0)), ({"alpha_pattern": {"down_proj": 2}}, (4.0, 0.5)),
])
def test_an_adapter_is_merged(tmp_path: Path, config: dict[str, Any], scales: tuple[float, ...]) -> None:
    base, merged = (tiny_model_dir(tmp_path, "llama") for _ in range(2))
    products = adapter_dir(tmp_path / "adapter", SHAPES, **config)
    state = load_file(merged / "model.safetensors")
    for (module, product), scale in zip(products.items(), scales, strict=True):
        state[f"{module}.weight"] += scale * product
    save_file(state, merged / "model.safetensors", metadata={"format": "pt"})
    token_ids = random_ids(40, 320)
    found = our_logits(load_model(str(base), dtype="float32", device="cpu", lora=str(tmp_path / "adapter")), token_ids)
    assert (found - reference_logits(merged, token_ids)).abs().max() < 1e-4
    assert (found - reference_logits(base, token_ids)).abs().max() > 0.1


def test_an_adapter_of_a_quantised_model(tmp_path: Path) -> None:
    directory, merged = (tiny_model_dir(tmp_path, "llama") for _ in range(2))
    plain = quantise(directory, *SCHEMES["awq"])
    for module, product in adapter_dir(tmp_path / "adapter", SHAPES).items():
        plain[f"{module}.weight"] = plain[f"{module}.weight"] + 4.0 * product
    save_file({name: tensor.contiguous() for name, tensor in plain.items()}, merged / "model.safetensors")
    token_ids = random_ids(40, 320)
    found = our_logits(load_model(str(directory), dtype="float32", device="cpu", lora=str(tmp_path / "adapter")), token_ids)
    assert (found - our_logits(load_model(str(merged), dtype="float32", device="cpu"), token_ids)).abs().max() < 1e-4


@pytest.mark.parametrize(("config", "shapes", "message"), [
    ({"peft_type": "LOHA"}, SHAPES, "adapters of type LOHA are not supported. Supported: LORA"),
    ({"use_dora": True}, SHAPES, "use_dora is not supported. Merge the adapter with PEFT"),
    ({}, {"model.layers.0.self_attn.q_proj": (64, 32)}, "made for another model: model.layers.0.self_attn.q_proj.weight is"),
    ({}, {"model.layers.7.self_attn.q_proj": (64, 64)}, "made for another model: it has no model.layers.7.self_attn.q_proj"),
])
def test_adapters_that_do_not_fit(tmp_path: Path, config: dict[str, Any], shapes: dict[str, tuple[int, int]], message: str) -> None:
    adapter_dir(tmp_path / "adapter", shapes, **config)
    with pytest.raises(ModelError, match=message):
        load_model(str(tiny_model_dir(tmp_path)), device="cpu", lora=str(tmp_path / "adapter"))


def test_files_that_are_no_adapter(tmp_path: Path) -> None:
    base = str(tiny_model_dir(tmp_path))
    with pytest.raises(ModelError, match=r"adapter_config\.json does not exist; an adapter is a directory"):
        load_model(base, device="cpu", lora=str(tmp_path))
    adapter_dir(tmp_path / "adapter", SHAPES)
    save_file({"base_model.model.lm_head.modules_to_save.weight": torch.ones(2, 2)}, tmp_path / "adapter" / "adapter_model.safetensors")
    with pytest.raises(ModelError, match="cannot be merged"):
        load_model(base, device="cpu", lora=str(tmp_path / "adapter"))
    (tmp_path / "adapter" / "adapter_model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"adapter_model\.safetensors is not a readable safetensors file"):
        load_model(base, device="cpu", lora=str(tmp_path / "adapter"))
