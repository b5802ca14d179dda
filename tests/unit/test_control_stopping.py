"""Where drafts stop: the choice is the best one there is, and goodput with it beats any fixed length."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from headway.control.costs import CostModel, Work
from headway.control.goodput.draft_length import Stopping
from headway.control.goodput.drafter_state import DrafterState
from headway.control.policies.goodput import Goodput
from headway.control.policy import DrafterView
from headway.types import DrafterFeedback, Feedback
from tests.closed_loop import DrafterCost, Fixed, Texture, World, run

MAX_K = 6


def candidate(fixed: float, each: float) -> DrafterState:
    """One pass for n drafts takes fixed + each * n milliseconds."""
    costs = CostModel()
    for step in range(80):
        rows, passes = 1 + step % 4, 1 + step // 4 % 5
        part = DrafterFeedback("small", rows, passes, 0, rows * passes, passes * (fixed + each * rows))
        costs.observe(Feedback(step, (), 0, 0, 0, part.draft_ms, part.draft_ms, part.draft_ms, drafters=(part,)))
    return DrafterState(DrafterView("small", True, stepwise=True), MAX_K, costs)


@settings(max_examples=60, deadline=None)
@given(
    stated=st.lists(st.floats(0.02, 0.98), min_size=1, max_size=4), position=st.integers(0, 3), rate=st.floats(0.01, 0.3),
    slope=st.floats(0.0, 1.0), tile=st.floats(0.0, 5.0),
)  # fmt: skip
def test_it_goes_on_for_those_that_bring_most(stated: list[float], position: int, rate: float, slope: float, tile: float) -> None:
    drafter, ids = candidate(1.5, 0.5), list(range(len(stated)))
    counts = np.arange(4 * MAX_K + 1)
    step_ms = 10.0 + slope * counts + tile * (counts > 5)
    stopping = Stopping(drafter, step_ms, rate)
    for before in range(position):
        stopping.goes_on(ids, before, np.full(len(ids), 0.9))
    kept = stopping.goes_on(ids, position, np.array(stated))
    sure = np.full((len(ids), MAX_K), np.nan)
    sure[:, :position], sure[:, position] = 0.9, stated
    reach = np.cumprod(drafter.with_confidence.predict(ids, MAX_K, sure), axis=1)[:, position]
    ahead = np.cumsum(np.cumprod(drafter.without_confidence.predict(ids, MAX_K)[:, position + 1 :], axis=1), axis=1)
    drafted = (position + 1) * len(ids)

    def net(going: tuple[int, ...], passes: int) -> float:
        n = len(going)
        ms = passes * n * drafter.further_ms(n, 2) + step_ms[drafted + n * passes] - step_ms[drafted]
        return float(sum(reach[i] * ahead[i, passes - 1] for i in going) - rate * ms)

    def most(going: tuple[int, ...]) -> float:
        return max(net(going, passes) for passes in range(1, min(4, MAX_K - position - 1) + 1)) if going else 0.0

    best = max(most(going) for n in range(len(ids) + 1) for going in combinations(ids, n))
    assert np.isclose(most(tuple(np.flatnonzero(kept).tolist())), best, rtol=1e-9, atol=1e-9)


def test_the_last_token_is_not_followed_by_another() -> None:
    stopping = Stopping(candidate(0.0, 0.0), np.full(MAX_K + 1, 10.0), 0.1)
    assert not stopping.goes_on([7], MAX_K - 1, np.array([1.0])).any()


def dear(work: Work) -> float:
    """Each verified token costs a fifth of a plain step."""
    return 110.0 + 30.0 * work.num_tokens


UNEVEN = Texture(rates=(0.998,) * 10 + (0.97,) * 3 + (0.86, 0.7, 0.55))


def of_uneven(*, stepwise: bool, step: float = 53.0, seed: int = 0) -> World:
    """Most tokens are certain and some are not; a pass takes a third of a plain step."""
    return World(
        1, lambda *_: {"small": UNEVEN}, dear, drafters={"small": DrafterCost(2.0, 0.0, step)}, deterministic=False, noise=0.05, seed=seed,
        request=lambda serial: (45, 200), stepwise=stepwise,
    )  # fmt: skip


def test_stopping_by_confidence_beats_every_fixed_length() -> None:
    """Of SpecDec++'s gain without its threshold: prices say where to stop."""
    seeds = range(6)
    listening = np.mean([run(Goodput(), of_uneven(stepwise=True, seed=seed), 300).rate() for seed in seeds])
    fixed = [np.mean([run(Fixed(k, "small"), of_uneven(stepwise=False, seed=seed), 300).rate() for seed in seeds]) for k in (2, 3, 4, 6)]
    assert listening > 1.02 * max(fixed)


def test_who_drafts_for_next_to_nothing_is_not_asked_token_by_token() -> None:
    class Counting(Goodput):
        num_asked = 0

        def continue_drafting(self, seq_ids: Sequence[int], position: int, confidence: NDArray[np.float64]) -> NDArray[np.bool_]:
            self.num_asked += 1
            return super().continue_drafting(seq_ids, position, confidence)

    cheap, slow = Counting(), Counting()
    run(cheap, of_uneven(stepwise=True, step=2.0), 100)
    run(slow, of_uneven(stepwise=True), 100)
    assert cheap.num_asked == 0
    assert slow.num_asked > 50
