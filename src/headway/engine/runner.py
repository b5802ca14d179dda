"""Rows -> tensors -> one forward pass of the target."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from headway.models.attention import KVCache
from headway.models.attention_plan import Tree
from headway.models.decoder import Decoder
from headway.types import Draft, Row, Verdict


@dataclass(slots=True)
class ForwardOutput:
    """One pass over `num_tokens` tokens, laid out row after row, each row's drafts behind its known tokens.

    hidden   [num_tokens, hidden], after the final norm
    layers   the hidden states asked for, each [num_tokens, hidden]
    logits   [num_logit_rows, vocab]: for each sampling row, after its last known token and after each of its drafts
    offsets  where each row begins among the tokens
    """

    hidden: Tensor
    layers: tuple[Tensor, ...]
    logits: Tensor
    offsets: list[int]
    num_tokens: int


class Runner:
    """Owns the K/V tensors; knows sequences only as ranges of token ids and block tables."""

    def __init__(self, model: Decoder, num_blocks: int, block_size: int, hidden_layers: tuple[int, ...] = ()) -> None:
        self.model = model
        self.block_size = block_size
        self.hidden_layers = hidden_layers
        self.cache = KVCache(model.config, num_blocks, block_size, model.dtype, model.device)

    @torch.inference_mode()
    def forward(self, rows: SequenceOf[Row], drafts: SequenceOf[Draft | None]) -> ForwardOutput:
        token_ids: list[int] = []
        spans: list[tuple[list[int], int, int]] = []
        offsets: list[int] = []
        wanted: list[int] = []
        trees: list[Tree | None] = []
        for row, draft in zip(rows, drafts, strict=True):
            offsets.append(len(token_ids))
            end = row.start + row.length
            token_ids += row.seq.token_ids[row.start : end]
            if draft is not None:
                token_ids += draft.tokens
            if row.samples:
                wanted.extend(range(offsets[-1] + row.length - 1, len(token_ids)))
            spans.append((row.seq.block_table, row.start, len(token_ids) - offsets[-1]))
            trees.append(None if draft is None or draft.parents is None else Tree(end, draft.parents))
        positions = np.concatenate([_positions(span, tree) for span, tree in zip(spans, trees, strict=True)])
        device = self.model.device
        hidden, layers = self.model.forward(
            torch.tensor(token_ids, device=device),
            torch.from_numpy(positions).to(device),
            self.cache.plan(spans, trees if any(trees) else ()),
            self.cache,
            self.hidden_layers,
        )
        sampled = hidden if len(wanted) == len(token_ids) else hidden[torch.tensor(wanted, dtype=torch.int64, device=device)]
        return ForwardOutput(hidden, layers, self.model.logits(sampled), offsets, len(token_ids))

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """[n, hidden] -> [n, vocab]"""
        return self.model.logits(hidden)

    def compact(self, rows: SequenceOf[Row], verdicts: SequenceOf[Verdict | None]) -> None:
        """Moves the K/V of accepted nodes to the slots behind the known tokens, where those of a chain are."""
        sources: list[int] = []
        targets: list[int] = []
        size = self.block_size
        for row, verdict in zip(rows, verdicts, strict=True):
            if verdict is None or not verdict.path:
                continue
            table, base = row.seq.block_table, row.start + row.length
            for depth, node in enumerate(verdict.path):
                if node != depth:
                    sources.append(table[(base + node) // size] * size + (base + node) % size)
                    targets.append(table[(base + depth) // size] * size + (base + depth) % size)
        self.cache.move(sources, targets)


def _positions(span: tuple[list[int], int, int], tree: Tree | None) -> np.ndarray:
    """Of the row's tokens: a node's is that of its depth."""
    _, start, length = span
    if tree is None:
        return np.arange(start, start + length)
    return np.concatenate([np.arange(start, tree.base), tree.base + np.array(tree.depths)])
