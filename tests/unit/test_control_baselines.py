"""confidence, smartspec, ema_slots, bandit: their published rules, in numbers and in a computed world."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from headway.config import SpeculativeConfig
from headway.control.costs import CostModel, Work
from headway.control.policies.bandit import Bandit
from headway.control.policies.confidence import Confidence
from headway.control.policies.ema_slots import EmaSlots
from headway.control.policies.smartspec import Smartspec
from headway.control.policy import BatchView, DrafterView, DraftView, Policy, SequenceView, Setup
from headway.errors import ConfigError
from headway.types import Feedback, SequenceFeedback
from tests.closed_loop import DrafterCost, Fixed, Texture, World, cpu, gpu, run

EDIT, NEVER = Texture(hit=1.0, rate=0.95), Texture(hit=1.0, rate=0.05)


def world(texture: Texture, num_requests: int = 4, **options: Any) -> World:
    return World(num_requests, lambda step, request: {"suffix": texture}, drafters={"suffix": DrafterCost(0.0, 0.02)}, **options)


def view(num_requests: int, max_k: int = 8) -> BatchView:
    sequences = tuple(SequenceView(i, 100, 5, True, max_k, True, 0, 0, 0) for i in range(num_requests))
    return BatchView(0, sequences, 0, 10, 512, ("suffix",), max_k)


def step(policy: Policy, num_requests: int, accepted: float, ms: float = 10.0, max_k: int = 8) -> int:
    """One step in which every request accepts `accepted` of its drafts; returns k."""
    plan = policy.plan(view(num_requests, max_k))
    k = plan[0].k if plan else 0
    sequences = tuple(
        SequenceFeedback(i, "suffix" if k else "none", k, k, k, min(k, round(accepted)), 100) for i in range(num_requests)
    )
    policy.observe(Feedback(0, sequences, 0, num_requests * (1 + k), 100 * num_requests, 0.0, ms, ms, num_requests))
    return k


# -- confidence -------------------------------------------------------------------------------------------------------


def test_confidence_stops_where_the_product_falls() -> None:
    policy = Confidence()   # a product of at least 0.7
    drafts = [
        DraftView(1, "suffix", 4, True, (0.9, 0.9, 0.9, 0.9)),     # 0.9, 0.81, 0.73, 0.66
        DraftView(2, "suffix", 2, True, (0.5, 1.0)),
        DraftView(3, "suffix", 3, True, None),
        DraftView(4, "suffix", 3, True, (1.0, math.nan, 0.7)),
    ]
    assert policy.select(drafts, view(4)) == {1: 4, 2: 1, 3: 3, 4: 3}
    assert policy.select([DraftView(1, "suffix", 4, True, (0.9, 0.7, 0.9, 0.9))], view(1)) == {1: 2}


def test_stopping_early_and_select_are_one_rule() -> None:
    random = np.random.default_rng(0)
    for threshold in (0.0, 0.3, 0.8, 1.0):
        policy = Confidence(Confidence.Options(threshold))
        confidence = random.uniform(0.3, 1.0, size=(50, 6))
        drafts = [DraftView(i, "eagle", 6, False, tuple(row)) for i, row in enumerate(confidence.tolist())]
        policy.plan(view(50))
        kept = np.ones(50, dtype=int)
        for position in range(5):
            asked = np.flatnonzero(kept == position + 1)
            going = policy.continue_drafting(asked.tolist(), position, confidence[asked, position])
            kept[asked[going]] += 1
        assert dict(enumerate(kept.tolist())) == policy.select(drafts, view(50))


def test_confidence_asks_for_everything() -> None:
    assert {choice.k for choice in Confidence().plan(view(5)).values()} == {8}


# -- smartspec --------------------------------------------------------------------------------------------------------


def smartspec(cost: Any, **options: Any) -> Smartspec:
    policy = Smartspec(Smartspec.Options(**options))
    costs = CostModel()
    costs.learn((w, cost(w)) for w in (Work(b, b * t, b * 100) for b in (1, 4, 16, 64) for t in (1, 2, 3, 5, 9)))
    policy.start(Setup((DrafterView("suffix", True),), 8, costs))
    return policy


def test_smartspec_maximises_its_goodput() -> None:
    """Against the formula written out, with the first acceptance of 0.7."""
    for num_rows in (1, 4, 16, 64):
        policy = smartspec(cpu)
        ms = policy._costs.predict(num_rows, num_rows * (1 + np.arange(9)), 100 * num_rows)
        goodput = num_rows * (1.0 - 0.7 ** (1.0 + np.arange(9))) / 0.3 / ms
        goodput[0] *= 1.1
        first_fall = next((k for k in range(1, 9) if goodput[k] < goodput[k - 1]), 9)
        assert step(policy, num_rows, 0) == first_fall - 1


def test_smartspec_decides_every_twenty_steps() -> None:
    policy = smartspec(gpu)
    ks = [step(policy, 4, 0) for _ in range(61)]
    assert ks[0] > 0
    assert len(set(ks[:20])) == len(set(ks[20:40])) == 1
    assert ks[60] == 0   # 0.85^20 of the hope is left, then none
    assert all(step(policy, 4, 0) == 0 for _ in range(40))   # and it does not come back


def test_smartspec_speculates_where_it_pays() -> None:
    assert run(Smartspec(), world(EDIT, cost=gpu), 200).rate() >= 0.9 * run(Fixed(8), world(EDIT, cost=gpu), 200).rate()
    assert run(Smartspec(), world(NEVER), 300).rate(100) >= 0.95 * run(Fixed(0), world(NEVER), 300).rate(100)


# -- ema_slots --------------------------------------------------------------------------------------------------------


def test_ema_slots_takes_the_candidates_of_the_batch_size() -> None:
    policy = EmaSlots()
    for num_requests, candidates in ((1, {1, 3, 5, 7}), (7, {1, 3, 5, 7}), (8, {0, 1, 3}), (31, {0, 1, 3}), (40, {0, 1}), (64, {0})):
        assert {step(policy, num_requests, accepted, max_k=8) for accepted in (0, 0, 0, 9, 9, 9) for _ in range(8)} <= candidates


def test_ema_slots_climbs_and_descends() -> None:
    policy = EmaSlots()
    assert [step(policy, 1, 9) for _ in range(40)][-1] == 7
    assert [step(policy, 1, 0) for _ in range(60)][-1] == 1
    assert [step(policy, 1, 9) for _ in range(60)][-1] == 7
    ks = [step(policy, 1, 2) for _ in range(60)]
    assert set(ks[-20:]) == {3}   # round(2) + 1
    assert "drafts accepted" in policy.reason


def test_ema_slots_probes_when_it_is_off() -> None:
    policy = EmaSlots()
    ks = [step(policy, 8, 0) for _ in range(400)]
    assert ks[100:].count(0) == ks[100:].count(1) == 150   # every second interval
    assert [step(policy, 8, 3) for _ in range(200)][-1] == 3


# -- bandit -----------------------------------------------------------------------------------------------------------


def test_bandit_finds_the_best_arm() -> None:
    for texture, best in ((EDIT, 8), (NEVER, 0)):
        result = run(Bandit(), world(texture, num_requests=8), 600)
        assert result.rate(300) >= 0.93 * run(Fixed(best), world(texture, num_requests=8), 600).rate(300)


def test_bandit_tells_loads_apart() -> None:
    policy = Bandit(Bandit.Options(exploration=0.02))
    for _ in range(150):
        k = policy._arm.k if policy._arm else 0
        step(policy, 1, 8, ms=10.0)                 # drafts are free
        step(policy, 32, 0, ms=10.0 + 5.0 * k)      # drafts are dear and useless
    small = [step(policy, 1, 8, ms=10.0) for _ in range(20)]
    large = [step(policy, 32, 0, ms=10.0) for _ in range(20)]
    assert np.mean(small) > np.mean(large)


def test_bandit_ignores_broken_clocks() -> None:
    policy = Bandit()
    for ms in (math.nan, math.inf, 0.0, -1.0, 10.0) * 20:
        assert 0 <= step(policy, 4, 1, ms=ms) <= 8
    assert all(math.isfinite(arm.mean) for arms in policy._arms.values() for arm in arms)


@pytest.mark.parametrize("policy", [Confidence, Smartspec, EmaSlots, Bandit])
def test_an_empty_batch_is_fine(policy: type[Policy]) -> None:
    made = policy()
    made.start(Setup((DrafterView("suffix", True),), 8, CostModel()))
    assert made.plan(view(0)) == {}
    made.observe(Feedback(0, (), 0, 0, 0, 0.0, 0.0, 0.0))


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ({"name": "confidence", "rejection_threshold": 1.5}, r"must be in \[0, 1\]"),
        ({"name": "smartspec", "update_interval": 0}, "must be >= 1"),
        ({"name": "ema_slots", "slots": []}, "must start at batch size 1"),
        ({"name": "ema_slots", "slots": [[2, [1], 0, 0]]}, "must start at batch size 1"),
        ({"name": "ema_slots", "slots": [[1, [3, 1], 0, 0]]}, "must rise"),
        ({"name": "ema_slots", "slots": [[1, [], 0, 0]]}, "must rise"),
        ({"name": "ema_slots", "ema_alpha": 0.0}, "ema_alpha"),
        ({"name": "bandit", "arms": []}, "arms must be different"),
        ({"name": "bandit", "arms": [1, 1]}, "arms must be different"),
        ({"name": "bandit", "exploration": -1.0}, "exploration"),
        ({"name": "bandit", "memory": 1.0}, "memory"),
    ],
)
def test_bad_options(policy: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SpeculativeConfig.parse({"method": "ngram", "policy": policy})
