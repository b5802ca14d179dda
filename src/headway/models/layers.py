"""The layers of a decoder, as plain objects: no nn.Module, no autograd, weights packed for the device once."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from headway import native
from headway.errors import ModelError
from headway.native import ops

PACK_ROWS = 32
"""Token rows oneDNN's packed layout is made for; it picks the same one for all row counts that matter here."""


class Linear:
    """x [n, in] -> [n, out]. On CPU in bf16 the weight is kept in one packed layout only: the compiled kernel's, else oneDNN's.

    `int8` keeps it as 8-bit integers; raises ModelError where the compiled kernels do not multiply these.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None, int8: bool = False) -> None:
        self.bias = bias
        self.packed = _pack(weight, bias, int8=int8)
        self.onednn = self.packed is None and can_reorder(weight)
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight, PACK_ROWS) if self.onednn else None if self.packed else weight

    def __call__(self, x: Tensor) -> Tensor:
        if self.packed is not None:
            return self.packed(x)
        if self.onednn:
            return torch.ops.mkldnn._linear_pointwise.default(x, self.weight, self.bias, "none", [], "")  # type: ignore[no-any-return]
        assert self.weight is not None
        return F.linear(x, self.weight, self.bias)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """residual + self(x), in one operation where the packed kernel can."""
        if self.packed is not None:
            return self.packed(x, residual)
        if self.onednn:
            return torch.ops.mkldnn._linear_pointwise.binary(x, residual, self.weight, self.bias, "add")  # type: ignore[no-any-return]
        return self(x).add_(residual)


class GatedLinear:
    """x [n, in] -> silu(gate) * up [n, inner], from the gate and up projections, one weight [2 * inner, in]."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None, int8: bool = False) -> None:
        self.packed = _pack(weight, bias, gated=True, int8=int8)
        self.linear = None if self.packed is not None else Linear(weight, bias)

    def __call__(self, x: Tensor) -> Tensor:
        if self.packed is not None:
            return self.packed(x)
        assert self.linear is not None
        gate, up = self.linear(x).chunk(2, dim=-1)
        return F.silu(gate).mul_(up)


def _pack(weight: Tensor, bias: Tensor | None, gated: bool = False, int8: bool = False) -> ops.PackedLinear | None:
    library = native.library() if weight.device.type == "cpu" else None
    if library is not None and ops.can_pack(library, weight, int8):
        return ops.PackedLinear(library, weight, bias, gated, int8)
    if int8:
        raise ModelError(
            "int8 weights need a CPU with AVX2, the compiled kernels, dtype bfloat16, and layers of a multiple of 64 outputs and "
            f"16 inputs; here: {weight.dtype} {tuple(weight.shape)} on {weight.device}, kernels: {native.choose().reason}"
        )
    return None


def can_reorder(weight: Tensor) -> bool:
    """Whether oneDNN's packed bf16 linear layer is there for this weight."""
    if weight.device.type != "cpu" or weight.dtype != torch.bfloat16 or not torch._C._has_mkldnn:
        return False
    return (
        hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )


class RMSNorm:
    def __init__(self, weight: Tensor, eps: float) -> None:
        self.weight, self.eps, self.shape = weight.contiguous(), eps, weight.shape
        self.library = native.library() if weight.device.type == "cpu" and len(weight) % native.LANES == 0 else None

    def __call__(self, x: Tensor) -> Tensor:
        if self.library is not None and x.dim() == 2:
            return ops.rms_norm(self.library, x.contiguous(), self.weight, self.eps)
        return F.rms_norm(x, self.shape, self.weight, self.eps)


@dataclass(slots=True)
class Layer:
    """One decoder layer; its attention and order of operations are in decoder.py."""

    input_norm: RMSNorm
    qkv: Linear
    q_norm: RMSNorm | None
    k_norm: RMSNorm | None
    o: Linear
    post_norm: RMSNorm
    gate_up: GatedLinear
    down: Linear
    window: int | None

    def mlp(self, x: Tensor, residual: Tensor) -> Tensor:
        return self.down.add_to(residual, self.gate_up(x))
