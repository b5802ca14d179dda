"""The guard of the goodput policy: what a wrong choice may cost, and how a drafter comes back."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np
import pytest
from numpy.typing import NDArray

from headway.control.goodput.drafter_state import DrafterState
from headway.control.goodput.gain import RequestGain
from headway.control.policies.goodput import Goodput
from headway.control.policy import DrafterView, DraftView, SequenceView, Setup
from headway.types import Feedback
from tests.closed_loop import EDIT, NEVER, SUFFIX, WORKLOADS, DrafterCost, Fixed, Texture, World, always, run


class Slow(Goodput):
    """Its own time has a price."""

    def observe(self, feedback: Feedback) -> None:
        super().observe(dataclasses.replace(feedback, policy_ms=0.15))


class Optimist(Goodput):
    """Believes that drafts are nearly free to verify and nearly always right: the guard alone is left."""

    def _new_drafter(self, view: DrafterView, setup: Setup) -> DrafterState:
        return OptimistsDrafter(view, setup.max_k, setup.costs)

    def _expected(self, drafter: DrafterState, seq: SequenceView, own: RequestGain) -> float:
        return 5.0


class OptimistsDrafter(DrafterState):
    def values(self, drafts: list[DraftView]) -> NDArray[np.float64]:
        lengths = np.array([draft.length for draft in drafts])[:, None]
        return np.where(np.arange(lengths.max()) < lengths, 0.99, 0.0)

    def reach(self, draft: DraftView) -> list[float]:
        return [0.99] * draft.length


def test_the_guard_bounds_the_loss_of_a_choice_that_is_wrong() -> None:
    world = World(16, WORKLOADS["never"], drafters=SUFFIX, max_k=8)
    plain, naive, guarded = run(Fixed(0), world, 900), run(Fixed(8), world, 900), run(Optimist(), world, 900)
    assert naive.rate() < 0.93 * plain.rate()
    assert guarded.rate() >= 0.97 * plain.rate()
    assert guarded.rate(300) >= 0.98 * plain.rate(300)


def test_plain_steps_are_rare() -> None:
    result = run(Goodput(), World(4, always(suffix=Texture(hit=1.0, rate=0.9)), drafters=SUFFIX), 1000)
    plain = (result.drafts == 0).sum()
    assert 1 <= plain <= 20


def test_a_drafter_that_was_switched_off_comes_back() -> None:
    def textures(step: int, request: int) -> Mapping[str, Texture]:
        return {"suffix": EDIT if step >= 400 else NEVER}

    result = run(Goodput(), World(8, textures, drafters={"suffix": DrafterCost(0.2, 0.3)}), 800, keep=True)
    assert any("off" in feedback.reason or "does not pay" in feedback.reason for feedback in result.feedback[:400])
    assert result.drafts[700:].mean() > 8 * 2


def test_drafting_that_does_not_pay_costs_almost_nothing() -> None:
    result = run(Goodput(), World(32, WORKLOADS["never"], drafters={"suffix": DrafterCost(0.05, 0.2)}), 500, keep=True)
    late = result.feedback[150:]
    assert sum(feedback.draft_ms for feedback in late) <= 0.015 * sum(feedback.step_ms for feedback in late)


@pytest.mark.parametrize("num_requests", [1, 4])
def test_copies_that_come_in_bursts_are_caught(num_requests: int) -> None:
    """Each request copies for 25 steps now and then, and between the bursts nothing pays: then the mean says little."""
    def textures(step: int, request: int) -> Mapping[str, Texture]:
        begins = np.random.default_rng([request, step // 200]).integers(0, 250)
        return {"suffix": Texture(hit=1.0, rate=0.97) if begins <= step % 200 < begins + 25 else Texture(hit=0.1, rate=0.2, length=1)}

    world = World(num_requests, textures, drafters={"suffix": DrafterCost(0.02, 0.2)})
    copying = [any(textures(step, request)["suffix"].hit == 1.0 for request in range(num_requests)) for step in range(1000)]
    result = run(Slow(), world, 1000)
    assert 0.05 < np.mean(copying) < 0.6
    # Of the tokens that drafting everything writes beyond plain decoding.
    assert (result.tokens - num_requests).sum() >= 0.65 * (run(Fixed(8), world, 1000).tokens - num_requests).sum()
    assert result.rate() >= 0.95 * max(run(Fixed(k), world, 1000).rate() for k in (0, 8))
