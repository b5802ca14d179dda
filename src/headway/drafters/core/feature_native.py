"""Passes of a feature network in one call of the compiled kernels (native/draft.c)."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from headway import native
from headway.drafters.core.chain import Prediction
from headway.drafters.core.features import Hidden
from headway.drafters.core.wiring import Wiring
from headway.models.attention import KVCache
from headway.models.attention_native import NativePlan
from headway.models.config import ModelConfig
from headway.models.layers import Layer, Linear, RMSNorm
from headway.models.stack_native import NativeStack
from headway.native.ops import PackedLinear

_P, _I64, _I32 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32


class _Product(ctypes.Structure):
    _fields_ = (("weight", _P), ("scales", _P), ("bias", _P))


class _DraftArgs(ctypes.Structure):
    _fields_ = (
        *((name, _P) for name in ("stack", "token_ids", "positions", "hidden", "lengths", "hidden_norms", "wide_norm")),
        ("fuse", _Product),
        *((name, _P) for name in ("wide", "features", "embedding", "token_norm", "feature_norm")),
        ("project", _Product), ("final_norm", _P), ("head", _Product),
        *((name, _P) for name in (
            "target_ids", "picked", "pair", "last", "normed", "logits", "best", "confidence", "rows", "tasks", "slots",
        )),
        *((name, _I64) for name in ("num_passes", "num_parts", "num_hidden", "hidden_size", "num_picked", "width", "tasks_per_row")),
        *((name, _I32) for name in ("feature_first", "normed_residual", "norm_output", "direct", "num_threads")),
    )  # fmt: skip


class Network(Protocol):
    """What is read of a `FeatureNetwork`."""

    shape: ModelConfig
    hidden_layers: tuple[int, ...]
    embedding: Tensor
    layers: list[Layer]
    lm_head: Linear
    target_ids: Tensor | None
    wiring: Wiring
    dtype: torch.dtype
    device: torch.device


class NativePass:
    """Made for a network on a CPU in bf16 whose products are all packed; see `make`."""

    def __init__(self, network: Network, stack: NativeStack, library: native.Library) -> None:
        wiring = network.wiring
        fuse, project, head = (None if linear is None else linear.packed for linear in (wiring.fuse, wiring.project, network.lm_head))
        assert head is not None
        self._stack, self._wiring, self._tile_rows = stack, wiring, library.tile_rows
        self.hidden_size, self.width, self.vocab_size = network.shape.hidden_size, head.size_out, len(network.embedding)
        self.num_hidden = len(network.hidden_layers)
        self.wide_size = self.hidden_size * self.num_hidden if fuse is None else fuse.size_in   # of a position's hidden states together
        self._products = [product for product in (fuse, project, head) if product is not None]
        self._norms = (_P * len(wiring.hidden_norms))(*(norm.weight.data_ptr() for norm in wiring.hidden_norms))
        self._kept = network.embedding, network.target_ids, network.layers, network.lm_head   # what the record points to
        self._function = library.function("draft", torch.bfloat16)
        self._args = _DraftArgs(
            hidden_norms=ctypes.addressof(self._norms) if wiring.hidden_norms else None, wide_norm=_weight(wiring.wide_norm),
            fuse=_product(fuse), embedding=network.embedding.data_ptr(), token_norm=_weight(wiring.token_norm),
            feature_norm=_weight(wiring.feature_norm), project=_product(project), final_norm=_weight(wiring.final_norm),
            head=_product(head), target_ids=None if network.target_ids is None else network.target_ids.data_ptr(), width=head.size_out,
            num_hidden=self.num_hidden, hidden_size=self.wide_size // self.num_hidden, feature_first=wiring.feature_first,
            normed_residual=wiring.normed_residual, norm_output=wiring.norm_output, direct=wiring.direct,
        )

    @classmethod
    def make(cls, network: Network) -> NativePass | None:
        """None where the kernels cannot run all of it."""
        library = native.library()
        if library is None or network.device.type != "cpu" or network.dtype != torch.bfloat16:
            return None
        stack, hidden = NativeStack.make(network.layers, network.shape.head_dim), network.shape.hidden_size
        wiring, head, num_hidden = network.wiring, network.lm_head.packed, len(network.hidden_layers)
        norms = [wiring.wide_norm, wiring.token_norm, wiring.feature_norm, wiring.final_norm, *wiring.hidden_norms]
        fits = (
            stack is not None
            and stack.hidden_size == hidden
            and stack.qkv.size_in == (2 * hidden if wiring.project is None else hidden)
            and head is not None and head.size_in == hidden
            and (wiring.project is None or wiring.project.packed is not None)
            and (num_hidden == 1 if wiring.fuse is None else wiring.fuse.packed is not None)
            and all(norm is None or (norm.library is not None and norm.eps == stack.eps) for norm in norms)
            and network.embedding.shape[1] == hidden and network.embedding.is_contiguous()
        )  # fmt: skip
        return cls(network, stack, library) if fits and stack is not None else None

    def __call__(
        self, token_ids: Sequence[int], features: Tensor | Sequence[Hidden], plan: NativePlan, cache: KVCache, picked: Sequence[int],
        num_passes: int = 1,
    ) -> list[Prediction]:
        """As `FeatureNetwork.steps`; the plan has begun."""
        num_tokens, hidden, num, args = len(token_ids), self.hidden_size, len(picked), self._args
        for name, given, limit in (("token_ids", token_ids, self.vocab_size), ("picked", picked, num_tokens)):
            if min(given) < 0 or max(given) >= limit:
                raise ValueError(f"{name} must be in [0, {limit}), got {list(given)}")
        num_angles = num_tokens + plan.ahead * num
        if num_passes != plan.ahead + 1 or len(plan.positions) != num_angles or (num_passes > 1 and num != plan.num_rows):
            raise ValueError(f"{num_passes} passes need a plan with room for as many, of rows that all predict, and all their positions")
        taken = self._take(features, num_tokens)
        x, pair = torch.empty(num_tokens, hidden, dtype=torch.bfloat16), torch.empty(num_tokens, 2 * hidden, dtype=torch.bfloat16)
        last, normed, logits = (torch.empty(num, width, dtype=torch.bfloat16) for width in (hidden, hidden, self.width))
        best, confidence = torch.empty(num_passes, num, dtype=torch.int64), torch.empty(num_passes, num)
        read, predicting = array("q", token_ids), array("q", picked)
        stack, beside = self._stack.arguments(x, len(cache.layers), plan, cache)
        scratch = max((product.scratch(num_tokens) for product in self._products), key=torch.Tensor.numel)
        if scratch.numel() > beside[-1].numel():
            stack.scratch = scratch.data_ptr()
        following = self._follow(num, cache) if num_passes > 1 else None
        args.stack, args.token_ids, args.picked = ctypes.addressof(stack), read.buffer_info()[0], predicting.buffer_info()[0]
        args.positions = plan.positions.data_ptr() if self._wiring.mask_first else None
        args.pair, args.last, args.normed, args.logits = pair.data_ptr(), last.data_ptr(), normed.data_ptr(), logits.data_ptr()
        args.best, args.confidence, args.num_passes = best.data_ptr(), confidence.data_ptr(), num_passes
        args.num_picked, args.num_threads = num, stack.num_threads
        self._function(ctypes.byref(args))
        del taken, following
        state = normed if self._wiring.norm_output else last
        return [Prediction(logits, state, *each) for each in zip(best.numpy(), confidence.numpy(), strict=True)]

    def _take(self, features: Tensor | Sequence[Hidden], num_tokens: int) -> object:
        """Points the record at them; returns what must outlive the call."""
        args, hidden = self._args, self.hidden_size
        if isinstance(features, Tensor):
            if features.shape != (num_tokens, hidden) or features.dtype != torch.bfloat16 or not features.is_contiguous():
                raise ValueError(
                    f"features must be contiguous bfloat16 [{num_tokens}, {hidden}], got {tuple(features.shape)} {features.dtype}"
                )
            args.hidden, args.features = None, features.data_ptr()
            return features
        lengths, size = [len(part[0]) for part in features], self.wide_size // self.num_hidden
        for part, length in zip(features, lengths, strict=True):
            for layer in part:
                if layer.shape != (length, size) or layer.dtype != torch.bfloat16 or not layer.is_contiguous():
                    raise ValueError(f"hidden states must be contiguous bfloat16 [n, {size}], got {tuple(layer.shape)} {layer.dtype}")
        pointers = [layer.data_ptr() for part in features for layer in part]
        if sum(lengths) != num_tokens or len(pointers) != len(lengths) * self.num_hidden:
            raise ValueError(f"hidden states must be contiguous parts of {self.num_hidden} layers for {num_tokens} tokens, got {lengths}")
        made = torch.empty(num_tokens, hidden, dtype=torch.bfloat16)
        wide = made if args.fuse.weight is None else torch.empty(num_tokens, self.wide_size, dtype=torch.bfloat16)
        where, counts = (_P * len(pointers))(*pointers), (_I64 * len(lengths))(*lengths)
        args.hidden, args.lengths, args.num_parts = ctypes.addressof(where), ctypes.addressof(counts), len(lengths)
        args.features, args.wide = made.data_ptr(), wide.data_ptr()
        return made, wide, where, counts

    def _follow(self, num: int, cache: KVCache) -> object:
        """The plan of the passes behind the first, which the kernels make; returns what must outlive the call."""
        kv_heads, args = cache.config.num_kv_heads, self._args
        args.tasks_per_row = kv_heads * -(-cache.config.num_heads // kv_heads // self._tile_rows)
        slots = torch.empty(num, dtype=torch.int64)
        rows, tasks = torch.empty(num, 3, dtype=torch.int32), torch.empty(num, args.tasks_per_row, 4, dtype=torch.int32)
        args.rows, args.tasks, args.slots = rows.data_ptr(), tasks.data_ptr(), slots.data_ptr()
        return rows, tasks, slots


def _weight(norm: RMSNorm | None) -> int | None:
    return None if norm is None else norm.weight.data_ptr()


def _product(packed: PackedLinear | None) -> _Product:
    if packed is None:
        return _Product()
    scales, bias = (None if tensor is None else tensor.data_ptr() for tensor in (packed.scales, packed.bias))
    return _Product(packed.weight.data_ptr(), scales, bias)
