"""How deep to draft: until a further position gains less, over all requests asked, than drafting and verifying it costs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from headway.control.costs import CostModel, Work
from headway.control.goodput.allocation import FEW, allocate, allocate_few
from headway.control.goodput.drafter_state import DrafterState

FloatArray = NDArray[np.float64]

DEPTHS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32)
_MOST_SHARED = 16.0   # rows that pay for one that is drafted for, at most


def choose_depth(
    drafter: DrafterState, costs: CostModel, seq_ids: list[int], work: Work, rate: float, depths: Sequence[int]
) -> tuple[int, list[int]]:
    """What `best_depth` finds by the drafter's statistics of these requests, beside a step that does `work` without drafts."""
    num_rows, longest = len(seq_ids), depths[-1]
    draft_ms = _draft_ms(drafter, costs, num_rows)
    if num_rows * longest <= FEW and drafter.breadth.value == 1.0:
        few = [drafter.without_confidence.reach(seq_id, longest, None) for seq_id in seq_ids]
        return best_depth_few(
            few, costs.curve(work.num_rows, work.num_tokens, num_rows * longest, work.num_context_tokens), draft_ms, rate, depths
        )
    reached = np.asarray(np.cumprod(drafter.without_confidence.predict(seq_ids, longest), axis=1), dtype=np.float64)
    tokens = work.num_tokens + drafter.breadth.value * np.arange(reached.size + 1)
    return best_depth(reached, costs.predict(work.num_rows, tokens, work.num_context_tokens), draft_ms, rate, depths)


def _draft_ms(drafter: DrafterState, costs: CostModel, num_rows: int) -> Callable[[int], float]:
    """depth -> milliseconds of drafting, as if for all rows: where cheaper drafters draft for some, fewer pay for its fixed cost."""
    share = max(1.0 / _MOST_SHARED, drafter.reached.value)
    asked = max(1, round(share * num_rows))
    return lambda depth: num_rows / asked * costs.predict_draft(drafter.name, asked, depth)


def best_depth(
    reached: FloatArray, step_ms: FloatArray, draft_ms: Callable[[int], float], rate: float, depths: Sequence[int]
) -> tuple[int, list[int]]:
    """(depth, [n] positions of each request that would be verified)

    reached   [n, k] P(the draft is accepted up to here)
    step_ms   [1 + n k] of a step that verifies 0, 1, ... drafts
    draft_ms  what drafting to a depth costs
    rate      tokens a millisecond is worth
    depths    to choose from, at most k
    """
    best, found = -np.inf, (depths[-1], [0] * len(reached))
    for depth in depths:
        part = reached[:, :depth]
        chosen = allocate(part, step_ms, rate=rate)
        tokens = float(part[np.arange(depth) < chosen[:, None]].sum())
        gained = tokens - rate * (float(step_ms[int(chosen.sum())]) + draft_ms(depth))
        if gained > best:
            best, found = gained, (depth, chosen.tolist())
    return found


def best_depth_few(
    reached: Sequence[Sequence[float]], step_ms: Sequence[float], draft_ms: Callable[[int], float], rate: float, depths: Sequence[int]
) -> tuple[int, list[int]]:
    """The same without arrays: several times quicker for some tens of positions."""
    best, found = -np.inf, (depths[-1], [0] * len(reached))
    for depth in depths:
        part = [line[:depth] for line in reached]
        chosen = allocate_few(part, step_ms, rate)
        tokens = sum([sum(line[:length]) for line, length in zip(part, chosen, strict=True)])
        gained = tokens - rate * (step_ms[sum(chosen)] + draft_ms(depth))
        if gained > best:
            best, found = gained, (depth, chosen)
    return found
