"""What to verify of finished drafts: control/goodput/allocation.py with each drafter's calibrated acceptance.

In numbers for few drafts, in arrays for many. What a drafter that is new may have verified: control/goodput/exploration.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from headway.control.goodput.allocation import allocate, allocate_few
from headway.control.goodput.decision import Step
from headway.control.goodput.drafter_state import DrafterState
from headway.control.policy import DraftView

FloatArray = NDArray[np.float64]


def select_few(
    drafts: Sequence[DraftView], by_name: Mapping[str, DrafterState], verify_ms: Sequence[float], step: Step
) -> tuple[dict[int, int], float]:
    """(seq_id -> drafts to verify, tokens expected of them)

    verify_ms  of a step that verifies 0, 1, ... of them
    """
    values = [by_name[draft.drafter].reach(draft) for draft in drafts]
    chosen = allocate_few(values, verify_ms, step.prices.rate)
    _on_trial(by_name, drafts, values, chosen, verify_ms, step)
    gained = sum([sum(line[:length]) for line, length in zip(values, chosen, strict=True)])
    return {draft.seq_id: length for draft, length in zip(drafts, chosen, strict=True)}, gained


def select_many(
    drafts: Sequence[DraftView], by_name: Mapping[str, DrafterState], verify_ms: FloatArray, step: Step, *,
    latency: bool = False, slo_ms: FloatArray | None = None,
) -> tuple[dict[int, int], float]:
    """The same for all objectives, in arrays.

    slo_ms  [rows of the step] milliseconds per token that each may take
    """
    rows = {seq.seq_id: row for row, seq in enumerate(step.prices.sequences)}
    values = np.zeros((len(rows), max([draft.length for draft in drafts], default=1)))
    for name, drafter in by_name.items():
        mine = [draft for draft in drafts if draft.drafter == name]
        if mine:
            made = drafter.values(mine)
            values[[rows[draft.seq_id] for draft in mine], : made.shape[1]] = made
    corrected = verify_ms + (step.prices.plain_ms - step.prices.predicted_ms)
    lengths = allocate(values, corrected, rate=step.prices.rate, latency=latency, slo_ms=slo_ms)
    places = [rows[draft.seq_id] for draft in drafts]
    found = lengths[places].tolist()
    if any(drafter.is_new for drafter in by_name.values()):
        _on_trial(by_name, drafts, values[places].tolist(), found, verify_ms.tolist(), step)
        lengths[places] = found
    gained = float(values[np.arange(values.shape[1]) < lengths[:, None]].sum())
    return dict(zip([draft.seq_id for draft in drafts], found, strict=True)), gained


def _on_trial(
    by_name: Mapping[str, DrafterState], drafts: Sequence[DraftView], values: Sequence[Sequence[float]], lengths: list[int],
    step_ms: Sequence[float], step: Step,
) -> None:
    """Cuts `lengths`, what is to be verified of each draft, to what drafters that are new may have verified. A draft of which nothing is
    left tells what asking is worth by what the target writes.

    step_ms  of a step that verifies 0, 1, ... of them
    """
    for drafter in by_name.values():
        if not drafter.is_new:
            continue
        mine = [i for i, draft in enumerate(drafts) if draft.drafter == drafter.name]
        allowed = drafter.allowed([values[i] for i in mine], [lengths[i] for i in mine], step_ms, step.prices.plain_ms)
        for i, length in zip(mine, allowed, strict=True):
            if length == 0 < lengths[i]:
                drafter.watch(drafts[i].seq_id, drafts[i].length, len(mine), step.prices.rate, step.verify_ms)
            lengths[i] = length
