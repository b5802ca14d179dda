"""Attention by the compiled kernels of headway/native: pages are read in place, nothing is gathered, padded or reordered.

A page tensor is [num_blocks, kv_heads, 2, block_size * head_dim]; the layout inside a page is described in native/attention.c.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headway import native
from headway.models.attention import MAX_NODES, AttentionPlan, KVCache, Row, Tree
from headway.models.config import ModelConfig
from headway.models.layers import Layer
from headway.models.rope import Rope
from headway.native.memory import on_huge_pages
from headway.native.ops import AttentionArgs, MoveArgs, RotateArgs

TASKS_PER_THREAD = 3
"""Rows are cut finer when a step has few tasks, so that threads finish together."""


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
    which passes that follow in the same call write (native/draft.c)."""

    def __init__(
        self, rows: Sequence[Row], block_size: int, library: native.Library, trees: Sequence[Tree | None] = (), ahead: int = 0
    ) -> None:
        self.library, self.ahead = library, ahead
        self.block_size = block_size
        self.starts = np.array([start for _, start, _ in rows], dtype=np.int64)
        self.lengths = np.array([length for _, _, length in rows], dtype=np.int64)
        counts = -(-(self.starts + self.lengths + ahead) // block_size)
        self.tables = np.zeros((len(rows), int(counts.max(initial=1))), dtype=np.int32)
        for i, (table, _, _) in enumerate(rows):
            if len(table) < counts[i]:
                raise ValueError(f"row {i} needs {counts[i]} blocks of {block_size} tokens, its table has {len(table)}")
            self.tables[i, : counts[i]] = table[: counts[i]]
        if self.tables.min(initial=0) < 0 or self.starts.min(initial=0) < 0 or self.lengths.min(initial=1) < 1:
            raise ValueError("rows need blocks >= 0, starts >= 0 and lengths >= 1")
        self.first_tokens = np.cumsum(self.lengths) - self.lengths
        self.num_tokens = int(self.lengths.sum())
        self.rows = np.stack([self.first_tokens, self.starts, self.lengths], axis=1).astype(np.int32)  # [num_rows, 3]
        of_row = np.repeat(np.arange(len(rows)), self.lengths)
        positions = np.arange(self.num_tokens) + np.repeat(self.starts - self.first_tokens, self.lengths)
        self.slots = self.tables[of_row, positions // block_size].astype(np.int64) * block_size + positions % block_size
        self.max_block = int(self.tables.max(initial=0))
        self.trees: NDArray[np.int32] | None = None     # [num_rows, 2]: slot of the first node or -1, its first entry in `parents`
        if trees:
            sizes = [0 if tree is None else len(tree.parents) for tree in trees]
            bases = [-1 if tree is None else tree.base for tree in trees]
            self.trees = np.stack([bases, np.cumsum(sizes) - sizes], axis=1).astype(np.int32)
            self.parents = np.array([parent for tree in trees if tree is not None for parent in tree.parents], dtype=np.int32)
        self._attention: AttentionArgs | None = None

    def begin(self, positions: Tensor, rope: Rope, dtype: torch.dtype) -> None:
        self.cos, self.sin = rope.angles(positions)

    def write(self, qkv: Tensor, layer: Layer, pages: Tensor) -> None:
        _, rotate = self.arguments(qkv, pages)
        rotate.qkv, rotate.pages = qkv.data_ptr(), pages.data_ptr()
        if layer.q_norm is not None and layer.k_norm is not None:
            rotate.q_norm, rotate.k_norm = layer.q_norm.weight.data_ptr(), layer.k_norm.weight.data_ptr()
            rotate.eps = layer.q_norm.eps
        self.library.function("rotate", qkv.dtype)(ctypes.byref(rotate))

    def attend(self, qkv: Tensor, layer: Layer, pages: Tensor) -> Tensor:
        attention, _ = self.arguments(qkv, pages)
        out = qkv.new_empty(self.num_tokens, attention.heads * attention.head_dim)
        attention.q, attention.out, attention.pages = qkv.data_ptr(), out.data_ptr(), pages.data_ptr()
        attention.window = layer.window or 0
        self.library.function("attention", qkv.dtype)(ctypes.byref(attention))
        return out

    def arguments(self, qkv: Tensor, pages: Tensor) -> tuple[AttentionArgs, RotateArgs]:
        """Checked and made on the first layer; the other layers of the pass have the same shapes (checked as well)."""
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
            heads = all_heads - 2 * kv_heads
            threads = torch.get_num_threads()
            self.tasks = self._tasks(heads // kv_heads, kv_heads, threads)
            self._attention = AttentionArgs(
                tables=self.tables.ctypes.data, rows=self.rows.ctypes.data, tasks=self.tasks.ctypes.data, q_stride=qkv.stride(0),
                table_width=self.tables.shape[1], num_tasks=len(self.tasks), heads=heads, kv_heads=kv_heads, head_dim=head_dim,
                block_size=self.block_size, num_threads=threads, scale=head_dim**-0.5,
            )
            if self.trees is not None:
                self._attention.trees, self._attention.parents = self.trees.ctypes.data, self.parents.ctypes.data
            self._rotate = RotateArgs(
                cos=self.cos.data_ptr(), sin=self.sin.data_ptr(), slots=self.slots.ctypes.data, num_tokens=num_tokens,
                stride=qkv.stride(0), heads=heads, kv_heads=kv_heads, head_dim=head_dim, block_size=self.block_size, num_threads=threads,
            )
        elif self._attention.heads + 2 * kv_heads != all_heads or self._attention.q_stride != qkv.stride(0):
            raise ValueError(f"layers differ in shape: {tuple(qkv.shape)} after {self._attention.heads} heads")
        return self._attention, self._rotate

    def _tasks(self, group: int, kv_heads: int, threads: int) -> NDArray[np.int32]:
        """int32 [num_tasks, 4]: (row, KV head, first query vector, how many), those with the most keys first."""
        vectors = self.lengths * group
        most = self.library.tile_rows
        whole = int((-(-vectors // most)).sum()) * kv_heads
        if whole < TASKS_PER_THREAD * threads:
            most = max(group, -(-int(vectors.max()) * whole // (TASKS_PER_THREAD * threads)))
            most = min(most, self.library.tile_rows)
        tiles = -(-vectors // most)
        of_row = np.repeat(np.arange(len(vectors)), tiles)
        first = (np.arange(len(of_row)) - np.repeat(np.cumsum(tiles) - tiles, tiles)) * most
        count = np.minimum(most, vectors[of_row] - first)
        sees = self.starts[of_row] + (first + count - 1) // group
        order = np.argsort(-sees * count, kind="stable")
        tasks = np.stack([of_row, np.zeros_like(of_row), first, count], axis=1)[order].repeat(kv_heads, axis=0)
        tasks[:, 1] = np.tile(np.arange(kv_heads), len(of_row))
        return tasks.astype(np.int32)


def make_plan(
    rows: Sequence[Row], block_size: int, device: torch.device | str, trees: Sequence[Tree | None] = (), ahead: int = 0
) -> NativePlan:
    library = native.library()
    assert library is not None
    return NativePlan(rows, block_size, library, trees, ahead)


def move(cache: KVCache, sources: Sequence[int], targets: Sequence[int]) -> None:
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
