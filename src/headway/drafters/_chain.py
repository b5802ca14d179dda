"""The loop of every drafter that writes its draft token by token: ask the policy, choose, go on with those that are left.

One rule for all of them: a greedy request gets the likeliest tokens, a request that samples gets tokens drawn from the draft network's
distribution, which the target accepts with min(1, p/q): more often than it would write the likeliest token, the more so the higher the
temperature. `draft_sample_method` "greedy" asks for the likeliest tokens everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from headway.config import option
from headway.control.policy import Policy
from headway.drafters._confidence_head import ConfidenceHead
from headway.drafters.drafter import DraftRequest, DraftSampler, Keep, keep_all
from headway.types import Draft

Advance = Callable[[list[int], Tensor, Tensor, int], tuple[Tensor, Tensor]]
"""(which requests, their newest tokens [n], their state [n, ...], position of these tokens in the draft) -> (logits, state) after them"""


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


def draft_chain(
    requests: Sequence[DraftRequest], keep: Keep, sampler: DraftSampler, logits: Tensor, state: Tensor, advance: Advance,
    target_ids: Tensor | None, head: ConfidenceHead | None = None, *, deterministic: bool = False,
) -> list[Draft]:
    """One draft per request. `logits` [n, draft vocabulary] and `state` [n, ...] are those before the first draft token.

    target_ids     int64 [draft vocabulary]: the target's token for each; None: the vocabularies are the same
    head           estimates confidence from the state; None: it is the largest probability
    deterministic  the likeliest tokens for requests that sample, too

    Both kinds of confidence depend on the prefix alone; the policy sees the confidence before the token is chosen.
    """
    listens = keep is not keep_all and getattr(keep, "__func__", None) is not Policy.keep
    drafts = [Draft([], confidence=[]) for _ in requests]
    probs: list[list[Tensor]] = [[] for _ in requests]
    greedy = [deterministic or request.greedy for request in requests]
    going = np.arange(len(requests))
    ks = np.array([request.k for request in requests])
    for position in range(int(ks.max())):
        confidence = _confidence(logits) if head is None else head(state).cpu().numpy()
        if listens:
            kept = keep([requests[i].seq_id for i in going.tolist()], position, confidence.astype(np.float64))
            going, confidence, logits, state = _subset(kept, going, confidence, logits, state)
        if len(going) == 0:
            break
        _choose(logits, target_ids, going, requests, greedy, sampler, drafts, probs)
        for i, sure in zip(going.tolist(), confidence.tolist(), strict=True):
            drafts[i].confidence.append(sure)   # type: ignore[union-attr]
        more = ks[going] > position + 1
        if not more.any():
            break
        going, confidence, state = _subset(more, going, confidence, state)
        tokens = torch.tensor([drafts[i].tokens[-1] for i in going.tolist()], device=state.device)
        logits, state = advance(going.tolist(), tokens, state, position)
    for draft, rows in zip(drafts, probs, strict=True):
        draft.probs = torch.stack(rows) if rows else None
    return drafts


def _choose(
    logits: Tensor, target_ids: Tensor | None, going: np.ndarray, requests: Sequence[DraftRequest], greedy: Sequence[bool],
    sampler: DraftSampler, drafts: list[Draft], probs: list[list[Tensor]],
) -> None:
    """The next token of each draft: the likeliest one, or one drawn as the request samples."""
    for likeliest in (True, False):
        rows = [row for row, i in enumerate(going.tolist()) if greedy[i] == likeliest]
        if not rows:
            continue
        mine = [int(going[row]) for row in rows]
        part = logits if len(rows) == len(going) else logits[rows]
        asked, drafted = [requests[i] for i in mine], [drafts[i].tokens for i in mine]
        if likeliest:
            tokens = sampler.likely(part, asked, drafted, target_ids)
        else:
            tokens, drawn_from = sampler.sampled(part, asked, drafted, target_ids)
            for i, row in zip(mine, drawn_from, strict=True):
                probs[i].append(row)
        for i, token in zip(mine, tokens, strict=True):
            drafts[i].tokens.append(token)


def _confidence(logits: Tensor) -> np.ndarray:
    """[n] the largest probability of each row."""
    logits = logits.float()
    return (logits.amax(-1) - logits.logsumexp(-1)).exp().cpu().numpy()


def _subset(mask: np.ndarray, going: np.ndarray, confidence: np.ndarray, *tensors: Tensor) -> tuple[Any, ...]:
    if mask.all():
        return (going, confidence, *tensors)
    where = torch.from_numpy(np.flatnonzero(mask)).to(tensors[0].device)
    return (going[mask], confidence[mask], *(tensor[where] for tensor in tensors))
