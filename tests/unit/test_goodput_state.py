"""The goodput policy from one run to the next, and what must never break it."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from headway.control.costs import CostModel
from headway.control.policies.goodput import Goodput
from headway.control.policy import BatchView, DrafterView, DraftView, SequenceView, Setup
from headway.types import Feedback, SequenceFeedback
from tests.closed_loop import STEPS, SUFFIX, WORKLOADS, DrafterCost, Fixed, Texture, World, always, gpu, run


class Warm(Goodput):
    def __init__(self, kept: Mapping[str, Any]) -> None:
        super().__init__()
        self._given = kept

    def start(self, setup: Setup) -> None:
        super().start(dataclasses.replace(setup, learned=self._given))


@pytest.mark.parametrize("before", ["edit", "never"])
@pytest.mark.parametrize("after", ["edit", "never", "half"])
def test_what_was_learned_helps_and_is_unlearned(before: str, after: str) -> None:
    """The first 80 steps after another run, of the same or of another workload: never much worse than without any memory."""
    first = run(Goodput(), World(8, WORKLOADS[before], drafters=SUFFIX), STEPS).policy
    kept = json.loads(json.dumps(first.learned()))
    assert kept["suffix"]["gain"] == first._drafters[0].gain.pool   # type: ignore[attr-defined]
    worlds = [World(8, WORKLOADS[after], drafters=SUFFIX, seed=seed) for seed in (1, 2, 3, 4)]
    warm = sum(run(Warm(kept), world, 80).rate() for world in worlds)
    cold = sum(run(Goodput(), world, 80).rate() for world in worlds)
    assert warm >= 0.97 * cold


FORMER_NAMES = {"gain": "worth", "with_confidence": "sighted", "without_confidence": "blind"}


def test_what_was_saved_under_former_names_is_read() -> None:
    saved = run(Goodput(), World(8, WORKLOADS["edit"], drafters=SUFFIX), STEPS).policy.learned()
    former = {name: {FORMER_NAMES.get(key, key): value for key, value in drafter.items()} for name, drafter in saved.items()}
    assert former["suffix"].keys() == {"worth", "sighted", "blind", "depth", "max_k"}
    former["suffix"]["sighted"] |= {"line": [1.2, -0.1], "curvature": [[4.0, 0.0], [0.0, 4.0]]}   # is not used any more
    world = World(8, WORKLOADS["half"], drafters=SUFFIX, seed=3)
    assert np.array_equal(run(Warm(former), world, 40).k_by_request, run(Warm(saved), world, 40).k_by_request)
    assert not np.array_equal(run(Warm(former), world, 40).k_by_request, run(Goodput(), world, 40).k_by_request)


def test_too_little_to_keep() -> None:
    assert run(Goodput(), World(2, WORKLOADS["edit"], drafters=SUFFIX), 5).policy.learned() == {}


def test_nobody_is_asked_when_deciding_costs_more_than_it_gains() -> None:
    """Drafts bring 1 % of a step; the policy says it takes 3 % of one."""
    little = World(4, always(suffix=Texture(hit=0.2, rate=0.6, length=1)), drafters=SUFFIX, cost=gpu)

    class Slow(Goodput):
        def observe(self, feedback: Feedback) -> None:
            super().observe(dataclasses.replace(feedback, policy_ms=0.6))

    assert run(Goodput(), little, 300).drafts[100:].sum() > 4 * run(Slow(), little, 300).drafts[100:].sum()




@pytest.mark.parametrize("broken", [math.nan, math.inf, 0.0, -3.0, -math.inf, 1e12])
def test_broken_clocks(broken: float) -> None:
    random = np.random.default_rng(1)

    def clock(step: int, ms: float) -> float:
        return broken if random.random() < 0.2 else ms

    world = World(8, WORKLOADS["edit"], drafters=SUFFIX, clock=clock)
    result = run(Goodput(), world, STEPS)
    assert result.rate(100) >= 1.5 * run(Fixed(0), world, STEPS).rate(100)


def test_drafts_that_are_there_anyway_are_all_weighed_after_a_few_steps() -> None:
    """One request: 32 asks of a new drafter are 32 steps, and only the first ones must vary for the cost model's sake."""
    verified = {}
    for drafts_ahead in (False, True):
        world = World(1, WORKLOADS["edit"], drafters={"suffix": DrafterCost(0.0, 0.0)}, drafts_ahead=drafts_ahead)
        verified[drafts_ahead] = run(Goodput(), world, 30, profiled=False).drafts
    assert verified[True][:8].tolist() == verified[False][:8].tolist()
    assert verified[True][10:].mean() > 1.3 * verified[False][10:].mean()


def test_only_broken_clocks() -> None:
    for broken in (math.nan, 0.0, -1.0):
        result = run(Goodput(), World(4, WORKLOADS["edit"], drafters=SUFFIX, clock=lambda step, ms, broken=broken: broken), 60)   # type: ignore[misc]
        assert np.all(result.tokens >= 4)


def test_empty_batches() -> None:
    policy = Goodput()
    policy.start(Setup((DrafterView("suffix", True),), 8, CostModel()))
    view = BatchView(0, (), 0, 10, 512, ("suffix",), 8)
    assert policy.plan(view) == policy.shadow(view) == policy.select([], view) == {}
    policy.observe(Feedback(0, (), 0, 0, 0, 0.0, 0.0, 0.0))


def test_a_step_in_which_nobody_may_draft_decides_nothing() -> None:
    """Requests about to end, or an engine that made no drafts in this step: the next step is asked as if it had not been."""
    policy = Goodput()
    policy.start(Setup((DrafterView("suffix", True),), 4, CostModel()))
    for step, max_k in ((1, 0), (2, 4)):
        view = BatchView(step, tuple(SequenceView(i, 50, 5, True, max_k, True, 0, 0, 0) for i in range(4)), 0, 10, 512, ("suffix",), 4)
        assert bool(policy.plan(view)) == (max_k > 0)


def test_state_does_not_grow_with_the_number_of_requests() -> None:
    policy = Goodput()
    policy.start(Setup((DrafterView("a", True), DrafterView("b", True)), 4, CostModel()))
    for step in range(400):
        ids = range(4 * step, 4 * step + 4)
        view = BatchView(step, tuple(SequenceView(i, 50, 5, True, 4, True, 0, 0, 0) for i in ids), 0, 10, 512, ("a", "b"), 4)
        plan = policy.plan(view)
        drafts = [DraftView(i, choice.drafter, 4, True, None) for i, choice in plan.items()]
        lengths = {draft.seq_id: 4 for draft in drafts} | dict(policy.select(drafts, view))
        policy.observe(Feedback(step, tuple(
            SequenceFeedback(i, plan[i].drafter if i in plan else "none", 4, 4, lengths.get(i, 0), 0, 50) for i in ids
        ), 0, 8, 200, 0.1, 10.0, 10.0, 4))  # fmt: skip
    for drafter in policy._drafters:
        assert len(drafter.gain) <= 200
        assert drafter.with_confidence.num_requests <= 200
        assert len(drafter.shadows) <= 200
