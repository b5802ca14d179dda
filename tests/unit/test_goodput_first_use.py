"""What the goodput policy loses and wins while a drafter is new, or was given up."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import pytest

from headway.control.costs import Work
from headway.control.policies.goodput import Goodput
from tests.closed_loop import DrafterCost, Texture, World, always, run


def priced(verification: float) -> Callable[[Work], float]:
    """A token more costs this share of a plain step of one request."""
    return lambda work: 60.0 * (1.0 + verification * (work.num_tokens - 1))


CHEAP_DRAFTS = {"suffix": DrafterCost(0.1, 0.1)}


@pytest.mark.parametrize("num_requests", [1, 8])
@pytest.mark.parametrize("verification", [0.02, 0.15, 0.9])
@pytest.mark.parametrize("stated", [0.85, 0.29, None])
def test_a_new_drafter_that_is_useless_loses_little_at_first(stated: float | None, verification: float, num_requests: int) -> None:
    """Whatever it says of itself, and whatever verifying costs."""
    useless = Texture(0.6, 4, 0.05, None if stated is None else lambda rate: stated)
    world = World(num_requests, always(suffix=useless), priced(verification), drafters=CHEAP_DRAFTS, noise=0.0)
    plain = num_requests / (60.0 * (1.0 + verification * (num_requests - 1)))
    assert run(Goodput(), world, 100).rate() >= 0.97 * plain


@pytest.mark.parametrize("stated", [lambda rate: rate, None])
def test_a_new_drafter_that_is_right_takes_off_at_once(stated: Callable[[float], float] | None) -> None:
    for verification, least in ((0.02, 4.0), (0.15, 2.2)):
        world = World(1, always(suffix=Texture(rate=0.97, stated=stated)), priced(verification), drafters=CHEAP_DRAFTS, noise=0.0)
        result = run(Goodput(), world, 40)
        assert result.rate(0, 5) >= 1.5 * 1.0 / 60.0
        assert result.rate() >= least / 60.0


def test_an_expensive_new_drafter_is_tried_within_its_loan() -> None:
    world = World(1, always(suffix=Texture(rate=0.05)), priced(0.15), drafters={"suffix": DrafterCost(2.0, 0.0, 6.0)}, noise=0.0)
    assert run(Goodput(), world, 200).rate() >= 0.96 / 60.0


@pytest.mark.parametrize("names", [("eagle",), ("eagle", "suffix")])
@pytest.mark.parametrize("seed", range(4))
def test_an_expensive_drafter_that_was_given_up_comes_back_when_it_pays(names: tuple[str, ...], seed: int) -> None:
    """Verifying is expensive, copies hold at first and then no longer, and the network is wrong at first and then right."""
    def textures(step: int, request: int) -> Mapping[str, Texture]:
        if step < 800:
            return {"eagle": Texture(1.0, 16, 0.2), "suffix": Texture(0.6, 8, 0.9)}
        return {"eagle": Texture(1.0, 16, 0.65), "suffix": Texture(0.08, 3, 0.4)}

    costs = {"eagle": DrafterCost(0.6, 0.2, 0.9), "suffix": DrafterCost(0.05, 0.05)}
    world = World(
        1, textures, lambda work: 11.0 + 2.8 * work.num_tokens, drafters={name: costs[name] for name in names},
        deterministic=False, copying=("suffix",), seed=seed,
    )  # fmt: skip
    result = run(Goodput(), world, 1300, keep=True)
    drafted = [feedback.sequences[0].drafter == "eagle" and feedback.sequences[0].num_drafts > 0 for feedback in result.feedback]
    assert np.mean(drafted[400:800]) < 0.1
    assert np.mean(drafted[1050:]) > 0.9
    assert result.rate(400, 800) >= 0.97 / 13.8


@pytest.mark.parametrize(("names", "begin", "end"), [(("eagle",), 0, 300), (("eagle", "suffix"), 400, 600)])
def test_a_network_that_was_of_no_use_drafts_again_for_other_requests(names: tuple[str, ...], begin: int, end: int) -> None:
    """Long prompts whose answers are copied, and then chat. Each request has to be read before the network can be tried on it."""
    edit = {"eagle": Texture(1.0, 16, 0.12), "suffix": Texture(0.6, 8, 0.9)}
    chat = {"eagle": Texture(1.0, 16, 0.5), "suffix": Texture(0.15, 3, 0.35)}
    costs = {"eagle": DrafterCost(0.6, 0.2, 0.9, unseen=0.07), "suffix": DrafterCost(0.05, 0.05)}
    shares = []
    for seed in range(8):
        world = World(
            1, lambda step, request: edit if request < 10 else chat,
            lambda work: 12.6 + 1.2 * work.num_tokens + 5.0 * (work.num_tokens > 3),
            drafters={name: costs[name] for name in names}, deterministic=False, copying=("suffix",), seed=seed,
            request=lambda serial: (500, 64) if serial < 10 else (50, 72),
        )  # fmt: skip
        feedback = run(Goodput(), world, 1300, keep=True).feedback
        turn = next(step.step for step in feedback if step.sequences[0].seq_id == 10)
        drafted = [step.sequences[0].drafter == "eagle" and step.sequences[0].num_drafts > 0 for step in feedback[turn:]]
        shares.append(np.mean(drafted[begin:end]))
    assert np.mean(shares) > 0.8


@pytest.mark.parametrize(("rate", "least"), [(0.93, 1.25), (0.6, 1.0)])
def test_a_draft_model_takes_a_third_of_a_step_for_each_draft_and_pays(rate: float, least: float) -> None:
    """Answers of 48 tokens, from the first step on. One draft costs little of what eight cost, and reading the prompt more than both."""
    def cost(work: Work) -> float:
        return 146.0 if work.num_tokens <= 3 else 140.0 + 12.0 * work.num_tokens

    speedups = []
    for seed in range(8):
        world = World(
            1, always(suffix=Texture(rate=rate)), cost, drafters={"suffix": DrafterCost(2.0, 0.0, 53.0, unseen=5.0)}, deterministic=False,
            noise=0.05, seed=seed, request=lambda serial: (45, 48),
        )  # fmt: skip
        speedups.append(run(Goodput(), world, 300).rate() * 146.0)
    assert np.mean(speedups) >= least
    assert min(speedups) >= 0.94
