"""The layers of a decoder, as plain objects: no nn.Module, no autograd, weights packed for the device once."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

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
    """x [n, in] -> activation(gate) * up [n, inner], from the gate and up projections, one weight [2 * inner, in].

    activation  by Hugging Face's names: silu, gelu_pytorch_tanh; gpt_oss: both clamped at 7, gate * sigmoid(1.702 * gate) * (up + 1)
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None, int8: bool = False, activation: str = "silu") -> None:
        self.activation = activation
        self.packed = _pack(weight, bias, activation, int8)
        self.linear = None if self.packed is not None else Linear(weight, bias)

    def __call__(self, x: Tensor) -> Tensor:
        if self.packed is not None:
            return self.packed(x)
        assert self.linear is not None
        gate, up = self.linear(x).chunk(2, dim=-1)
        if self.activation == "gpt_oss":
            gate = gate.clamp(max=7.0)
            return (up.clamp(-7.0, 7.0) + 1.0) * gate * (gate * 1.702).sigmoid()
        return (F.silu(gate) if self.activation == "silu" else F.gelu(gate, approximate="tanh")).mul_(up)


def _pack(weight: Tensor, bias: Tensor | None, gate: str | None = None, int8: bool = False) -> ops.PackedLinear | None:
    library = native.library() if weight.device.type == "cpu" else None
    if library is not None and ops.can_pack(library, weight, int8):
        return ops.PackedLinear(library, weight, bias, gate, int8)
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
    """x / sqrt(mean(x^2) + eps) * (weight + offset), over the last dimension."""

    def __init__(self, weight: Tensor, eps: float, offset: float = 0.0) -> None:
        self.weight, self.eps, self.offset, self.shape = weight.contiguous(), eps, offset, weight.shape
        self.library = native.library() if weight.device.type == "cpu" and len(weight) % native.LANES == 0 else None

    def __call__(self, x: Tensor) -> Tensor:
        if self.library is not None and x.dim() == 2:
            return ops.rms_norm(self.library, x.contiguous(), self.weight, self.eps, self.offset)
        if self.offset:   # the sum is not rounded to the type
            return F.rms_norm(x.float(), self.shape, self.weight.float() + self.offset, self.eps).to(x.dtype)
        return F.rms_norm(x, self.shape, self.weight, self.eps)


def softcapped(x: Tensor, softcap: float) -> Tensor:
    """softcap * tanh(x / softcap) of x [n, width], which may be overwritten."""
    library = native.library() if x.device.type == "cpu" else None
    return ops.softcap_(library, x, softcap) if library is not None and x.is_contiguous() else (x / softcap).tanh_().mul_(softcap)


class MLP:
    """x [n, hidden] -> [n, hidden]"""

    def __init__(self, gate_up: GatedLinear, down: Linear) -> None:
        self.gate_up, self.down = gate_up, down

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(self.gate_up(x))

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """residual + self(x)"""
        return self.down.add_to(residual, self.gate_up(x))


class FeedForward(Protocol):
    """What follows attention in a layer: an MLP, or a mixture of experts."""

    def __call__(self, x: Tensor) -> Tensor: ...

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor: ...


@dataclass(frozen=True, slots=True, eq=False)
class Scores:
    """How a layer's queries weigh the keys they see.

    window   so many last positions, the query's own included; None: all
    scale    of query times key; None: head_dim ** -0.5
    softcap  a score s becomes softcap * tanh(s / softcap); 0: as it is
    sinks    float32 [heads]: a score that takes its share of the weight and has no value; None: none
    """

    window: int | None = None
    scale: float | None = None
    softcap: float = 0.0
    sinks: Tensor | None = None

    @property
    def plain(self) -> bool:
        """Whether a softmax of scaled scores is all of it."""
        return not self.softcap and self.sinks is None


@dataclass(slots=True)
class Layer:
    """One decoder layer. Norms that are None do nothing.

    q_norm, k_norm   of each head by itself, before the rotation
    wide_norms       of all query heads together, and of all key heads
    rotation         which of the network's rotations turns its queries and keys
    """

    input_norm: RMSNorm | None
    qkv: Linear
    q_norm: RMSNorm | None
    k_norm: RMSNorm | None
    o: Linear
    post_norm: RMSNorm | None
    mlp: FeedForward
    scores: Scores = field(default_factory=Scores)
    rotation: int = 0
    wide_norms: tuple[RMSNorm, RMSNorm] | None = None
    attention_out_norm: RMSNorm | None = None
    mlp_out_norm: RMSNorm | None = None

    def project(self, x: Tensor) -> Tensor:
        """[n, hidden] -> queries, keys and values [n, (heads + 2 * kv_heads) * head_dim]"""
        qkv = self.qkv(x if self.input_norm is None else self.input_norm(x))
        if self.wide_norms is not None:
            begin = 0
            for norm in self.wide_norms:
                part = qkv[:, begin : begin + len(norm.weight)]
                part.copy_(norm(part))
                begin += len(norm.weight)
        return qkv

    def add_attended(self, x: Tensor, attended: Tensor) -> Tensor:
        """The layer behind its attention: [n, hidden], [n, heads * head_dim] -> [n, hidden]."""
        x = self.o.add_to(x, attended) if self.attention_out_norm is None else self.attention_out_norm(self.o(attended)).add_(x)
        normed = x if self.post_norm is None else self.post_norm(x)
        return self.mlp.add_to(x, normed) if self.mlp_out_norm is None else self.mlp_out_norm(self.mlp(normed)).add_(x)
