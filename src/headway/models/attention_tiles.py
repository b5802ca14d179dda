"""Attention over the paged K/V cache in plain PyTorch.

The rows of a step are sorted into tiles of similar length and context, padded to the longest; every layer then runs the same few batched
operations per tile:

    gather the tile's blocks            -> keys, values [kv_heads, rows, context, head_dim], dense
    scores = queries x keys             query heads that share a KV head are folded into query rows: its keys are read once
    softmax, times values

On CPU that is oneDNN's (bf16) or MKL's (fp32) batched matrix product: several times faster than
`scaled_dot_product_attention` for a few query rows over a long context, and for prefill chunks too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from headway.models import attention_cuda
from headway.models.attention_cuda import Ragged
from headway.models.attention_plan import AttentionPlan, Pages, Row, Tree
from headway.models.config import ModelConfig
from headway.models.layers import Layer, Scores
from headway.models.rope import Rope, rotate_, rotation

CHUNK = 128
"""Query tokens of one row attended at a time: a later chunk of a prefill reads more context, an earlier one skips it."""

TILE_TOKENS = 12288
"""Context tokens gathered at a time (3 to 8 MB of keys and values for models of 0.1 to 1 billion parameters): stays in cache."""

TILE_OVERHEAD = 600.0
QUERY_COST = 0.12
"""What padding may cost, in units of gathering one context token: a tile of its own costs TILE_OVERHEAD, and attending to
a context token costs 1 + QUERY_COST * length. Measured on one layer; the optimum is flat."""


def make_pages(
    config: ModelConfig, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device | str
) -> list[Tensor]:
    """One per layer, [2 * kv_heads, num_blocks, block_size * head_dim]: keys of every KV head, then values."""
    shape = (2 * config.num_kv_heads, num_blocks, block_size * config.head_dim)
    # Not zeroed: untouched pages of a pool that is sized for the worst case cost no memory.
    return [torch.empty(shape, dtype=dtype, device=device) for _ in range(config.num_layers)]


@dataclass(slots=True)
class Tile:
    """Rows attended together, consecutive in the plan's order of tokens.

    tokens   slice of the pass
    take     None, or int64 [num_rows * length]: the row-padded tokens as indices into the slice; `keep` undoes it
    blocks   int64 [num_rows * blocks per row], padded with the row's own first block (masked)
    run      (first block, number of blocks) when they are consecutive: copying larger pieces is faster
    positions    int64 [num_rows, length]: position of every query token
    context_end  tokens the longest row sees: <= context, which is whole blocks
    paths        where a row carries a tree: (position of each slot int64 [num_rows, context], whether a query may look at it, order apart,
                 bool [num_rows, length, context])
    """

    tokens: slice
    take: Tensor | None
    keep: Tensor | None
    num_rows: int
    length: int
    context: int
    blocks: Tensor
    run: tuple[int, int] | None
    positions: Tensor
    context_end: int
    paths: tuple[Tensor, Tensor] | None = None
    masks: dict[int | None, Tensor] = field(default_factory=dict)

    def chunks(self) -> Iterator[tuple[int, int, int]]:
        """A long row's query tokens [begin, end) and how much context the last of them sees."""
        start = self.context_end - self.length
        for begin in range(0, self.length, CHUNK):
            end = min(begin + CHUNK, self.length)
            yield begin, end, start + end

    def mask(self, window: int | None, shared: int, dtype: torch.dtype) -> Tensor:
        """Additive, [1, num_rows, length * shared, context]: 0 where a query may look, -inf elsewhere."""
        mask = self.masks.get(window)
        if mask is None:
            own = self.positions[:, :, None]
            key = torch.arange(self.context, device=own.device) if self.paths is None else self.paths[0][:, None]
            hidden = key > own
            if window is not None:
                hidden |= key <= own - window
            if self.paths is not None:
                hidden |= ~self.paths[1]
            mask = torch.zeros(hidden.shape, dtype=dtype, device=own.device).masked_fill_(hidden, float("-inf"))
            mask = self.masks[window] = mask.repeat_interleave(shared, dim=1)[None]
        return mask


@dataclass(slots=True)
class TilePlan(AttentionPlan):
    """Where this pass's K/V goes and which rows are attended together.

    ragged   on CUDA only: the same rows for kernels that read the pages in place
    slots    int64 [num_tokens]: cache slot of every token, in the order of the pass
    stale    None, or int64 [n]: slots of blocks begun in this pass that are not written yet. They are zeroed: a block from the
             pool may hold anything, and 0 * NaN is NaN
    rotations   by rotation (cos, sin), each [num_tokens, 1, head_dim], see `rotation`
    """

    tiles: list[Tile]
    slots: Tensor
    stale: Tensor | None
    order: Tensor | None
    inverse: Tensor | None
    ragged: Ragged | None = None
    rotations: Sequence[tuple[Tensor, Tensor]] = ()

    def begin(self, positions: Tensor, rope: Rope, dtype: torch.dtype) -> None:
        self.rotations = rotation(positions, rope, dtype)

    def write(self, qkv: Tensor, layer: Layer, pages: Tensor) -> None:
        kv_heads = pages.shape[0] // 2
        heads = qkv.shape[1] - 2 * kv_heads
        if layer.q_norm is not None and layer.k_norm is not None:
            qkv[:, :heads] = layer.q_norm(qkv[:, :heads])
            qkv[:, heads:heads + kv_heads] = layer.k_norm(qkv[:, heads:heads + kv_heads])
        rotate_(qkv[:, :heads + kv_heads], *self.rotations[layer.rotation])
        flat = pages.view(2 * kv_heads, -1, qkv.shape[2])
        if self.stale is not None:
            flat.index_fill_(1, self.stale, 0.0)
        flat.index_copy_(1, self.slots, qkv[:, heads:].transpose(0, 1))

    def attend(self, qkv: Tensor, layer: Layer, pages: Tensor) -> Tensor:
        return attend(qkv[:, : qkv.shape[1] - pages.shape[0]], pages, self, layer.scores)


def make_plan(rows: Sequence[Row], block_size: int, device: torch.device | str, trees: Sequence[Tree | None] = ()) -> TilePlan:
    """The tokens of the pass are the rows' tokens, in the order of `rows`."""
    by_size = sorted(range(len(rows)), key=lambda i: (rows[i][2], rows[i][1]), reverse=True)
    if len({rows[i][1:] for i in by_size}) == 1:
        by_size = list(range(len(rows)))
    groups = _group(rows, by_size)
    in_order = [i for group in groups for i in group]
    tables = {i: np.array(rows[i][0][: -(-(rows[i][1] + rows[i][2]) // block_size)], dtype=np.int64) for i in in_order}
    slots: list[np.ndarray] = []
    stale: list[np.ndarray] = []
    for i in in_order:
        _, start, length = rows[i]
        stop, table = start + length, tables[i]
        positions = np.arange(start, stop)
        slots.append(table[positions // block_size] * block_size + positions % block_size)
        if 0 < stop % block_size <= length:
            stale.append(np.arange(table[-1] * block_size + stop % block_size, (table[-1] + 1) * block_size))
    order = inverse = None
    if in_order != list(range(len(rows))):
        begins = np.concatenate([[0], np.cumsum([row[2] for row in rows])])
        gathered = np.concatenate([np.arange(begins[i], begins[i + 1]) for i in in_order])
        order, inverse = torch.from_numpy(gathered).to(device), torch.from_numpy(np.argsort(gathered)).to(device)
    tiles = []
    begin = 0
    for group in groups:
        tiles.append(_tile([rows[i] for i in group], [tables[i] for i in group], begin, block_size, device))
        if any(trees[i] for i in group) if trees else False:
            _grow_trees(tiles[-1], [rows[i] for i in group], [trees[i] for i in group])
        begin = tiles[-1].tokens.stop
    return TilePlan(
        tiles=tiles,
        slots=torch.from_numpy(np.concatenate(slots)).to(device),
        stale=torch.from_numpy(np.concatenate(stale)).to(device) if stale else None,
        order=order,
        inverse=inverse,
        ragged=Ragged.make([rows[i] for i in in_order], block_size, device) if torch.device(device).type == "cuda" and not trees else None,
    )


def _group(rows: Sequence[Row], by_size: list[int]) -> list[list[int]]:
    """Rows, longest first, into tiles: a tile ends when padding in it would cost more than another tile does."""
    groups: list[list[int]] = []
    waste = top_context = top_length = 0.0
    for i in by_size:
        _, start, length = rows[i]
        context = start + length
        top = max(context, top_context)
        full = top * (1.0 + QUERY_COST * top_length)
        more = full - context * (1.0 + QUERY_COST * length) + (top - top_context) * len(groups[-1] if groups else ())
        full_up = waste + more > TILE_OVERHEAD or top * (len(groups[-1] if groups else ()) + 1) > TILE_TOKENS
        if not groups or length >= CHUNK or top_length > CHUNK or full_up:   # a row attended in chunks is alone
            groups.append([i])
            waste, top_context, top_length = 0.0, context, length
        else:
            groups[-1].append(i)
            waste, top_context = waste + more, top
    return groups


def _tile(rows: list[Row], tables: list[np.ndarray], begin: int, block_size: int, device: torch.device | str) -> Tile:
    lengths = np.array([length for _, _, length in rows])
    length = int(lengths.max())
    starts = np.array([start for _, start, _ in rows])
    ahead = np.minimum(np.arange(length), lengths[:, None] - 1)   # a padded query repeats the row's last token
    take = keep = None
    if (lengths != length).any():
        offsets = np.concatenate([[0], np.cumsum(lengths)[:-1]])
        take = torch.from_numpy((offsets[:, None] + ahead).reshape(-1)).to(device)
        keep = torch.from_numpy(np.flatnonzero(np.arange(length) < lengths[:, None])).to(device)
    per_row = max(len(table) for table in tables)
    blocks = np.stack([np.concatenate([table, np.full(per_row - len(table), table[0])]) for table in tables]).reshape(-1)
    return Tile(
        tokens=slice(begin, begin + int(lengths.sum())),
        take=take,
        keep=keep,
        num_rows=len(rows),
        length=length,
        context=per_row * block_size,
        blocks=torch.from_numpy(blocks).to(device),
        run=(int(blocks[0]), len(blocks)) if (np.diff(blocks) == 1).all() else None,
        positions=torch.from_numpy(starts[:, None] + ahead).to(device),
        context_end=int((starts + lengths).max()),
    )


def _grow_trees(tile: Tile, rows: Sequence[Row], trees: Sequence[Tree | None]) -> None:
    """Gives the tile the positions and paths of its rows' nodes."""
    where = np.tile(np.arange(tile.context), (len(rows), 1))
    positions = tile.positions.cpu().numpy().copy()
    visible = np.ones((len(rows), tile.length, tile.context), dtype=np.bool_)
    for i, ((_, _start, _length), tree) in enumerate(zip(rows, trees, strict=True)):
        if tree is None:
            continue
        base, num_nodes = tree.base, len(tree.parents)
        paths = np.zeros((num_nodes, num_nodes), dtype=np.bool_)
        for node, parent in enumerate(tree.parents):
            if parent >= 0:
                paths[node] = paths[parent]
            paths[node, node] = True
        where[i, base : base + num_nodes] = base + np.array(tree.depths)
        slots = positions[i]                       # so far the slot of each query
        nodes = slots >= base
        visible[i, nodes, base : base + num_nodes] = paths[slots[nodes] - base]
        visible[i, ~nodes, base : base + num_nodes] = False
        positions[i] = where[i, slots]
    device = tile.positions.device
    tile.positions = torch.from_numpy(positions).to(device)
    tile.paths = torch.from_numpy(where).to(device), torch.from_numpy(visible).to(device)


def move(cache: Pages, sources: Sequence[int], targets: Sequence[int]) -> None:
    """See `KVCache.move`."""
    device = cache.layers[0].device
    source, target = (torch.tensor(slots, device=device) for slots in (sources, targets))
    for pages in cache.layers:
        flat = pages.view(pages.shape[0], -1, cache.config.head_dim)
        flat.index_copy_(1, target, flat.index_select(1, source))


def attend(q: Tensor, pages: Tensor, plan: TilePlan, scores: Scores) -> Tensor:
    """q [num_tokens, heads, head_dim], rotated -> [num_tokens, heads * head_dim]"""
    if plan.ragged is not None and scores.plain:
        scale = q.shape[2] ** -0.5 if scores.scale is None else scores.scale
        out = attention_cuda.attend(q, pages, plan.ragged, scores.window, scale, _attend_alone)
        if out is not None:
            return out
    return _attend_tiles(q, pages, plan, scores)


def _attend_alone(q: Tensor, pages: Tensor, rows: Sequence[Row], window: int | None, scale: float) -> Tensor:
    """Attention of `rows` as they come, by tiles; q in the order of the rows."""
    plan = make_plan(rows, pages.shape[2] // q.shape[2], q.device)
    out = _attend_tiles(q if plan.order is None else q[plan.order], pages, plan, Scores(window, scale))
    return out if plan.inverse is None else out[plan.inverse]


def _attend_tiles(q: Tensor, pages: Tensor, plan: TilePlan, scores: Scores) -> Tensor:
    if len(plan.tiles) == 1:
        return _attend_tile(q, pages, plan.tiles[0], scores)
    return torch.cat([_attend_tile(q[tile.tokens], pages, tile, scores) for tile in plan.tiles])


def _attend_tile(q: Tensor, pages: Tensor, tile: Tile, scores: Scores) -> Tensor:
    heads, head_dim = q.shape[1:]
    kv_heads = pages.shape[0] // 2
    dense = pages.index_select(1, tile.blocks) if tile.run is None else pages.narrow(1, *tile.run).contiguous()
    keys, values = dense.view(2, kv_heads * tile.num_rows, tile.context, head_dim)
    shared = heads // kv_heads
    mask = tile.mask(scores.window, shared, q.dtype)
    if tile.length > CHUNK:
        return torch.cat([
            _attend_rows(q[begin:end], keys[:, :context], values[:, :context], mask[:, :, begin * shared:end * shared, :context], scores)
            for begin, end, context in tile.chunks()
        ])
    if tile.take is not None:
        q = q.index_select(0, tile.take)
    out = _attend_rows(q, keys, values, mask, scores)
    return out if tile.keep is None else out.index_select(0, tile.keep)


def _attend_rows(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scores: Scores) -> Tensor:
    """q [rows * length, heads, head_dim], keys and values [kv_heads * rows, context, head_dim] -> [rows * length, heads * head_dim]"""
    (tokens, heads, head_dim), rows = q.shape, mask.shape[1]
    kv_heads, length = keys.shape[0] // rows, tokens // rows
    shared = heads // kv_heads
    folded = q.view(rows, length, kv_heads, shared, head_dim).permute(2, 0, 1, 3, 4).reshape(kv_heads * rows, length * shared, head_dim)
    scale = head_dim**-0.5 if scores.scale is None else scores.scale
    if scores.plain:
        out = (_fused if q.is_cuda else _attention)(folded, keys, values, mask, scale)
    else:
        sinks = None if scores.sinks is None else scores.sinks.view(kv_heads, 1, 1, shared)
        out = _capped(folded, keys, values, mask, scale, scores.softcap, sinks)
    return out.view(kv_heads, rows, length, shared, head_dim).permute(1, 2, 0, 3, 4).reshape(tokens, heads * head_dim)


def _fused(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float) -> Tensor:
    """As `_attention`, by PyTorch's fused kernel: it keeps its scores in float32."""
    q, keys, values = (tensor.view(-1, mask.shape[1], *tensor.shape[1:]) for tensor in (q, keys, values))
    return F.scaled_dot_product_attention(q, keys, values, attn_mask=mask.expand(q.shape[0], -1, -1, -1), scale=scale).flatten(0, 1)


def _attention(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float) -> Tensor:
    """q [n, queries, head_dim], keys and values [n, context, head_dim], mask [1, rows, queries, context] -> [n, queries, head_dim]

    Scores in bf16 would lose what separates them when they are large (hundreds in models with biases on keys). So they
    are made relative to the score of the sequence's first key, inside the matrix product, before it rounds: a softmax
    does not change when a constant is subtracted from its row, and the first key's score is near the top of most rows.
    """
    shape = (-1, *mask.shape[1:])
    reference = (q * keys[:, :1]).sum(-1, keepdim=True)
    scores = torch.sub(mask, reference.view(*shape[:-1], 1), alpha=scale).view(-1, *shape[2:])
    scores.baddbmm_(q, keys.transpose(1, 2), alpha=scale)
    return torch.bmm(torch.softmax(scores, -1, out=scores), values)


def _capped(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float, softcap: float, sinks: Tensor | None) -> Tensor:
    """As `_attention`, with a softcap of the scores (0: none) and sinks [kv_heads, 1, 1, shared]; softmax in float32."""
    scores = torch.bmm(q, keys.transpose(1, 2)).float().mul_(scale).view(-1, *mask.shape[1:])
    if softcap:
        scores = scores.div_(softcap).tanh_().mul_(softcap)
    scores += mask
    if sinks is not None:
        shared = sinks.shape[-1]
        sink = sinks.expand(-1, scores.shape[1], scores.shape[2] // shared, -1).reshape(*scores.shape[:-1], 1)
        scores = torch.cat([scores, sink], -1)
    weights = torch.softmax(scores, -1)[..., : keys.shape[1]]
    return torch.bmm(weights.to(q.dtype).flatten(0, 1), values)
