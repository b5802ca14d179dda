"""Prompt lookup against a brute-force search, and the index under it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.config import SpeculativeConfig
from headway.drafters.core.ngram_index import NgramIndex, acceptance
from headway.drafters.drafter import Committed, DraftRequest, never_stop
from headway.drafters.ngram import Ngram
from headway.errors import ConfigError
from headway.types import Draft

histories = st.integers(1, 4).flatmap(lambda size: st.lists(st.integers(0, size), min_size=1, max_size=150))


def brute_force(history: list[int], shortest: int, longest: int, k: int) -> list[int]:
    for n in range(longest, shortest - 1, -1):
        for last in range(len(history) - 2, n - 2, -1):
            if history[last - n + 1 : last + 1] == history[-n:]:
                text = list(history)
                for j in range(k):   # reading on in the text being written is what continues a period
                    text.append(text[last + 1 + j])
                return text[len(history) :]
    return []


def propose(drafter: Ngram, history: list[int], k: int, seq_id: int = 0) -> Draft:
    return drafter.propose([DraftRequest(seq_id, history, 1, k, True)], never_stop)[0]


@given(histories, st.integers(1, 4), st.integers(0, 4), st.integers(1, 9))
def test_equals_brute_force(history: list[int], shortest: int, more: int, k: int) -> None:
    drafter = Ngram(Ngram.Options(prompt_lookup_min=shortest, prompt_lookup_max=shortest + more))
    assert propose(drafter, history, k).tokens == brute_force(history, shortest, shortest + more, k)


@given(histories, st.lists(st.tuples(st.integers(1, 60), st.booleans()), max_size=8))
def test_catches_up_after_any_gap(history: list[int], growth: list[tuple[int, bool]]) -> None:
    """Asked at some lengths and not at others, it drafts what a drafter that sees the history for the first time drafts."""
    drafter = Ngram(Ngram.Options(prompt_lookup_min=2, prompt_lookup_max=3))
    live = history[:1]
    for length, ask in growth:
        live += history[len(live) : len(live) + length]
        drafter.commit([Committed(0, live, 1, length, 0)])
        if ask:
            assert propose(drafter, live, 4).tokens == brute_force(live, 2, 3, 4)


def test_most_recent_of_the_longest() -> None:
    #          v oldest          v most recent      v shorter but newer
    history = [1, 2, 3, 10, 0, 1, 2, 3, 11, 0, 7, 2, 3, 12, 0, 1, 2, 3]
    assert propose(Ngram(Ngram.Options(2, 2)), history, 1).tokens == [12]
    assert propose(Ngram(Ngram.Options(3, 2)), history, 1).tokens == [11]


def test_a_period_is_continued_for_all_of_k() -> None:
    assert propose(Ngram(Ngram.Options(2, 2)), [5, 1, 2, 1, 2], 7).tokens == [1, 2, 1, 2, 1, 2, 1]
    assert propose(Ngram(Ngram.Options(3, 3)), [9] * 4, 5).tokens == [9] * 5


@pytest.mark.parametrize("history", [[1], [1, 2], [1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 6, 7]])
def test_no_match_is_an_empty_draft(history: list[int]) -> None:
    assert propose(Ngram(), history, 4).tokens == []


def test_a_history_that_got_shorter_is_read_again() -> None:
    drafter = Ngram(Ngram.Options(2, 2))
    assert propose(drafter, [1, 2, 3, 4, 5, 6, 1, 2], 2).tokens == [3, 4]
    assert propose(drafter, [1, 2, 8, 1, 2], 2).tokens == [8, 1]


def test_sequences_are_separate_and_forgotten() -> None:
    drafter = Ngram(Ngram.Options(1, 1))
    first, second = drafter.propose([DraftRequest(7, [1, 2, 1], 1, 1, True), DraftRequest(8, [1, 3, 1], 1, 1, True)], never_stop)
    assert (first.tokens, second.tokens) == ([2], [3])
    drafter.stop(7)
    drafter.stop(99)
    assert propose(drafter, [1, 5, 1], 1, seq_id=7).tokens == [5]
    assert set(drafter._indices) == {7, 8}


def test_confidence_grows_with_the_match() -> None:
    short = propose(Ngram(Ngram.Options(2, 2)), [1, 2, 3, 4, 1, 2], 3).confidence
    long = propose(Ngram(Ngram.Options(2, 2)), [*range(40), 99, *range(39)], 3).confidence
    assert short is not None
    assert long is not None
    assert 0.0 < short[0] < short[1] < short[2] < long[0] < long[2] <= 1.0


@given(st.lists(st.integers(0, 3), min_size=6, max_size=60), st.integers(1, 8))
def test_confidence_is_made_from_the_prefix_only(history: list[int], k: int) -> None:
    """The first positions of a longer draft are the shorter draft, confidence included."""
    drafter = Ngram(Ngram.Options(3, 2))
    short, long = propose(drafter, history, k), propose(drafter, history, k + 3)
    assert long.truncated(len(short)) == short


@pytest.mark.parametrize(
    ("given_options", "bounds"),
    [({}, (5, 5)), ({"prompt_lookup_max": 4}, (4, 4)), ({"prompt_lookup_min": 2}, (2, 2)),
     ({"prompt_lookup_min": 2, "prompt_lookup_max": 4}, (2, 4)), ({"prompt_lookup_max": 1}, (1, 1))],
)  # fmt: skip
def test_defaults_are_filled_as_vllm_fills_them(given_options: dict[str, int], bounds: tuple[int, int]) -> None:
    config = SpeculativeConfig.parse({"method": "ngram", **given_options})
    assert config is not None
    assert Ngram.Options(**config.options_of("ngram")).bounds == bounds
    assert isinstance(config.build_drafter(), Ngram)


@pytest.mark.parametrize(
    ("given_options", "message"),
    [
        ({"prompt_lookup_max": 0}, "prompt_lookup_max must be >= 1, got 0"),
        ({"prompt_lookup_min": -1}, "prompt_lookup_min must be >= 1, got -1"),
        ({"prompt_lookup_min": 3, "prompt_lookup_max": 2}, r"prompt_lookup_min \(3\) must be <= prompt_lookup_max \(2\)"),
        ({"prompt_lookup_min": 2.5}, "prompt_lookup_min must be an integer or null, got 2.5"),
    ],
)
def test_bad_options(given_options: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SpeculativeConfig.parse({"method": "ngram", **given_options})


# -- the index ------------------------------------------------------------------------------------------------------


def found(index: NgramIndex, history: list[int], order: int, first: int = 0) -> list[int]:
    """Verified occurrences of the last `order` tokens; `first`: the position of history[0]."""
    at = [p - first for p in index.occurrences(history[-order:], order, first + len(history) - 1)]
    return [p + first for p in at if p >= order - 1 and history[p - order + 1 : p + 1] == history[-order:]]


@given(
    st.sampled_from([2, 5, 1000]).flatmap(lambda size: st.lists(st.integers(0, size), min_size=1, max_size=400)),
    st.sampled_from([(1,), (1, 3), (2, 4, 5), (5,)]),
    st.lists(st.sampled_from([1, 3, 47, 48, 49, 130]), min_size=1),
)
def test_every_way_of_appending_gives_the_same_chains(history: list[int], orders: tuple[int, ...], pieces: list[int]) -> None:
    index = NgramIndex(orders)
    while index.end < len(history):
        for piece in pieces:
            index.extend(history[index.end : index.end + piece])
    for n in orders:
        expected = [p for p in range(len(history) - 2, n - 2, -1) if history[p - n + 1 : p + 1] == history[-n:]]
        if len(history) >= n:
            assert found(index, history, n) == expected


@given(st.lists(st.integers(1, 70), min_size=1, max_size=30), st.integers(0, 2**32 - 1))
def test_a_ring_knows_its_window_and_nothing_older(pieces: list[int], seed: int) -> None:
    index, window = NgramIndex((1, 3), window=128), 128
    size = index.nbytes
    tokens: list[int] = []
    for number, piece in enumerate(pieces):
        tokens += np.random.default_rng(seed + number).integers(0, 3, piece).tolist()
        index.start = max(0, len(tokens) - window)
        index.extend(tokens[index.end :])
    for n in (1, 3):
        alive = tokens[index.start :]
        if len(alive) > n:
            expected = [p for p in range(len(alive) - 2, n - 2, -1) if alive[p - n + 1 : p + 1] == alive[-n:]]
            assert found(index, alive, n, index.start) == [p + index.start for p in expected]
    assert index.nbytes == size


def test_memory_is_linear_in_the_history() -> None:
    index = NgramIndex((1, 3))
    index.extend(list(range(100_000)))
    assert index.nbytes <= 40 * 3 * 100_000


def test_match_lengths_and_continuations() -> None:
    history = [4, 1, 2, 3, 9, 1, 2, 3]
    index = NgramIndex((1,))
    index.extend(history)
    places = [3, 6, 0]
    assert index.match_lengths(places, history) == [3, 0, 0]
    assert index.match_lengths(places * 10, history) == [3, 0, 0] * 10   # in arrays
    assert index.continuations(places * 10, 6) == index.continuations(places, 6) * 10
    assert index.match_lengths([7], history[-2:]) == [2]
    assert index.match_lengths([7], history) == [8]
    assert index.continuations(places, 6) == [[9, 1, 2, 3, 9, 1], [3, 3, 3, 3, 3, 3], [1, 2, 3, 9, 1, 2]]


@pytest.mark.parametrize("length", [255, 256, 257, 512, 1024])
def test_a_match_ends_where_the_history_begins(length: int) -> None:
    """Also when the history fills its tables exactly: before its first token there is nothing, not its last token again."""
    history = [1, 2, *range(10, length + 5), 2, 1, 2]
    assert len(history) == length
    index = NgramIndex((1,))
    index.extend(history)
    assert index.match_lengths([1], history[-24:]) == [2]


def test_acceptance_grows_with_evidence() -> None:
    assert acceptance(1, 1, 1) < acceptance(1, 1, 2) < acceptance(1, 1, 24) < 1.0
    assert acceptance(1, 1, 3) < acceptance(4, 4, 3)
    assert acceptance(1, 2, 3) < acceptance(1, 1, 3)
