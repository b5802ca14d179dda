"""What attention is asked to do: the rows of a pass, trees of drafts in them, and the plan that a backend makes of them."""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from typing import NamedTuple, Protocol

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


class Pages(Protocol):
    """What a backend is given of a `KVCache`."""

    config: ModelConfig
    num_blocks: int
    block_size: int
    layers: list[Tensor]
    pointers: ctypes.Array[ctypes.c_void_p]
