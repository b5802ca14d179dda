"""How many tokens to draft: the depth to ask for, and, where a token takes a while, for which drafts to go on.

`best_depth` is asked before drafting: a further position must gain more, over all requests asked, than drafting and verifying it costs.

`Stopping` is asked while drafting, before each further pass. A pass is paid by all drafts that it goes on for, so this is decided for all
of them together. Let reach be P(all that is drafted is accepted), by calibrated confidence, and ahead(m) the tokens that m more are
expected to add when it is. Of all numbers n of drafts, those with the largest reach, and m of further passes, the one wins that brings
most:

    sum over the n of reach * ahead(m)  -  rate * (m * pass_ms(n) + T(drafted + n * m) - T(drafted))

With m = 1 alone a step of T (a tile that is full) would end drafts that it pays to carry across. SpecDec++ (arXiv 2405.19715) stops where
a rejection has become likely, whatever a pass and a verified token cost.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from headway.control import constants as const
from headway.control.goodput.drafter_state import DrafterState

FloatArray = NDArray[np.float64]


def best_depth(reached: FloatArray, step_ms: FloatArray, draft_ms: Sequence[float], rate: float) -> tuple[int, list[int]]:
    """(depth, [n] positions of each request that would be verified)

    reached   [n, k] P(the draft is accepted up to here)
    step_ms   [1 + n k] of a step that verifies 0, 1, ... drafts
    draft_ms  [depths <= k] what drafting to each depth costs
    rate      price of time, in tokens per millisecond
    """
    order = np.argsort(-reached.ravel(), kind="stable")
    values, positions = reached.ravel()[order], order % reached.shape[1]
    best, found = -np.inf, (1, order[:0])
    for depth, ms in enumerate(draft_ms, start=1):
        within = positions < depth
        gained = np.concatenate([[0.0], np.cumsum(values[within])])
        net = gained - rate * (step_ms[: len(gained)] + ms)
        total = int(net.argmax())
        if net[total] > best:
            best, found = net[total], (depth, order[within][:total])
    return found[0], np.bincount(found[1] // reached.shape[1], minlength=len(reached)).tolist()


class Stopping:
    """The drafts of one drafter in one step.

    step_ms  [1 + drafts of all requests at most] T(n): of a step that verifies n of them
    rate     price of time, in tokens per millisecond
    """

    def __init__(self, drafter: DrafterState, step_ms: FloatArray, rate: float) -> None:
        self._drafter, self._step_ms, self._rate = drafter, step_ms, rate
        self._reach: dict[int, float] = {}   # by seq_id
        self._drafted = 0

    def goes_on(self, seq_ids: Sequence[int], position: int, confidence: FloatArray) -> NDArray[np.bool_]:
        """[n] as `AdaptivePolicy.continue_drafting`."""
        reach = self._reached(seq_ids, position, confidence)
        self._drafted += len(seq_ids)
        going = np.zeros(len(seq_ids), dtype=np.bool_)
        passes = np.arange(1, min(const.PASSES_AHEAD, self._drafter.max_k - position - 1) + 1)
        if len(passes) == 0:
            return going
        rates = self._drafter.without_confidence.predict(seq_ids, position + 1 + len(passes))[:, position + 1 :]
        order = np.argsort(-reach, kind="stable")
        gained = np.cumsum((reach[:, None] * np.cumsum(np.cumprod(rates, axis=1), axis=1))[order], axis=0)   # [n, m]
        count = np.arange(1, len(seq_ids) + 1)[:, None]
        pass_ms = np.array([n * self._drafter.further_ms(n, 2) for n in range(1, len(seq_ids) + 1)])[:, None]
        verified = self._step_ms[np.minimum(self._drafted + count * passes, len(self._step_ms) - 1)]
        spent = passes * pass_ms + verified - self._step_ms[min(self._drafted, len(self._step_ms) - 1)]
        net = gained - self._rate * spent
        if net.max() > 0.0:
            going[order[: int(net.argmax()) // len(passes) + 1]] = True
        return going

    def _reached(self, seq_ids: Sequence[int], position: int, confidence: FloatArray) -> FloatArray:
        """[n] P(all drafted tokens up to `position` are accepted)."""
        stated = np.full((len(seq_ids), position + 1), np.nan)
        stated[:, position] = confidence
        rates = self._drafter.with_confidence.predict(seq_ids, position + 1, stated)[:, position]
        reach = np.array([self._reach.get(seq_id, 1.0) for seq_id in seq_ids]) * rates
        self._reach.update(zip(seq_ids, reach.tolist(), strict=True))
        return reach
