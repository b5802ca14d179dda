"""The paged K/V cache, and who attends over it.

A row is (block table, start, length): tokens [start, start + length) of one sequence are in this pass. A prefill chunk, a
plain decode and a verification differ in length only. `KVCache.plan` looks at the rows of a step once; every layer then does

    plan.write(qkv, layer, pages)                   rotate, write K/V to the pages
    attended = plan.attend(qkv, layer, pages)

native      compiled CPU kernels that read the pages in place (attention_native.py), where they were built and fit
tiles       PyTorch only: gathers blocks into dense batches (attention_tiles.py); on CUDA it prefers a paged kernel (attention_cuda.py)

The layout of the pages belongs to whoever attends.
"""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from headway.models.config import ModelConfig
from headway.models.layers import Layer
from headway.models.rope import Rope
from headway.types import depths_of

Row = tuple[list[int], int, int]
"""(block_table, start, length)"""

MAX_NODES = 128
"""Of one tree."""


class Tree(NamedTuple):
    """A row whose last tokens are a tree of drafts: node j is in slot `base + j`, sees every slot before `base` and its own path, and
    stands at position base + its depth. Nodes before the row's first token are in the cache already.

    parents   by node, up to the row's end: the node it follows (< j), -1 for those that follow the token in slot base - 1
    """

    base: int
    parents: tuple[int, ...]

    @property
    def depths(self) -> list[int]:
        """By node, 0 for those that follow what is before the tree."""
        return depths_of(self.parents)

    def checked(self, row: Row) -> Tree:
        """Raises ValueError unless it fits the row."""
        _, start, length = row
        if len(self.parents) != start + length - self.base or not 1 <= len(self.parents) <= MAX_NODES or self.base < 1:
            raise ValueError(f"a tree of 1 to {MAX_NODES} nodes must end with its row, got {len(self.parents)} from slot {self.base} on in "
                             f"a row of tokens [{start}, {start + length})")
        if not all(-1 <= parent < node for node, parent in enumerate(self.parents)):
            raise ValueError(f"the parent of node j must be in -1 ... j - 1, got {self.parents}")
        return self


class AttentionPlan(ABC):
    """The rows of one pass. Made once per step, used by every layer.

    order    None, or int64 [num_tokens]: the pass runs its tokens in this order; `inverse` undoes it
    """

    order: Tensor | None = None
    inverse: Tensor | None = None

    @abstractmethod
    def begin(self, positions: Tensor, rope: Rope, dtype: torch.dtype) -> None:
        """Before the first layer: int64 [num_tokens] positions, in the pass's order."""

    @abstractmethod
    def write(self, qkv: Tensor, layer: Layer, pages: Tensor) -> None:
        """qkv [num_tokens, heads + 2 * kv_heads, head_dim]: norms (where the layer has them) and rotates queries and keys, in place, and
        writes K/V of the rows to `pages`."""

    @abstractmethod
    def attend(self, qkv: Tensor, layer: Layer, pages: Tensor) -> Tensor:
        """After `write` of the same qkv: the queries' attention over all K/V they may see, [num_tokens, heads * head_dim]."""


class KVCache:
    """Keys and values of all layers, in blocks, all of it uninitialised: a block may hold anything until a pass writes to it."""

    def __init__(self, config: ModelConfig, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device | str) -> None:
        from headway.models import attention_native, attention_tiles

        self.config = config
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._backend = attention_native if attention_native.fits(config, block_size, dtype, device) else attention_tiles
        self.layers: list[Tensor] = self._backend.make_pages(config, num_blocks, block_size, dtype, device)
        self.pointers = (ctypes.c_void_p * len(self.layers))(*(pages.data_ptr() for pages in self.layers))

    @property
    def backend(self) -> str:
        """ "native" or "tiles"."""
        return self._backend.__name__.rpartition("_")[2]

    def plan(self, rows: Sequence[Row], trees: Sequence[Tree | None] = ()) -> AttentionPlan:
        """Where the K/V of these rows goes and how they are attended; the pass's tokens are the rows' tokens, in their order.

        trees   one entry per row where any of them carries a tree; empty: all are chains
        """
        trees = [None if tree is None else tree.checked(row) for row, tree in zip(rows, trees, strict=True)] if any(trees) else ()
        plan: AttentionPlan = self._backend.make_plan(rows, self.block_size, self.layers[0].device, trees)
        return plan

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copies keys and values of all layers from slot to slot (block * block_size + offset), in order: a target may be a later source
        only where it was one before."""
        if sources:
            self._backend.move(self, sources, targets)

    @staticmethod
    def bytes_per_block(config: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
        return 2 * config.num_layers * config.num_kv_heads * block_size * config.head_dim * dtype.itemsize
