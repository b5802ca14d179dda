"""P(the target accepts draft token j | it accepted the ones before), for each request, learned while serving.

    odds(r, j) = exp(slope * log odds of the drafter's confidence + offset)      what it is worth, by logistic regression
               * how drafts of about that confidence differ from the line        (a line cannot follow every lie)
               * how the position j differs from that, over all requests
               * exp(offset of the request r)

Bins and positions are observed over expected odds under the factors before them, with pseudo-counts that pull them to 1. A request's
offset has a normal prior around 0 (a new request starts at the pool's value) and follows its own drafts by Newton steps; how wide
the prior is, so how different requests are from one another, is chosen by which width has predicted better. Drafts without
confidence have a rate of their own in the place of the line. Evidence is forgotten: the pool's in hundreds of judged tokens, a
request's in tens. Each prediction is scored before it is learned from; `calibration_error` is the expected calibration error
of these.
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
_LINE_WEIGHT = 4.0      # pseudo-observations for the confidence as it is given
_BIN_WEIGHT = 40.0
_POSITION_WEIGHT = 16.0
_POOL_MEMORY = 600.0    # judged tokens that a bin or position remembers
_PRECISIONS = np.array([0.3, 2.0, 30.0])   # candidates for 1 / variance of the requests' offsets, in log odds
_REQUEST_MEMORY = 3.0   # precision that a request gathers at most; a judged token brings at most 0.25
_WIDTH_MEMORY = 2000.0  # judged tokens that the choice of the width remembers
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
        """[size] observed odds over expected odds, 1 without evidence: those of the rate that `weight` pseudo-counts of the expected one
        leave over."""
        hits, misses = self.expected_hits + _TINY, self.expected_misses + _TINY
        share = weight / (hits + misses)
        ratio: FloatArray = (self.hits + share * hits) * misses / ((self.misses + share * misses) * hits)
        return ratio


class _Offsets:
    """Per request and candidate prior: its offset in log odds and the precision of that."""

    def __init__(self, size: int) -> None:
        self.offset = np.zeros((len(_PRECISIONS), size))
        self.precision = np.repeat(_PRECISIONS[:, None], size, axis=1)
        self.loss = np.zeros(len(_PRECISIONS))
        self._slots: dict[int, int] = {}
        self._free = list(range(size))

    def __len__(self) -> int:
        return len(self._slots)

    def get(self, seq_ids: Iterable[int]) -> FloatArray:
        """[n] factors of the odds under the best prior, 1 for an unknown request."""
        slots = [self._slots.get(seq_id, -1) for seq_id in seq_ids]
        offset = np.append(self.offset[int(self.loss.argmin())], 0.0)   # the last entry is what -1 reads
        factors: FloatArray = np.exp(offset[slots])
        return factors

    def observe(self, seq_ids: Iterable[int], row: IntArray, hit: FloatArray, expected: FloatArray) -> FloatArray:
        """Judged tokens of the requests `seq_ids[row]`; returns what the best prior had predicted."""
        slots = np.array([self._slot(seq_id) for seq_id in seq_ids], dtype=np.int64)[row]
        p = _scaled(expected, np.exp(self.offset[:, slots]))   # [candidates, n]
        predicted: FloatArray = p[int(self.loss.argmin())]
        self.loss *= max(0.0, 1.0 - len(hit) / _WIDTH_MEMORY)
        self.loss -= np.log(np.where(hit > 0.0, p, 1.0 - p)).sum(axis=1)
        size = self.offset.shape[1]
        for c, prior in enumerate(_PRECISIONS):
            gathered = self.precision[c] + np.bincount(slots, p[c] * (1.0 - p[c]), size)
            self.offset[c] = np.clip(self.offset[c] + np.bincount(slots, hit - p[c], size) / gathered, -6.0, 6.0)
            self.precision[c] = np.minimum(gathered, prior + _REQUEST_MEMORY)
        return predicted

    def forget(self, live: Iterable[int]) -> None:
        for seq_id in self._slots.keys() - set(live):
            slot = self._slots.pop(seq_id)
            self.offset[:, slot], self.precision[:, slot] = 0.0, _PRECISIONS
            self._free.append(slot)

    def _slot(self, seq_id: int) -> int:
        slot = self._slots.get(seq_id)
        if slot is None:
            if not self._free:
                size = self.offset.shape[1]
                self._free = list(range(size, 2 * size))
                self.offset = np.concatenate([self.offset, np.zeros_like(self.offset)], axis=1)
                self.precision = np.concatenate([self.precision, np.repeat(_PRECISIONS[:, None], size, axis=1)], axis=1)
            slot = self._slots[seq_id] = self._free.pop()
        return slot


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
        self._line = np.array([1.0, 0.0])                    # slope, offset
        self._curvature = _LINE_WEIGHT * np.eye(2)           # of its likelihood
        self._bins = _Counts(_BINS + 1, _POOL_MEMORY)        # the last one: drafts without confidence
        self._positions = _Counts(max_k, _POOL_MEMORY)
        self._requests = _Offsets(64)
        self._scores = np.zeros((3, _SCORE_BINS))   # weight, predicted, observed
        self.num_observed = 0                       # drafts judged

    # -- asking ---------------------------------------------------------------------------------------------------

    def predict(self, seq_ids: Iterable[int], k: int, confidence: FloatArray | None = None) -> FloatArray:
        """[n, k] P(accept position j | the ones before). `confidence` [n, k] or None; NaN: none for that position."""
        return self._predict(self._requests.get(seq_ids), k, confidence)

    def pooled(self, k: int) -> FloatArray:
        """[k] of a new request without confidence."""
        rates: FloatArray = self._predict(np.ones(1), k, None)[0]
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
        confidence = None if confidence is None else confidence[:, :k]
        position = np.arange(k)
        judged = (position < num_drafts[:, None]) & (position <= num_accepted[:, None])
        if start is not None:
            judged &= position >= start[:, None]
        hit = (position < num_accepted[:, None])[judged].astype(np.float64)
        if len(hit) == 0:
            return
        row, column = np.nonzero(judged)
        logit, low, share = self._placed(confidence, (len(num_drafts), k))
        logit, low, share = logit[judged], low[judged], share[judged]
        by_line = self._by_line(logit)
        by_bin = self._by_bin(by_line, low, share)
        by_position = _scaled(by_bin, self._positions.odds_ratio(_POSITION_WEIGHT)[column])
        predicted = self._requests.observe(seq_ids, row, hit, by_position)
        if score:
            self._score(predicted, hit)
        self._fit_line(logit, hit, by_line)
        self._bins.add(low + (share > 0.5), hit, by_line)
        self._positions.add(column, hit, by_bin)
        self.num_observed += len(num_drafts)

    def forget(self, live: Iterable[int]) -> None:
        """Drops every request that is not in `live`."""
        self._requests.forget(live)

    @property
    def num_requests(self) -> int:
        return len(self._requests)

    # -- inside ---------------------------------------------------------------------------------------------------

    def _predict(self, request: FloatArray, k: int, confidence: FloatArray | None) -> FloatArray:
        logit, low, share = self._placed(confidence, (len(request), k))
        base = self._by_bin(self._by_line(logit), low, share)
        position = self._positions.odds_ratio(_POSITION_WEIGHT)
        position = position[:k] if k <= self.max_k else np.concatenate([position, np.repeat(position[-1:], k - self.max_k)])
        return _scaled(base, position * request[:, None])

    def _placed(self, confidence: FloatArray | None, shape: tuple[int, int]) -> tuple[FloatArray, IntArray, FloatArray]:
        """(log odds, the bin below, the share of the bin above) of each confidence; NaN and bin _BINS where there is none."""
        if confidence is None:
            return np.full(shape, np.nan), np.full(shape, _BINS), np.zeros(shape)
        p = np.clip(confidence, 1e-4, 1.0 - 1e-4)
        logit = np.clip(np.log(p / (1.0 - p)), -_LOGIT_RANGE, _LOGIT_RANGE)
        known = np.isfinite(confidence)
        place = np.where(known, (logit + _LOGIT_RANGE) * ((_BINS - 1) / (2.0 * _LOGIT_RANGE + 1e-9)), 0.0)
        low = place.astype(np.int64)
        return np.where(known, logit, np.nan), np.where(known, low, _BINS), np.where(known, place - low, 0.0)

    def _by_line(self, logit: FloatArray) -> FloatArray:
        rate: FloatArray = 1.0 / (1.0 + np.exp(-(self._line[0] * logit + self._line[1])))
        return np.where(np.isnan(logit), PRIOR, np.clip(rate, _TINY, 1.0 - _TINY))

    def _by_bin(self, by_line: FloatArray, low: IntArray, share: FloatArray) -> FloatArray:
        ratio = self._bins.odds_ratio(_BIN_WEIGHT)
        above = np.append(ratio[1:], ratio[-1:])
        return _scaled(by_line, ratio[low] + share * (above[low] - ratio[low]))

    def _fit_line(self, logit: FloatArray, hit: FloatArray, predicted: FloatArray) -> None:
        """One Newton step of the logistic regression, with the curvature of what is remembered."""
        known = np.isfinite(logit)
        if not known.any():
            return
        x = np.stack([logit[known], np.ones(int(known.sum()))])
        p = predicted[known]
        self._curvature = self._curvature * max(0.0, 1.0 - x.shape[1] / _POOL_MEMORY) + (x * (p * (1.0 - p))) @ x.T
        (a, b), (_, c) = (self._curvature + 0.05 * np.eye(2)).tolist()
        u, v = (x @ (hit[known] - p)).tolist()
        step = np.array([c * u - b * v, a * v - b * u]) / (a * c - b * b)
        self._line = np.clip(self._line + np.clip(step, -0.5, 0.5), -3.0, 3.0)

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
