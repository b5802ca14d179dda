"""The paged K/V cache and attention over it.

A row is (block table, start, length): tokens [start, start + length) of one sequence are in this pass. Rows of equal
length are computed together; a prefill chunk, a plain decode and a verification differ in length only.

Query heads that share a KV head are folded into query rows, so a KV head's keys are read once for all of them.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from headway.models.config import ModelConfig

LONG = 32
"""Rows of at least this many tokens are prefill chunks: attended one by one."""


class KVCache:
    """Keys and values of all layers, in blocks.

    layers[i]  [2 * kv_heads, num_blocks, block_size * head_dim]: keys of every KV head, then values
    """

    def __init__(self, config: ModelConfig, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device | str) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        shape = (2 * config.num_kv_heads, num_blocks, block_size * config.head_dim)
        self.layers = [_zeros(shape, dtype, torch.device(device)) for _ in range(config.num_layers)]

    @staticmethod
    def bytes_per_block(config: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
        return 2 * config.num_layers * config.num_kv_heads * block_size * config.head_dim * dtype.itemsize


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """On a CPU, pages that cost memory only once they are written: a pool is sized for the worst case."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.frombuffer(mmap.mmap(-1, math.prod(shape) * dtype.itemsize), dtype=dtype).view(shape)


@dataclass(slots=True)
class Group:
    """Rows of equal length, consecutive in the pass.

    tokens     slice of the pass
    blocks     int64 [num_rows * blocks_per_row], padded with the row's own first block (masked)
    masks      window (or None) -> additive mask [num_rows, length, context], 0 or -inf
    """

    tokens: slice
    num_rows: int
    length: int
    context: int
    blocks: Tensor
    starts: Tensor
    causal: bool
    masks: dict[tuple[int | None, torch.dtype], Tensor | None] = field(default_factory=dict)


@dataclass(slots=True)
class AttentionPlan:
    """Where this pass's K/V goes and which rows are attended together. Made once per step, used by every layer.

    slots   int64 [num_tokens]: cache slot of every token
    stale   int64 [n]: slots of freshly begun blocks that are not written in this pass; zeroed, since a block from the pool may
            hold anything, and 0 * NaN is NaN
    """

    slots: Tensor
    stale: Tensor | None
    groups: list[Group]

    def write(self, kv: Tensor, pages: Tensor) -> None:
        """kv [num_tokens, 2 * kv_heads, head_dim] -> the cache."""
        flat = pages.view(pages.shape[0], -1, kv.shape[-1])
        if self.stale is not None:
            flat.index_fill_(1, self.stale, 0.0)
        flat.index_copy_(1, self.slots, kv.transpose(0, 1))


def make_plan(rows: Sequence[tuple[list[int], int, int]], block_size: int, device: torch.device | str) -> AttentionPlan:
    """rows: (block_table, start, length); the tokens of the pass are the rows' tokens, in this order."""
    slots: list[int] = []
    stale: list[int] = []
    groups: list[Group] = []
    begin = 0
    first = 0
    while first < len(rows):
        length = rows[first][2]
        last = first + 1
        if length < LONG:
            while last < len(rows) and rows[last][2] == length:
                last += 1
        groups.append(_group(rows[first:last], begin, block_size, device))
        begin += length * (last - first)
        first = last
    for table, start, length in rows:
        stop = start + length
        slots.extend(table[p // block_size] * block_size + p % block_size for p in range(start, stop))
        if stop % block_size and stop % block_size <= length:
            block = table[stop // block_size] * block_size
            stale.extend(range(block + stop % block_size, block + block_size))
    return AttentionPlan(
        torch.tensor(slots, device=device), torch.tensor(stale, device=device) if stale else None, groups
    )


def _group(
    rows: Sequence[tuple[list[int], int, int]], begin: int, block_size: int, device: torch.device | str
) -> Group:
    length = rows[0][2]
    counts = [-(-(start + length) // block_size) for _, start, _ in rows]
    per_row = max(counts)
    blocks = [[*table[:count], *[table[0]] * (per_row - count)] for (table, _, _), count in zip(rows, counts, strict=True)]
    return Group(
        tokens=slice(begin, begin + length * len(rows)),
        num_rows=len(rows),
        length=length,
        context=per_row * block_size,
        blocks=torch.tensor(blocks, device=device).view(-1),
        starts=torch.tensor([start for _, start, _ in rows], device=device),
        causal=len(rows) == 1 and rows[0][1] == 0,
    )


def attend(q: Tensor, pages: Tensor, plan: AttentionPlan, window: int | None) -> Tensor:
    """q [num_tokens, heads, head_dim], rotated -> [num_tokens, heads * head_dim]"""
    if len(plan.groups) == 1:
        return _attend_group(q, pages, plan.groups[0], window)
    return torch.cat([_attend_group(q[group.tokens], pages, group, window) for group in plan.groups])


def _attend_group(q: Tensor, pages: Tensor, group: Group, window: int | None) -> Tensor:
    _, heads, head_dim = q.shape
    kv_heads = pages.shape[0] // 2
    rows, length, shared = group.num_rows, group.length, heads // kv_heads
    gathered = pages.index_select(1, group.blocks).view(2, kv_heads * rows, group.context, head_dim)
    keys, values = gathered[0], gathered[1]
    folded = q.view(rows, length, kv_heads, shared, head_dim).permute(2, 0, 1, 3, 4).reshape(kv_heads * rows, length * shared, head_dim)
    mask = _mask(group, window, q.dtype, shared)
    shape = (kv_heads, rows, -1, head_dim)
    out = F.scaled_dot_product_attention(folded.view(shape), keys.view(shape), values.view(shape), attn_mask=mask)
    return out.view(kv_heads, rows, length, shared, head_dim).permute(1, 2, 0, 3, 4).reshape(rows * length, heads * head_dim)


def _mask(group: Group, window: int | None, dtype: torch.dtype, shared: int) -> Tensor:
    mask = group.masks.get((window, dtype))
    if mask is None:
        device = group.starts.device
        own = group.starts[:, None, None] + torch.arange(group.length, device=device)[:, None]
        key = torch.arange(group.context, device=device)
        hidden = key > own
        if window is not None:
            hidden |= key <= own - window
        mask = torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, float("-inf"))
        mask = mask.repeat_interleave(shared, dim=1)
        group.masks[window, dtype] = mask
    return mask
