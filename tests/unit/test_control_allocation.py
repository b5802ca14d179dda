"""The batch-wide choice against brute force over every prefix-closed set, for each objective."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from headway.control.goodput.verification import allocate, allocate_few

Floats = NDArray[np.float64]

# A few values only, so that ties happen.
rates = st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0]) | st.floats(0.0, 1.0)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Floats, Floats]:
    """([rows, k] values, [rows * k + 1] milliseconds that never fall)"""
    rows, k = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    conditional = np.array(draw(st.lists(rates, min_size=rows * k, max_size=rows * k))).reshape(rows, k)
    rises = draw(st.lists(st.sampled_from([0.0, 0.1, 1.0, 5.0]), min_size=rows * k, max_size=rows * k))
    return np.cumprod(conditional, axis=1), draw(st.sampled_from([1.0, 10.0])) + np.concatenate([[0.0], np.cumsum(rises)])


def tokens_of(values: Floats, lengths: tuple[int, ...]) -> Floats:
    return np.array([1.0 + values[row, :length].sum() for row, length in enumerate(lengths)])


def best_by_force(values: Floats, score: Callable[[Floats, int], float]) -> float:
    rows, k = values.shape
    return max(score(tokens_of(values, lengths), sum(lengths)) for lengths in product(range(k + 1), repeat=rows))


def reached(values: Floats, lengths: NDArray[np.int64], score: Callable[[Floats, int], float]) -> float:
    assert lengths.shape == (len(values),)
    assert np.all((lengths >= 0) & (lengths <= values.shape[1]))
    assert not any(values[row, :length].size and values[row, length - 1] == 0.0 for row, length in enumerate(lengths) if length)
    return score(tokens_of(values, tuple(lengths.tolist())), int(lengths.sum()))


@given(cases(), st.sampled_from([0.0, 0.05, 0.3, 2.0]))
def test_without_arrays_it_is_the_same_choice(case: tuple[Floats, Floats], rate: float) -> None:
    values, ms = case
    positive = [[value for value in line if value > 0.0] for line in values.tolist()]
    lengths = tuple(allocate_few(positive, ms.tolist(), rate))
    found = tokens_of(values, lengths).sum() - rate * ms[sum(lengths)]
    expected = tokens_of(values, tuple(allocate(values, ms, rate=rate).tolist()))
    best = expected.sum() - rate * ms[int(allocate(values, ms, rate=rate).sum())]
    assert found == pytest.approx(best)


@given(cases(), st.sampled_from([0.0, 0.05, 0.3, 2.0]))
def test_tokens_against_the_price_of_time(case: tuple[Floats, Floats], rate: float) -> None:
    values, ms = case

    def net(tokens: Floats, total: int) -> float:
        return float(tokens.sum() - rate * ms[total])

    assert reached(values, allocate(values, ms, rate=rate), net) == pytest.approx(best_by_force(values, net))


@given(cases())
def test_latency(case: tuple[Floats, Floats]) -> None:
    values, ms = case

    def minus_time_per_token(tokens: Floats, total: int) -> float:
        return -float(ms[total] * np.mean(1.0 / tokens))

    assert reached(values, allocate(values, ms, rate=0.4, latency=True), minus_time_per_token) == pytest.approx(
        best_by_force(values, minus_time_per_token)
    )


def test_a_target_is_met_where_it_can_be() -> None:
    """One request with perfect drafts, three with poor ones: the best goodput leaves the three above 12 ms per token."""
    values = np.array([[1.0] * 6, [0.6, 0.3, 0, 0, 0, 0], [0.6, 0.3, 0, 0, 0, 0], [0.6, 0.3, 0, 0, 0, 0]])
    ms = 10.0 + 0.8 * np.arange(25)

    def worst(lengths: NDArray[np.int64]) -> float:
        return float(ms[lengths.sum()] / tokens_of(values, tuple(lengths.tolist())).min())

    free = allocate(values, ms, rate=0.4)
    assert worst(free) > 9.0
    held = allocate(values, ms, rate=0.4, slo_ms=np.full(4, 9.0))
    assert worst(held) <= 9.0
    assert held[0] < free[0]
    one = np.array([np.inf, 9.0, np.inf, np.inf])
    assert ms[(lengths := allocate(values, ms, rate=0.4, slo_ms=one)).sum()] <= 9.0 * tokens_of(values, tuple(lengths.tolist()))[1]
    # Out of reach: the least latency.
    assert allocate(values, ms, rate=0.4, slo_ms=np.full(4, 1.0)).tolist() == allocate(values, ms, rate=0.4, latency=True).tolist()
    # No target in the way: as without one.
    assert allocate(values, ms, rate=0.4, slo_ms=np.full(4, 1e6)).tolist() == free.tolist()


@given(cases(), st.floats(0.5, 20.0))
def test_a_target_never_breaks_the_choice(case: tuple[Floats, Floats], target: float) -> None:
    values, ms = case
    lengths = allocate(values, ms, rate=0.2, slo_ms=np.full(len(values), target))
    assert np.all((lengths >= 0) & (lengths <= (values > 0.0).sum(axis=1)))


def test_a_kink_is_seen() -> None:
    """Free up to 4 rows, then a step: stop at the kink however good the next draft is."""
    values = np.tile([0.9, 0.8, 0.7], (2, 1))
    ms = np.array([10.0, 10.0, 10.0, 30.0, 30.0, 30.0, 30.0])
    assert allocate(values, ms, rate=0.2).tolist() == [1, 1]
    ms[3:] = 11.0
    assert allocate(values, ms, rate=0.2).tolist() == [3, 3]


def test_drafts_that_are_free_and_certain_are_all_taken() -> None:
    assert allocate(np.ones((3, 5)), np.full(16, 10.0), rate=0.1).tolist() == [5, 5, 5]
    assert allocate(np.zeros((3, 5)), np.full(16, 10.0), rate=0.1).tolist() == [0, 0, 0]
    assert allocate(np.zeros((0, 0)), np.array([10.0]), rate=0.1).tolist() == []
    assert allocate(np.zeros((2, 0)), np.array([10.0]), rate=0.1).tolist() == [0, 0]
