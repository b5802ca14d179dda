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
from collections.abc import Sequence

import torch
from torch import Tensor

from headway.models import attention_native, attention_tiles
from headway.models.attention_plan import AttentionPlan, Row, Tree
from headway.models.config import ModelConfig


class KVCache:
    """Keys and values of all layers, in blocks, all of it uninitialised: a block may hold anything until a pass writes to it."""

    def __init__(self, config: ModelConfig, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device | str) -> None:
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
