"""Which drafts are worth verifying, for the whole batch at once.

    value[r, j] = P(the first j + 1 drafts of request r are all accepted)      the expected extra token from verifying draft j
    tokens(S)   = num_rows + sum of value over S
    T(n)        = milliseconds of the step when n drafts are verified in total

A row's values never increase, so for a given total n the best set S is the n largest values, and that set is a prefix of every row. One
sort and one scan over n therefore find the optimum, exactly, for any T that depends on the total only (monotone or not). This is
the batch-wide form of what TETRIS (arXiv 2502.15197) does for a fixed capacity and DSpark (arXiv 2607.05147) for a measured one.

Objectives:

    rate       maximise tokens(S) - rate * T(n). `rate` is what a millisecond is worth, in tokens: the long-run tokens per
               millisecond. Then this maximises long-run goodput (Dinkelbach's condition for the best ratio of two sums): a
               step with excellent drafts may go deeper than its own ratio would allow.
    None       maximise tokens(S) / T(n), the goodput of this step alone
    latency    minimise the mean over requests of T(n) / (tokens of the request): each draft counts by how much it shortens
               its request's time per token, v / ((1 + V) (1 + V + v)) with V the value before it. These never increase along a
               row either.
    slo_ms     when the optimum leaves a request above its target: of the sets on the paths of the two orders, the best one in
               which no request is expected to take more than its target per token; where there is none, the least latency of those
               that have a target
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

FEW = 96             # drafts up to which lists are quicker than arrays
_SLO_POINTS = 16     # totals at which the targets are checked, on each path


def allocate(
    values: FloatArray, step_ms: FloatArray, *, rate: float | None = None, latency: bool = False, slo_ms: FloatArray | None = None
) -> IntArray:
    """[num_rows] how many drafts of each row to verify.

    values    [num_rows, k], non-increasing along a row; 0 where there is no draft
    step_ms   [at least 1 + number of positive values] T(n) for n = 0, 1, ...
    slo_ms    [num_rows] milliseconds per token, inf for a request without a target
    """
    order = _by_gain(_shortenings(values) if latency else values)
    total = _best_total(values, order, step_ms, rate, latency)
    if slo_ms is not None and not _meets(values, order[:total], float(step_ms[total]), slo_ms):
        return _within(values, step_ms, order, rate, slo_ms)
    return _lengths(order[:total], values.shape)


def allocate_few(values: Sequence[Sequence[float]], step_ms: Sequence[float], rate: float) -> list[int]:
    """`allocate` for a rate, without arrays: several times quicker for some tens of drafts.

    values    one list per row, of any length, positive and non-increasing
    step_ms   [at least 1 + number of values]
    """
    order = sorted([(-value, position, row) for row, line in enumerate(values) for position, value in enumerate(line)])
    best = -rate * step_ms[0]
    tokens, total = 0.0, 0
    for count, (loss, _, _) in enumerate(order, start=1):
        tokens -= loss
        gained = tokens - rate * step_ms[count]
        if gained > best:
            best, total = gained, count
    lengths = [0] * len(values)
    for _, _, row in order[:total]:
        lengths[row] += 1
    return lengths


def _by_gain(gains: FloatArray) -> IntArray:
    """Flat indices of the positive gains, the largest first; equal ones in order of position, so every beginning is prefix-closed."""
    flat = gains.ravel()
    positive = np.flatnonzero(flat > 0.0)
    return positive[np.argsort(-flat[positive], kind="stable")]


def _shortenings(values: FloatArray) -> FloatArray:
    """[num_rows, k] by how much each draft reduces 1 / (expected tokens of its row)."""
    after = 1.0 + np.cumsum(values, axis=1)
    shortenings: FloatArray = values / (after * (after - values))
    return shortenings


def _best_total(values: FloatArray, order: IntArray, step_ms: FloatArray, rate: float | None, latency: bool) -> int:
    gains = (_shortenings(values) if latency else values).ravel()[order]
    summed = np.concatenate([[0.0], np.cumsum(gains)])
    ms = step_ms[: len(summed)]
    num_rows = len(values)
    if latency:
        return int(np.argmin(ms * (num_rows - summed)))
    return int(np.argmax(summed - rate * ms if rate is not None else (num_rows + summed) / ms))


def _lengths(chosen: IntArray, shape: tuple[int, ...]) -> IntArray:
    return np.bincount(chosen // max(1, shape[1]), minlength=shape[0])


def _tokens(values: FloatArray, chosen: IntArray) -> FloatArray:
    """[num_rows] expected tokens of each row."""
    return 1.0 + np.bincount(chosen // max(1, values.shape[1]), values.ravel()[chosen], len(values)).astype(np.float64)


def _meets(values: FloatArray, chosen: IntArray, ms: float, slo_ms: FloatArray) -> bool:
    return bool(np.all(ms <= slo_ms * _tokens(values, chosen)))


def _within(values: FloatArray, step_ms: FloatArray, order: IntArray, rate: float | None, slo_ms: FloatArray) -> IntArray:
    """The best set that meets every target, over points of the throughput order and of the latency order."""
    balanced, targeted = _by_gain(_shortenings(values)), np.isfinite(slo_ms)
    best: tuple[bool, float] | None = None
    found = np.zeros(len(values), dtype=np.int64)
    for path, latency in ((order, False), (balanced, True)):
        optimum = _best_total(values, path, step_ms, rate, latency)
        for total in sorted({*np.linspace(0, len(path), _SLO_POINTS).astype(int).tolist(), optimum}):
            tokens, ms = _tokens(values, path[:total]), float(step_ms[total])
            meets = bool(np.all(ms <= slo_ms * tokens))
            gained = float(tokens.sum())
            reached = (gained - rate * ms if rate is not None else gained / ms) if meets else -ms * float(np.mean(1.0 / tokens[targeted]))
            if best is None or (meets, reached) > best:
                best, found = (meets, reached), _lengths(path[:total], values.shape)
    return found
