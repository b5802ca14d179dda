"""What a step costs on this machine: measured, refitted while serving, aware of its own error.

    T(B, N, C, P) = speed * ( f(N) + b B + l (N - P) + c C + a C (N - P) / B + p P + v [N - P > B] )

B rows, N token rows of the forward pass, C tokens of K/V read, P prefill tokens among the N. f is piecewise linear with
knots where tiles, vectors and graph buckets bend it; every coefficient is >= 0, so T never falls when a draft is added. l is
what a row of logits costs, a what attention pays for each further query token of a row, v what a step that verifies any draft at all pays
beyond a plain one. A drafter's time for R sequences and S steps, after W tokens it has not read yet, is

    D(R, S, W) = speed * ( d0 + d1 R + d2 S + d3 R S + d4 W )

How the coefficients are fitted, and what `speed` is: control/cost_fit.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from headway.control import constants as const
from headway.control.cost_fit import CostFit, FloatArray
from headway.types import Feedback

FORMAT = 2              # of the saved file
KNOTS = np.array([
    *range(1, 10), 12, 13, 16, 17, 20, 24, 25, 28, 32, 33, 40, 48, 56, 64, 65, 80, 96, 112, 128, 129, 160, 192, 224, 256, 257, 320, 384,
    512, 768, 1024, 1536, 2048, 4096, 8192, 16384,
], dtype=np.float64)  # fmt: skip
_WIDTHS = np.diff(KNOTS)
_TABLE = 1025           # f is tabulated for fewer tokens than this


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
        self._target = CostFit(_target_design, _target_smooth())
        self._drafters: dict[str, CostFit] = {}
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

    @property
    def num_observed(self) -> int:
        return self._target.num_observed

    @property
    def is_known(self) -> bool:
        """Measured by a profile or an earlier run, or in a few live steps."""
        return self._target.is_trusted or self._target.num_observed >= const.FEW_STEPS

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
                    fit = self._drafters[part.drafter] = CostFit(_draft_design, _DRAFT_SMOOTH)
                if fit.num_observed >= const.LEARN_ALL and feedback.step % const.LEARN_EVERY:
                    continue
                asked = (part.num_rows, part.num_steps, part.num_catch_up)
                fit.observe(asked, part.draft_ms, _draft_ms(fit, *asked))

    def learn(self, measured: Iterable[tuple[Work, float]]) -> None:
        """Measurements of a profile, (work, milliseconds): taken as they are, in one fit."""
        for work, ms in measured:
            if math.isfinite(ms) and ms > 0.0:
                raw = (work.num_rows, work.num_tokens, work.num_context_tokens, work.num_prefill_tokens)
                self._target.learn(raw, ms, const.PROFILE_WEIGHT)
        self._target.refit()
        self._target.trust()

    def rescale(self, factor: float) -> None:
        """The machine takes `factor` times what is predicted, as far as anyone knows for everything: another clock, another neighbour."""
        if math.isfinite(factor) and factor > 0.0 and abs(math.log(factor)) > const.SAME_SPEED:
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
                model._drafters[str(name)] = CostFit(_draft_design, _DRAFT_SMOOTH)
                model._drafters[str(name)].load(saved)
        except (KeyError, TypeError, AttributeError, IndexError, OverflowError) as error:
            raise ValueError(f"not a saved cost model: {error!r}") from error
        return model


# -- what the coefficients stand for -----------------------------------------------------------------------------------

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
    early = KNOTS[1:] <= const.BEND
    smooth[1 : 1 + count, 1] = np.where(early, _WIDTHS, 0.0) / const.BEND
    smooth[1 : 1 + count, 2] = np.where(early, 0.0, _WIDTHS) / 256.0
    smooth[1 + count : -1, 3:] = np.eye(others)
    return smooth


# Rows, rows * steps, catching up: what is paid once whatever the number of rows has to show in the data.
_DRAFT_SMOOTH = np.eye(5)[:, [1, 3, 4]]


def _draft_ms(fit: CostFit, rows: int, steps: int, catch_up: int) -> float:
    """`_draft_design` times theta, without arrays: asked several times a step."""
    fixed, per_row, per_step, per_both, per_unseen = fit.coefficients
    return fit.speed * (fixed + per_row * rows + per_step * steps + per_both * rows * steps / 8.0 + per_unseen * catch_up / 256.0)


def _draft_design(raw: FloatArray) -> FloatArray:
    """[n, 3] rows, steps, catch-up -> [n, 5]."""
    rows, steps, catch_up = raw.T
    return np.stack([np.ones(len(raw)), rows, steps, rows * steps / 8.0, catch_up / 256.0], axis=1)
