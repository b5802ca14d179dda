"""Every layer of a decoder in one call of the compiled kernels: at few tokens a tenth of a step went to Python between them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from headway import native
from headway.models.attention import KVCache
from headway.models.attention_native import NativePlan
from headway.models.config import ModelConfig
from headway.models.layers import MLP, Layer
from headway.models.traits import Norms
from headway.native.ops import PackedLinear

_P, _I64 = ctypes.c_void_p, ctypes.c_int64
_PRODUCTS = ("qkv", "o", "gate_up", "down")


class _LayerRecord(ctypes.Structure):
    _fields_ = (
        *((name, _P) for name in ("input_norm", "post_norm", "q_norm", "k_norm")),
        *((f"{name}_{part}", _P) for name in _PRODUCTS for part in ("weight", "scales", "bias")),
        ("window", _I64),
    )


class StackArgs(ctypes.Structure):
    _fields_ = (
        *((name, _P) for name in ("layers", "pages", "rotate", "attention", "entered", "x", "normed", "qkv", "attended", "inner")),
        ("scratch", _P), ("outputs", _P),
        *((name, _I64) for name in ("num_layers", "num_tokens", "hidden", "qkv_size", "q_size", "inner_size", "enter_size")),
        ("num_threads", ctypes.c_int32), ("eps", ctypes.c_float),
    )


class NativeStack:
    """Layers whose products are packed and whose cache the kernels attend over; see `make`."""

    def __init__(self, layers: Sequence[Layer], head_dim: int, library: native.Library) -> None:
        self.head_dim = head_dim
        self._layers = layers
        self._records = (_LayerRecord * len(layers))(*(_record(layer) for layer in layers))
        first = layers[0]
        self.qkv, self.o, self.gate_up, self.down = (_packed(first, name) for name in _PRODUCTS)
        self._function = library.function("stack", self.qkv.dtype)
        self.hidden_size = self.down.size_out
        assert first.input_norm is not None
        self.eps = first.input_norm.eps
        self._scale = first.scores.scale

    @classmethod
    def make(cls, layers: Sequence[Layer], head_dim: int) -> NativeStack | None:
        """None where a layer has what the C code lacks (see `_fits`), or where layers differ in shape; the first may read what is wider
        (`arguments`)."""
        library = native.library()
        if library is None or not library.linear_panel or not layers:
            return None
        if not all(_fits(layer, layers[0]) for layer in layers):
            return None
        products = [[_packed(layer, name) for name in _PRODUCTS] for layer in layers]
        shapes = {(qkv.size_out, *((p.size_in, p.size_out) for p in rest)) for qkv, *rest in products}
        same = len(shapes) == 1 and all(qkv.size_in == rest[-1].size_out for qkv, *rest in products[1:])
        return cls(layers, head_dim, library) if same else None

    def run(self, x: Tensor, num_layers: int, plan: NativePlan, cache: KVCache, wanted: Sequence[int] = ()) -> tuple[Tensor, list[Tensor]]:
        """The first layers of `x` [num_tokens, hidden], of the weights' type; new tensors: their output, and that of the `wanted` ones."""
        if x.shape[1] != self.hidden_size or self.qkv.size_in != self.hidden_size or x.dtype != self.qkv.dtype:
            raise ValueError(f"x must be {self.qkv.dtype} [n, {self.qkv.size_in}], got {tuple(x.shape)} {x.dtype}")
        x = x.clone(memory_format=torch.contiguous_format)
        args, _scratch = self.arguments(x, num_layers, plan, cache)
        kept = [torch.empty_like(x) for _ in wanted]
        outputs = (_P * num_layers)()
        for layer, output in zip(wanted, kept, strict=True):
            outputs[layer] = output.data_ptr()
        args.outputs = ctypes.addressof(outputs) if kept else None
        self._function(ctypes.byref(args))
        return x, kept

    def arguments(self, x: Tensor, num_layers: int, plan: NativePlan, cache: KVCache) -> tuple[StackArgs, tuple[Tensor, ...]]:
        """The record for the first layers of `x` [num_tokens, hidden], changed in place, and the tensors it points to beside it.
        Its `entered` is what the first layer's attention reads instead of its normed input, [num_tokens, qkv.size_in]: None until it
        is set."""
        num_tokens, hidden = x.shape
        if len(cache.layers) != len(self._layers):
            raise ValueError(f"the cache has {len(cache.layers)} layers, the decoder {len(self._layers)}")
        inner_size = self.gate_up.size_out // 2
        qkv = x.new_empty(num_tokens, self.qkv.size_out // self.head_dim, self.head_dim)
        normed, attended, inner = torch.empty_like(x), x.new_empty(num_tokens, self.o.size_in), x.new_empty(num_tokens, inner_size)
        scratch = max((p.scratch(num_tokens) for p in (self.qkv, self.o, self.gate_up, self.down)), key=torch.Tensor.numel)
        attention, rotate = plan.arguments(qkv, cache.layers[0], self._scale)
        args = StackArgs(
            layers=ctypes.addressof(self._records), pages=ctypes.addressof(cache.pointers),
            rotate=ctypes.addressof(rotate), attention=ctypes.addressof(attention),
            x=x.data_ptr(), normed=normed.data_ptr(), qkv=qkv.data_ptr(), attended=attended.data_ptr(), inner=inner.data_ptr(),
            scratch=scratch.data_ptr(),
            num_layers=num_layers, num_tokens=num_tokens, hidden=hidden, qkv_size=self.qkv.size_out, q_size=self.o.size_in,
            inner_size=inner_size, num_threads=torch.get_num_threads(), eps=self.eps,
        )
        return args, (qkv, normed, attended, inner, scratch)


def missing(config: ModelConfig) -> str | None:
    """What a network of these dimensions has that stack.c lacks, in words; None: nothing, it runs all layers where products are packed."""
    features = config.features
    lacks = {
        "other norms than those before attention and MLP": features.norms != Norms() or features.norm_offset or features.qk_norm_wide,
        f"activation {config.activation}": config.activation != "silu",
        "soft caps on scores": features.attention_softcap,
        "sinks": features.sinks,
        "mixtures of experts": features.experts is not None,
        "two rotations": config.local_rope is not None,
    }
    return ", ".join(what for what, there in lacks.items() if there) or None


def _fits(layer: Layer, first: Layer) -> bool:
    """Whether stack.c does all of it: packed products, norms before attention and MLP alone, and what all layers share like the first's."""
    if not isinstance(layer.mlp, MLP) or layer.input_norm is None or layer.post_norm is None or layer.input_norm.library is None:
        return False
    norms = [norm for norm in (layer.input_norm, layer.post_norm, layer.q_norm, layer.k_norm) if norm is not None]
    return (
        all(linear.packed is not None for linear in (layer.qkv, layer.o, layer.mlp.gate_up, layer.mlp.down))
        and layer.mlp.gate_up.activation == "silu"
        and layer.attention_out_norm is None and layer.mlp_out_norm is None and layer.wide_norms is None
        and layer.rotation == 0 and layer.scores.plain and layer.scores.scale == first.scores.scale
        and all(norm.eps == layer.input_norm.eps and norm.offset == 0 for norm in norms)
    )


def _packed(layer: Layer, name: str) -> PackedLinear:
    packed: PackedLinear = getattr(layer.mlp if name in ("gate_up", "down") else layer, name).packed
    return packed


def _record(layer: Layer) -> _LayerRecord:
    record = _LayerRecord(window=layer.scores.window or 0)
    for name in ("input_norm", "post_norm", "q_norm", "k_norm"):
        norm = getattr(layer, name)
        setattr(record, name, None if norm is None else norm.weight.data_ptr())
    for name in _PRODUCTS:
        packed = _packed(layer, name)
        for part in ("weight", "scales", "bias"):
            tensor = getattr(packed, part)
            setattr(record, f"{name}_{part}", None if tensor is None else tensor.data_ptr())
    return record
