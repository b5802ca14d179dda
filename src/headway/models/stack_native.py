"""Every layer of a decoder in one call of the compiled kernels: at few tokens a tenth of a step went to Python between them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from headway import native
from headway.models.attention import KVCache
from headway.models.attention_native import NativePlan
from headway.models.layers import Layer
from headway.native.ops import PackedLinear

_P, _I64 = ctypes.c_void_p, ctypes.c_int64
_PRODUCTS = ("qkv", "o", "gate_up", "down")


class _LayerRecord(ctypes.Structure):
    _fields_ = (
        *((name, _P) for name in ("input_norm", "post_norm", "q_norm", "k_norm")),
        *((f"{name}{part}", _P) for name in _PRODUCTS for part in ("", "_bias")),
        ("window", _I64),
    )


class _StackArgs(ctypes.Structure):
    _fields_ = (
        *((name, _P) for name in ("layers", "pages", "rotate", "attention", "x", "normed", "qkv", "attended", "inner")),
        *((name, _I64) for name in ("num_layers", "num_tokens", "hidden", "qkv_size", "q_size", "inner_size")),
        ("num_threads", ctypes.c_int32), ("eps", ctypes.c_float),
    )


class NativeStack:
    """Layers whose products are packed and whose cache the kernels attend over; see `make`."""

    def __init__(self, layers: Sequence[Layer], head_dim: int, library: native.Library) -> None:
        self.head_dim = head_dim
        self._layers = layers
        self._records = (_LayerRecord * len(layers))(*(_record(layer) for layer in layers))
        self._function = library.function("stack", torch.bfloat16)
        first = layers[0]
        self._packed = [_packed(first, name) for name in _PRODUCTS]
        self.eps = first.input_norm.eps

    @classmethod
    def make(cls, layers: Sequence[Layer], head_dim: int) -> NativeStack | None:
        """None where a layer has no packed products, or where layers differ in shape."""
        library = native.library()
        if library is None or not library.linear_panel or not layers:
            return None
        shapes = {tuple((p.size_in, p.size_out) if p else None for p in (_packed(layer, name) for name in _PRODUCTS)) for layer in layers}
        fits = len(shapes) == 1 and None not in shapes.pop() and all(layer.input_norm.library is not None for layer in layers)
        return cls(layers, head_dim, library) if fits else None

    def run(self, x: Tensor, begin: int, end: int, plan: NativePlan, cache: KVCache) -> Tensor:
        """Layers [begin, end) of `x` bfloat16 [num_tokens, hidden]; returns a new tensor."""
        num_tokens, hidden = x.shape
        qkv_product, o, gate_up, _ = self._packed
        if hidden != qkv_product.size_in or x.dtype != torch.bfloat16:
            raise ValueError(f"x must be bfloat16 [n, {qkv_product.size_in}], got {tuple(x.shape)} {x.dtype}")
        if len(cache.layers) != len(self._layers):
            raise ValueError(f"the cache has {len(cache.layers)} layers, the decoder {len(self._layers)}")
        x = x.clone(memory_format=torch.contiguous_format)
        qkv = x.new_empty(num_tokens, qkv_product.size_out // self.head_dim, self.head_dim)
        normed, attended, inner = torch.empty_like(x), x.new_empty(num_tokens, o.size_in), x.new_empty(num_tokens, gate_up.size_out // 2)
        attention, rotate = plan.arguments(qkv, cache.layers[begin])
        args = _StackArgs(
            layers=ctypes.addressof(self._records) + begin * ctypes.sizeof(_LayerRecord),
            pages=ctypes.addressof(cache.pointers) + begin * ctypes.sizeof(_P),
            rotate=ctypes.addressof(rotate), attention=ctypes.addressof(attention),
            x=x.data_ptr(), normed=normed.data_ptr(), qkv=qkv.data_ptr(), attended=attended.data_ptr(), inner=inner.data_ptr(),
            num_layers=end - begin, num_tokens=num_tokens, hidden=hidden, qkv_size=qkv_product.size_out, q_size=o.size_in,
            inner_size=gate_up.size_out // 2, num_threads=torch.get_num_threads(), eps=self.eps,
        )
        self._function(ctypes.byref(args))
        return x


def _packed(layer: Layer, name: str) -> PackedLinear:
    packed: PackedLinear = getattr(layer, name).packed
    return packed


def _record(layer: Layer) -> _LayerRecord:
    record = _LayerRecord(window=layer.window or 0)
    for name in ("input_norm", "post_norm", "q_norm", "k_norm"):
        norm = getattr(layer, name)
        setattr(record, name, None if norm is None else norm.weight.data_ptr())
    for name in _PRODUCTS:
        packed = _packed(layer, name)
        setattr(record, name, packed.weight.data_ptr())
        setattr(record, f"{name}_bias", None if packed.bias is None else packed.bias.data_ptr())
    return record
