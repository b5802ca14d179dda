"""Fits what something takes to what was asked for, from a stream of measurements: non-negative least squares that follows a machine.

Measurements are averaged in cells (similar ones share a cell), so memory and time stay bounded however long it runs. Old cells lose
weight, which is the forgetting. `speed` is one factor for everything: it follows the machine at once (a noisy neighbour, another clock),
and a cell that nobody visits keeps what it knew, scaled by it. The coefficients minimise the squared relative error with every coefficient
>= 0, shrunk towards a smooth curve where there is no data. A step that took far too long moves nothing until several in a row agree.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.control import constants as const

FloatArray = NDArray[np.float64]


@dataclass(slots=True)
class _Cell:
    """Steps that are alike: the mean of what they asked for and of what they took (divided by `speed` at the time)."""

    raw: list[float]
    ms: float
    weight: float
    seen: int           # number of the latest observation

    def learn(self, raw: Sequence[float], ms: float, weight: float, number: int) -> None:
        # Steps that are rare now, as plain ones are where drafts pay, would take hundreds to correct what they were under another load.
        self.weight = min(self.weight * 0.5 ** ((number - self.seen) / const.CELL_FADE) + weight, const.CELL_MEMORY)
        share = weight / self.weight
        self.raw = [mean + share * (value - mean) for mean, value in zip(self.raw, raw, strict=True)]
        self.ms += share * (ms - self.ms)
        self.seen = number

    def fade(self, factor: float) -> None:
        self.weight *= factor


class CostFit:
    """Non-negative least squares on aging cells, and one factor for the speed of the machine."""

    def __init__(self, design: Callable[[FloatArray], FloatArray], smooth: FloatArray) -> None:
        self._design = design
        self._smooth = smooth       # [d, s]: which coefficients a smooth curve of s parameters consists of
        self._cells: dict[tuple[int, ...], _Cell] = {}
        self._recent = [0.0] * const.RECENT_ERRORS
        self._num_recent = 0
        self._next_refit = 2
        self._num_surprises = 0     # since it was refitted
        self.is_trusted = False
        self._typical = 0.3         # log error that is nothing special
        self._outliers: list[float] = []   # log errors of the latest steps, as long as each is one
        self._support: FloatArray = np.full(smooth.shape[1], 1.0 / smooth.shape[1])   # of the smooth curve
        self.theta: FloatArray = smooth @ self._support
        self.coefficients: list[float] = self.theta.tolist()
        self.speed = 1.0
        self._fitted_speed = 1.0    # when what is in the cells was last devalued
        self.num_observed = 0

    @property
    def error(self) -> float:
        return float(np.median(self._recent[: min(self._num_recent, const.RECENT_ERRORS)])) if self._num_recent else math.inf

    def observe(self, raw: Sequence[float], ms: float, predicted: float) -> None:
        if not (math.isfinite(ms) and ms > 0.0):
            return
        if not self._cells or predicted <= 0.0:
            self.learn(raw, ms)
            self.refit()
            self.num_observed += 1
            return
        log_error = math.log(ms / predicted)
        if self._num_recent % 32 == 0 or self._num_recent == 8:
            self._typical = max(0.02, 1.5 * self.error) if self._num_recent else 0.3
        self._recent[self._num_recent % const.RECENT_ERRORS] = abs(predicted / ms - 1.0)
        self._num_recent += 1
        self.num_observed += 1
        bound = 3.0 * self._typical
        # While little is known, an error says something about the curve, not about the machine.
        known = 1.0 if self.is_trusted else min(1.0, self.num_observed / const.FIRST_REFIT)
        self.speed *= math.exp(known * const.SPEED_GAIN * min(bound, max(-bound, log_error)))
        # Only a pause makes a single step an outlier: nothing makes one too fast.
        if log_error > max(0.7, 2.0 * bound):
            self._outliers.append(log_error)
        elif self._outliers:
            self._outliers = []
        if 0 < len(self._outliers) < const.OUTLIER_RUN:
            return
        if log_error < -max(0.7, 2.0 * bound):
            self._disprove(raw, ms)
        if self._outliers:   # so many in a row are no outliers: the machine has changed
            self.speed *= math.exp(float(np.median(self._outliers)))
            self._outliers = []
            self.refit()
        changed = abs(math.log(self.speed / self._fitted_speed)) > const.SPEED_CHANGE
        surprising = abs(log_error) > 2.0 * self._typical
        self._num_surprises += surprising
        if changed or surprising or self.num_observed < const.LEARN_ALL or self.num_observed % const.LEARN_EVERY == 0:
            self.learn(raw, ms)
        if changed or self._num_surprises >= const.REFIT_SURPRISES or self.num_observed >= self._next_refit:
            # The longer nothing changes, the less there is to learn.
            self._next_refit = self.num_observed + min(const.REFIT_EVERY, max(2, self.num_observed // 2))
            self.refit()

    def _disprove(self, raw: Sequence[float], ms: float) -> None:
        """Forgets steps that took longer than as many like this one as they could be done in: first steps do, where something is compiled
        or read from disk. While those that verify seem to take that long nothing is verified, and nobody would ever find out."""
        for key, cell in list(self._cells.items()):
            parts = math.prod([
                max(1.0, there / here) if here > 0.0 else math.inf if there > 0.0 else 1.0
                for there, here in zip(cell.raw, raw, strict=True)
            ])  # fmt: skip
            if cell.ms * self.speed > const.IN_PARTS * parts * ms and len(self._cells) > 1:
                del self._cells[key]

    def learn(self, raw: Sequence[float], ms: float, weight: float = 1.0) -> None:
        key = _key(raw)
        cell = self._cells.get(key)
        if cell is None:
            if len(self._cells) >= const.MAX_CELLS:
                del self._cells[min(self._cells, key=lambda k: self._cells[k].seen)]
            cell = self._cells[key] = _Cell([0.0] * len(raw), 0.0, 0.0, 0)
        cell.learn(raw, ms / self.speed, weight, self.num_observed)

    def rescale(self, factor: float) -> None:
        self.speed *= factor

    def trust(self) -> None:
        """The cells hold measurements already: live steps correct it now and then, not every other step."""
        self.is_trusted = True
        self._next_refit = max(self._next_refit, self.num_observed + const.FIRST_REFIT)

    def refit(self) -> None:
        """Minimises sum of weight * (prediction / ms - 1)^2 over theta >= 0, first for the smooth curve, then around it."""
        if not self._cells:
            return
        self._num_surprises = 0
        change = abs(math.log(self.speed / self._fitted_speed))
        if change > const.SPEED_CHANGE:
            self._fitted_speed = self.speed
            for key, cell in list(self._cells.items()):
                cell.fade(math.exp(-const.CELL_DEVALUATION * change))
                if cell.weight < const.LEAST_WEIGHT and len(self._cells) > 1:
                    del self._cells[key]
        cells = list(self._cells.values())
        ms = np.array([cell.ms for cell in cells])
        weight = np.array([cell.weight for cell in cells])
        rows = self._design(np.array([cell.raw for cell in cells])) / ms[:, None]
        gram, target = rows.T @ (weight[:, None] * rows), rows.T @ weight
        smooth = self._smooth
        small = smooth.T @ gram @ smooth
        # Of explanations that are as good, the constant: what grows would be extrapolated.
        ridge = np.full(len(small), const.FLAT_PRIOR / max(float(weight.sum()), 1e-9))
        ridge[0] *= 1e-3
        small[np.diag_indices_from(small)] += ridge * small.diagonal() + 1e-12
        self._support = nonnegative(small, smooth.T @ target, self._support)
        prior = smooth @ self._support
        # Shrinkage in relative units: a rise counts against the time of the steps it is part of.
        relative = np.sqrt(gram.diagonal() / max(float(weight.sum()), 1e-9)) + 0.02 / float(np.median(ms))
        ridge = const.SMOOTH_PRIOR * relative**2
        gram[np.diag_indices_from(gram)] += ridge
        self.theta = nonnegative(gram, target + ridge * prior, self.theta)
        self.coefficients = self.theta.tolist()

    def to_json(self) -> dict[str, Any]:
        cells = [[*key] for key in self._cells]
        values = [[*cell.raw, cell.ms, cell.weight, cell.seen] for cell in self._cells.values()]
        return {"cells": cells, "values": values, "speed": self.speed, "num_observed": self.num_observed}

    def load(self, saved: Any) -> None:
        for key, values in zip(saved["cells"], saved["values"], strict=True):
            *raw, ms, weight, seen = (float(value) for value in values)
            if not all(map(math.isfinite, (*raw, ms, weight))) or ms <= 0.0 or weight <= 0.0:
                raise ValueError("not a saved cost model: a cell is not finite and positive")
            self._cells[tuple(int(part) for part in key)] = _Cell(raw, ms, weight, int(seen))
        self.speed = self._fitted_speed = float(saved["speed"])
        self.num_observed = int(saved["num_observed"])
        if not (math.isfinite(self.speed) and self.speed > 0.0 and self.num_observed >= 0):
            raise ValueError("not a saved cost model: speed and number of observations must be finite and positive")
        self.refit()
        self.trust()


def _key(raw: Sequence[float]) -> tuple[int, ...]:
    """Of the cell that `raw` belongs to: fine where numbers are small."""
    return tuple(int(2.0 * math.log2(1.0 + value) + 0.5) if value > 8 else int(value) for value in raw)


def nonnegative(gram: FloatArray, target: FloatArray, start: FloatArray) -> FloatArray:
    """min x' gram x / 2 - target' x over x >= 0, exactly, for a positive definite `gram`. Quick when `start` is positive where x is.

    Block principal pivoting (Kim and Park 2011): solve on the positive entries, then exchange all that have the wrong sign; one at a time
    when that does not lead on.
    """
    free = start > 0.0
    least, tries = len(target) + 1, 3
    tolerance = 1e-10 * (1.0 + float(np.abs(target).max(initial=0.0)))
    x = np.zeros(len(target))
    for _ in range(4 * len(target) + 10):
        index = np.flatnonzero(free)
        x = np.zeros(len(target))
        x[index] = np.linalg.solve(gram[index[:, None], index], target[index])
        wrong = np.flatnonzero(np.where(free, x < 0.0, gram @ x - target < -tolerance))
        if len(wrong) == 0:
            break
        if len(wrong) < least:
            least, tries = len(wrong), 3
        elif tries > 0:
            tries -= 1
        else:
            wrong = wrong[-1:]
        free[wrong] = ~free[wrong]
    return np.maximum(x, 0.0)
