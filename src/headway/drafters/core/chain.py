"""The loop of every drafter that writes its draft token by token: ask the policy, choose, go on with those that are left. Before it,
those that have a state catch up with what was committed since (`catch_up`).

One rule for all of them: a greedy request gets the likeliest tokens, a request that samples gets tokens drawn from the draft network's
distribution, which the target accepts with min(1, p/q): more often than it would write the likeliest token, the more so the higher the
temperature. `draft_sample_method` "greedy" asks for the likeliest tokens everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headway.config import option
from headway.drafters.drafter import ContinueDrafting, DraftRequest, DraftSampler, never_stop
from headway.types import Draft

CATCH_UP_ROWS = 512
"""Rows of one catch-up pass: bounds its working memory."""

FEW_ROWS = 8
"""A sequence with at most this many unread tokens brings them along in the pass that drafts."""


@dataclass(slots=True)
class Prediction:
    """What a network says about the next token of each of n drafts.

    logits      [n, draft vocabulary]
    state       [n, ...]: what it goes on from
    best        int64 [n]: the target's token of the largest logit, where the network has looked it up
    confidence  f32 [n]: the largest probability, likewise
    """

    logits: Tensor
    state: Tensor
    best: NDArray[np.int64] | None = None
    confidence: NDArray[np.float32] | None = None


Advance = Callable[[list[int], list[int], Tensor, int, int], list[Prediction]]
"""(which requests, their newest tokens [n], their state [n, ...], position of these tokens in the draft, how many) -> what follows them

One prediction, or up to as many as asked for, each behind the likeliest token of the one before."""


@dataclass(frozen=True)
class SampleOptions:
    """The name and its values are vLLM's."""

    draft_sample_method: Literal["greedy", "probabilistic"] = option(
        "probabilistic", "drafts for requests that sample: drawn from the drafter's distribution, or the likeliest token"
    )

    @property
    def deterministic(self) -> bool:
        """Every draft is a function of the prefix."""
        return self.draft_sample_method == "greedy"


def catch_up(num_unread: Sequence[int]) -> Iterator[list[tuple[int, int]]]:
    """Passes that read all but the last token of sequences with many: each a list of (which sequence, how many of its next tokens)."""
    missing = {i: num - 1 for i, num in enumerate(num_unread) if num > FEW_ROWS}
    while missing:
        budget, part = CATCH_UP_ROWS, []
        for i, num in missing.items():
            if budget:
                part.append((i, min(num, budget)))
                budget -= part[-1][1]
        for i, num in part:
            missing[i] -= num
        missing = {i: num for i, num in missing.items() if num}
        yield part


def num_unasked(
    requests: Sequence[DraftRequest], continue_drafting: ContinueDrafting, sampler: DraftSampler, head: Callable[[Tensor], Tensor] | None,
    deterministic: bool,
) -> int:
    """How many tokens of each draft can be predicted in one go: nobody is asked between them, and they are the likeliest ones."""
    plain = _all_likeliest(requests, sampler, deterministic)
    return 1 if continue_drafting is not never_stop or head is not None or not plain else min(request.k for request in requests)


def draft_chain(
    requests: Sequence[DraftRequest], continue_drafting: ContinueDrafting, sampler: DraftSampler, following: list[Prediction],
    advance: Advance, target_ids: Tensor | None, head: Callable[[Tensor], Tensor] | None = None, *, deterministic: bool = False,
) -> list[Draft]:
    """One draft per request. `following` are the predictions of the first draft token, and of up to `num_unasked` in all.

    target_ids     int64 [draft vocabulary]: the target's token for each; None: the vocabularies are the same
    head           estimates confidence from the state; None: it is the largest probability
    deterministic  the likeliest tokens for requests that sample, too

    Both kinds of confidence depend on the prefix alone. The policy is asked where a further pass would follow: what this one has predicted
    is paid for and drafted.
    """
    stops_early = continue_drafting is not never_stop
    choose = _Chooser(requests, sampler, target_ids, deterministic)
    going = list(range(len(requests)))
    confidences: list[list[float]] = [[] for _ in requests]
    position = 0
    while True:
        for prediction in following:
            confidence = _confidence(prediction) if head is None else head(prediction.state).cpu().numpy()
            tokens = choose(going, prediction)
            for i, sure in zip(going, confidence.tolist(), strict=True):
                confidences[i].append(sure)
            position += 1
        more = [row for row, i in enumerate(going) if requests[i].k > position]
        if stops_early and more:
            on = continue_drafting([requests[going[row]].seq_id for row in more], position - 1, confidence[more].astype(np.float64))
            more = [row for row, goes in zip(more, on.tolist(), strict=True) if goes]
        if not more:
            break
        state = prediction.state
        if len(more) < len(going):
            going, tokens, state = [going[row] for row in more], [tokens[row] for row in more], state[more]
        num = 1 if stops_early or head is not None or not choose.plain else min(requests[i].k for i in going) - position
        following = advance(going, tokens, state, position - 1, num)
    return choose.drafts(confidences)


def _all_likeliest(requests: Sequence[DraftRequest], sampler: DraftSampler, deterministic: bool) -> bool:
    """Whether every draft is the network's largest logits as they are."""
    return (deterministic or all(request.greedy for request in requests)) and sampler.takes_largest(requests)


class _Chooser:
    """The next token of each draft: the likeliest one, or one drawn as the request samples."""

    def __init__(self, requests: Sequence[DraftRequest], sampler: DraftSampler, target_ids: Tensor | None, deterministic: bool) -> None:
        self.requests, self.sampler, self.target_ids = requests, sampler, target_ids
        self.greedy = [deterministic or request.greedy for request in requests]
        self.plain = _all_likeliest(requests, sampler, deterministic)
        self.tokens: list[list[int]] = [[] for _ in requests]
        self.probs: list[list[Tensor]] = [[] for _ in requests]

    def __call__(self, going: list[int], prediction: Prediction) -> list[int]:
        """Appends a token to each draft in `going`; returns them."""
        if self.plain and prediction.best is not None:
            chosen: list[int] = prediction.best.tolist()
            for i, token in zip(going, chosen, strict=True):
                self.tokens[i].append(token)
            return chosen
        for likeliest in (True, False):
            rows = [row for row, i in enumerate(going) if self.greedy[i] == likeliest]
            if rows:
                logits = prediction.logits if len(rows) == len(going) else prediction.logits[rows]
                self._choose([going[row] for row in rows], logits, likeliest)
        return [self.tokens[i][-1] for i in going]

    def _choose(self, mine: list[int], logits: Tensor, likeliest: bool) -> None:
        asked, drafted = [self.requests[i] for i in mine], [self.tokens[i] for i in mine]
        if likeliest:
            tokens = self.sampler.likely(logits, asked, drafted, self.target_ids)
        else:
            tokens, drawn_from = self.sampler.sampled(logits, asked, drafted, self.target_ids)
            for i, row in zip(mine, drawn_from, strict=True):
                self.probs[i].append(row)
        for i, token in zip(mine, tokens, strict=True):
            self.tokens[i].append(token)

    def drafts(self, confidences: list[list[float]]) -> list[Draft]:
        return [
            Draft(tokens, torch.stack(probs) if probs else None, sure)
            for tokens, probs, sure in zip(self.tokens, self.probs, confidences, strict=True)
        ]


def _confidence(prediction: Prediction) -> NDArray[np.float32]:
    """[n] the largest probability of each row."""
    if prediction.confidence is not None:
        return prediction.confidence
    logits = prediction.logits.float()
    found: NDArray[np.float32] = (logits.amax(-1) - logits.logsumexp(-1)).exp().cpu().numpy()
    return found
