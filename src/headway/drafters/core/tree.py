"""Trees of drafts: the likeliest continuations of the likeliest continuations, level by level (EAGLE-2, arXiv:2406.16858).

A node's value is the product of the probabilities along its path: an estimate of P(the target writes the path). At each level the `topk`
most valuable nodes are continued, each by its `topk` likeliest tokens; of all that were made the most valuable stay. A node is never
worth more than its parent, so what stays is a tree, and so is every beginning of it in order of value. All of it is a function of the
prefix: the target's own token either is among a node's children or is not (`engine/verify.py`).

Requests that sample get children that are drawn from the network's distribution, without replacement (with `draft_sample_method` "greedy",
the likeliest, as above). Then nothing may be dropped for what was drawn: how many children a node gets is settled before, by what its
likeliest ones would be worth; only which nodes are continued depends on what they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headway.config import option
from headway.drafters.core.chain import Prediction, SampleOptions
from headway.drafters.drafter import ContinueDrafting, DraftRequest, DraftSampler, never_stop
from headway.errors import ConfigError
from headway.models.attention_plan import MAX_NODES
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


_Frontier = tuple[IntArray, FloatArray]
"""By node to be continued: which node of the frontier before it follows, and its value."""


@dataclass(slots=True)
class _Pool:
    """One request's nodes, level by level, and which of them are continued."""

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    confidence: list[float] = field(default_factory=list)
    probs: list[Tensor | None] = field(default_factory=list)         # [vocab]: what it was drawn from; None: it is only there to fill up
    frontier: list[int] = field(default_factory=lambda: [-1])
    read: dict[int, int] = field(default_factory=lambda: {-1: -1})   # node -> its number among those the network reads

    def path(self, node: int) -> list[int]:
        tokens = []
        while node >= 0:
            tokens.append(self.tokens[node])
            node = self.parents[node]
        return tokens[::-1]

    def add(self, above: IntArray, tokens: IntArray, values: FloatArray, confidence: FloatArray, topk: int) -> _Frontier:
        """Children, each of the node `above` of the frontier; returns the new frontier."""
        first = len(self.tokens)
        self.tokens += tokens.tolist()
        self.parents += [self.frontier[node] for node in above.tolist()]
        self.values += values.tolist()
        self.confidence += confidence.tolist()
        best = np.argsort(-values, kind="stable")[:topk]
        self.frontier = (first + best).tolist()
        return above[best], values[best]

    def continued(self) -> tuple[int, ...]:
        """The frontier will be read: what all nodes read follow."""
        for node in self.frontier:
            self.read[node] = len(self.read) - 1
        return tuple(self.read[self.parents[node]] for node in self.read if node >= 0)

    def drawn(self) -> Draft:
        """All nodes."""
        real = [node for node, q in enumerate(self.probs) if q is not None]
        place = {-1: -1} | {node: j for j, node in enumerate(real)}
        probs = torch.stack([q for q in self.probs if q is not None]) if real else None
        return Draft(
            [self.tokens[node] for node in real], probs, [self.confidence[node] for node in real],
            tuple(place[self.parents[node]] for node in real),
        )

    def likeliest(self, size: int) -> Draft:
        """The `size` most valuable nodes."""
        values = np.array(self.values)
        order = [node for node in np.argsort(-values, kind="stable")[:size].tolist() if values[node] > 0.0]
        place = {-1: -1} | {node: j for j, node in enumerate(order)}
        return Draft(
            [self.tokens[node] for node in order], None, [self.confidence[node] for node in order],
            tuple(place[self.parents[node]] for node in order),
        )


def draft_trees(
    requests: Sequence[DraftRequest], continue_drafting: ContinueDrafting, sampler: DraftSampler, prediction: Prediction, go_on: Continue,
    target_ids: Tensor | None, options: TreeOptions,
) -> list[Draft]:
    """One tree per request. `prediction` is that of the first level.

    The policy is asked level by level whether to go on; the confidence it sees is P(some node of the level is accepted | one of those
    continued was).
    """
    grower = _Grower(requests, sampler, target_ids, options)
    stops_early = continue_drafting is not never_stop
    device, topk = prediction.logits.device, options.topk
    ks = np.array([request.k for request in requests])
    going, values = list(range(len(requests))), np.ones((len(requests), 1))
    for depth in range(int(ks.max())):
        width = values.shape[1]
        tokens, probs = grower.candidates(going, prediction.logits, width)
        found = grower.grow(list(enumerate(going)), prediction.logits, tokens, probs, values, depth)
        on = [
            row for row, i in enumerate(going)
            if ks[i] > depth + 1 and grower.left(i) > 0 and len(found[row][0]) == topk and found[row][1].any()
        ]  # fmt: skip
        if stops_early and on:
            confidence = (values[on, :, None] * probs[on]).sum((1, 2)) / np.maximum(values[on].sum(1), 1e-300)
            kept = continue_drafting([requests[going[row]].seq_id for row in on], depth, np.minimum(confidence, 1.0))
            on = [row for row, goes in zip(on, kept.tolist(), strict=True) if goes]
        if not on:
            break
        above = torch.from_numpy(np.concatenate([row * width + found[row][0] for row in on])).to(device)
        values, going = np.stack([found[row][1] for row in on]), [going[row] for row in on]
        pools = [grower.pools[i] for i in going]
        level = Level(
            going, torch.tensor([[pool.tokens[node] for node in pool.frontier] for pool in pools], device=device), above,
            [pool.continued() for pool in pools], depth,
        )
        prediction = go_on(level, prediction.state[above])
    return grower.drafts()


class _Grower:
    """The trees of all requests while they grow."""

    def __init__(self, requests: Sequence[DraftRequest], sampler: DraftSampler, target_ids: Tensor | None, options: TreeOptions) -> None:
        self.requests, self.sampler, self.target_ids, self.options = requests, sampler, target_ids, options
        self.pools = [_Pool() for _ in requests]
        self.draws = [not (options.deterministic or request.greedy) for request in requests]
        self.room = [request.room or options.tree_size for request in requests]

    def candidates(self, going: list[int], logits: Tensor, width: int) -> tuple[IntArray, FloatArray]:
        """Of every node of the frontiers [g, width]: the likeliest tokens and their probabilities [g, width, topk]."""
        self.asked = [self.requests[i] for i in going for _ in range(width)]
        self.paths = [self.pools[i].path(node) for i in going for node in self.pools[i].frontier]
        tokens, probs = self.sampler.candidates(logits, self.asked, self.paths, self.options.topk, self.target_ids)
        return tokens.reshape(len(going), width, -1), probs.reshape(len(going), width, -1)

    def left(self, i: int) -> int:
        """Nodes that request i may still get; where the best of all are taken in the end, there is always room."""
        return self.room[i] - sum(q is not None for q in self.pools[i].probs)

    def grow(
        self, rows: list[tuple[int, int]], logits: Tensor, tokens: IntArray, probs: FloatArray, values: FloatArray, depth: int
    ) -> dict[int, _Frontier]:
        """Children for the frontiers of these (row of the arrays, request): row -> its new frontier."""
        found = {}
        for row, i in rows:
            if not self.draws[i]:
                above = np.repeat(np.arange(tokens.shape[1]), tokens.shape[2])
                made = (values[row][:, None] * probs[row]).ravel()
                found[row] = self.pools[i].add(above, tokens[row].ravel(), made, probs[row].ravel(), self.options.topk)
        drawing = [(row, i) for row, i in rows if self.draws[i]]
        if drawing:
            found |= self._draw(drawing, logits, probs, values, depth)
        return found

    def _draw(
        self, rows: list[tuple[int, int]], logits: Tensor, probs: FloatArray, values: FloatArray, depth: int
    ) -> dict[int, _Frontier]:
        width, topk = values.shape[1], self.options.topk
        shares = [self._shares(i, values[row], probs[row], depth) for row, i in rows]
        nodes: list[int] = []       # rows of `logits`
        counts: list[int] = []      # how many children each gets
        firsts: list[int] = []      # and which number draws its first one
        for (row, i), share in zip(rows, shares, strict=True):
            with_children = np.flatnonzero(share)
            nodes += (row * width + with_children).tolist()
            counts += share[with_children].tolist()
            firsts += (len(self.pools[i].tokens) + np.cumsum(share) - share)[with_children].tolist()
        tokens, likely, sources = self._branches(logits, nodes, counts, firsts)
        found, end = {}, 0
        for (row, i), share in zip(rows, shares, strict=True):
            begin, end = end, end + int(share.sum())
            above = np.repeat(np.arange(width), share)
            sure = [probs[row, node, turn] for node in range(width) for turn in range(share[node])]   # of the prefix alone
            missing = max(0, topk - len(above))   # every frontier is as wide
            self.pools[i].probs += [*sources[begin:end], *[None] * missing]
            found[row] = self.pools[i].add(
                np.pad(above, (0, missing)), np.array(tokens[begin:end] + [0] * missing, dtype=np.int64),
                np.pad(values[row][above] * likely[begin:end], (0, missing)), np.pad(sure, (0, missing)), topk,
            )
        return found

    def _branches(
        self, logits: Tensor, nodes: list[int], counts: list[int], firsts: list[int]
    ) -> tuple[list[int], FloatArray, list[Tensor]]:
        """Of all children, in order: the token, its probability, and the distribution it was drawn from."""
        if not nodes:
            return [], np.zeros(0), []
        asked, paths = [self.asked[node] for node in nodes], [self.paths[node] for node in nodes]
        drawn, probs = self.sampler.branches(logits[nodes], asked, paths, counts, firsts, self.target_ids)
        tokens = [token for each in drawn for token in each]
        above = np.repeat(np.arange(len(nodes)), counts).tolist()
        likely: FloatArray = probs[above, tokens].double().cpu().numpy()
        return tokens, likely, [probs[node] for node in above]

    def _shares(self, i: int, values: FloatArray, probs: FloatArray, depth: int) -> IntArray:
        """[width] how many children each node gets. Of the room that is left this level has what lies on it of the best tree, if the
        nodes below had children as likely as these have on average."""
        here = level = (values[:, None] * probs).ravel()
        worth = [here]
        for _ in range(self.requests[i].k - depth - 1):
            level = (np.sort(level)[: -1 - self.options.topk : -1, None] * (values @ probs / values.sum())).ravel()
            worth.append(level)
        best = np.argsort(-np.concatenate(worth), kind="stable")[: self.left(i)]
        best = best[best < len(here)]
        shares: IntArray = np.bincount(best[here[best] > 0.0] // probs.shape[1], minlength=len(values))
        return shares

    def drafts(self) -> list[Draft]:
        return [
            pool.drawn() if draws else pool.likeliest(room)
            for pool, draws, room in zip(self.pools, self.draws, self.room, strict=True)
        ]
