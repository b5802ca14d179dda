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

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice, repeat
from typing import Any

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

PRIOR = 0.6             # acceptance before anything was seen: high enough to try
_LEVELS = 200           # confidence is read to half a percent
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
_KEPT = 0.25            # of the evidence, from one run to the next: another workload may come


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

    def restore(self, saved: FloatArray) -> None:
        """[4, size] hits, misses, expected hits, expected misses."""
        self.hits, self.misses, self.expected_hits, self.expected_misses = saved

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
        self._best = 0
        self._slots: dict[int, int] = {}
        self._free = list(range(size))

    def __len__(self) -> int:
        return len(self._slots)

    def factor(self, seq_id: int) -> float:
        """By which its odds differ from the pool's under the best prior; 1 for an unknown request."""
        slot = self._slots.get(seq_id)
        return 1.0 if slot is None else math.exp(self.offset[self._best, slot])

    def get(self, seq_ids: Iterable[int]) -> FloatArray:
        """[n] factors."""
        slots = [self._slots.get(seq_id, -1) for seq_id in seq_ids]
        offset = np.append(self.offset[self._best], 0.0)   # the last entry is what -1 reads
        factors: FloatArray = np.exp(offset[slots])
        return factors

    def observe(self, seq_ids: Iterable[int], hit: FloatArray, expected: FloatArray) -> FloatArray:
        """Judged tokens, each of the request `seq_ids[i]`; returns what the best prior had predicted."""
        slots = np.array([self._slot(seq_id) for seq_id in seq_ids], dtype=np.int64)
        p = _scaled(expected, np.exp(self.offset[:, slots]))   # [candidates, n]
        predicted: FloatArray = p[self._best]
        self.loss *= max(0.0, 1.0 - len(hit) / _WIDTH_MEMORY)
        self.loss -= np.log(np.where(hit > 0.0, p, 1.0 - p)).sum(axis=1)
        self._best = int(self.loss.argmin())
        shape = self.offset.shape
        index = (slots + shape[1] * np.arange(shape[0])[:, None]).ravel()
        gathered = self.precision + np.bincount(index, (p * (1.0 - p)).ravel(), self.offset.size).reshape(shape)
        step = np.bincount(index, (hit - p).ravel(), self.offset.size).reshape(shape) / gathered
        self.offset = np.minimum(6.0, np.maximum(-6.0, self.offset + step))
        self.precision = np.minimum(gathered, _PRECISIONS[:, None] + _REQUEST_MEMORY)
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
class _Tables:
    """Predictions of the pool, factor by factor. [levels] by confidence or [max_k] by position; lists for single look-ups."""

    by_line: FloatArray
    by_bin: FloatArray
    position_ratio: FloatArray
    odds_array: FloatArray
    odds: list[float]
    positions: list[float]


@dataclass(frozen=True, slots=True)
class Reliability:
    """One bin of the reliability table: predictions of about `predicted`, of which the share `observed` was accepted."""

    predicted: float
    observed: float
    weight: float       # decayed number of predictions


class AcceptanceModel:
    """One drafter's acceptance, for any number of requests. Arrays are [n] requests or [n, k] draft positions."""

    def __init__(self, max_k: int) -> None:
        self.max_k = max_k
        self._line = np.array([1.0, 0.0])                    # slope, offset
        self._curvature = _LINE_WEIGHT * np.eye(2)           # of its likelihood
        self._bins = _Counts(_BINS + 1, _POOL_MEMORY)        # the last one: drafts without confidence
        self._positions = _Counts(max_k, _POOL_MEMORY)
        self._requests = _Offsets(64)
        self._scores = np.zeros((3, _SCORE_BINS))   # weight, predicted, observed
        self._tables: _Tables | None = None         # None: something was learned since they were made
        self.num_observed = 0                       # drafts judged

    # -- asking ---------------------------------------------------------------------------------------------------

    def predict(self, seq_ids: Iterable[int], k: int, confidence: FloatArray | None = None) -> FloatArray:
        """[n, k] P(accept position j | the ones before). `confidence` [n, k] or None; NaN: none for that position."""
        return self._predict(self._requests.get(seq_ids), k, confidence)

    def reach(self, seq_id: int, k: int, confidence: Sequence[float] | None = None) -> list[float]:
        """[k] P(all positions up to j are accepted) of one request, without arrays."""
        tables, factor = self._tabled(), self._requests.factor(seq_id)
        odds, unknown = tables.odds, tables.odds[-1]
        positions = tables.positions if k <= self.max_k else tables.positions + tables.positions[-1:] * (k - self.max_k)
        reached, found = 1.0, []
        for position, told in zip(positions[:k], islice(chain(confidence or (), repeat(math.nan)), k), strict=True):
            ahead = (odds[int(_LEVELS * told + 0.5)] if 0.0 <= told <= 1.0 else unknown) * position * factor
            reached *= ahead / (1.0 + ahead)
            found.append(reached)
        return found

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
        position = np.arange(k)
        judged = (position < num_drafts[:, None]) & (position <= num_accepted[:, None])
        if start is not None:
            judged &= position >= start[:, None]
        row, column = np.nonzero(judged)
        if len(row) == 0:
            return
        told = np.full(len(row), np.nan) if confidence is None else confidence[row, column]
        ids = list(seq_ids)
        self.learn([ids[i] for i in row.tolist()], column, (column < num_accepted[row]).astype(np.float64), told, score=score)
        self.num_observed += len(num_drafts)

    def learn(
        self, seq_ids: Sequence[int], position: IntArray, hit: FloatArray, confidence: FloatArray, *, score: bool = True
    ) -> None:
        """[n] judged tokens: whose they are, where in their draft (< max_k), 1 accepted or 0, and the confidence or NaN."""
        if len(hit) == 0:
            return
        tables, level = self._tabled(), _levels(confidence)
        by_line, by_bin = tables.by_line[level], tables.by_bin[level]
        predicted = self._requests.observe(seq_ids, hit, _scaled(by_bin, tables.position_ratio[position]))
        if score:
            self._score(predicted, hit)
        self._fit_line(_LOGITS[level], hit, by_line)
        self._bins.add(_LOW[level] + (_SHARE[level] > 0.5), hit, by_line)
        self._positions.add(position, hit, by_bin)
        self._tables = None

    def forget(self, live: Iterable[int]) -> None:
        """Drops every request that is not in `live`."""
        self._requests.forget(live)

    @property
    def num_requests(self) -> int:
        return len(self._requests)

    # -- keeping --------------------------------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """The pool; requests do not outlive a run."""
        counts = {"bins": self._bins, "positions": self._positions}
        return {
            "line": self._line.tolist(), "curvature": self._curvature.tolist(),
            **{name: [array.tolist() for array in (c.hits, c.misses, c.expected_hits, c.expected_misses)] for name, c in counts.items()},
        }  # fmt: skip

    def load(self, saved: Any) -> None:
        """What `to_json` wrote, as weaker evidence. Raises ValueError or TypeError, then nothing has changed."""
        line, curvature = np.array(saved["line"], dtype=np.float64), np.array(saved["curvature"], dtype=np.float64)
        bins, positions = (np.array(saved[name], dtype=np.float64) for name in ("bins", "positions"))
        if line.shape != (2,) or curvature.shape != (2, 2) or bins.shape != (4, _BINS + 1) or positions.shape != (4, self.max_k):
            raise ValueError("acceptance that was kept has another shape")
        if not all(np.isfinite(array).all() for array in (line, curvature, bins, positions)) or min(bins.min(), positions.min()) < 0.0:
            raise ValueError("acceptance that was kept is not finite")
        self._line, self._curvature = line, _KEPT * curvature + (1.0 - _KEPT) * _LINE_WEIGHT * np.eye(2)
        for counts, array in ((self._bins, bins), (self._positions, positions)):
            counts.restore(_KEPT * array)
        self._tables = None

    # -- inside ---------------------------------------------------------------------------------------------------

    def _tabled(self) -> _Tables:
        if self._tables is None:
            rate = 1.0 / (1.0 + np.exp(-(self._line[0] * _LOGITS + self._line[1])))
            by_line = np.minimum(1.0 - _TINY, np.maximum(_TINY, rate))
            by_line[-1] = PRIOR
            ratio = self._bins.odds_ratio(_BIN_WEIGHT)
            above = np.append(ratio[1:], ratio[-1:])
            by_bin = _scaled(by_line, ratio[_LOW] + _SHARE * (above[_LOW] - ratio[_LOW]))
            position_ratio = self._positions.odds_ratio(_POSITION_WEIGHT)
            odds = by_bin / (1.0 - by_bin)
            self._tables = _Tables(by_line, by_bin, position_ratio, odds, odds.tolist(), position_ratio.tolist())
        return self._tables

    def _predict(self, request: FloatArray, k: int, confidence: FloatArray | None) -> FloatArray:
        tables, position = self._tabled(), np.minimum(np.arange(k), self.max_k - 1)
        level = _levels(confidence) if confidence is not None else np.full((len(request), k), _LEVELS + 1)
        odds = tables.odds_array[level] * tables.position_ratio[position] * request[:, None]
        rates: FloatArray = np.minimum(1.0 - _TINY, np.maximum(_TINY, odds / (1.0 + odds)))
        return rates

    def _fit_line(self, logit: FloatArray, hit: FloatArray, predicted: FloatArray) -> None:
        """One Newton step of the logistic regression, with the curvature of what is remembered."""
        known = np.isfinite(logit)
        if not known.any():
            return
        x = np.stack([logit[known], np.ones(int(np.count_nonzero(known)))])
        p = predicted[known]
        self._curvature = self._curvature * max(0.0, 1.0 - x.shape[1] / _POOL_MEMORY) + (x * (p * (1.0 - p))) @ x.T
        (a, b), (_, c) = (self._curvature + 0.05 * np.eye(2)).tolist()
        u, v = (x @ (hit[known] - p)).tolist()
        step = np.array([c * u - b * v, a * v - b * u]) / (a * c - b * b)
        self._line = np.minimum(3.0, np.maximum(-3.0, self._line + np.minimum(0.5, np.maximum(-0.5, step))))

    def _score(self, predicted: FloatArray, hit: FloatArray) -> None:
        index = np.minimum((predicted * _SCORE_BINS).astype(np.int64), _SCORE_BINS - 1)
        self._scores *= max(0.0, 1.0 - len(hit) / _SCORE_MEMORY)
        self._scores[0] += np.bincount(index, minlength=_SCORE_BINS)
        self._scores[1] += np.bincount(index, predicted, _SCORE_BINS)
        self._scores[2] += np.bincount(index, hit, _SCORE_BINS)


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
    """Per level (log odds, the bin below, the share of the bin above); NaN and bin _BINS where there is no confidence."""
    p = np.clip(np.arange(_LEVELS + 1) / _LEVELS, 1e-4, 1.0 - 1e-4)
    logit = np.clip(np.log(p / (1.0 - p)), -_LOGIT_RANGE, _LOGIT_RANGE)
    place = (logit + _LOGIT_RANGE) * ((_BINS - 1) / (2.0 * _LOGIT_RANGE + 1e-9))
    low = place.astype(np.int64)
    return np.append(logit, np.nan), np.append(low, _BINS), np.append(place - low, 0.0)


_LOGITS, _LOW, _SHARE = _placed()
