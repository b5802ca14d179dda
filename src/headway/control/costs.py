"""What a step costs on this machine: measured, refitted while serving, aware of its own error.

    T(B, N, C, P) = speed * ( f(N) + b B + l (N - P) + c C + a C (N - P) / B + p P + v [N - P > B] )

B rows, N token rows of the forward pass, C tokens of K/V read, P prefill tokens among the N. f is piecewise linear with
knots where tiles, vectors and graph buckets bend it; every coefficient is >= 0, so T never falls when a draft is added. l is
what a row of logits costs, a what attention pays for each further query token of a row, v what a step that verifies any draft at all pays
beyond a plain one. A drafter's time for R sequences and S steps, after W tokens it has not seen (it slept), is

    D(R, S, W) = speed * ( d0 + d1 R + d2 S + d3 R S + d4 W )

Observations are averaged in cells (similar steps), so memory and time stay bounded however long it runs; old cells lose weight, which
is the forgetting, and a cell nobody visits keeps what it knew, scaled by `speed`, the one factor that follows the machine at once (a
noisy neighbour, another clock). The coefficients minimise the squared relative error under the constraint, shrunk towards a smooth curve
where there is no data. A step that took far too long moves nothing until several in a row agree with it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from headway.types import Feedback

FloatArray = NDArray[np.float64]

FORMAT = 2              # of the saved file
KNOTS = np.array([
    *range(1, 10), 12, 13, 16, 17, 20, 24, 25, 28, 32, 33, 40, 48, 56, 64, 65, 80, 96, 112, 128, 129, 160, 192, 224, 256, 257, 320, 384,
    512, 768, 1024, 1536, 2048, 4096, 8192, 16384,
], dtype=np.float64)  # fmt: skip
_WIDTHS = np.diff(KNOTS)
_TABLE = 1025           # f is tabulated for fewer tokens than this
_BEND = 32              # the smooth curve has one slope up to here and another beyond
_PREFER = 0.3           # a curve that is flat, in observations
_SHRINK = 0.5           # towards the smooth curve, in observations
_MEMORY = 24.0          # observations a cell remembers
_FADE = 300.0           # steps without a visit until what a cell remembers counts half against what comes next
_PROFILED = 8.0         # observations that a profile's measurement (a minimum or median of several) stands for
_HALF_LIFE = 3000.0     # steps until a cell that is not visited counts half
_MAX_CELLS = 320
_FEW = 8                # live steps that tell roughly what steps cost
_WELL_KNOWN = 256       # observations after which only one step in
_SELDOM = 3             # is learned from: learning has its price
_YOUNG = 6.0            # observations up to which every step of a cell is
_RARE = 12              # steps since the last of its cell, after which one is, too
_REFIT_EVERY = 64       # observations, at most
_SURPRISES = 2          # steps whose error is no noise, after which it refits: a load that is new must not wait its turn
_FIRST_REFIT = 32       # observations after a profile or what was kept has been read
_RECENT = 128           # errors that `error` is the median of
_TRACK = 0.06           # how fast `speed` follows
_SAME_SPEED = 0.1       # change of speed, as a logarithm, that a few passes cannot prove
_REGIME = 0.2           # change of speed, as a logarithm, after which all cells count less: not everything slows down alike
_LEAST_WEIGHT = 0.1     # a cell that counts less is forgotten
_DEVALUE = 3.0          # how much less: 30 % of a change halves them
_OUTLIER_RUN = 6        # this many outliers in a row are no outliers
_IN_PARTS = 1.5         # times what a step would take in parts: more must have been something else, as compilation


@dataclass(frozen=True, slots=True)
class Work:
    """What one step asks of the target."""

    num_rows: int               # sequences, prefill chunks included
    num_tokens: int             # rows of the forward pass: known tokens plus verified drafts
    num_context_tokens: int     # K/V read, summed over rows
    num_prefill_tokens: int = 0


class CostModel:
    """Predicts the milliseconds of a step and of its drafting; learns from what steps took.

    A model that has seen nothing predicts a plausible shape of unknown size; `num_observed` says how much it has seen.
    """

    def __init__(self) -> None:
        self._target = _Fit(_target_design, _target_smooth())
        self._drafters: dict[str, _Fit] = {}
        self._theta: FloatArray | None = None   # what the next three were made from
        self._heights = KNOTS                   # f at the knots
        self._at: list[float] = []              # f(0), f(1), ... up to _TABLE
        self._others: list[float] = []

    # -- asking ---------------------------------------------------------------------------------------------------

    def predict(self, num_rows: float, num_tokens: ArrayLike, num_context_tokens: float, num_prefill_tokens: float = 0.0) -> FloatArray:
        """Milliseconds of everything in a step but drafting, for each entry of `num_tokens` (any shape)."""
        rows = max(1.0, float(num_rows))
        fixed, growing, verifying = self._line(rows, num_context_tokens, num_prefill_tokens)
        tokens = np.asarray(num_tokens, dtype=np.float64)
        sampled = tokens - num_prefill_tokens
        result: FloatArray = self._target.speed * (
            np.interp(tokens, KNOTS, self._heights) + fixed + growing * sampled + verifying * (sampled > rows)
        )
        return result

    def curve(
        self, num_rows: int, num_tokens: int, num_drafts: int, num_context_tokens: float, num_prefill_tokens: int = 0
    ) -> list[float]:
        """[num_drafts + 1] the same for num_tokens, num_tokens + 1, ... up to `num_drafts` more, without arrays."""
        end = num_tokens + num_drafts + 1
        if end > _TABLE:
            found: list[float] = self.predict(num_rows, np.arange(num_tokens, end), num_context_tokens, num_prefill_tokens).tolist()
            return found
        rows, speed = max(1, num_rows), self._target.speed
        fixed, growing, verifying = self._line(rows, num_context_tokens, num_prefill_tokens)
        fixed, growing, plain = speed * (fixed - growing * num_prefill_tokens), speed * growing, rows + num_prefill_tokens
        at, fixed_verifying = self._at, fixed + speed * verifying
        return [speed * at[n] + growing * n + (fixed_verifying if n > plain else fixed) for n in range(num_tokens, end)]

    def _line(self, rows: float, num_context_tokens: float, num_prefill_tokens: float) -> tuple[float, float, float]:
        """What does not depend on the tokens, what each sampled one adds, and what verifying adds, before `speed`."""
        if self._theta is not self._target.theta:
            self._theta, count = self._target.theta, len(KNOTS)
            self._heights = np.cumsum(self._theta[:count])
            self._at = np.interp(np.arange(_TABLE), KNOTS, self._heights).tolist()
            self._others = (self._theta[count:] / _SCALES).tolist()
        per_row, per_logit, per_context, per_pair, per_prefill, verifying = self._others
        fixed = per_row * rows + per_context * num_context_tokens + per_prefill * num_prefill_tokens
        return fixed, per_logit + per_pair * num_context_tokens / rows, verifying

    def predict_draft(self, drafter: str, num_rows: int, num_steps: int, num_catch_up: int = 0) -> float:
        """Milliseconds of asking `drafter` for `num_rows` drafts of at most `num_steps` tokens; 0 while it is unknown."""
        fit = self._drafters.get(drafter)
        if fit is None or num_rows <= 0 or not fit.num_observed:
            return 0.0
        return _draft_ms(fit, num_rows, num_steps, num_catch_up)

    @property
    def error(self) -> float:
        """Median relative error of the latest predictions of the target, each made before its step was learned from; inf: none yet."""
        return self._target.error

    def draft_error(self, drafter: str) -> float:
        """The same for one drafter."""
        return self._drafters[drafter].error if drafter in self._drafters else math.inf

    @property
    def num_observed(self) -> int:
        return self._target.num_observed

    @property
    def is_known(self) -> bool:
        """Measured by a profile or an earlier run, or in a few live steps."""
        return self._target.is_trusted or self._target.num_observed >= _FEW

    def num_drafted(self, drafter: str) -> int:
        """How often the time of this drafter was observed."""
        return self._drafters[drafter].num_observed if drafter in self._drafters else 0

    @property
    def speed(self) -> float:
        """How slow the machine is now, against the measurements the curve was fitted to: 1.3 is 30 % slower."""
        return self._target.speed

    # -- learning -------------------------------------------------------------------------------------------------

    def observe(self, feedback: Feedback) -> None:
        """One live step. Times that are not positive and finite are ignored."""
        drafting = sum(part.draft_ms for part in feedback.drafters) if feedback.drafters else feedback.draft_ms
        work = (feedback.num_rows or len(feedback.sequences), feedback.num_tokens, feedback.num_context_tokens, feedback.num_prefill_tokens)
        if feedback.num_tokens > 0 and work[0] > 0:
            self._target.observe(work, feedback.step_ms - drafting, self.curve(work[0], work[1], 0, work[2], work[3])[0])
        for part in feedback.drafters:
            if part.num_rows > 0:
                fit = self._drafters.get(part.drafter)
                if fit is None:
                    fit = self._drafters[part.drafter] = _Fit(_draft_design, _DRAFT_SMOOTH)
                if fit.num_observed >= _WELL_KNOWN and feedback.step % _SELDOM:
                    continue
                asked = (part.num_rows, part.num_steps, part.num_catch_up)
                fit.observe(asked, part.draft_ms, _draft_ms(fit, *asked))

    def learn(self, measured: Iterable[tuple[Work, float]]) -> None:
        """Measurements of a profile, (work, milliseconds): taken as they are, in one fit."""
        for work, ms in measured:
            if math.isfinite(ms) and ms > 0.0:
                raw = (work.num_rows, work.num_tokens, work.num_context_tokens, work.num_prefill_tokens)
                self._target.learn(raw, ms, _PROFILED)
        self._target.refit()
        self._target.trust()

    def rescale(self, factor: float) -> None:
        """The machine takes `factor` times what is predicted, as far as anyone knows for everything: another clock, another neighbour."""
        if math.isfinite(factor) and factor > 0.0 and abs(math.log(factor)) > _SAME_SPEED:
            for fit in (self._target, *self._drafters.values()):
                fit.rescale(factor)

    # -- keeping --------------------------------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "target": self._target.to_json(),
            "drafters": {name: fit.to_json() for name, fit in self._drafters.items()},
        }

    @classmethod
    def from_json(cls, document: Any) -> CostModel:
        """Raises ValueError for anything that `to_json` did not write."""
        model = cls()
        try:
            if document["format"] != FORMAT:
                raise ValueError(f"a cost model of format {document['format']!r}; this version reads {FORMAT}")
            model._target.load(document["target"])
            for name, saved in document["drafters"].items():
                model._drafters[str(name)] = _Fit(_draft_design, _DRAFT_SMOOTH)
                model._drafters[str(name)].load(saved)
        except (KeyError, TypeError, AttributeError, IndexError, OverflowError) as error:
            raise ValueError(f"not a saved cost model: {error!r}") from error
        return model


# -- the regression ---------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Cell:
    """Steps that are alike: the mean of what they asked for and of what they took (divided by `speed` at the time)."""

    raw: list[float]
    ms: float
    weight: float
    seen: int           # number of the latest observation

    def learn(self, raw: Sequence[float], ms: float, weight: float, number: int) -> None:
        # Steps that are rare now, as plain ones are where drafts pay, would take hundreds to correct what they were under another load.
        self.weight = min(self.weight * 0.5 ** ((number - self.seen) / _FADE) + weight, _MEMORY)
        share = weight / self.weight
        self.raw = [mean + share * (value - mean) for mean, value in zip(self.raw, raw, strict=True)]
        self.ms += share * (ms - self.ms)
        self.seen = number

    def fade(self, factor: float) -> None:
        self.weight *= factor


class _Fit:
    """Non-negative least squares on aging cells, and one factor for the speed of the machine."""

    def __init__(self, design: Callable[[FloatArray], FloatArray], smooth: FloatArray) -> None:
        self._design = design
        self._smooth = smooth       # [d, s]: which coefficients a smooth curve of s parameters consists of
        self._cells: dict[tuple[int, ...], _Cell] = {}
        self._recent = [0.0] * _RECENT
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
        return float(np.median(self._recent[: min(self._num_recent, _RECENT)])) if self._num_recent else math.inf

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
        self._recent[self._num_recent % _RECENT] = abs(predicted / ms - 1.0)
        self._num_recent += 1
        self.num_observed += 1
        bound = 3.0 * self._typical
        # While little is known, an error says something about the curve, not about the machine.
        known = 1.0 if self.is_trusted else min(1.0, self.num_observed / _FIRST_REFIT)
        self.speed *= math.exp(known * _TRACK * min(bound, max(-bound, log_error)))
        # Only a pause makes a single step an outlier: nothing makes one too fast.
        if log_error > max(0.7, 2.0 * bound):
            self._outliers.append(log_error)
        elif self._outliers:
            self._outliers = []
        if 0 < len(self._outliers) < _OUTLIER_RUN:
            return
        if log_error < -max(0.7, 2.0 * bound):
            self._disprove(raw, ms)
        if self._outliers:   # so many in a row are no outliers: the machine has changed
            self.speed *= math.exp(float(np.median(self._outliers)))
            self._outliers = []
            self.refit()
        changed = abs(math.log(self.speed / self._fitted_speed)) > _REGIME
        surprising = abs(log_error) > 2.0 * self._typical
        self._num_surprises += surprising
        if changed or surprising or self.num_observed < _WELL_KNOWN or self.num_observed % _SELDOM == 0 or self._is_young(raw):
            self.learn(raw, ms)
        if changed or self._num_surprises >= _SURPRISES or self.num_observed >= self._next_refit:
            # The longer nothing changes, the less there is to learn.
            self._next_refit = self.num_observed + min(_REFIT_EVERY, max(2, self.num_observed // 2))
            self.refit()

    def _is_young(self, raw: Sequence[float]) -> bool:
        """Whether steps like this one were hardly learned from, or not for a while."""
        cell = self._cells.get(_key(raw))
        return cell is None or cell.weight < _YOUNG or self.num_observed - cell.seen > _RARE

    def _disprove(self, raw: Sequence[float], ms: float) -> None:
        """Forgets steps that took longer than as many like this one as they could be done in: first steps do, where something is compiled
        or read from disk. While those that verify seem to take that long nothing is verified, and nobody would ever find out."""
        for key, cell in list(self._cells.items()):
            parts = math.prod([
                max(1.0, there / here) if here > 0.0 else math.inf if there > 0.0 else 1.0
                for there, here in zip(cell.raw, raw, strict=True)
            ])  # fmt: skip
            if cell.ms * self.speed > _IN_PARTS * parts * ms and len(self._cells) > 1:
                del self._cells[key]

    def learn(self, raw: Sequence[float], ms: float, weight: float = 1.0) -> None:
        key = _key(raw)
        cell = self._cells.get(key)
        if cell is None:
            if len(self._cells) >= _MAX_CELLS:
                del self._cells[min(self._cells, key=lambda k: self._cells[k].seen)]
            cell = self._cells[key] = _Cell([0.0] * len(raw), 0.0, 0.0, 0)
        cell.learn(raw, ms / self.speed, weight, self.num_observed)

    def rescale(self, factor: float) -> None:
        self.speed *= factor

    def trust(self) -> None:
        """What is in the cells is worth something already: live steps correct it now and then, not every other step."""
        self.is_trusted = True
        self._next_refit = max(self._next_refit, self.num_observed + _FIRST_REFIT)

    def refit(self) -> None:
        """Minimises sum of weight * (prediction / ms - 1)^2 over theta >= 0, first for the smooth curve, then around it."""
        if not self._cells:
            return
        self._num_surprises = 0
        change = abs(math.log(self.speed / self._fitted_speed))
        if change > _REGIME:
            self._fitted_speed = self.speed
            for key, cell in list(self._cells.items()):
                cell.fade(math.exp(-_DEVALUE * change))
                if cell.weight < _LEAST_WEIGHT and len(self._cells) > 1:
                    del self._cells[key]
        cells = list(self._cells.values())
        ms = np.array([cell.ms for cell in cells])
        age = self.num_observed - np.array([cell.seen for cell in cells], dtype=np.float64)
        weight = np.array([cell.weight for cell in cells]) * np.maximum(0.02, 0.5 ** (age / _HALF_LIFE))
        rows = self._design(np.array([cell.raw for cell in cells])) / ms[:, None]
        gram, target = rows.T @ (weight[:, None] * rows), rows.T @ weight
        smooth = self._smooth
        small = smooth.T @ gram @ smooth
        # Of explanations that are as good, the constant: what grows would be extrapolated.
        ridge = np.full(len(small), _PREFER / max(float(weight.sum()), 1e-9))
        ridge[0] *= 1e-3
        small[np.diag_indices_from(small)] += ridge * small.diagonal() + 1e-12
        self._support = _nonnegative(small, smooth.T @ target, self._support)
        prior = smooth @ self._support
        # Shrinkage in relative units: a rise counts against the time of the steps it is part of.
        relative = np.sqrt(gram.diagonal() / max(float(weight.sum()), 1e-9)) + 0.02 / float(np.median(ms))
        ridge = _SHRINK * relative**2
        gram[np.diag_indices_from(gram)] += ridge
        self.theta = _nonnegative(gram, target + ridge * prior, self.theta)
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


def _nonnegative(gram: FloatArray, target: FloatArray, start: FloatArray) -> FloatArray:
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


# Typical sizes: they bring the coefficients of different things to one scale. Rows, logit rows, context, context * query tokens, prefill,
# verifying at all.
_SCALES = np.array([16.0, 16.0, 4096.0, 4096.0, 256.0, 1.0])


def _target_design(raw: FloatArray) -> FloatArray:
    """[n, 4] rows, tokens, context, prefill -> [n, d]."""
    rows, tokens, context, prefill = raw.T
    ramps = np.clip((tokens[:, None] - KNOTS[:-1]) / _WIDTHS, 0.0, 1.0)
    sampled = tokens - prefill
    others = np.stack([rows, sampled, context, context * sampled / np.maximum(rows, 1.0), prefill, sampled > rows], axis=1) / _SCALES
    return np.concatenate([np.ones((len(raw), 1)), ramps, others], axis=1)


def _target_smooth() -> FloatArray:
    """A constant, two slopes for the ramps, and the others as they are; verifying costs nothing extra until that has been seen."""
    count, others = len(_WIDTHS), len(_SCALES) - 1
    smooth = np.zeros((1 + count + others + 1, 3 + others))
    smooth[0, 0] = 1.0
    early = KNOTS[1:] <= _BEND
    smooth[1 : 1 + count, 1] = np.where(early, _WIDTHS, 0.0) / _BEND
    smooth[1 : 1 + count, 2] = np.where(early, 0.0, _WIDTHS) / 256.0
    smooth[1 + count : -1, 3:] = np.eye(others)
    return smooth


# Rows, rows * steps, catching up: what is paid once whatever the number of rows has to show in the data.
_DRAFT_SMOOTH = np.eye(5)[:, [1, 3, 4]]


def _draft_ms(fit: _Fit, rows: int, steps: int, catch_up: int) -> float:
    """`_draft_design` times theta, without arrays: asked several times a step."""
    fixed, per_row, per_step, per_both, per_unseen = fit.coefficients
    return fit.speed * (fixed + per_row * rows + per_step * steps + per_both * rows * steps / 8.0 + per_unseen * catch_up / 256.0)


def _draft_design(raw: FloatArray) -> FloatArray:
    """[n, 3] rows, steps, catch-up -> [n, 5]."""
    rows, steps, catch_up = raw.T
    return np.stack([np.ones(len(raw)), rows, steps, rows * steps / 8.0, catch_up / 256.0], axis=1)
