"""The acceptance model against known truths: positions, requests, drift, honest and lying confidence, calibration."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest
from numpy.typing import NDArray

from headway.control.constants import PRIOR_ACCEPTANCE, REQUEST_PRECISION
from headway.control.goodput.acceptance import AcceptanceModel

Floats = NDArray[np.float64]


def judge(random: np.random.Generator, truth: Floats) -> NDArray[np.int64]:
    """[n, k] conditional acceptance -> [n] how many drafts were accepted."""
    accepted: NDArray[np.int64] = np.cumprod(random.random(truth.shape) < truth, axis=1).sum(axis=1)
    return accepted


def full(n: int, k: int) -> NDArray[np.int64]:
    return np.full(n, k)


def pooled(model: AcceptanceModel, k: int) -> Floats:
    """[k] of a request that is not known, without confidence."""
    return model.predict([-1], k)[0]


def observe(
    model: AcceptanceModel, seq_ids: Iterable[int], num_drafts: NDArray[np.int64], num_accepted: NDArray[np.int64],
    confidence: Floats | None = None, start: int = 0,
) -> None:
    """[n] drafts: of positions [start, num_drafts) those below `num_accepted` were accepted, the next one was not."""
    for row, (seq_id, drafts, accepted) in enumerate(zip(seq_ids, num_drafts.tolist(), num_accepted.tolist(), strict=True)):
        positions = np.arange(start, min(accepted + 1, drafts))
        stated = np.full(len(positions), np.nan) if confidence is None else confidence[row, positions]
        model.learn([seq_id] * len(positions), positions, (positions < accepted).astype(np.float64), stated)


def test_a_new_model_is_hopeful() -> None:
    model = AcceptanceModel(4)
    assert pooled(model, 4) == pytest.approx([PRIOR_ACCEPTANCE] * 4)
    assert model.predict([1, 2], 3).shape == (2, 3)
    assert model.predict([1], 2, np.array([[0.9, 0.2]]))[0] == pytest.approx([0.9, 0.2], abs=0.03)


def test_positions_are_learned_apart() -> None:
    random = np.random.default_rng(0)
    truth = np.array([0.9, 0.7, 0.5, 0.3])
    model = AcceptanceModel(4)
    for step in range(400):
        observe(model, [step % 7], full(1, 4), judge(random, truth[None]))
    assert pooled(model, 4) == pytest.approx(truth, abs=0.12)
    assert np.all(np.diff(pooled(model, 4)) < 0.0)


def test_a_request_is_sharpened_and_a_new_one_starts_at_the_pool() -> None:
    """One request always misses among fifty that always hit. Requests are taken to differ by 0.7 in log odds (the root of 1 / 2), this one
    differs by more than 4: twelve misses in a row bring it down as far as that prior allows, and twelve more the rest of the way."""
    model, hits = AcceptanceModel(4), np.array([0] + [4] * 50)
    for _ in range(12):
        observe(model, range(51), full(51, 4), hits)
    seen = model.predict(range(52), 1)[:, 0]
    pooled_logit = float(np.log(seen[51] / (1.0 - seen[51])))
    # The mode of the posterior: REQUEST_PRECISION * d + 12 * P(accept | d) = 0.
    shifts = np.linspace(-8.0, 0.0, 8001)
    slope = REQUEST_PRECISION * shifts + 12.0 / (1.0 + np.exp(-(pooled_logit + shifts)))
    mode = pooled_logit + shifts[np.abs(slope).argmin()]
    assert seen[0] == pytest.approx(1.0 / (1.0 + np.exp(-mode)), abs=0.05)
    assert min(seen[1:51]) > 0.93
    assert seen[51] == pytest.approx(pooled(model, 1)[0])
    assert seen[51] > 0.85
    for _ in range(12):
        observe(model, range(51), full(51, 4), hits)
    assert model.predict([0], 1)[0, 0] < 0.3
    model.forget(set(range(1, 51)))
    assert model.num_requests == 50
    assert model.predict([0], 1)[0, 0] == pytest.approx(pooled(model, 1)[0])


def test_old_evidence_is_forgotten() -> None:
    random = np.random.default_rng(1)
    model = AcceptanceModel(4)
    for rate, steps in ((0.9, 1000), (0.2, 1500), (0.9, 600)):
        for step in range(steps):
            observe(model, [1000 * steps + step], full(1, 4), judge(random, np.full((1, 4), rate)))
        assert pooled(model, 1)[0] == pytest.approx(rate, abs=0.12)


def test_a_request_that_changes_its_mind_is_followed() -> None:
    """From misses to hits within a few drafts: an edit that reaches the part it copies."""
    model = AcceptanceModel(8)
    for _ in range(30):
        observe(model, [1], full(1, 8), np.array([0]))
    before = model.predict([1], 1)[0, 0]
    for _ in range(4):
        observe(model, [1], full(1, 8), np.array([8]))
    assert before < 0.1
    assert model.predict([1], 1)[0, 0] > 0.5


def calibrated(confidence_of: str, drafts: int = 500) -> tuple[Floats, Floats]:
    """Trains on `drafts` drafts of 4 tokens, each with its own true rate; returns a fresh sample's (truth, prediction)."""
    random = np.random.default_rng(2)
    model = AcceptanceModel(4)

    def sample(n: int) -> tuple[Floats, Floats]:
        truth = random.beta(1.2, 1.0, size=(n, 4))
        stated = {"honest": truth, "inverted": 1.0 - truth, "random": random.random((n, 4)), "boastful": 1.0 - 0.3 * (1.0 - truth)}
        return truth, stated[confidence_of]

    for step in range(drafts // 5):
        truth, stated = sample(5)
        observe(model, [step], full(1, 4), judge(random, truth[:1]), stated[:1])
        observe(model, range(5000, 5004), full(4, 4), judge(random, truth[1:]), stated[1:])
    truth, stated = sample(2000)
    return truth, model.predict(range(9000, 11000), 4, stated)


def expected_calibration_error(truth: Floats, predicted: Floats) -> float:
    """Over ten bins of the prediction, against the true rates instead of draws from them."""
    index = np.minimum((predicted * 10).astype(int), 9).ravel()
    gaps = np.bincount(index, (predicted - truth).ravel(), 10)
    return float(np.abs(gaps).sum() / predicted.size)


@pytest.mark.parametrize("stated", ["honest", "inverted", "random", "boastful"])
def test_confidence_is_calibrated_even_when_it_lies(stated: str) -> None:
    truth, predicted = calibrated(stated)
    assert expected_calibration_error(truth, predicted) <= 0.05
    useful = np.corrcoef(truth[:, 0], predicted[:, 0])[0, 1]
    if stated == "random":
        assert predicted.std() < 0.12
    else:
        assert useful > 0.9
    low, high = predicted < 0.4, predicted > 0.7
    for part in (low, high):
        if part.sum() > 200:
            assert predicted[part].mean() == pytest.approx(truth[part].mean(), abs=0.1)


def test_the_tail_of_a_shadow_counts_where_it_was_judged() -> None:
    whole, tail = AcceptanceModel(4), AcceptanceModel(4)
    for _ in range(50):
        observe(whole, [1], np.array([4]), np.array([2]))
        observe(tail, [1], np.array([4]), np.array([2]), start=2)
    assert whole.predict([9], 3)[0, 2] < 0.2
    assert whole.predict([9], 1)[0, 0] > 0.8
    assert tail.predict([9], 3)[0, 2] < 0.2


@pytest.mark.parametrize("confidence", [np.nan, 0.0, 1.0, -3.0, 7.0, np.inf, -np.inf])
def test_any_confidence_gives_a_probability(confidence: float) -> None:
    model = AcceptanceModel(3)
    stated = np.full((2, 3), confidence)
    for _ in range(30):
        observe(model, [1, 2], np.array([3, 2]), np.array([1, 2]), stated)
    predicted = model.predict([1, 2, 3], 3, np.full((3, 3), confidence))
    assert np.all((predicted > 0.0) & (predicted < 1.0))


def test_nothing_to_learn_from_is_fine() -> None:
    model = AcceptanceModel(3)
    empty = np.zeros(0, dtype=np.int64)
    observe(model, [], empty, empty)
    observe(model, [1], np.array([0]), np.array([0]), np.zeros((1, 3)))
    observe(model, [1], np.array([2]), np.array([2]), start=2)
    assert model.predict([], 3).shape == (0, 3)
    assert model.predict([1], 5).shape == (1, 5)   # beyond max_k: the last position's


def test_many_requests() -> None:
    model = AcceptanceModel(2)
    for first in range(0, 4000, 100):
        ids = range(first, first + 100)
        observe(model, ids, full(100, 2), full(100, 1))
        model.forget(set(ids))
    assert model.num_requests == 100
