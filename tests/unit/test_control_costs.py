"""The cost model against known truths: kinks, noise, drift, outliers, broken clocks, what is saved and read."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from headway.control.costs import FORMAT, CostModel, Work
from headway.types import DrafterFeedback, Feedback

Truth = Callable[[Work], float]


def memory_bound(work: Work) -> float:
    """Flat up to a tile, then steps: small matrix products on a CPU or GPU."""
    tokens = work.num_tokens
    return 8.0 + 0.02 * tokens + 1.5 * (tokens > 4) + 3.0 * (tokens > 16) + 0.3 * max(0, tokens - 16) + attention(work)


def compute_bound(work: Work) -> float:
    return 2.0 + 0.6 * work.num_tokens + attention(work)


def bucketed(work: Work) -> float:
    """Graph buckets: the price of the next power of two."""
    return 4.0 + 0.15 * 2 ** math.ceil(math.log2(work.num_tokens)) + attention(work)


def attention(work: Work) -> float:
    sampled = work.num_tokens - work.num_prefill_tokens
    return 3e-4 * work.num_context_tokens + 1e-4 * work.num_context_tokens * sampled / work.num_rows + 0.03 * sampled


def feedback(work: Work, step_ms: float, drafters: tuple[DrafterFeedback, ...] = ()) -> Feedback:
    draft_ms = sum(part.draft_ms for part in drafters)
    counts = (work.num_prefill_tokens, work.num_tokens, work.num_context_tokens)
    return Feedback(0, (), *counts, draft_ms, step_ms, step_ms, work.num_rows, drafters=drafters)


def random_work(random: np.random.Generator, largest: int = 64) -> Work:
    rows = int(random.integers(1, largest + 1))
    tokens = rows + int(random.integers(0, 6 * rows + 1))
    return Work(rows, tokens, rows * int(random.integers(50, 900)))


def profile(truth: Truth, random: np.random.Generator, noise: float = 0.05) -> list[tuple[Work, float]]:
    grid = [Work(b, b * t, b * c) for b in (1, 4, 16, 64) for t in (1, 2, 3, 5, 9) for c in (64, 600)] + [Work(1, 256, 256, 256)]
    return [(work, truth(work) * math.exp(noise * random.normal())) for work in grid]


def predict(model: CostModel, work: Work) -> float:
    return float(model.predict(work.num_rows, work.num_tokens, work.num_context_tokens, work.num_prefill_tokens))


def errors(model: CostModel, truth: Truth, random: np.random.Generator) -> list[float]:
    return [abs(predict(model, work) / truth(work) - 1.0) for work in (random_work(random) for _ in range(300))]


@pytest.mark.parametrize("truth", [memory_bound, compute_bound, bucketed])
def test_a_profile_predicts_steps_it_has_not_seen(truth: Truth) -> None:
    random = np.random.default_rng(1)
    model = CostModel()
    model.learn(profile(truth, random))
    assert np.median(errors(model, truth, random)) <= 0.08


@pytest.mark.parametrize("truth", [memory_bound, compute_bound, bucketed])
def test_a_cold_model_learns_from_live_steps(truth: Truth) -> None:
    random = np.random.default_rng(2)
    model = CostModel()
    for _ in range(600):
        work = random_work(random)
        model.observe(feedback(work, truth(work) * math.exp(0.05 * random.normal())))
    assert np.median(errors(model, truth, random)) <= 0.08
    assert model.error <= 0.12
    assert model.num_observed == 600


def test_the_error_it_states_is_the_error_it_makes() -> None:
    random = np.random.default_rng(3)
    model = CostModel()
    assert model.error == math.inf
    made = []
    for step in range(500):
        work = random_work(random)
        ms = memory_bound(work) * math.exp(0.15 * random.normal())
        if step >= 372:
            made.append(abs(predict(model, work) / ms - 1.0))
        model.observe(feedback(work, ms))
    assert model.error == pytest.approx(float(np.median(made)), rel=1e-6)


@pytest.mark.parametrize("factor", [1.3, 0.7])
def test_follows_a_change_of_speed(factor: float) -> None:
    """From batch 8 alone, so that what it says of batch 32 afterwards comes from the machine's speed, not from new data."""
    random = np.random.default_rng(4)
    model = CostModel()
    model.learn(profile(memory_bound, random))
    for scale, steps in ((1.0, 300), (factor, 200)):
        for _ in range(steps):
            work = Work(8, 8 + int(random.integers(0, 33)), 8 * int(random.integers(100, 400)))
            model.observe(feedback(work, scale * memory_bound(work) * math.exp(0.05 * random.normal())))
    for work in (Work(8, 24, 2000), Work(8, 8, 1000), Work(32, 64, 6000), Work(32, 96, 6000)):
        assert predict(model, work) == pytest.approx(factor * memory_bound(work), rel=0.10)


def test_outliers_move_little() -> None:
    random = np.random.default_rng(5)
    model = CostModel()
    model.learn(profile(memory_bound, random))
    for _ in range(600):
        work = random_work(random)
        pause = 40.0 if random.random() < 0.03 else 1.0
        model.observe(feedback(work, pause * memory_bound(work) * math.exp(0.05 * random.normal())))
    assert np.median(errors(model, memory_bound, random)) <= 0.08


def test_a_jump_that_stays_is_no_outlier() -> None:
    random = np.random.default_rng(6)
    model = CostModel()
    model.learn(profile(memory_bound, random))
    for _ in range(150):
        work = random_work(random)
        model.observe(feedback(work, 6.0 * memory_bound(work)))
    assert np.median([abs(predict(model, w) / (6.0 * memory_bound(w)) - 1.0) for w in (random_work(random) for _ in range(99))]) <= 0.15


@pytest.mark.parametrize("seed", range(3))
def test_more_drafts_never_cost_less(seed: int) -> None:
    random = np.random.default_rng(seed)
    model = CostModel()
    for _ in range(200):
        model.observe(feedback(random_work(random), float(random.uniform(1.0, 50.0))))   # pure noise
    for rows in (1, 7, 64):
        predicted = model.predict(rows, np.arange(rows, rows * 17), rows * 500, 0)
        assert np.all(np.diff(predicted) >= -1e-9)
        assert np.all(predicted > 0.0)


@pytest.mark.parametrize("ms", [math.nan, math.inf, -math.inf, 0.0, -5.0])
def test_broken_clocks_change_nothing(ms: float) -> None:
    model = CostModel()
    model.learn(profile(memory_bound, np.random.default_rng(7)))
    before = model.to_json()
    model.observe(feedback(Work(4, 8, 400), ms, (DrafterFeedback("ngram", 4, 4, 0, 8, ms),)))
    model.observe(feedback(Work(0, 0, 0), 5.0))
    after = model.to_json()
    assert after["target"] == before["target"]
    assert model.predict_draft("ngram", 4, 4) == 0.0


def test_each_drafter_has_its_own_cost() -> None:
    random = np.random.default_rng(8)
    model = CostModel()
    assert model.predict_draft("eagle", 8, 4) == 0.0
    for _ in range(300):
        rows, steps = int(random.integers(1, 65)), int(random.integers(1, 9))
        unseen = int(random.integers(0, 600)) if random.random() < 0.5 else 0
        eagle = 0.3 + 0.8 * steps + 0.01 * rows * steps + 0.004 * unseen
        parts = (
            DrafterFeedback("eagle", rows, steps, unseen, rows * steps, eagle),
            DrafterFeedback("ngram", rows, steps, 0, 9, 0.02 * rows),
        )
        model.observe(feedback(Work(rows, rows * 2, rows * 300), 20.0 + eagle + 0.02 * rows, parts))
    assert model.predict_draft("eagle", 16, 4) == pytest.approx(0.3 + 3.2 + 0.64, rel=0.1)
    assert model.predict_draft("eagle", 16, 4, 600) == pytest.approx(0.3 + 3.2 + 0.64 + 2.4, rel=0.1)
    assert model.predict_draft("ngram", 32, 8) == pytest.approx(0.64, rel=0.1)
    assert model.predict_draft("ngram", 0, 8) == 0.0
    assert predict(model, Work(16, 32, 4800)) == pytest.approx(20.0, rel=0.05)   # drafting is not in the target's time


def test_saved_and_read() -> None:
    random = np.random.default_rng(9)
    model = CostModel()
    model.learn(profile(bucketed, random))
    for _ in range(100):
        work = random_work(random)
        model.observe(feedback(work, 1.2 * bucketed(work), (DrafterFeedback("ngram", work.num_rows, 4, 0, 1, 0.1),)))
    read = CostModel.from_json(json.loads(json.dumps(model.to_json())))
    for work in (random_work(random) for _ in range(50)):
        assert predict(read, work) == pytest.approx(predict(model, work), rel=0.05)
    assert read.predict_draft("ngram", 8, 4) == pytest.approx(model.predict_draft("ngram", 8, 4), rel=0.05)


GOOD = {"format": FORMAT, "target": {"cells": [], "values": [], "speed": 1.0, "num_observed": 0}, "drafters": {}}
CELL = [[1, 1, 1, 0]]


@pytest.mark.parametrize(
    "document",
    [
        None, [], {}, "x", {**GOOD, "format": FORMAT + 1}, {**GOOD, "target": None}, {**GOOD, "drafters": []},
        {**GOOD, "drafters": {"a": {}}},
        {**GOOD, "target": {**GOOD["target"], "cells": CELL, "values": []}},
        {**GOOD, "target": {**GOOD["target"], "cells": CELL, "values": [[1, 1, 1, 0, math.nan, 1, 0]]}},
        {**GOOD, "target": {**GOOD["target"], "cells": CELL, "values": [[1, 1, 1, 0, 0.0, 1, 0]]}},
        {**GOOD, "target": {**GOOD["target"], "cells": CELL, "values": [["x"]]}},
        {**GOOD, "target": {**GOOD["target"], "cells": [[math.inf, 1, 1, 0]], "values": [[1, 1, 1, 0, 1.0, 1, 0]]}},
        {**GOOD, "target": {**GOOD["target"], "speed": math.nan}},
        {**GOOD, "target": {**GOOD["target"], "speed": 0.0}},
        {**GOOD, "target": {**GOOD["target"], "num_observed": math.inf}},
    ],
)  # fmt: skip
def test_what_is_no_cost_model_is_refused(document: Any) -> None:
    assert CostModel.from_json(GOOD).num_observed == 0
    with pytest.raises(ValueError, match=r"cost model|zip|convert"):
        CostModel.from_json(document)


def test_memory_is_bounded() -> None:
    random = np.random.default_rng(10)
    model = CostModel()
    for _ in range(1500):
        rows = int(random.integers(1, 500))
        model.observe(feedback(Work(rows, rows * int(random.integers(1, 20)), rows * int(random.integers(1, 5000))), 10.0))
    assert len(model.to_json()["target"]["cells"]) <= 320


def test_the_curve_is_the_prediction() -> None:
    random = np.random.default_rng(8)
    model = CostModel()
    model.learn(profile(memory_bound, random))
    for rows, tokens, drafts, context, prefill in ((1, 1, 8, 300, 0), (8, 8, 64, 4000, 0), (4, 104, 20, 900, 100), (64, 999, 80, 9000, 0)):
        expected = model.predict(rows, np.arange(tokens, tokens + drafts + 1), context, prefill)
        assert model.curve(rows, tokens, drafts, context, prefill) == pytest.approx(expected.tolist())


def test_what_verifying_at_all_costs_is_learned() -> None:
    """2 ms for the first draft, next to nothing for further ones: seen in steps of some sizes, expected of others."""
    def truth(work: Work) -> float:
        return 10.0 + 0.05 * work.num_tokens + 2.0 * (work.num_tokens > work.num_rows)

    random = np.random.default_rng(9)
    model = CostModel()
    for _ in range(800):
        rows = int(random.integers(1, 17))
        work = Work(rows, rows + int(random.integers(0, 3)) * rows, rows * 200)
        model.observe(feedback(work, truth(work) * math.exp(0.04 * random.normal())))
    plain, one, two = model.curve(12, 12, 2, 12 * 200)
    assert one - plain == pytest.approx(2.0, abs=0.7)
    assert two - one < 0.5


def test_another_speed_is_taken_over_when_it_is_plain() -> None:
    model = CostModel()
    model.learn(profile(memory_bound, np.random.default_rng(1)))
    before = predict(model, Work(4, 8, 400))
    model.rescale(1.02)
    assert predict(model, Work(4, 8, 400)) == before
    model.rescale(2.0)
    assert predict(model, Work(4, 8, 400)) == pytest.approx(2.0 * before)


def test_a_new_kind_of_step_is_learned_at_once() -> None:
    """However well other steps are known: a few surprises, and the prediction is right."""
    random, model = np.random.default_rng(3), CostModel()

    def seen(rows: int, drafts: int) -> float:
        """Relative error of the prediction. Many drafts in a large batch cost more than those of small ones let expect."""
        work = Work(rows, rows + drafts, 100 * rows)
        truth = 27.0 + 1.3 * rows + (1.2 if rows < 16 else 1.9) * drafts
        predicted = float(model.predict(rows, work.num_tokens, work.num_context_tokens))
        model.observe(feedback(work, truth * float(np.exp(random.normal(0.0, 0.02)))))
        return abs(predicted / truth - 1.0)

    for _ in range(700):
        seen(int(random.integers(1, 9)), int(random.integers(0, 3)))
    for _ in range(40):
        seen(32, 0)
    errors = [seen(32, 24) for _ in range(12)]
    assert errors[0] > 0.15, "no surprise: the test proves nothing"
    assert max(errors[6:]) < 0.08


def test_first_steps_that_took_too_long_are_forgotten_when_others_disprove_them() -> None:
    model = CostModel()
    prefill, plain, verifying = Work(8, 2048, 2048, 2048), Work(8, 8, 4000), Work(8, 24, 4000)
    model.observe(feedback(prefill, 8000.0))
    for _ in range(2):
        model.observe(feedback(verifying, 3000.0))   # something was compiled
    model.observe(feedback(plain, 100.0))
    assert model.curve(8, 24, 0, 4000)[0] < 1000.0
    assert model.curve(8, 2048, 0, 2048, 2048)[0] == pytest.approx(8000.0, rel=0.3)   # that long it may take: 256 times as many tokens
