"""The goodput policy in computed worlds: what it converges to, and how it follows what changes."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import pytest

from headway.control.goodput.budget import Budget
from headway.control.policies.goodput import Goodput
from tests.closed_loop import (
    CHAT,
    EDIT,
    NEVER,
    STEPS,
    SUFFIX,
    WORKLOADS,
    Fixed,
    Texture,
    World,
    always,
    cpu,
    fixed_rate,
    gpu,
    half_and_half,
    run,
)


@pytest.mark.parametrize("num_requests", [1, 4, 16, 48])
@pytest.mark.parametrize("workload", list(WORKLOADS))
def test_regret_against_the_best_fixed_k(workload: str, num_requests: int) -> None:
    """Learning included, from a cold start of everything but the cost model."""
    reached = run(Goodput(), World(num_requests, WORKLOADS[workload], drafters=SUFFIX), STEPS).rate()
    assert reached >= 0.97 * fixed_rate(workload, num_requests, 0)
    assert reached >= 0.95 * max(fixed_rate(workload, num_requests, k) for k in (0, 2, 4, 8))


def test_a_mixed_batch_beats_every_fixed_k() -> None:
    best = max(fixed_rate("half", 16, k) for k in (0, 1, 2, 3, 4, 6, 8))
    result = run(Goodput(), World(16, half_and_half, drafters=SUFFIX), STEPS)
    assert result.rate() >= 1.02 * best
    drafts = result.k_by_request[60:].mean(axis=0)
    assert drafts[1::2].min() > 5.0 * drafts[0::2].max()   # each request gets what pays for it


def test_a_cold_start_without_a_profile_learns_the_costs() -> None:
    world = World(16, WORKLOADS["edit"], drafters=SUFFIX)
    result = run(Goodput(), world, STEPS, profiled=False)
    assert result.rate(60) >= 0.95 * max(fixed_rate("edit", 16, k) for k in (0, 2, 4, 8))


@pytest.mark.parametrize("seed", [0, 7])
@pytest.mark.parametrize("num_requests", [1, 8])
def test_first_steps_that_take_too_long_are_overcome(num_requests: int, seed: int) -> None:
    """Something is compiled, or read from disk, while all that is known of a step's time comes from such steps."""
    world = World(
        num_requests, WORKLOADS["edit"], drafters=SUFFIX, drafts_ahead=True, seed=seed,
        clock=lambda step, ms: ms * (100.0 if step < 3 else 1.0),
    )  # fmt: skip
    result = run(Goodput(), world, STEPS, profiled=False)
    assert np.count_nonzero(result.drafts[60:]) > 0.8 * (STEPS - 60)
    assert result.rate(60) >= 0.85 * fixed_rate("edit", num_requests, 4)


def test_a_probe_that_seemed_to_lose_much_is_not_the_last_one() -> None:
    budget = Budget()
    budget.book(-1e6)   # lost, as it seemed while a step seemed to take so long
    budget.earn(10, 0.2, 1)
    assert not budget.can_probe
    for step in range(16, 160, 6):
        budget.earn(step, 0.2, 1)
    assert budget.can_probe


def test_what_verifying_a_probe_lost_is_earned_before_the_next_one() -> None:
    """A lucky probe pays for others. Were the losses of those forgotten, a drafter that does not pay would be asked again and again."""
    budget = Budget()
    budget.end_loan()
    for lost in (0.3, 0.5):
        budget.book(-lost)
    budget.earn(40, 0.2, 1)      # 40 steps bring 0.4 of the 0.8 that are owed
    budget.book(0.5)
    assert not budget.can_probe
    budget.book(0.2)
    assert budget.can_probe


def test_recovers_within_100_steps_of_a_switch() -> None:
    def drifting(step: int, request: int) -> Mapping[str, Texture]:
        return {"suffix": EDIT if (step // 200) % 2 else CHAT}

    world = World(24, drifting, drafters=SUFFIX)
    adaptive, plain, deep = (run(policy, world, 800) for policy in (Goodput(), Fixed(0), Fixed(8)))
    for start in (200, 600):      # to edits
        assert adaptive.rate(start + 100, start + 200) >= 0.93 * deep.rate(start + 100, start + 200)
    for start in (400,):          # to chat
        assert adaptive.rate(start + 100, start + 200) >= 0.97 * plain.rate(start + 100, start + 200)
    assert adaptive.rate() >= 1.02 * max(plain.rate(), deep.rate())


def test_sampled_trees_are_as_deep_as_their_nodes_pay() -> None:
    """Four nodes at each depth, verified as they were drawn: priced by depth alone, all eight levels would seem to pay."""
    world = World(
        4, always(suffix=Texture(rate=0.7, stated=None)), drafters=SUFFIX, deterministic=False, greedy=False, breadth=4,
    )  # fmt: skip
    result = run(Goodput(), world, 400)
    fixed = {k: run(Fixed(k), world, 400) for k in (0, 1, 2, 3, 8)}
    assert result.rate(100) >= 0.95 * max(other.rate(100) for other in fixed.values())
    assert result.rate(100) >= 1.1 * fixed[8].rate(100)


def test_follows_costs_that_change() -> None:
    """Verification becomes a hundred times as expensive in the middle of the run: what was right before is wrong after."""
    world = World(16, always(suffix=Texture(hit=0.9, rate=0.8)), cost=gpu, later=(150, cpu), drafters=SUFFIX)
    result = run(Goodput(), world, 500)
    fixed = [run(Fixed(k), world, 500) for k in (0, 2, 4, 8)]
    for start, end in ((50, 150), (300, 500)):
        assert result.rate(start, end) >= 0.92 * max(other.rate(start, end) for other in fixed)


@pytest.mark.parametrize("factor", [1.3, 3.0])
def test_a_machine_that_slows_down_changes_nothing_else(factor: float) -> None:
    world = World(16, WORKLOADS["edit"], drafters=SUFFIX, slowdown=lambda step: factor if step >= 100 else 1.0)
    result, best = run(Goodput(), world, STEPS), run(Fixed(4), world, STEPS)
    assert result.rate(100) >= 0.93 * best.rate(100)


def test_adversarial_flips_cost_little() -> None:
    """The workload turns round just as it has been learned, again and again."""
    def flipping(step: int, request: int) -> Mapping[str, Texture]:
        return {"suffix": EDIT if (step // 25) % 2 else NEVER}

    world = World(16, flipping, drafters=SUFFIX)
    assert run(Goodput(), world, 600).rate() >= 0.97 * run(Fixed(0), world, 600).rate()


@pytest.mark.parametrize("stated", [lambda rate: 0.99, lambda rate: 1.0 - rate, lambda rate: float("nan"), None])
def test_a_lying_confidence_costs_little(stated: Callable[[float], float] | None) -> None:
    for texture, workload in ((Texture(0.3, 4, 0.02, stated), "never"), (Texture(0.9, 16, 0.93, stated), "edit")):
        reached = run(Goodput(), World(16, always(suffix=texture), drafters=SUFFIX), STEPS).rate()
        assert reached >= 0.95 * max(fixed_rate(workload, 16, k) for k in (0, 4))


def test_one_request_that_always_misses_among_fifty_that_always_hit() -> None:
    def textures(step: int, request: int) -> Mapping[str, Texture]:
        return {"suffix": Texture(hit=1.0, rate=0.0 if request == 7 else 0.97, stated=None)}

    result = run(Goodput(), World(51, textures, drafters=SUFFIX, cost=gpu), 150)
    drafts = result.k_by_request[50:].mean(axis=0)
    assert drafts[7] < 0.5
    assert np.delete(drafts, 7).min() > 2.0
