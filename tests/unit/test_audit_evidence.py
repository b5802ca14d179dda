"""The sequential tests of an audit: never fooled more often than they say, and not blind."""

from __future__ import annotations

import math

import numpy as np
import pytest

from headway.audit import evidence, known
from headway.audit.evidence import NUM_WAGERS, WagerBook, detectable, log_average
from headway.audit.strata import END, WARM_UP, Stratum, TwoSamples, looked_up


@pytest.mark.parametrize("allowance", [0.0, 0.003, 0.02, 0.08])
@pytest.mark.parametrize("p", [0.001, 0.03, 0.2, 0.5, 0.97])
def test_a_pair_is_a_fair_game_under_every_null(p: float, allowance: float) -> None:
    factors = np.exp(evidence.log_factors(p, allowance))
    a = np.linspace(0, 1, 101)[:, None]
    b = np.clip(a + allowance * np.linspace(-1, 1, 9)[None, :], 0, 1)
    likelihoods = np.stack([(1 - a) * (1 - b), (1 - a) * b, a * (1 - b), a * b], -1)
    assert (likelihoods @ factors.T).max() <= 1 + 1e-9


def test_an_allowance_silences_wagers_on_less_only() -> None:
    factors = evidence.log_factors(0.4, 0.03)
    assert not factors[:2].any()      # differences of 1 % and 2 %
    assert factors[2:5].any(-1).all()


@pytest.mark.parametrize("allowance", [0.0, 0.004, 0.05])
@pytest.mark.parametrize("p", [0.002, 0.1, 0.5, 0.995])
def test_an_outcome_of_a_known_probability_is_a_fair_game(p: float, allowance: float) -> None:
    factors = np.exp(known.log_factors(p, allowance))
    true = np.clip(np.linspace(p - allowance, p + allowance, 21), 0, 1)
    assert (np.stack([1 - true, true], -1) @ factors.T).max() <= 1 + 1e-6   # nulls are kept at least LEAST from 0 and 1


def test_wealth_of_a_wager_that_is_right_grows_as_promised() -> None:
    book, rng = WagerBook(), np.random.default_rng(0)
    a, b = rng.random(60000) < 0.195, rng.random(60000) < 0.205
    book.settle(0.2, 0.0, np.bincount(2 * a + b, minlength=4))
    assert book.best()[1] == 0.01
    assert book.best()[0] == pytest.approx(0.01**2 * book.sharpness, rel=1.0)
    assert detectable(book.sharpness, 1e3, 1) == pytest.approx(0.02, abs=0.01)


def test_the_average_starts_at_one() -> None:
    assert log_average({"a": (0.25, WagerBook()), "b": (0.75, WagerBook())}) == pytest.approx(0.0)


def chain(seed: int, words: int = 6) -> np.ndarray:
    return np.random.default_rng(seed).dirichlet(np.ones(words), size=words)


def draw(table: np.ndarray, rng: np.random.Generator, count: int, depth: int = 3) -> list[tuple[str, ...]]:
    cumulative, last, columns = table.cumsum(-1), np.zeros(count, dtype=int), []
    for _ in range(depth):
        last = np.minimum((cumulative[last] <= rng.random((count, 1))).sum(-1), len(table) - 1)
        columns.append(last)
    return [tuple(f"w{i}" for i in row) for row in np.stack(columns, -1)]


def run(seed: int, batches: int, change: float = 0.0) -> TwoSamples:
    """The test after so many batches; with `change`, the second side takes the likeliest word so much more often after the first one."""
    table, rng, test = chain(seed), np.random.default_rng(seed), TwoSamples(0.0, 1)
    other = (1 - change) * table + change * np.eye(len(table))[table.argmax(-1)]
    for _ in range(batches):
        test.add(0, "", (draw(table, rng, 64), draw(other, rng, 64)))
    return test


def test_sound_sides_are_seldom_accused() -> None:
    """Looked at after every batch, at odds of 1 in 10: of 40 runs at most 4 may be expected, and wagers cost, so there are fewer."""
    alarms = sum(run(seed, 12).ledger.log_evidence() > math.log(10) for seed in range(40))
    assert alarms <= 4


def test_a_bias_is_found() -> None:
    assert all(run(seed, 60, change=0.1).ledger.log_evidence() > math.log(1e3) for seed in range(4))


def test_told_probabilities_find_a_smaller_bias_sooner() -> None:
    table, rng = chain(3), np.random.default_rng(3)
    other = 0.97 * table + 0.03 * np.eye(len(table))[table.argmax(-1)]
    sound, biased = known.KnownSamples(0.0, 1), known.KnownSamples(0.0, 1)
    for _ in range(120):
        plain = draw(table, rng, 64)
        logs = [[math.log(table[i, j]) for i, j in zip([0, *row], row, strict=False)] for row in ([int(w[1:]) for w in p] for p in plain)]
        for test, source in ((sound, table), (biased, other)):
            test.add(0, "", draw(source, rng, 64))
            test.learn(0, "", plain, logs)
    assert biased.ledger.log_evidence() > math.log(1e3) > 0 > sound.ledger.log_evidence()
    assert sound.control.log_evidence() < 1.0


def test_probabilities_that_are_not_those_drawn_from_are_noticed() -> None:
    table, rng, test = chain(5), np.random.default_rng(5), known.KnownSamples(0.0, 1)
    for _ in range(60):
        plain = draw(table, rng, 64)
        test.learn(0, "", plain, [[math.log(0.5)] * 3 for _ in plain])
    assert test.control.log_evidence() > math.log(1e3)


def test_one_string_of_several_tokens_is_left_out() -> None:
    test = known.KnownSamples(0.0, 1)
    for value in (-1.0, -2.0):
        test.learn(0, "", [("a", "b")], [[value, -0.1]])
    test.add(0, "", [("a", "b")] * 50)
    assert all(book.num_pairs == 0 for book in test.ledger.later.values())


def test_outcomes_wait_for_their_partners() -> None:
    stratum = Stratum()
    stratum.waiting[0].extend(["a", "b", "c"])
    stratum.waiting[1].extend(["x"])
    assert stratum.take_pairs() == [("a", "x")]
    assert stratum.take_pairs() == []


def test_nothing_is_wagered_before_something_is_known() -> None:
    stratum = Stratum()
    stratum.learn([("a", "b")] * (WARM_UP // 2 - 1))
    assert stratum.events("") == {}
    stratum.learn([("a", "a")])
    events = stratum.events("a tail")
    assert events["rank 1"][1] == frozenset({"a"})
    assert events["lookup"][1] == frozenset({"a"})


def test_what_a_lookup_would_draft() -> None:
    assert looked_up("red blue green red", (" blue",)).startswith(" green")
    assert looked_up("red", (" blue",)) == ""
    assert looked_up("red", ()) == looked_up("red", (END,)) == ""


def test_there_are_as_many_factors_as_wagers() -> None:
    assert evidence.log_factors(0.3).shape == (NUM_WAGERS, 4)
    assert known.log_factors(0.3, 0.0).shape == (NUM_WAGERS, 2)
