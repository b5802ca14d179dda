"""P(the target accepts draft token j | it accepted the ones before), for each request, learned while serving.

    odds(r, j) = exp(slope * log odds of the drafter's confidence + offset)      by logistic regression; of PRIOR where it states none
               * how drafts of about that confidence differ from the line        (a line cannot follow every lie)
               * how position j differs from that, over all requests
               * how request r differs from that

Confidence bins and positions are observed over expected odds under the factors before them, with pseudo-counts that pull them to 1. A
request's factor has a prior around 1 (a new request starts at the pool's value) and follows its own drafts by Newton steps. Evidence is
forgotten: the pool's in hundreds of judged tokens, a request's in tens.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, islice, repeat
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.control import constants as const

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

_LEVELS = 200             # steps: confidence is read to half a percent
_BINS = 12                # of confidence, evenly spaced in log odds
_LOGIT_RANGE = 4.2        # log odds: bins lie between 0.015 and 0.985
_TINY = 1e-3              # probability: predictions stay in [_TINY, 1 - _TINY]


class _Counts:
    """Observed against expected hits and misses, per entry; decayed by entry, as new evidence comes in."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._observed = np.zeros((2, size))   # hits, misses
        self._expected = np.zeros((2, size))

    def add(self, index: IntArray, hit: FloatArray, expected: FloatArray) -> None:
        new = np.bincount(index, minlength=self._size).astype(np.float64)
        remembered = np.maximum(0.0, 1.0 - new / const.POOL_MEMORY)
        hits, expected_hits = np.bincount(index, hit, self._size), np.bincount(index, expected, self._size)
        self._observed = self._observed * remembered + np.stack([hits, new - hits])
        self._expected = self._expected * remembered + np.stack([expected_hits, new - expected_hits])

    def odds_ratio(self) -> FloatArray:
        """[size] observed odds over expected odds, 1 without evidence."""
        expected = self._expected + _TINY
        hits, misses = self._observed + const.PSEUDO_COUNTS * expected / expected.sum(axis=0)
        ratio: FloatArray = hits * expected[1] / (misses * expected[0])
        return ratio

    def to_json(self) -> list[list[float]]:
        """[4, size] hits, misses, expected hits, expected misses."""
        saved: list[list[float]] = np.concatenate([self._observed, self._expected]).tolist()
        return saved

    def load(self, saved: Any) -> None:
        """Raises ValueError or TypeError, then nothing has changed."""
        counts = np.array(saved, dtype=np.float64)
        if counts.shape != (4, self._size) or not np.isfinite(counts).all() or counts.min() < 0.0:
            raise ValueError("saved acceptance has another shape or is out of range")
        self._observed, self._expected = const.SAVED_SHARE * counts[:2], const.SAVED_SHARE * counts[2:]


class _Requests:
    """By how much each request differs from the pool, in log odds."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[float, float]] = {}   # seq_id -> (difference, its precision)

    def __len__(self) -> int:
        return len(self._known)

    def factor(self, seq_id: int) -> float:
        """Of its odds; 1 for an unknown request."""
        known = self._known.get(seq_id)
        return 1.0 if known is None else math.exp(known[0])

    def learn(self, seq_ids: Iterable[int], hits: Iterable[float], expected: Iterable[float]) -> None:
        """Judged tokens, each of the request `seq_ids[i]`."""
        for seq_id, hit, pooled in zip(seq_ids, hits, expected, strict=True):
            difference, precision = self._known.get(seq_id, (0.0, const.REQUEST_PRECISION))
            odds = pooled / (1.0 - pooled) * math.exp(difference)
            p = min(1.0 - _TINY, max(_TINY, odds / (1.0 + odds)))
            precision += p * (1.0 - p)
            self._known[seq_id] = difference + (hit - p) / precision, min(precision, const.REQUEST_PRECISION + const.REQUEST_MEMORY)

    def forget(self, live: set[int]) -> None:
        self._known = {seq_id: known for seq_id, known in self._known.items() if seq_id in live}


@dataclass(frozen=True, slots=True)
class _Tables:
    """Predictions of the pool, factor by factor. [levels] by confidence or [max_k] by position; lists for single look-ups."""

    by_line: FloatArray
    by_bin: FloatArray
    position_ratio: FloatArray
    odds_array: FloatArray
    odds: list[float]
    positions: list[float]


class AcceptanceModel:
    """One drafter's acceptance, for any number of requests. Arrays are [n] requests or [n, k] draft positions."""

    def __init__(self, max_k: int) -> None:
        self.max_k = max_k
        self._line = np.array([1.0, 0.0])           # slope, offset
        self._curvature = const.LINE_WEIGHT * np.eye(2)  # of its likelihood
        self._bins = _Counts(_BINS + 1)             # the last one: drafts without confidence
        self._positions = _Counts(max_k)
        self._requests = _Requests()
        self._tables: _Tables | None = None         # None: something was learned since they were made

    @property
    def num_requests(self) -> int:
        return len(self._requests)

    def predict(self, seq_ids: Iterable[int], k: int, confidence: FloatArray | None = None) -> FloatArray:
        """[n, k] P(accept position j | the ones before). `confidence` [n, k] or None; NaN: none for that position."""
        tables, position = self._tabled(), np.minimum(np.arange(k), self.max_k - 1)
        factors = np.array([self._requests.factor(seq_id) for seq_id in seq_ids])
        level = _levels(confidence) if confidence is not None else np.full((len(factors), k), _LEVELS + 1)
        odds = tables.odds_array[level] * tables.position_ratio[position] * factors[:, None]
        rates: FloatArray = np.minimum(1.0 - _TINY, np.maximum(_TINY, odds / (1.0 + odds)))
        return rates

    def reach(self, seq_id: int, k: int, confidence: Sequence[float] | None = None) -> list[float]:
        """[k] P(all positions up to j are accepted) of one request, without arrays."""
        tables, factor = self._tabled(), self._requests.factor(seq_id)
        odds, unknown = tables.odds, tables.odds[-1]
        positions = tables.positions if k <= self.max_k else tables.positions + tables.positions[-1:] * (k - self.max_k)
        reached, found = 1.0, []
        for position, stated in zip(positions[:k], islice(chain(confidence or (), repeat(math.nan)), k), strict=True):
            ahead = (odds[int(_LEVELS * stated + 0.5)] if 0.0 <= stated <= 1.0 else unknown) * position * factor
            reached *= ahead / (1.0 + ahead)
            found.append(reached)
        return found

    def learn(self, seq_ids: Sequence[int], position: IntArray, hit: FloatArray, confidence: FloatArray) -> None:
        """[n] judged tokens: whose they are, where in their draft (< max_k), 1 accepted or 0, and the confidence or NaN."""
        if len(hit) == 0:
            return
        tables, level = self._tabled(), _levels(confidence)
        by_line, by_bin = tables.by_line[level], tables.by_bin[level]
        self._requests.learn(seq_ids, hit.tolist(), _scaled(by_bin, tables.position_ratio[position]).tolist())
        self._fit_line(_LOGITS[level], hit, by_line)
        self._bins.add(_LOW[level] + (_SHARE[level] > 0.5), hit, by_line)
        self._positions.add(position, hit, by_bin)
        self._tables = None

    def forget(self, live: set[int]) -> None:
        """Drops every request that is not in `live`."""
        self._requests.forget(live)

    def to_json(self) -> dict[str, Any]:
        """The pool; requests do not outlive a run."""
        return {
            "line": self._line.tolist(), "curvature": self._curvature.tolist(),
            "bins": self._bins.to_json(), "positions": self._positions.to_json(),
        }  # fmt: skip

    def load(self, saved: Any) -> None:
        """What `to_json` wrote, as weaker evidence. Raises ValueError or TypeError."""
        line, curvature = np.array(saved["line"], dtype=np.float64), np.array(saved["curvature"], dtype=np.float64)
        if line.shape != (2,) or curvature.shape != (2, 2) or not (np.isfinite(line).all() and np.isfinite(curvature).all()):
            raise ValueError("saved acceptance has another shape or is not finite")
        self._line, self._curvature = line, const.SAVED_SHARE * curvature + (1.0 - const.SAVED_SHARE) * const.LINE_WEIGHT * np.eye(2)
        self._bins.load(saved["bins"])
        self._positions.load(saved["positions"])
        self._tables = None

    def _tabled(self) -> _Tables:
        if self._tables is None:
            rate = 1.0 / (1.0 + np.exp(-(self._line[0] * _LOGITS + self._line[1])))
            by_line = np.minimum(1.0 - _TINY, np.maximum(_TINY, rate))
            by_line[-1] = const.PRIOR_ACCEPTANCE
            ratio = self._bins.odds_ratio()
            above = np.append(ratio[1:], ratio[-1:])
            by_bin = _scaled(by_line, ratio[_LOW] + _SHARE * (above[_LOW] - ratio[_LOW]))
            position_ratio = self._positions.odds_ratio()
            odds = by_bin / (1.0 - by_bin)
            self._tables = _Tables(by_line, by_bin, position_ratio, odds, odds.tolist(), position_ratio.tolist())
        return self._tables

    def _fit_line(self, logit: FloatArray, hit: FloatArray, predicted: FloatArray) -> None:
        """One Newton step of the logistic regression, with the curvature of what is remembered."""
        known = np.isfinite(logit)
        if not known.any():
            return
        x = np.stack([logit[known], np.ones(int(np.count_nonzero(known)))])
        p = predicted[known]
        self._curvature = self._curvature * max(0.0, 1.0 - x.shape[1] / const.POOL_MEMORY) + (x * (p * (1.0 - p))) @ x.T
        step = np.linalg.solve(self._curvature + 0.05 * np.eye(2), x @ (hit[known] - p))
        self._line = np.clip(self._line + np.clip(step, -0.5, 0.5), -3.0, 3.0)


def _scaled(p: FloatArray, odds_ratio: FloatArray) -> FloatArray:
    """`p` with its odds multiplied."""
    scaled: FloatArray = p * odds_ratio / (1.0 + p * (odds_ratio - 1.0))
    return np.minimum(1.0 - _TINY, np.maximum(_TINY, scaled))   # several times quicker than np.clip


def _levels(confidence: FloatArray) -> IntArray:
    """Which entry of the tables: in half percents, the last one where there is none (NaN)."""
    known = np.isfinite(confidence)
    rate = np.minimum(1.0, np.maximum(0.0, np.where(known, confidence, 0.0)))
    level: IntArray = np.where(known, np.rint(_LEVELS * rate), _LEVELS + 1).astype(np.int64)
    return level


def _placed() -> tuple[FloatArray, IntArray, FloatArray]:
    """Per level (log odds, the bin below, the share of the bin above); the last entry is for drafts without confidence."""
    p = np.clip(np.arange(_LEVELS + 1) / _LEVELS, 1e-4, 1.0 - 1e-4)
    logit = np.clip(np.log(p / (1.0 - p)), -_LOGIT_RANGE, _LOGIT_RANGE)
    place = (logit + _LOGIT_RANGE) * ((_BINS - 1) / (2.0 * _LOGIT_RANGE + 1e-9))
    low = place.astype(np.int64)
    return np.append(logit, np.nan), np.append(low, _BINS), np.append(place - low, 0.0)


_LOGITS, _LOW, _SHARE = _placed()
