"""Which drafts to verify, for the whole batch at once.

    value[r, j] = P(the first j + 1 drafts of request r are all accepted)      the expected extra token from verifying draft j
    tokens(S)   = num_rows + sum of value over S
    T(n)        = milliseconds of the step when n drafts are verified in total

A row's values never increase, so for a given total n the best set S is the n largest values, and that set is a prefix of every row. One
sort and one scan over n therefore find the optimum, exactly, for any T that depends on the total only (monotone or not). This is
the batch-wide form of what TETRIS (arXiv 2502.15197) does for a fixed capacity and DSpark (arXiv 2607.05147) for a measured one.

Objectives:

    rate       maximise tokens(S) - rate * T(n). `rate` is the price of time in tokens: the long-run tokens per
               millisecond. Then this maximises long-run goodput (Dinkelbach's condition for the best ratio of two sums): a
               step with excellent drafts may go deeper than its own ratio would allow.
    latency    minimise the mean over requests of T(n) / (tokens of the request): each draft counts by how much it shortens
               its request's time per token, v / ((1 + V) (1 + V + v)) with V the value before it. These never increase along a
               row either.
    slo_ms     when the optimum leaves a request above its target: of the sets on the paths of the two orders, the best one in
               which no request is expected to take more than its target per token; where there is none, the least latency of those
               that have a target
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from headway.control import constants as const
from headway.control.costs import CostModel
from headway.control.goodput.decision import Step
from headway.control.goodput.drafter_state import DrafterState
from headway.control.policy import DraftView
from headway.types import Forecast

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
Lines = Sequence[Sequence[float]]   # one per draft, of any length, positive and non-increasing


def select(
    step: Step, drafts: Sequence[DraftView], drafters: Mapping[str, DrafterState], costs: CostModel, *, latency: bool,
    slo_ms: Mapping[int, float],
) -> tuple[dict[int, int], Forecast]:
    """(seq_id -> drafts to verify, what is expected of the step). Sampled drafts are not in it: they are verified whole.

    slo_ms  seq_id -> milliseconds per token, of requests with a target
    """
    prices, sequences = step.prices, step.prices.sequences
    sampled = {seq.seq_id for seq in sequences if not seq.greedy}
    free = [draft for draft in drafts if draft.deterministic or draft.seq_id not in sampled]
    num_free = sum([draft.length for draft in free])
    whole = sum([draft.length for draft in drafts]) - num_free
    num_rows, prefill = len(sequences), prices.num_prefill
    step_ms = costs.curve(num_rows + (prefill > 0), num_rows + prefill + whole, num_free, prices.num_context + prefill, prefill)
    if num_free <= const.FEW_DRAFTS and not latency and not slo_ms:
        values = [drafters[draft.drafter].reach(draft) for draft in free]
        lengths = allocate_few(values, step_ms, prices.rate)
    else:
        rows = {seq.seq_id: row for row, seq in enumerate(sequences)}   # those without drafts have targets, too
        places = [rows[draft.seq_id] for draft in free]
        array = np.zeros((num_rows, max([draft.length for draft in free], default=1)))
        for name, drafter in drafters.items():
            if mine := [draft for draft in free if draft.drafter == name]:
                made = drafter.values(mine)
                array[[rows[draft.seq_id] for draft in mine], : made.shape[1]] = made
        slo = np.array([slo_ms.get(seq.seq_id, np.inf) for seq in sequences]) if slo_ms else None
        lengths = allocate(array, np.array(step_ms), rate=prices.rate, latency=latency, slo_ms=slo)[places].tolist()
        values = array[places].tolist()
    _limit_new(step, free, drafters, values, lengths, step_ms)
    total, gained = sum(lengths), sum([sum(line[:length]) for line, length in zip(values, lengths, strict=True)])
    if total:
        step.verified((step_ms[total] - step_ms[0]) / total)
    drafting_ms = step.drafting_ms(list(drafters.values()), drafts, costs)
    forecast = Forecast(step_ms[total] + drafting_ms, num_rows + gained, prices.plain_ms if whole else step_ms[0])
    return {draft.seq_id: length for draft, length in zip(free, lengths, strict=True)}, forecast


def _limit_new(
    step: Step, drafts: Sequence[DraftView], drafters: Mapping[str, DrafterState], values: Lines, lengths: list[int],
    step_ms: Sequence[float],
) -> None:
    """Cuts `lengths` to what drafters that are new may have verified. A draft of which nothing is left says what asking gains by what the
    target writes."""
    for drafter in drafters.values():
        if not drafter.is_new:
            continue
        mine = [i for i, draft in enumerate(drafts) if draft.drafter == drafter.name]
        most = drafter.allowed(step_ms, step.prices.plain_ms)
        order = sorted([(-value, position, i) for i in mine for position, value in enumerate(values[i][: lengths[i]])])
        for i in mine:
            allowed = max(1, lengths[i]) if most is None else sum([row == i for _, _, row in order[:most]])
            if allowed == 0 < lengths[i]:
                drafter.watch(drafts[i].seq_id, drafts[i].length, len(mine), step.prices.rate, step.verify_ms)
            lengths[i] = allowed


def allocate(
    values: FloatArray, step_ms: FloatArray, *, rate: float, latency: bool = False, slo_ms: FloatArray | None = None
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


def allocate_few(values: Lines, step_ms: Sequence[float], rate: float) -> list[int]:
    """`allocate` for a rate, without arrays: several times quicker for some tens of drafts.

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


def _best_total(values: FloatArray, order: IntArray, step_ms: FloatArray, rate: float, latency: bool) -> int:
    gains = (_shortenings(values) if latency else values).ravel()[order]
    summed = np.concatenate([[0.0], np.cumsum(gains)])
    ms = step_ms[: len(summed)]
    return int(np.argmin(ms * (len(values) - summed)) if latency else np.argmax(summed - rate * ms))


def _lengths(chosen: IntArray, shape: tuple[int, ...]) -> IntArray:
    return np.bincount(chosen // max(1, shape[1]), minlength=shape[0])


def _tokens(values: FloatArray, chosen: IntArray) -> FloatArray:
    """[num_rows] expected tokens of each row."""
    return 1.0 + np.bincount(chosen // max(1, values.shape[1]), values.ravel()[chosen], len(values)).astype(np.float64)


def _meets(values: FloatArray, chosen: IntArray, ms: float, slo_ms: FloatArray) -> bool:
    return bool(np.all(ms <= slo_ms * _tokens(values, chosen)))


def _within(values: FloatArray, step_ms: FloatArray, order: IntArray, rate: float, slo_ms: FloatArray) -> IntArray:
    """The best set that meets every target, over points of the throughput order and of the latency order."""
    balanced, targeted = _by_gain(_shortenings(values)), np.isfinite(slo_ms)
    best: tuple[bool, float] | None = None
    found = np.zeros(len(values), dtype=np.int64)
    for path, latency in ((order, False), (balanced, True)):
        optimum = _best_total(values, path, step_ms, rate, latency)
        for total in sorted({*np.linspace(0, len(path), const.SLO_POINTS).astype(int).tolist(), optimum}):
            tokens, ms = _tokens(values, path[:total]), float(step_ms[total])
            meets = bool(np.all(ms <= slo_ms * tokens))
            gained = float(tokens.sum()) - rate * ms if meets else -ms * float(np.mean(1.0 / tokens[targeted]))
            if best is None or (meets, gained) > best:
                best, found = (meets, gained), _lengths(path[:total], values.shape)
    return found
