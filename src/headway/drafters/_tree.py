"""Trees of drafts: the likeliest continuations of the likeliest continuations, level by level (EAGLE-2, arXiv:2406.16858).

A node's value is the product of the probabilities along its path: an estimate of P(the target writes the path). At each level the `topk`
most valuable nodes are continued, each by its `topk` likeliest tokens; of all that were made the most valuable stay. A node is never
worth more than its parent, so what stays is a tree, and so is every beginning of it in order of value. All of it is a function of the
prefix, for requests that sample, too: the target's own token either is among a node's children or is not (`engine/verify.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headway.config import option
from headway.control.policy import Policy
from headway.drafters._chain import Prediction, SampleOptions
from headway.drafters.drafter import DraftRequest, DraftSampler, Keep, keep_all
from headway.errors import ConfigError
from headway.models.attention import MAX_NODES
from headway.types import Draft

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

NUM_DRAFT_TOKENS = 16


@dataclass(frozen=True)
class TreeOptions(SampleOptions):
    """What drafters that can draft trees are asked."""

    topk: int = option(1, "tokens that continue a draft token, and draft tokens continued per level; 1: drafts are chains")
    num_draft_tokens: int | None = option(None, f"draft tokens of a tree at most; default: {NUM_DRAFT_TOKENS}")

    def __post_init__(self) -> None:
        if self.topk < 1:
            raise ConfigError(f"topk must be >= 1, got {self.topk}")
        if self.num_draft_tokens is not None and self.topk == 1:
            raise ConfigError("num_draft_tokens is the size of a tree: give topk > 1, too (num_speculative_tokens is a chain's length)")
        if not 1 <= self.tree_size <= MAX_NODES - 1 and self.topk > 1:
            raise ConfigError(f"num_draft_tokens must be in [1, {MAX_NODES - 1}], got {self.num_draft_tokens}")

    @property
    def tree_size(self) -> int:
        """0: chains."""
        return 0 if self.topk == 1 else NUM_DRAFT_TOKENS if self.num_draft_tokens is None else self.num_draft_tokens

    def check_depth(self, num_speculative_tokens: int) -> None:
        """Raises ConfigError when so deep a tree has more continued nodes than one pass can attend over."""
        if self.topk > 1 and self.topk * (num_speculative_tokens - 1) > MAX_NODES:
            raise ConfigError(
                f"topk {self.topk} over {num_speculative_tokens} levels (num_speculative_tokens) continues more than {MAX_NODES} tokens"
            )


@dataclass(slots=True)
class Level:
    """Nodes to be continued, of all requests that go on: what the network reads next.

    requests   [g] which requests
    tokens     [g, topk], the nodes' own
    above      [g * topk] row of the level before that each follows, in [0, g_before * width_before)
    parents    by request, of all nodes the network has read and of these: which of those read each follows, -1: none
    depth      of these nodes
    """

    requests: list[int]
    tokens: Tensor
    above: Tensor
    parents: list[tuple[int, ...]]
    depth: int


Continue = Callable[[Level, Tensor], Prediction]
"""(level, state before each of its nodes [g * topk, ...]) -> what follows each"""


@dataclass(slots=True)
class _Pool:
    """One request's nodes, level by level, and which of them are continued."""

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    confidence: list[float] = field(default_factory=list)
    frontier: list[int] = field(default_factory=lambda: [-1])
    read: dict[int, int] = field(default_factory=lambda: {-1: -1})   # node -> its number among those the network reads

    def path(self, node: int) -> list[int]:
        tokens = []
        while node >= 0:
            tokens.append(self.tokens[node])
            node = self.parents[node]
        return tokens[::-1]

    def add(self, tokens: IntArray, probs: FloatArray, values: FloatArray, topk: int) -> IntArray:
        """Children of the frontier [width, topk]; returns the flat indices of the new frontier."""
        first = len(self.tokens)
        self.tokens += tokens.ravel().tolist()
        self.parents += np.repeat(self.frontier, tokens.shape[1]).tolist()
        self.values += values.ravel().tolist()
        self.confidence += probs.ravel().tolist()
        best = np.argsort(-values.ravel(), kind="stable")[:topk]
        self.frontier = (first + best).tolist()
        return best

    def continued(self) -> tuple[int, ...]:
        """The frontier will be read: what all nodes read follow."""
        for node in self.frontier:
            self.read[node] = len(self.read) - 1
        return tuple(self.read[self.parents[node]] for node in self.read if node >= 0)

    def draft(self, size: int) -> Draft:
        """The `size` most valuable nodes."""
        values = np.array(self.values)
        order = [node for node in np.argsort(-values, kind="stable")[:size].tolist() if values[node] > 0.0]
        place = {-1: -1} | {node: j for j, node in enumerate(order)}
        return Draft(
            [self.tokens[node] for node in order], None, [self.confidence[node] for node in order],
            tuple(place[self.parents[node]] for node in order),
        )


def draft_trees(
    requests: Sequence[DraftRequest], keep: Keep, sampler: DraftSampler, prediction: Prediction, go_on: Continue,
    target_ids: Tensor | None, options: TreeOptions,
) -> list[Draft]:
    """One tree per request. `prediction` is that of the first level.

    The policy is asked level by level; the confidence it sees is P(some node of the level is accepted | one of those continued was).
    """
    listens = keep is not keep_all and getattr(keep, "__func__", None) is not Policy.keep
    device = prediction.logits.device
    pools = [_Pool() for _ in requests]
    ks = np.array([request.k for request in requests])
    going, values, width = list(range(len(requests))), np.ones((len(requests), 1)), 1
    for depth in range(int(ks.max())):
        asked = [requests[i] for i in going for _ in range(width)]
        paths = [pools[i].path(node) for i in going for node in pools[i].frontier]
        found, likely = sampler.candidates(prediction.logits, asked, paths, options.topk, target_ids)
        tokens, probs = (array.reshape(len(going), width, -1) for array in (found, likely))
        made = values[:, :, None] * probs
        rows = np.arange(len(going))
        if listens:
            confidence = made.sum((1, 2)) / np.maximum(values.sum(1), 1e-300)
            rows = np.flatnonzero(keep([requests[i].seq_id for i in going], depth, np.minimum(confidence, 1.0)))
        best = {row: pools[going[row]].add(tokens[row], probs[row], made[row], options.topk) for row in rows.tolist()}
        on = [row for row in rows.tolist() if ks[going[row]] > depth + 1 and len(best[row]) == options.topk]
        if not on:
            break
        above = np.concatenate([row * width + best[row] // tokens.shape[2] for row in on])
        chosen = [going[row] for row in on]
        level = Level(
            chosen, torch.tensor([[pools[i].tokens[node] for node in pools[i].frontier] for i in chosen], device=device),
            torch.from_numpy(above).to(device), [pools[i].continued() for i in chosen], depth,
        )
        values = np.stack([made[row].ravel()[best[row]] for row in on])
        going, width = chosen, options.topk
        prediction = go_on(level, prediction.state[level.above])
    return [pool.draft(request.room or options.tree_size) for pool, request in zip(pools, requests, strict=True)]
