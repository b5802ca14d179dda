"""The kernels as functions of tensors. Each checks what the C code relies on; a wrong shape, type or layout raises ValueError.

The argument records mirror the structs in kernels.h field by field.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from headway.native import LANES, Library, memory

_P, _I64, _I32, _F = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_float


class AttentionArgs(ctypes.Structure):
    _fields_ = (
        *((name, _P) for name in ("q", "out", "pages", "tables", "rows", "tasks", "trees", "parents", "sinks")),
        *((name, _I64) for name in ("q_stride", "table_width", "num_tasks")),
        *((name, _I32) for name in ("heads", "kv_heads", "head_dim", "block_size", "window", "num_threads")),
        ("scale", _F), ("softcap", _F),
    )


class PlanArgs(ctypes.Structure):
    _fields_ = (
        *((name, _P) for name in ("tables", "rows", "positions", "inv_freq", "slots", "cos", "sin", "tasks")),
        *((name, _I64) for name in ("num_rows", "table_width", "num_angles", "half", "num_tasks")),
        *((name, _I32) for name in ("heads", "kv_heads", "block_size", "num_threads")),
        ("factor", _F),
    )


class MoveArgs(ctypes.Structure):
    _fields_ = (
        *((name, _P) for name in ("pages", "sources", "targets")),
        *((name, _I64) for name in ("num_moves", "num_layers")),
        *((name, _I32) for name in ("kv_heads", "head_dim", "block_size", "num_threads")),
    )


class RotateArgs(ctypes.Structure):
    _fields_ = (
        *((name, _P) for name in ("qkv", "pages", "cos", "sin", "slots", "q_norm", "k_norm")),
        *((name, _I64) for name in ("num_tokens", "stride", "angle_stride")),
        *((name, _I32) for name in ("heads", "kv_heads", "head_dim", "block_size", "num_threads")),
        ("eps", _F), ("offset", _F),
    )


class _NormArgs(ctypes.Structure):
    _fields_ = (
        ("x", _P), ("out", _P), ("weight", _P), ("num_tokens", _I64), ("width", _I64), ("num_threads", _I32), ("eps", _F), ("offset", _F),
    )


class _LinearArgs(ctypes.Structure):
    _fields_ = (
        *((name, _P) for name in ("x", "weight", "scales", "scratch", "bias", "residual", "y")),
        *((name, _I64) for name in ("num_tokens", "size_in", "size_out", "stride")),
        *((name, _I32) for name in ("num_threads", "gated")),
    )


class _SoftcapArgs(ctypes.Structure):
    _fields_ = (("x", _P), ("num_tokens", _I64), ("width", _I64), ("num_threads", _I32), ("softcap", _F))


class _ArgmaxArgs(ctypes.Structure):
    _fields_ = (("logits", _P), ("out", _P), ("num_rows", _I64), ("width", _I64), ("stride", _I64), ("num_threads", _I32))


class _FloorArgs(ctypes.Structure):
    _fields_ = (
        *((name, _P) for name in ("probs", "floors", "top_k", "top_p")), ("num_rows", _I64), ("width", _I64), ("num_threads", _I32),
    )


def rms_norm(library: Library, x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """x [num_tokens, width], weight [width], to which `offset` is added; width a multiple of 16."""
    num_tokens, width = x.shape
    if x.dtype != weight.dtype or weight.shape != (width,) or width % LANES or not (x.is_contiguous() and weight.is_contiguous()):
        raise ValueError(
            f"rms_norm takes contiguous x [n, width] and weight [width] of one type, width a multiple of {LANES}; got "
            f"{tuple(x.shape)} {x.dtype}, {tuple(weight.shape)} {weight.dtype}"
        )
    out = torch.empty_like(x)
    args = _NormArgs(x.data_ptr(), out.data_ptr(), weight.data_ptr(), num_tokens, width, torch.get_num_threads(), eps, offset)
    library.function("norm", x.dtype)(ctypes.byref(args))
    return out


def softcap_(library: Library, x: Tensor, softcap: float) -> Tensor:
    """x [num_tokens, width], contiguous, becomes softcap * tanh(x / softcap)."""
    if x.dim() != 2 or not x.is_contiguous() or softcap <= 0:
        raise ValueError(f"softcap takes a contiguous [n, width] and a positive softcap; got {tuple(x.shape)}, {x.stride()}, {softcap}")
    args = _SoftcapArgs(x.data_ptr(), *x.shape, torch.get_num_threads(), softcap)
    library.function("softcap", x.dtype)(ctypes.byref(args))
    return x


GATES = {"silu": 1, "gelu_pytorch_tanh": 2, "gpt_oss": 3}
"""What linear.c does with the first half of the outputs before it multiplies the second half with it, by Hugging Face's names."""


class PackedLinear:
    """A bf16 or float32 weight as linear.c reads it. `gate`: this function of the first half of the outputs, times the second half.

    `int8`: a bf16 weight kept as 8-bit integers, rounded to the nearest, each output with the scale that makes its largest weight 127.
    """

    def __init__(self, library: Library, weight: Tensor, bias: Tensor | None = None, gate: str | None = None, int8: bool = False) -> None:
        """weight [size_out, size_in], bias None or [size_out]; see `can_pack`."""
        if not can_pack(library, weight, int8):
            raise ValueError(f"cannot pack a weight {tuple(weight.shape)} {weight.dtype} on {weight.device}")
        if bias is not None and (bias.shape != weight.shape[:1] or bias.dtype != weight.dtype):
            raise ValueError(f"the bias must be {weight.dtype} [{weight.shape[0]}], got {tuple(bias.shape)} {bias.dtype}")
        self.size_out, self.size_in = weight.shape
        self.gate = gate
        if gate:
            weight = weight.view(2, -1, LANES, self.size_in).transpose(0, 1).reshape(weight.shape)
            bias = None if bias is None else bias.view(2, -1, LANES).transpose(0, 1).reshape(bias.shape)
        self.scales: Tensor | None = None
        self.dtype = weight.dtype
        self._bytes_per_token = 4 * self.size_in if self.dtype == torch.bfloat16 and library.linear_expands else 0
        if int8:
            self._bytes_per_token = 4 + 2 * self.size_in
            largest = weight.float().abs().amax(dim=1)
            self.scales = (largest / 127).contiguous()
            weight = (weight.float() * (127 / largest).nan_to_num(posinf=0.0)[:, None]).round().to(torch.int8)
        together = 2 if self.dtype == torch.bfloat16 else 1   # inputs of an output that lie side by side
        panels = weight.view(-1, library.linear_panel, self.size_in // together, together)
        self.weight = memory.packed(panels.transpose(1, 2))  # [out / panel, in / together, panel, together]
        self.bias = None if bias is None else bias.contiguous()
        self._function = library.function("linear", self.dtype)
        self._args = _LinearArgs(
            weight=self.weight.data_ptr(), scales=None if self.scales is None else self.scales.data_ptr(),
            bias=None if self.bias is None else self.bias.data_ptr(), gated=GATES[gate] if gate else 0,
            size_in=self.size_in, size_out=self.size_out,
        )

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """x [num_tokens, size_in] (+ residual, shaped like the result) -> [num_tokens, size_out], half as wide with a gate."""
        num_tokens, size_in = x.shape
        if size_in != self.size_in or x.dtype != self.dtype or x.stride(1) != 1:
            raise ValueError(f"x must be {self.dtype} [n, {self.size_in}], dense rows; got {tuple(x.shape)} {x.dtype}, {x.stride()}")
        y = x.new_empty(num_tokens, self.size_out // 2 if self.gate else self.size_out)
        if residual is not None and (self.gate or residual.shape != y.shape or residual.dtype != y.dtype or not residual.is_contiguous()):
            raise ValueError(f"the residual must be a contiguous {y.dtype} {tuple(y.shape)}, got {tuple(residual.shape)} {residual.dtype}")
        scratch = self.scratch(num_tokens)
        args = self._args
        args.scratch = scratch.data_ptr()
        args.x, args.y, args.residual = x.data_ptr(), y.data_ptr(), None if residual is None else residual.data_ptr()
        args.num_tokens, args.stride = num_tokens, x.stride(0)
        args.num_threads = torch.get_num_threads()
        self._function(ctypes.byref(args))
        return y

    def scratch(self, num_tokens: int) -> Tensor:
        """Where linear.c puts x [num_tokens, size_in] as integers or floats; empty where it multiplies x as it is."""
        return torch.empty(num_tokens * self._bytes_per_token, dtype=torch.uint8)


class _Product(ctypes.Structure):
    _fields_ = (("weight", _P), ("scales", _P), ("bias", _P))


class _ExpertsArgs(ctypes.Structure):
    _fields_ = (
        *((name, _P) for name in ("x", "residual", "y", "logits", "choice_bias", "gate_up", "down", "chosen", "order", "weights")),
        *((name, _P) for name in ("rows", "inner", "made", "sums", "starts", "scores", "scratch")),
        *((name, _I64) for name in ("num_tokens", "hidden", "inner_size", "stride")),
        *((name, _I32) for name in ("num_experts", "per_token", "num_groups", "groups_kept", "sigmoid", "normalised", "gated")),
        ("num_threads", _I32), ("scale", _F),
    )


class PackedExperts:
    """Experts whose products are packed and alike, and how a router's scores choose and weigh them, for experts.c."""

    def __init__(
        self, library: Library, gate_ups: Sequence[PackedLinear], downs: Sequence[PackedLinear], *, per_token: int, sigmoid: bool,
        normalised: bool, scale: float, choice_bias: Tensor | None = None, num_groups: int = 1, groups_kept: int = 1,
    ) -> None:
        """choice_bias  float32 [number of experts], added to scores to choose"""
        first, last, num = gate_ups[0], downs[0], len(gate_ups)
        shapes = {(up.size_in, up.size_out, up.gate, down.size_in, down.size_out) for up, down in zip(gate_ups, downs, strict=True)}
        if shapes != {(last.size_out, 2 * last.size_in, first.gate, last.size_in, last.size_out)} or not first.gate:
            raise ValueError(f"experts must be alike and gated, got {shapes}")
        if not 1 <= per_token <= num // num_groups * groups_kept or num % num_groups or not 1 <= groups_kept <= num_groups:
            raise ValueError(f"{per_token} of {num} experts, from {groups_kept} of {num_groups} groups, cannot be chosen")
        if choice_bias is not None and (choice_bias.dtype != torch.float32 or choice_bias.shape != (num,)):
            raise ValueError(f"choice_bias must be float32 [{num}], got {choice_bias.dtype} {tuple(choice_bias.shape)}")
        self.hidden_size, self.inner_size, self.num, self.per_token = last.size_out, last.size_in, num, per_token
        self.dtype = first.dtype
        self._products, self._choice_bias = (gate_ups, downs), choice_bias
        self._records = tuple((_Product * num)(*map(_product, products)) for products in self._products)
        self._function = library.function("experts", self.dtype)
        self._args = _ExpertsArgs(
            gate_up=ctypes.addressof(self._records[0]), down=ctypes.addressof(self._records[1]), hidden=self.hidden_size,
            choice_bias=None if choice_bias is None else choice_bias.data_ptr(), inner_size=self.inner_size, num_experts=num,
            per_token=per_token, num_groups=num_groups, groups_kept=groups_kept, sigmoid=sigmoid, normalised=normalised,
            gated=GATES[first.gate], scale=scale,
        )

    def __call__(self, x: Tensor, logits: Tensor, residual: Tensor | None = None) -> Tensor:
        """x [num_tokens, hidden], the router's logits [num_tokens, number of experts] (+ residual like x) -> like x"""
        num_tokens = len(x)
        for tensor in (x, *([] if residual is None else [residual])):
            if tensor.shape != (num_tokens, self.hidden_size) or tensor.dtype != self.dtype or not tensor.is_contiguous():
                raise ValueError(f"x and residual must be contiguous {self.dtype} [n, {self.hidden_size}], got {tuple(tensor.shape)}")
        if logits.shape != (num_tokens, self.num) or logits.dtype != self.dtype or logits.stride(1) != 1:
            raise ValueError(f"logits must be {self.dtype} [{num_tokens}, {self.num}], got {tuple(logits.shape)} {logits.dtype}")
        y, choices = torch.empty_like(x), num_tokens * self.per_token
        whole, parts = torch.empty(2 * choices + self.num + 1, dtype=torch.int32), torch.empty(choices + 2 * self.num)
        made, inner, sums = x.new_empty(2, num_tokens, self.hidden_size), x.new_empty(num_tokens, self.inner_size), torch.empty(x.shape)
        scratch = max((products[0].scratch(num_tokens) for products in self._products), key=torch.Tensor.numel)
        args = self._args
        args.x, args.y, args.residual = x.data_ptr(), y.data_ptr(), None if residual is None else residual.data_ptr()
        args.logits, args.stride, args.num_tokens = logits.data_ptr(), logits.stride(0), num_tokens
        args.chosen, args.order, args.starts = (whole.data_ptr() + 4 * offset for offset in (0, choices, 2 * choices))
        args.weights, args.scores = parts.data_ptr(), parts.data_ptr() + 4 * choices
        args.rows, args.made = made[0].data_ptr(), made[1].data_ptr()
        args.inner, args.sums, args.scratch = inner.data_ptr(), sums.data_ptr(), scratch.data_ptr()
        args.num_threads = torch.get_num_threads()
        self._function(ctypes.byref(args))
        return y


def _product(packed: PackedLinear) -> _Product:
    return _Product(*(None if part is None else part.data_ptr() for part in (packed.weight, packed.scales, packed.bias)))


def can_pack(library: Library, weight: Tensor, int8: bool = False) -> bool:
    """Whether linear.c takes this weight [out, in] on this CPU."""
    panel = library.linear_panel
    return bool(
        panel and weight.device.type == "cpu" and weight.dim() == 2
        and (weight.dtype == torch.bfloat16 or (weight.dtype == torch.float32 and not int8))
        and weight.shape[0] % (2 * panel) == 0 and weight.shape[1] % (LANES if int8 else 2) == 0 and weight.numel()
    )


def argmax(library: Library, logits: Tensor) -> Tensor:
    """logits [num_rows, width] -> int64 [num_rows]: the first maximum, as torch.argmax; the first NaN if there is one."""
    num_rows, width = logits.shape
    if width == 0 or (num_rows > 0 and logits.stride(1) != 1):
        raise ValueError(f"argmax takes [n, width >= 1] with dense rows; got {tuple(logits.shape)}, strides {logits.stride()}")
    out = torch.empty(num_rows, dtype=torch.int64)
    args = _ArgmaxArgs(logits.data_ptr(), out.data_ptr(), num_rows, width, logits.stride(0), torch.get_num_threads())
    library.function("argmax", logits.dtype)(ctypes.byref(args))
    return out


def top_floors(library: Library, probs: Tensor, floors: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """The least probability that is kept of each row, float32 [n]: of the `top_k` most likely tokens not below `floors`, as many as reach
    the share `top_p` of what is left.

    probs  float32 [n, width], >= 0, rows sum to 1     floors  float32 [n]
    top_k  int64 [n], 0: off                           top_p   float64 [n], 1: off
    """
    num_rows, width = probs.shape
    columns = ((floors, torch.float32), (top_k, torch.int64), (top_p, torch.float64))
    if probs.dtype != torch.float32 or not probs.is_contiguous() or any(c.dtype != kind or c.shape != (num_rows,) for c, kind in columns):
        raise ValueError("top_floors takes contiguous float32 probs [n, width], float32 floors, int64 top_k and float64 top_p [n]")
    out, top_k, top_p = floors.clone(), top_k.contiguous(), top_p.contiguous()
    args = _FloorArgs(
        probs.data_ptr(), out.data_ptr(), top_k.data_ptr(), top_p.data_ptr(), num_rows, width, torch.get_num_threads(),
    )
    library.function("floor", torch.float32)(ctypes.byref(args))
    return out
