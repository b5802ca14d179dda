"""The kernels as functions of tensors. Each checks what the C code relies on; a wrong shape, type or layout raises ValueError.

The argument records mirror the structs in kernels.h field by field.
"""

from __future__ import annotations

import ctypes

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


GATES = {"silu": 1, "gelu_pytorch_tanh": 2}
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
