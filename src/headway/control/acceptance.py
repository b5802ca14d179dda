"""P(the target accepts draft token j | it accepted the ones before), for each request, learned while serving.

    odds(r, j) = odds of the drafter's confidence (what drafts of such a confidence turned out to be worth)
               * how the position j differs from that, over all requests
               * how the request r differs from that, so far

Each factor is observed / expected odds under the factors before it, with pseudo-counts that pull it to 1: a new request
starts at the pool's value, a confidence that lies is corrected to what it is worth, and where there is no confidence its
place is taken by the mean. Counts decay, so evidence is forgotten: the pool's in hundreds of judged tokens, a request's in
tens. Each prediction is scored before it is learned from; `calibration_error` is the expected calibration error of these.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]

PRIOR = 0.6             # acceptance before anything was seen: high enough to try
_BINS = 12              # of confidence, evenly spaced in log odds
_LOGIT_RANGE = 4.2      # 0.985
_PRIOR_WEIGHT = 4.0     # pseudo-counts of each bin for the confidence as it is given
_POSITION_WEIGHT = 12.0
_REQUEST_WEIGHT = 3.0
_POOL_MEMORY = 600.0    # judged tokens that a bin or position remembers
_REQUEST_MEMORY = 24.0
_SCORE_MEMORY = 4000.0
_SCORE_BINS = 10
_TINY = 1e-3            # predictions stay in [_TINY, 1 - _TINY]


@dataclass(slots=True)
class _Counts:
    """Observed against expected hits and misses, per entry; decayed by entry, as new evidence comes in."""

    size: int
    memory: float
    hits: FloatArray = field(init=False)
    misses: FloatArray = field(init=False)
    expected_hits: FloatArray = field(init=False)
    expected_misses: FloatArray = field(init=False)

    def __post_init__(self) -> None:
        self.hits, self.misses = np.zeros(self.size), np.zeros(self.size)
        self.expected_hits, self.expected_misses = np.zeros(self.size), np.zeros(self.size)

    def add(self, index: IntArray, hit: FloatArray, expected: FloatArray) -> None:
        new = np.bincount(index, minlength=self.size).astype(np.float64)
        keep = np.maximum(0.0, 1.0 - new / self.memory)
        hits, expected_hits = np.bincount(index, hit, self.size), np.bincount(index, expected, self.size)
        self.hits = self.hits * keep + hits
        self.misses = self.misses * keep + (new - hits)
        self.expected_hits = self.expected_hits * keep + expected_hits
        self.expected_misses = self.expected_misses * keep + (new - expected_hits)

    def odds_ratio(self, weight: float) -> FloatArray:
        """[size] observed odds over expected odds, 1 without evidence."""
        half = 0.5 * weight
        ratio: FloatArray = (self.hits + half) / (self.expected_hits + half) * (self.expected_misses + half) / (self.misses + half)
        return ratio

    def grow(self, size: int) -> None:
        for name in ("hits", "misses", "expected_hits", "expected_misses"):
            setattr(self, name, np.concatenate([getattr(self, name), np.zeros(size - self.size)]))
        self.size = size

    def clear(self, index: int) -> None:
        self.hits[index] = self.misses[index] = self.expected_hits[index] = self.expected_misses[index] = 0.0


@dataclass(frozen=True, slots=True)
class Reliability:
    """One bin of the reliability table: predictions of about `predicted`, of which the share `observed` was accepted."""

    predicted: float
    observed: float
    weight: float       # decayed number of predictions


class Acceptance:
    """One drafter's acceptance, for any number of requests. Arrays are [n] requests or [n, k] draft positions."""

    def __init__(self, max_k: int) -> None:
        self.max_k = max_k
        centers = np.linspace(-_LOGIT_RANGE, _LOGIT_RANGE, _BINS)
        self._centers = centers
        # Bins begin at the confidence as given; the last entry is for drafts without one.
        prior = np.append(1.0 / (1.0 + np.exp(-centers)), PRIOR)
        self._bin_hits, self._bin_misses = _PRIOR_WEIGHT * prior, _PRIOR_WEIGHT * (1.0 - prior)
        self._positions = _Counts(max_k, _POOL_MEMORY)
        self._requests = _Counts(64, _REQUEST_MEMORY)
        self._slots: dict[int, int] = {}
        self._free = list(range(64))
        self._scores = np.zeros((3, _SCORE_BINS))   # weight, predicted, observed
        self.num_observed = 0                       # drafts judged

    # -- asking ---------------------------------------------------------------------------------------------------

    def predict(self, seq_ids: Iterable[int], k: int, confidence: FloatArray | None = None) -> FloatArray:
        """[n, k] P(accept position j | the ones before). `confidence` [n, k] or None; NaN: none for that position."""
        slots = [self._slots.get(seq_id, -1) for seq_id in seq_ids]
        return self._predict(np.array(slots, dtype=np.int64), k, confidence)

    def pooled(self, k: int) -> FloatArray:
        """[k] of a new request without confidence."""
        rates: FloatArray = self._predict(np.array([-1]), k, None)[0]
        return rates

    @property
    def calibration_error(self) -> float:
        """Expected calibration error: mean |predicted - observed| over bins, by weight. 0 before anything was scored."""
        weight, predicted, observed = self._scores
        total = float(weight.sum())
        return float(np.abs(predicted - observed).sum() / total) if total else 0.0

    def reliability(self) -> list[Reliability]:
        """The reliability table, from the smallest predictions to the largest; bins without predictions are left out."""
        return [Reliability(p / w, o / w, w) for w, p, o in self._scores.T.tolist() if w > 0.0]

    # -- learning -------------------------------------------------------------------------------------------------

    def observe(
        self, seq_ids: Iterable[int], num_drafts: IntArray, num_accepted: IntArray, confidence: FloatArray | None = None,
        start: IntArray | None = None, *, score: bool = True,
    ) -> None:
        """Judged drafts: of positions [start, num_drafts) those below `num_accepted` were accepted, the next one was not.

        num_drafts, num_accepted, start   [n], start <= num_accepted <= num_drafts; start: 0 when None
        confidence                        [n, k >= max(num_drafts)] or None
        """
        k = min(self.max_k, int(num_drafts.max(initial=0)))
        if k == 0:
            return
        slots = np.array([self._slot(seq_id) for seq_id in seq_ids], dtype=np.int64)
        confidence = None if confidence is None else confidence[:, :k]
        position = np.arange(k)
        judged = (position < num_drafts[:, None]) & (position <= num_accepted[:, None])
        if start is not None:
            judged &= position >= start[:, None]
        hit = (position < num_accepted[:, None])[judged].astype(np.float64)
        if len(hit) == 0:
            return
        row, column = np.nonzero(judged)
        low, share = self._bins(confidence, (len(slots), k))
        low, share = low[judged], share[judged]
        by_bin = self._interpolated(low, share)
        by_position = _scaled(by_bin, self._positions.odds_ratio(_POSITION_WEIGHT)[column])
        if score:
            request = self._requests.odds_ratio(_REQUEST_WEIGHT)
            self._score(_scaled(by_position, request[slots[row]]), hit)
        self._add_to_bins(low, share, hit)
        self._positions.add(column, hit, by_bin)
        self._requests.add(slots[row], hit, by_position)
        self.num_observed += len(slots)

    def forget(self, live: Iterable[int]) -> None:
        """Drops every request that is not in `live`."""
        for seq_id in self._slots.keys() - set(live):
            slot = self._slots.pop(seq_id)
            self._requests.clear(slot)
            self._free.append(slot)

    @property
    def num_requests(self) -> int:
        return len(self._slots)

    # -- inside ---------------------------------------------------------------------------------------------------

    def _predict(self, slots: IntArray, k: int, confidence: FloatArray | None) -> FloatArray:
        base = self._interpolated(*self._bins(confidence, (len(slots), k)))
        position = self._positions.odds_ratio(_POSITION_WEIGHT)
        position = position[:k] if k <= self.max_k else np.concatenate([position, np.repeat(position[-1:], k - self.max_k)])
        request = np.where(slots >= 0, self._requests.odds_ratio(_REQUEST_WEIGHT)[slots], 1.0)
        return _scaled(base, position * request[:, None])

    def _slot(self, seq_id: int) -> int:
        slot = self._slots.get(seq_id)
        if slot is None:
            if not self._free:
                size = self._requests.size
                self._requests.grow(2 * size)
                self._free = list(range(size, 2 * size))
            slot = self._slots[seq_id] = self._free.pop()
        return slot

    def _bins(self, confidence: FloatArray | None, shape: tuple[int, int]) -> tuple[IntArray, FloatArray]:
        """(the bin below, the share of the bin above) of each confidence; bin _BINS stands for "none"."""
        if confidence is None:
            return np.full(shape, _BINS), np.zeros(shape)
        known = np.isfinite(confidence)
        p = np.clip(np.where(known, confidence, 0.5), 1e-4, 1.0 - 1e-4)
        place = np.clip((np.log(p / (1.0 - p)) + _LOGIT_RANGE) * ((_BINS - 1) / (2.0 * _LOGIT_RANGE)), 0.0, _BINS - 1.001)
        low = place.astype(np.int64)
        return np.where(known, low, _BINS), np.where(known, place - low, 0.0)

    def _interpolated(self, low: IntArray, share: FloatArray) -> FloatArray:
        rate = self._bin_hits / (self._bin_hits + self._bin_misses)
        above = np.append(rate[1:], rate[-1])
        result: FloatArray = rate[low] + share * (above[low] - rate[low])
        return result

    def _add_to_bins(self, low: IntArray, share: FloatArray, hit: FloatArray) -> None:
        size = _BINS + 1
        above = np.minimum(low + 1, _BINS)
        weight = np.bincount(low, 1.0 - share, size) + np.bincount(above, share, size)
        hits = np.bincount(low, (1.0 - share) * hit, size) + np.bincount(above, share * hit, size)
        keep = np.maximum(0.0, 1.0 - weight / _POOL_MEMORY)
        self._bin_hits = self._bin_hits * keep + hits + 1e-6
        self._bin_misses = self._bin_misses * keep + (weight - hits) + 1e-6

    def _score(self, predicted: FloatArray, hit: FloatArray) -> None:
        index = np.minimum((predicted * _SCORE_BINS).astype(np.int64), _SCORE_BINS - 1)
        self._scores *= max(0.0, 1.0 - len(hit) / _SCORE_MEMORY)
        self._scores[0] += np.bincount(index, minlength=_SCORE_BINS)
        self._scores[1] += np.bincount(index, predicted, _SCORE_BINS)
        self._scores[2] += np.bincount(index, hit, _SCORE_BINS)


def _scaled(p: FloatArray, odds_ratio: FloatArray) -> FloatArray:
    """`p` with its odds multiplied."""
    scaled: FloatArray = p * odds_ratio / (1.0 + p * (odds_ratio - 1.0))
    return np.clip(scaled, _TINY, 1.0 - _TINY)
