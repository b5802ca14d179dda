"""Weights that are published quantised, as plain numbers again.

A scheme names the tensors that stand for one weight [out, in] and what they mean:

fp8                `weight` float8 with `weight_scale_inv`, one scale for each block of `weight_block_size`, or `weight_scale`, one for all
                   (DeepSeek-V3, Qwen3-FP8)
compressed-tensors `weight` float8 or int8 with `weight_scale` for the whole, for each output, or by block, and `weight_zero_point`; or
                   `weight_packed`, 4 or 8 bits in int32 along the inputs, with scales by output or by group of inputs
                   (github.com/vllm-project/compressed-tensors: float-quantized, int-quantized, naive-quantized, pack-quantized)
gptq               `qweight` int32 [in / (32 / bits), out], `qzeros` [groups, out / (32 / bits)], `scales` [groups, out], `g_idx` [in];
                   zero points are stored less 1, but for checkpoint_format gptq_v2 (github.com/AutoGPTQ/AutoGPTQ)
awq                `qweight` int32 [in, out / 8] with outputs 0 2 4 6 1 3 5 7 in a word, `qzeros` and `scales` as gptq's, zero points
                   as they are (github.com/casper-hansen/AutoAWQ, version gemm)
mxfp4              `NAME_blocks` uint8 [..., out, in / 32, 16] of pairs of 4-bit floats, low half first, `NAME_scales` uint8: the powers of
                   two, plus 127 (OCP Microscaling Formats 1.0; gpt-oss's experts)

Activations stay in the model's type, whatever the scheme says of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headway.errors import ModelError
from headway.json_object import JsonObject

METHODS = ("awq", "compressed-tensors", "fp8", "gptq", "mxfp4")
INSTEAD = "Give the model as it was before (float32, bfloat16, float16), or a GGUF file of it"
FORMATS = ("float-quantized", "int-quantized", "naive-quantized", "pack-quantized")
_AWQ_ORDER = [0, 4, 1, 5, 2, 6, 3, 7]   # where output i of a word of 8 lies
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)


@dataclass(frozen=True)
class Scheme:
    """How the weights of a model are quantised."""

    method: str
    bits: int = 4
    block: tuple[int, int] | None = None
    zero_offset: int = 0

    @classmethod
    def of(cls, raw: JsonObject) -> Scheme | None:
        """From config.json; None: the weights are plain. Raises ModelError for what is not supported, with what to do instead."""
        key = next((key for key in ("quantization_config", "compression_config") if raw.has(key)), None)
        if key is None:
            return None
        config = raw.child(key)
        method = config.text("quant_method", "unknown")
        if method not in METHODS:
            raise ModelError(f"{method} weights are not supported. Supported: {', '.join(METHODS)}. {INSTEAD}")
        if method == "compressed-tensors":
            return cls(method, _compressed_bits(config))
        if method == "fp8":
            block = config.list_of(int, "weight_block_size", [])
            if block and (len(block) != 2 or min(block) < 1):
                raise config.wrong("weight_block_size", "two whole numbers >= 1")
            return cls(method, 8, (block[0], block[1]) if block else None)
        if method == "mxfp4":
            return cls(method)
        bits = config.integer("bits", config.integer("w_bit", 4))
        if bits not in ((4,) if method == "awq" else (2, 4, 8)):
            raise ModelError(f"{method} weights of {bits} bits are not supported. {INSTEAD}")
        if method == "awq" and config.text("version", "gemm").lower() != "gemm":
            raise ModelError(f"awq weights of version {config.text('version')} are not supported. Supported: gemm. {INSTEAD}")
        first = method == "gptq" and config.text("checkpoint_format", "gptq") != "gptq_v2"
        return cls(method, bits, zero_offset=1 if first else 0)

    def weight(self, name: str, read: Callable[[str], Tensor | None]) -> Tensor | None:
        """The tensor `name`, float32; None where nothing stands for it.

        read  a tensor of the checkpoint by its name, None where it has none
        """
        if self.method == "mxfp4":
            blocks, scales = read(f"{name}_blocks"), read(f"{name}_scales")
            return None if blocks is None or scales is None else _mxfp4(blocks, scales)
        if not name.endswith(".weight"):
            return None
        parts = _Parts(name.removesuffix("weight"), read)
        if self.method in ("gptq", "awq"):
            return None if parts.get("qweight") is None else (_gptq if self.method == "gptq" else _awq)(parts, self.bits, self.zero_offset)
        if parts.get("weight_packed") is not None:
            return _packed(parts, self.bits)
        return None if parts.get("weight") is None else _scaled(parts, self.block)


class _Parts:
    """The tensors that stand for one weight."""

    def __init__(self, prefix: str, read: Callable[[str], Tensor | None]) -> None:
        self.prefix, self._read = prefix, read

    def get(self, name: str) -> Tensor | None:
        return self._read(self.prefix + name)

    def __getitem__(self, name: str) -> Tensor:
        tensor = self.get(name)
        if tensor is None:
            raise ModelError(f"the weights lack {self.prefix}{name}")
        return tensor


def is_plain(tensor: Tensor) -> bool:
    """Whether its numbers are weights as they are."""
    return tensor.is_floating_point() and tensor.dtype not in _FLOAT8


def _compressed_bits(config: JsonObject) -> int:
    groups: Mapping[str, Any] = config.child("config_groups").values
    formats = {config.text("format", "unknown"), *(group["format"] for group in groups.values() if group.get("format"))}
    if not formats <= {*FORMATS, "mixed-precision"}:
        wrong = ", ".join(sorted(formats - set(FORMATS)))
        raise ModelError(f"compressed-tensors of format {wrong} are not supported. Supported: {', '.join(FORMATS)}. {INSTEAD}")
    if config.child("sparsity_config").text("format", "dense") != "dense":
        raise ModelError(f"compressed-tensors that are sparse are not supported. {INSTEAD}")
    bits = {int(group["weights"]["num_bits"]) for group in groups.values() if group.get("weights")}
    if len(bits) != 1 or not bits <= {4, 8}:
        raise ModelError(f"compressed-tensors of {sorted(bits)} bits are not supported. Supported: 4, 8. {INSTEAD}")
    return bits.pop()


def _scaled(parts: _Parts, block: tuple[int, int] | None) -> Tensor:
    """float8 or int8 with scales."""
    weight = parts["weight"].float()
    inverse = parts.get("weight_scale_inv")
    scale = (parts["weight_scale"] if inverse is None else inverse).float()
    zero = parts.get("weight_zero_point")
    if zero is not None:
        weight = weight - zero.float()
    if scale.numel() == 1:
        return weight * scale.reshape(())
    if block is None and scale.numel() == len(weight):
        return weight * scale.reshape(-1, 1)
    rows, columns = block or tuple(-(-size // count) for size, count in zip(weight.shape, scale.shape, strict=True))
    spread = scale.repeat_interleave(rows, 0)[: weight.shape[0]].repeat_interleave(columns, 1)[:, : weight.shape[1]]
    if spread.shape != weight.shape:
        raise ModelError(f"{parts.prefix}weight {tuple(weight.shape)} has scales {tuple(scale.shape)} for blocks of {rows} x {columns}")
    return weight * spread


def _unpacked(words: Tensor, bits: int) -> Tensor:
    """int32 [n, m] -> [n, m * 32 / bits], the lowest bits first."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    return ((words[..., None] >> shifts) & ((1 << bits) - 1)).flatten(-2)


def _packed(parts: _Parts, bits: int) -> Tensor:
    """compressed-tensors' weight_packed: numbers are stored with half their range added."""
    size_out, size_in = parts["weight_shape"].tolist()
    scale, half = parts["weight_scale"].float(), 1 << (bits - 1)
    numbers = _unpacked(parts["weight_packed"], bits)[:, :size_in] - half
    zero, order = parts.get("weight_zero_point"), parts.get("weight_g_idx")
    if zero is None:
        zeros = torch.zeros_like(scale)
    elif zero.dtype == torch.int32:   # packed along the outputs
        zeros = _unpacked(zero.T.contiguous(), bits)[:, :size_out].T.float() - half
    else:
        zeros = zero.float()
    groups = torch.arange(size_in) // -(-size_in // scale.shape[1]) if order is None or (order < 0).any() else order.long()
    return (numbers.float() - zeros[:, groups]) * scale[:, groups]


def _gptq(parts: _Parts, bits: int, zero_offset: int) -> Tensor:
    numbers = _unpacked(parts["qweight"].T.contiguous(), bits)                       # [out, in]
    scales = parts["scales"].float()                                                 # [groups, out]
    zeros = (_unpacked(parts["qzeros"], bits)[:, : scales.shape[1]] + zero_offset) & ((1 << bits) - 1)
    order, size_in = parts.get("g_idx"), numbers.shape[1]
    groups = torch.arange(size_in) // -(-size_in // len(scales)) if order is None else order.long()
    return (numbers - zeros.T[:, groups]).float() * scales.T[:, groups]


def _awq(parts: _Parts, bits: int, _: int) -> Tensor:
    def in_order(words: Tensor) -> Tensor:
        numbers = _unpacked(words, bits)
        return numbers.view(len(numbers), -1, 8)[..., _AWQ_ORDER].flatten(-2)

    numbers, scales = in_order(parts["qweight"]), parts["scales"].float()            # [in, out], [groups, out]
    groups = torch.arange(len(numbers)) // -(-len(numbers) // len(scales))
    return ((numbers - in_order(parts["qzeros"])[groups]).float() * scales[groups]).T.contiguous()


def _mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """[..., out, in / 32, 16] -> [..., in, out], as gpt-oss has its experts unquantised."""
    values = torch.tensor([*_FP4, *(-value for value in _FP4)])
    pairs = torch.stack([blocks & 15, blocks >> 4], -1).flatten(-2).long()           # [..., out, in / 32, 32]
    return torch.ldexp(values[pairs], scales.int()[..., None] - 127).flatten(-2).transpose(-1, -2)
