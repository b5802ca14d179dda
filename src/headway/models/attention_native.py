"""Attention by the compiled kernels of headway/native: pages are read in place, nothing is gathered, padded or reordered.

A page tensor is [num_blocks, kv_heads, 2, block_size * head_dim]; the layout inside a page is described in native/attention.c.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from headway import native
from headway.models.attention_plan import MAX_NODES, AttentionPlan, Pages, Row, Tree
from headway.models.config import ModelConfig
from headway.models.layers import Layer
from headway.models.rope import Rope
from headway.native.memory import on_huge_pages
from headway.native.ops import AttentionArgs, MoveArgs, PlanArgs, RotateArgs

TASKS_PER_THREAD = 3
"""As in native/plan.c."""


def fits(config: ModelConfig, block_size: int, dtype: torch.dtype, device: torch.device | str) -> bool:
    """Whether the kernels can attend over such a cache here."""
    library = native.library()
    return (
        library is not None
        and torch.device(device).type == "cpu"
        and dtype in native.SUFFIXES
        and block_size % native.LANES == 0
        and config.head_dim % native.LANES == 0
        and config.head_dim <= library.max_head_dim
        and library.max_nodes >= MAX_NODES
    )


def make_pages(
    config: ModelConfig, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device | str
) -> list[Tensor]:
    """One per layer, [num_blocks, kv_heads, 2, block_size * head_dim]."""
    shape = (num_blocks, config.num_kv_heads, 2, block_size * config.head_dim)
    return [on_huge_pages(torch.empty(shape, dtype=dtype, device=device)) for _ in range(config.num_layers)]


class NativePlan(AttentionPlan):
    """The rows as the kernels read them; arrays live as long as the plan. `ahead`: so many more tokens of each row its table has room for,
    which passes that follow in the same call write (native/draft.c); `begin` is then told the positions of those, too.

    Plain arrays, filled by native/plan.c: what a pass of few tokens needs of numpy costs more than the arithmetic.
    """

    def __init__(
        self, rows: Sequence[Row], block_size: int, library: native.Library, trees: Sequence[Tree | None] = (), ahead: int = 0
    ) -> None:
        self.library, self.block_size, self.ahead = library, block_size, ahead
        self.num_rows, self.num_tokens = len(rows), sum(length for _, _, length in rows)
        counts = [-(-(start + length + ahead) // block_size) for _, start, length in rows]
        for i, ((table, _, _), count) in enumerate(zip(rows, counts, strict=True)):
            if len(table) < count:
                raise ValueError(f"row {i} needs {count} blocks of {block_size} tokens, its table has {len(table)}")
        self.table_width = max(counts, default=1)
        blocks = []
        for (table, _, _), count in zip(rows, counts, strict=True):
            blocks += table[:count] + [0] * (self.table_width - count)
        if min(blocks, default=0) < 0 or any(start < 0 or length < 1 for _, start, length in rows):
            raise ValueError("rows need blocks >= 0, starts >= 0 and lengths >= 1")
        self.max_block = max(blocks, default=0)
        self.tables = array("i", blocks)                                                                # [num_rows, table_width]
        self.rows = array("i", [number for _, start, length in rows for number in (0, start, length)])  # [num_rows, 3]
        self.trees: array[int] | None = None     # [num_rows, 2]: slot of the first node or -1, its first entry in `parents`
        if trees:
            self.trees, self.parents = array("i"), array("i")
            for tree in trees:
                self.trees.extend((-1 if tree is None else tree.base, len(self.parents)))
                self.parents.extend(() if tree is None else tree.parents)
        self._attention: AttentionArgs | None = None

    def begin(self, positions: Tensor, rope: Rope, dtype: torch.dtype) -> None:
        if positions.dtype != torch.int64 or not positions.is_contiguous() or len(positions) < self.num_tokens:
            raise ValueError(f"positions must be contiguous int64, one for each of {self.num_tokens} tokens, got {positions}")
        self.positions, self.rope = positions, rope

    def write(self, qkv: Tensor, layer: Layer, pages: Tensor) -> None:
        _, rotate = self.arguments(qkv, pages)
        rotate.qkv, rotate.pages = qkv.data_ptr(), pages.data_ptr()
        rotate.cos, rotate.sin = (table.data_ptr() + 2 * qkv.shape[2] * layer.rotation for table in self.angles)   # of head_dim / 2 floats
        if layer.q_norm is not None and layer.k_norm is not None:
            rotate.q_norm, rotate.k_norm = layer.q_norm.weight.data_ptr(), layer.k_norm.weight.data_ptr()
            rotate.eps, rotate.offset = layer.q_norm.eps, layer.q_norm.offset
        self.library.function("rotate", qkv.dtype)(ctypes.byref(rotate))

    def attend(self, qkv: Tensor, layer: Layer, pages: Tensor) -> Tensor:
        scores = layer.scores
        attention, _ = self.arguments(qkv, pages, scores.scale)
        out = qkv.new_empty(self.num_tokens, attention.heads * attention.head_dim)
        attention.q, attention.out, attention.pages = qkv.data_ptr(), out.data_ptr(), pages.data_ptr()
        attention.window, attention.softcap = scores.window or 0, scores.softcap
        attention.sinks = None if scores.sinks is None else scores.sinks.data_ptr()
        self.library.function("attention", qkv.dtype)(ctypes.byref(attention))
        return out

    def arguments(self, qkv: Tensor, pages: Tensor, scale: float | None = None) -> tuple[AttentionArgs, RotateArgs]:
        """Checked and made on the first layer; the other layers of the pass have the same shapes (checked). `scale`: as `Scores`."""
        num_tokens, all_heads, head_dim = qkv.shape
        num_blocks, kv_heads, _, page = pages.shape
        if num_tokens != self.num_tokens or page != self.block_size * head_dim or pages.dtype != qkv.dtype or not pages.is_contiguous():
            raise ValueError(
                f"the plan is for {self.num_tokens} tokens and blocks of {self.block_size}; got qkv {tuple(qkv.shape)} {qkv.dtype}, "
                f"pages {tuple(pages.shape)} {pages.dtype}"
            )
        if qkv.stride(2) != 1 or qkv.stride(1) != head_dim or self.max_block >= num_blocks:
            raise ValueError(f"qkv strides {qkv.stride()}, blocks up to {self.max_block} of {num_blocks}")
        if self._attention is None:
            self._attention, self._rotate = self._make(qkv, kv_heads)
        elif self._attention.heads + 2 * kv_heads != all_heads or self._attention.q_stride != qkv.stride(0):
            raise ValueError(f"layers differ in shape: {tuple(qkv.shape)} after {self._attention.heads} heads")
        attention = self._attention
        attention.scale = head_dim**-0.5 if scale is None else scale
        return attention, self._rotate

    def _make(self, qkv: Tensor, kv_heads: int) -> tuple[AttentionArgs, RotateArgs]:
        num_tokens, all_heads, head_dim = qkv.shape
        heads, threads, num_angles = all_heads - 2 * kv_heads, torch.get_num_threads(), len(self.positions)
        tiles = sum(-(-length * (heads // kv_heads) // self.library.tile_rows) for length in self.rows[2::3])
        self.slots, self.tasks = array("q", bytes(8 * num_tokens)), array("i", bytes(16 * (tiles * kv_heads + TASKS_PER_THREAD * threads)))
        num_freqs = len(self.rope.inv_freq)
        if num_freqs != self.rope.rotations * head_dim // 2:
            raise ValueError(f"{num_freqs} frequencies for {self.rope.rotations} rotations of heads of {head_dim} dimensions")
        self.angles = torch.empty(2, num_angles, num_freqs)
        tables, rows, slots, tasks = (each.buffer_info()[0] for each in (self.tables, self.rows, self.slots, self.tasks))
        cos, sin = (table.data_ptr() for table in self.angles)
        plan = PlanArgs(
            tables=tables, rows=rows, positions=self.positions.data_ptr(), inv_freq=self.rope.inv_freq.data_ptr(), slots=slots, cos=cos,
            sin=sin, tasks=tasks, num_rows=self.num_rows, table_width=self.table_width, num_angles=num_angles, half=num_freqs, heads=heads,
            kv_heads=kv_heads, block_size=self.block_size, num_threads=threads, factor=self.rope.factor,
        )
        self.library.plan(ctypes.byref(plan))
        shared = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "block_size": self.block_size, "num_threads": threads}
        attention = AttentionArgs(
            tables=tables, rows=rows, tasks=tasks, q_stride=qkv.stride(0), table_width=self.table_width, num_tasks=plan.num_tasks,
            **shared,
        )
        if self.trees is not None:
            attention.trees, attention.parents = self.trees.buffer_info()[0], self.parents.buffer_info()[0]
        return attention, RotateArgs(
            cos=cos, sin=sin, slots=slots, num_tokens=num_tokens, stride=qkv.stride(0), angle_stride=num_freqs, **shared
        )


def make_plan(
    rows: Sequence[Row], block_size: int, device: torch.device | str, trees: Sequence[Tree | None] = (), ahead: int = 0
) -> NativePlan:
    library = native.library()
    assert library is not None
    return NativePlan(rows, block_size, library, trees, ahead)


def move(cache: Pages, sources: Sequence[int], targets: Sequence[int]) -> None:
    """See `KVCache.move`."""
    library = native.library()
    assert library is not None
    slots = np.array([sources, targets], dtype=np.int64)
    if slots.min() < 0 or slots.max() >= cache.num_blocks * cache.block_size:
        raise ValueError(f"slots are 0 ... {cache.num_blocks * cache.block_size - 1}, got {slots.min()} ... {slots.max()}")
    args = MoveArgs(
        pages=ctypes.addressof(cache.pointers), sources=slots[0].ctypes.data, targets=slots[1].ctypes.data, num_moves=slots.shape[1],
        num_layers=len(cache.layers), kv_heads=cache.config.num_kv_heads, head_dim=cache.config.head_dim, block_size=cache.block_size,
        num_threads=torch.get_num_threads(),
    )
    library.function("move", cache.layers[0].dtype)(ctypes.byref(args))
