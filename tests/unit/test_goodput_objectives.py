"""The goodput policy with a target for the time per token, and for latency."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

import numpy as np
import pytest

from headway.control.policies.goodput import Goodput
from headway.errors import ConfigError
from tests.closed_loop import NEVER, SUFFIX, DrafterCost, Texture, World, always, half_and_half, run


def test_a_target_for_the_time_per_token() -> None:
    """Deep drafts for the seven that copy make the step too long for the one that does not."""
    def textures(step: int, request: int) -> Mapping[str, Texture]:
        return {"suffix": NEVER if request == 0 else Texture(hit=1.0, rate=0.99)}

    world = World(8, textures, drafters=SUFFIX, max_k=16)

    def slowest(policy: Goodput) -> float:
        result = run(policy, world, 300)
        return float(result.ms[100:].sum() / result.by_request[100:].sum(axis=0).min())

    free, held = slowest(Goodput()), slowest(Goodput(Goodput.Options(tpot_slo_ms=18.0)))
    assert free > 22.0
    assert held <= 18.5


def test_a_target_of_one_request_binds_the_others_for_it_alone() -> None:
    """Request 0 cannot be drafted for; its target forbids the deep drafts of the others. Without one it waits for them."""
    def textures(step: int, request: int) -> Mapping[str, Texture]:
        return {"suffix": NEVER if request == 0 else Texture(hit=1.0, rate=0.99)}

    def result(targets: Mapping[int, float]) -> tuple[float, float]:
        found = run(Goodput(), World(8, textures, drafters=SUFFIX, max_k=16, targets=targets), 300)
        return float(found.ms[100:].sum() / found.by_request[100:, 0].sum()), found.rate(100)

    (free, fastest), (held, slower) = result({}), result({0: 18.0})
    assert free > 22.0
    assert held <= 18.5
    assert slower > 0.5 * fastest                   # the others are still drafted for
    unmoved, rate = result({1: 30.0})               # a target that is met anyway changes nothing
    assert unmoved > 22.0
    assert rate >= 0.97 * fastest


def test_a_target_that_plain_steps_miss_is_drafted_for_though_that_does_not_pay() -> None:
    """A plain step takes 14.3 ms. At these costs drafts for the one request that is in a hurry do not pay for themselves."""
    texture = Texture(hit=0.5, rate=0.7, length=4)
    world = World(16, always(suffix=texture), drafters={"suffix": DrafterCost(0.0, 0.3)})
    hurried = dataclasses.replace(world, targets={3: 12.0})
    before, after = (run(Goodput(), each, 400).k_by_request[150:, 3].mean() for each in (world, hurried))
    assert after > 2.0 * before + 0.3


def test_latency_favours_the_slow() -> None:
    world = World(16, half_and_half, drafters=SUFFIX)

    def mean_time_per_token(policy: Goodput) -> float:
        result = run(policy, world, 300)
        return float(np.mean(result.ms[100:].sum() / result.by_request[100:].sum(axis=0)))

    assert mean_time_per_token(Goodput(Goodput.Options(objective="latency"))) <= 1.02 * mean_time_per_token(Goodput())


@pytest.mark.parametrize(
    ("name", "value"), [("objective", "speed"), ("tpot_slo_ms", 0.0), ("tpot_slo_ms", math.nan), ("tpot_slo_ms", math.inf)]
)
def test_bad_options(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=name):
        Goodput.Options(**{name: value})   # type: ignore[arg-type]
