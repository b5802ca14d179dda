"""The layers of a decoder, as plain objects: no nn.Module, no autograd, weights packed for the device once."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

PACK_ROWS = 32
"""Token rows the packed layout is made for; oneDNN picks the same one for all row counts that matter here."""


class Linear:
    """x [n, in] -> [n, out]. On CPU in bf16 the weight is kept in oneDNN's own layout only: twice as fast at few rows."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.bias = bias
        self.packed = can_pack(weight)
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight, PACK_ROWS) if self.packed else weight

    def __call__(self, x: Tensor) -> Tensor:
        if self.packed:
            return torch.ops.mkldnn._linear_pointwise.default(x, self.weight, self.bias, "none", [], "")  # type: ignore[no-any-return]
        return F.linear(x, self.weight, self.bias)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """residual + self(x), in one operation where the packed kernel can."""
        if self.packed:
            return torch.ops.mkldnn._linear_pointwise.binary(x, residual, self.weight, self.bias, "add")  # type: ignore[no-any-return]
        return F.linear(x, self.weight, self.bias).add_(residual)


def can_pack(weight: Tensor) -> bool:
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
        self.weight, self.eps, self.shape = weight, eps, weight.shape

    def __call__(self, x: Tensor) -> Tensor:
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
    gate_up: Linear
    down: Linear
    window: int | None

    def mlp(self, x: Tensor, residual: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down.add_to(residual, F.silu(gate).mul_(up))
