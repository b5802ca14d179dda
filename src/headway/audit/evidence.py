"""A sequential two-sample test by betting: are two streams of outcomes drawn from one distribution?

Outcomes come in strata (here: a fixed text, whose next token each side chooses). An event, such as "the token is the likeliest one", has
some probability on each side; the null hypothesis is that the two differ by no more than rounding explains. Of each stratum the outcomes
of both sides are paired in order. A pair multiplies a wager's wealth by

    P(a, b | probabilities that differ as the wager says) / P(a, b | the nearest probabilities the null allows),

which has an expectation of at most 1 under every null (the denominator is the reverse information projection: Turner, Ly, Gruenwald 2024,
arXiv 2106.02693; with a least difference: Turner, Gruenwald 2022, arXiv 2203.09785; strata: arXiv 2302.11401). Wagers are chosen from
what came before only, so wealth is a supermartingale, and so is an average over many wagers. By Ville's inequality it ever reaches
1 / alpha with probability alpha at most, however often one looks and however the next stratum is chosen.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]

DIFFERENCES = (0.01, 0.02, 0.05, 0.1, 0.25)   # of an event's probability, that are wagered on; each in both directions
NUM_WAGERS = 2 * len(DIFFERENCES)
LEAST = 1e-4       # no wager thinks an event rarer: one surprise must not cost everything
OPEN = 0.02        # an event is open where its probability is this far from 0 and 1
GRID = 400         # probabilities are rounded to this many steps of their arc sine, so that factors are computed once
ERROR_STEPS = 50   # bisections of an interval of length 1: what is left is rounding


def log_factors(p: float, allowance: float = 0.0) -> FloatArray:
    """What a pair does to the logarithm of each wager's wealth: [NUM_WAGERS, 4], the columns for (a, b) = 00, 01, 10, 11.

    p          about how likely the event is, from earlier outcomes
    allowance  how much the two probabilities may differ and still be the same
    """
    step = round(math.asin(math.sqrt(min(1.0, max(0.0, p)))) / (math.pi / 2) * GRID)
    return _log_factors(step, 0.0 if allowance <= 0.0 else float(f"{allowance:.2g}"))


@lru_cache(maxsize=4096)
def _log_factors(step: int, allowance: float) -> FloatArray:
    p = math.sin(step / GRID * math.pi / 2) ** 2
    size = np.array(DIFFERENCES)
    low, high = np.clip(p - size / 2, LEAST, 1 - LEAST), np.clip(p + size / 2, LEAST, 1 - LEAST)
    ours, theirs = np.concatenate([low, high]), np.concatenate([high, low])
    silent = high - low <= allowance   # the null allows what the wager says
    null_low = np.where(silent, low, _nearest(low, high, allowance))
    null_high = np.where(silent, high, null_low + allowance)
    null_ours, null_theirs = np.concatenate([null_low, null_high]), np.concatenate([null_high, null_low])
    return _log_likelihoods(ours, theirs) - _log_likelihoods(null_ours, null_theirs)


def _log_likelihoods(a: FloatArray, b: FloatArray) -> FloatArray:
    return np.stack([np.log1p(-a) + np.log1p(-b), np.log1p(-a) + np.log(b), np.log(a) + np.log1p(-b), np.log(a) + np.log(b)], -1)


def _nearest(low: FloatArray, high: FloatArray, allowance: float) -> FloatArray:
    """The t for which (t, t + allowance) is nearest to (low, high) in relative entropy, for those that differ by more."""
    if allowance == 0.0:
        return (low + high) / 2
    left, right = low.copy(), np.maximum(low, high - allowance)   # the slope changes its sign between them
    for _ in range(ERROR_STEPS):
        t = (left + right) / 2
        u = t + allowance
        rising = (t - low) / (t * (1 - t)) + (u - high) / (u * (1 - u)) > 0.0
        left, right = np.where(rising, left, t), np.where(rising, t, right)
    return (left + right) / 2


class WagerBook:
    """The wealth of wagers of one kind: each starts with 1. Equal wagers on several strata multiply."""

    def __init__(self) -> None:
        self.log_wealth = np.zeros(NUM_WAGERS)
        self.num_pairs = 0     # or outcomes, where one side's probabilities are known
        # Sum over pairs of 1 / (4 p (1 - p)): what a wager on a difference d gains is d^2 times this. Strata where the event is all but
        # certain are not counted: a difference of d has no room there.
        self.sharpness = 0.0

    def settle(self, p: float, allowance: float, pairs: NDArray[np.int64]) -> None:
        """Takes in pairs [4] of one stratum, counted by (a, b) = 00, 01, 10, 11; `p` must not depend on them."""
        self.log_wealth += log_factors(p, allowance) @ pairs
        count = int(pairs.sum())
        self.num_pairs += count
        self.sharpness += count / (4 * p * (1 - p)) if OPEN < p < 1 - OPEN else 0.0

    def settle_known(self, log_factors_known: FloatArray, p: float, misses: int, hits: int) -> None:
        """Takes in outcomes of one stratum whose probability p is known; each multiplies wealth by a column (miss, hit) [NUM_WAGERS, 2]."""
        self.log_wealth += log_factors_known @ np.array([misses, hits])
        self.num_pairs += misses + hits
        self.sharpness += (misses + hits) / (2 * p * (1 - p)) if OPEN < p < 1 - OPEN else 0.0

    def best(self) -> tuple[float, float]:
        """(log wealth, difference it wagers on) of the wager that has most; positive: side b chooses the event more often."""
        index = int(self.log_wealth.argmax())
        size = DIFFERENCES[index % len(DIFFERENCES)]
        return float(self.log_wealth[index]), size if index < len(DIFFERENCES) else -size


def log_average(books: Mapping[str, tuple[float, WagerBook]]) -> float:
    """The logarithm of the average wealth; `books` maps to (share of the starting capital, book), shares sum to 1."""
    parts = [math.log(share / NUM_WAGERS) + book.log_wealth for share, book in books.values()]
    return float(np.logaddexp.reduce(np.concatenate(parts))) if parts else 0.0


def detectable(sharpness: float, threshold: float, num_books: int) -> float:
    """The difference in probability that would have been found with odds of 99 to 1, had it been there at every pair.

    A wager on a difference d ends near x - 2.33 sqrt(2 x) at its first percentile, x = d^2 sharpness; it must reach the threshold times the
    number of wagers it shares the capital with.
    """
    if sharpness <= 0.0:
        return 1.0
    need = math.log(threshold * num_books * NUM_WAGERS)
    root = (2.33 * math.sqrt(2.0) + math.sqrt(2 * 2.33**2 + 4 * need)) / 2
    return min(1.0, root / math.sqrt(sharpness))
