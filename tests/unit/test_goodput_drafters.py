"""The goodput policy with several drafters: who is asked for whom, how many tokens, in which order."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import pytest

from headway.control import constants
from headway.control.policies.goodput import Goodput
from tests.closed_loop import COPIER, EDIT, HEAD, SUFFIX, DrafterCost, Fixed, Texture, Textures, World, gpu, run


def test_each_request_gets_the_drafter_that_pays() -> None:
    good, poor = Texture(hit=0.9, rate=0.9), Texture(hit=0.9, rate=0.2)

    def textures(step: int, request: int) -> Mapping[str, Texture]:
        return {"a": good, "b": poor} if request % 2 else {"a": poor, "b": good}

    world = World(8, textures, drafters={"a": DrafterCost(0.0, 0.05), "b": DrafterCost(0.0, 0.05)}, cost=gpu)
    result = run(Goodput(), world, 600, keep=True)
    chosen = np.array([[seq.drafter == "a" for seq in feedback.sequences] for feedback in result.feedback[400:]]).mean(axis=0)
    assert chosen[1::2].min() > 0.6
    assert chosen[0::2].max() < 0.4
    assert any(feedback.shadows for feedback in result.feedback)


def test_an_expensive_drafter_is_left_for_a_cheap_one_that_is_as_good() -> None:
    world = World(
        4, lambda step, request: {"eagle": EDIT, "ngram": EDIT}, cost=gpu,
        drafters={"eagle": DrafterCost(0.5, 0.05, 0.8), "ngram": DrafterCost(0.0, 0.02)},
    )  # fmt: skip
    result = run(Goodput(), world, 500, keep=True)
    eagle = np.mean([seq.drafter == "eagle" for feedback in result.feedback[350:] for seq in feedback.sequences])
    assert eagle < 0.2


EAGLE = DrafterCost(0.3, 0.1, 0.6)


def bursts(length: int) -> Textures:
    """Half the time everything is a copy, half the time next to nothing is; a draft network has every second token right throughout."""
    copies = np.random.default_rng(7).random((1000, 8)) < 0.5

    def textures(step: int, request: int) -> Mapping[str, Texture]:
        copied = Texture(1.0, 8, 0.93) if copies[step // length, request] else Texture(0.35, 2, 0.25)
        return {"suffix": copied, "eagle": Texture(1.0, 16, 0.5)}

    return textures


def test_an_expensive_drafter_beside_a_cheap_one_costs_next_to_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def reached(drafters: Mapping[str, DrafterCost]) -> float:
        return sum(run(Goodput(), World(1, bursts(40), drafters=drafters, seed=seed), 800).rate(100) for seed in range(1, 7))

    both, alone = reached({"eagle": EAGLE, **SUFFIX}), reached(SUFFIX)
    assert both >= 0.975 * alone
    monkeypatch.setattr(constants, "LOOKUP_PRICE", 0.0)
    assert reached({"eagle": EAGLE, **SUFFIX}) <= 1.01 * both   # looking on is no loss


def test_a_cheap_drafter_is_looked_at_only_where_an_expensive_one_is_asked() -> None:
    def num_lookups(drafters: Mapping[str, DrafterCost]) -> int:
        textures = {"eagle": Texture(rate=0.8), "suffix": Texture(hit=0.3, rate=0.5, length=2)}
        world = World(2, lambda step, request: {name: textures[name] for name in drafters}, drafters=drafters)
        feedback = run(Goodput(), world, 400, keep=True).feedback[100:]
        return sum(part.drafter == "suffix" for step in feedback for part in step.drafters)

    assert num_lookups({"eagle": HEAD, **COPIER}) > 270
    assert num_lookups(dict.fromkeys(("eagle", "suffix"), DrafterCost(0.0, 0.1))) < 200


def here_and_there(share: float, stated: Callable[[float], float] = lambda rate: rate) -> Textures:
    """In some steps, by chance, a long copy; in the others next to nothing. The network has two thirds of its tokens right throughout."""
    copies = np.random.default_rng(7).random((1000, 8)) < share

    def textures(step: int, request: int) -> Mapping[str, Texture]:
        copied = Texture(1.0, 8, 0.9, stated) if copies[step, request] else Texture(0.35, 2, 0.25, stated)
        return {"suffix": copied, "eagle": Texture(1.0, 16, 0.65)}

    return textures


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("num_requests", [1, 8])
def test_a_cheap_and_an_expensive_drafter_together_beat_the_better_of_them(num_requests: int, sampled: bool) -> None:
    """Which one pays changes from step to step, and only the cheap one's draft says so."""
    textures = here_and_there(0.25)

    def reached(drafters: Mapping[str, DrafterCost], sampled: bool) -> float:
        world = World(
            num_requests, textures, cost=gpu, drafters=drafters, deterministic=not sampled, greedy=not sampled, copying=("suffix",)
        )
        return run(Goodput(), world, 600).rate(100)

    both = reached({"eagle": HEAD, **COPIER}, sampled)
    assert both >= 1.12 * max(reached({"eagle": HEAD}, sampled), reached(COPIER, False))


def test_a_cheap_drafter_that_lies_does_not_keep_the_expensive_one_from_drafting() -> None:
    """It promises nearly everything and holds next to nothing."""
    def textures(step: int, request: int) -> Mapping[str, Texture]:
        return {"suffix": Texture(0.6, 8, 0.05, lambda rate: 0.95), "eagle": Texture(1.0, 16, 0.65)}

    def reached(num_requests: int, drafters: Mapping[str, DrafterCost]) -> float:
        worlds = [World(num_requests, textures, cost=gpu, drafters=drafters, seed=seed) for seed in range(4)]
        return sum(run(Goodput(), world, 400).rate() for world in worlds)

    assert reached(1, {"eagle": HEAD, **COPIER}) >= 0.94 * reached(1, {"eagle": HEAD})
    assert reached(8, {"eagle": HEAD, **COPIER}) >= 0.97 * reached(8, {"eagle": HEAD})


def test_of_two_cheap_drafters_the_better_draft_is_taken() -> None:
    copies = np.random.default_rng(3).random((600, 2)) < 0.3

    def textures(step: int, request: int) -> Mapping[str, Texture]:
        found, none = Texture(1.0, 8, 0.9), Texture(0.0)
        return {
            "eagle": Texture(1.0, 16, 0.65), "suffix": found if copies[step, 0] else none, "ngram": found if copies[step, 1] else none
        }

    def reached(*cheap: str) -> float:
        drafters = {"eagle": HEAD} | dict.fromkeys(cheap, COPIER["suffix"])
        return run(Goodput(), World(1, textures, cost=gpu, drafters=drafters), 600).rate(100)

    assert reached("suffix", "ngram") >= 1.05 * max(reached("suffix"), reached("ngram"))


def test_an_expensive_drafter_is_not_asked_for_too_few_to_pay_for_it() -> None:
    """Asking it at all costs a third of a step: it pays when many need it, and not for the one that has nothing to copy."""
    def textures(step: int, request: int) -> Mapping[str, Texture]:
        return {"suffix": Texture(0.0) if (step + request) % 8 == 0 else Texture(1.0, 8, 0.9), "eagle": Texture(1.0, 16, 0.65)}

    world = World(8, textures, cost=gpu, drafters={"eagle": DrafterCost(2.0, 0.02, 0.05), **COPIER})
    result = run(Goodput(), world, 400, keep=True)
    eagle = np.mean([any(part.drafter == "eagle" for part in feedback.drafters) for feedback in result.feedback[150:]])
    assert eagle < 0.1


def test_a_drafter_that_pays_by_the_step_is_asked_for_less() -> None:
    """Each position costs 12 % of a step: the fourth is not worth drafting when half of the drafts hold."""
    world = World(4, lambda step, request: {"eagle": Texture(rate=0.6)}, cost=gpu, drafters={"eagle": DrafterCost(0.1, 0.0, 0.7)})
    result = run(Goodput(), world, 300, keep=True)
    asked = [seq.k for feedback in result.feedback[100:] for seq in feedback.sequences if seq.k]
    assert 1.0 <= np.mean(asked) <= 4.0
    assert result.rate(100) >= 0.95 * max(run(Fixed(k, "eagle"), world, 300).rate(100) for k in (0, 1, 2, 3, 4, 8))


def test_sampled_drafts_are_verified_whole() -> None:
    """The losslessness rule: after they are drawn, nothing may be dropped."""
    world = World(8, lambda step, request: {"eagle": Texture(rate=0.7)}, deterministic=False, greedy=False,
                  drafters={"eagle": DrafterCost(0.1, 0.02, 0.1)})  # fmt: skip
    result = run(Goodput(), world, 200, keep=True)
    assert result.drafts.sum() > 0
    assert all(seq.num_drafts == seq.num_proposed for feedback in result.feedback for seq in feedback.sequences)
    assert result.rate(50) >= 0.93 * max(run(Fixed(k, "eagle"), world, 200).rate(50) for k in (0, 1, 2, 3, 4, 8))
