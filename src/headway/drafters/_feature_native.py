"""Passes of a feature network in one call of the compiled kernels (native/draft.c)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from headway import native
from headway.drafters._chain import Prediction
from headway.models.attention import KVCache, Row
from headway.models.attention_native import NativePlan
from headway.models.layers import RMSNorm
from headway.models.rope import Rope
from headway.models.stack_native import NativeStack
from headway.native.ops import PackedLinear

if TYPE_CHECKING:
    from headway.drafters._feature_network import FeatureNetwork

_P, _I64, _I32 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32


class _DraftArgs(ctypes.Structure):
    _fields_ = (
        *((name, _P) for name in (
            "stack", "rotate", "attention", "token_ids", "positions", "features", "embedding", "token_norm", "feature_norm", "project",
            "project_bias", "final_norm", "head", "head_bias", "target_ids", "picked", "pair", "last", "normed", "logits", "best",
            "confidence",
        )),
        *((name, _I64) for name in ("num_passes", "num_picked", "width")),
        *((name, _I32) for name in ("feature_first", "normed_residual", "norm_output", "direct", "num_threads")),
    )  # fmt: skip


class NativePass:
    """Made for a network on a CPU in bf16 whose products are all packed; see `make`."""

    def __init__(self, network: FeatureNetwork, stack: NativeStack, library: native.Library) -> None:
        wiring, project, head = network.wiring, network.wiring.project, network.lm_head.packed
        assert head is not None
        self._stack, self._wiring = stack, wiring
        self.hidden_size, self.width, self.vocab_size = network.shape.hidden_size, head.size_out, len(network.embedding)
        self._kept = network.embedding, network.target_ids, network.layers, network.lm_head   # what the record points to
        self._function = library.function("draft", torch.bfloat16)
        self._args = _DraftArgs(
            embedding=network.embedding.data_ptr(), token_norm=_weight(wiring.token_norm), feature_norm=_weight(wiring.feature_norm),
            final_norm=_weight(wiring.final_norm), head=head.weight.data_ptr(), head_bias=_bias(head),
            target_ids=None if network.target_ids is None else network.target_ids.data_ptr(), width=head.size_out,
            feature_first=wiring.feature_first, normed_residual=wiring.normed_residual, norm_output=wiring.norm_output,
            direct=wiring.direct,
        )
        if project is not None and project.packed is not None:
            self._args.project, self._args.project_bias = project.packed.weight.data_ptr(), _bias(project.packed)

    @classmethod
    def make(cls, network: FeatureNetwork) -> NativePass | None:
        """None where the kernels cannot run all of it."""
        library = native.library()
        if library is None or network.device.type != "cpu" or network.dtype != torch.bfloat16:
            return None
        stack, hidden = NativeStack.make(network.layers, network.shape.head_dim), network.shape.hidden_size
        wiring, project, head = network.wiring, network.wiring.project, network.lm_head.packed
        norms = [norm for norm in (wiring.token_norm, wiring.feature_norm, wiring.final_norm) if norm is not None]
        fits = (
            stack is not None
            and stack.hidden_size == hidden
            and stack.qkv.size_in == (2 * hidden if project is None else hidden)
            and head is not None and head.size_in == hidden and head.scales is None
            and (project is None or project.packed is not None)
            and all(norm.library is not None and norm.eps == stack.eps for norm in norms)
            and network.embedding.shape[1] == hidden and network.embedding.is_contiguous()
        )  # fmt: skip
        return cls(network, stack, library) if fits and stack is not None else None

    def __call__(
        self, token_ids: Tensor, positions: Tensor, features: Tensor, plan: NativePlan, cache: KVCache, picked: Tensor, num_passes: int = 1
    ) -> list[Prediction]:
        """As `FeatureNetwork.steps`; the plan has begun, and is a StepPlan when there are to be several passes."""
        num_tokens, hidden, num = len(token_ids), self.hidden_size, len(picked)
        for name, tensor, limit in (("token_ids", token_ids, self.vocab_size), ("picked", picked, num_tokens)):
            if tensor.dtype != torch.int64 or not tensor.is_contiguous() or tensor.numpy().view(np.uint64).max() >= limit:
                raise ValueError(f"{name} must be contiguous int64 in [0, {limit}), got {tensor}")
        if features.shape != (num_tokens, hidden) or features.dtype != torch.bfloat16 or not features.is_contiguous():
            raise ValueError(f"features must be contiguous bfloat16 [{num_tokens}, {hidden}], got {tuple(features.shape)} {features.dtype}")
        if num_passes != (plan.num_steps if isinstance(plan, StepPlan) else 1) or (num_passes > 1 and num < num_tokens):
            raise ValueError(f"{num_passes} passes need a plan of as many steps in which every row predicts")
        pair, x = features.new_empty(num_tokens, 2 * hidden), torch.empty_like(features)
        last, normed, logits = (features.new_empty(num, width) for width in (hidden, hidden, self.width))
        best, confidence = torch.empty(num_passes, num, dtype=torch.int64), np.empty((num_passes, num), dtype=np.float32)
        stack, _scratch = self._stack.arguments(x, 0, len(cache.layers), plan, cache)
        args = self._args
        args.stack, args.rotate, args.attention = ctypes.addressof(stack), stack.rotate, stack.attention
        args.token_ids, args.features, args.picked = token_ids.data_ptr(), features.data_ptr(), picked.data_ptr()
        args.positions = positions.data_ptr() if self._wiring.mask_first else None
        args.pair, args.last, args.normed, args.logits = pair.data_ptr(), last.data_ptr(), normed.data_ptr(), logits.data_ptr()
        args.best, args.confidence, args.num_passes = best.data_ptr(), confidence.ctypes.data, num_passes
        args.num_picked, args.num_threads = num, stack.num_threads
        self._function(ctypes.byref(args))
        state = normed if self._wiring.norm_output else last
        return [Prediction(logits, state, *each) for each in zip(best, confidence, strict=True)]


class StepPlan(NativePlan):
    """Rows of one token each, for `num_steps` passes, from each to the next of which the kernels move them on by one position."""

    def __init__(self, rows: Sequence[Row], num_steps: int, positions: Tensor, size: int, rope: Rope) -> None:
        """`rows` of length 1 as they begin, with room in their blocks of `size` tokens for all passes; `positions` int64 [n]: the first."""
        library = native.library()
        assert library is not None
        super().__init__([(table, start + num_steps - 1, length) for table, start, length in rows], size, library)
        self.num_steps, self.starts = num_steps, self.starts - (num_steps - 1)
        self.rows[:, 1] = self.starts
        self.slots[:] = self.tables[np.arange(len(rows)), self.starts // size].astype(np.int64) * size + self.starts % size
        self.cos, self.sin = rope.angles((torch.arange(num_steps)[:, None] + positions).flatten())

    def begin(self, positions: Tensor, rope: Rope, dtype: torch.dtype) -> None:
        """The angles of all passes are known."""
        return


def _weight(norm: RMSNorm | None) -> int | None:
    return None if norm is None else norm.weight.data_ptr()


def _bias(packed: PackedLinear) -> int | None:
    return None if packed.bias is None else packed.bias.data_ptr()
