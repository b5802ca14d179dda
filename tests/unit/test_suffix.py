"""Suffix decoding against a brute-force count over every match length, and the bounded cache of past responses."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.config import SpeculativeConfig
from headway.drafters import suffix
from headway.drafters.drafter import Committed, DraftRequest, never_stop
from headway.drafters.suffix import ResponseCache, Suffix
from headway.errors import ConfigError
from headway.types import Draft

texts = st.integers(1, 4).flatmap(lambda size: st.lists(st.integers(0, size), min_size=1, max_size=30))
histories = st.integers(1, 4).flatmap(lambda size: st.lists(st.integers(0, size), min_size=1, max_size=80))
all_options = st.builds(
    Suffix.Options,
    suffix_decoding_max_tree_depth=st.integers(1, 12),
    suffix_decoding_max_spec_factor=st.sampled_from([0.0, 0.4, 1.0, 2.5, float("inf")]),
    suffix_decoding_min_token_prob=st.sampled_from([0.0, 0.1, 0.35, 0.9, 1.0]),
)


def brute_force(history: list[int], responses: list[list[int]], k: int, options: Suffix.Options) -> tuple[list[int], float]:
    """(tokens, score): the best path over every match length and both sources, by counting over all places."""
    tail = history[-options.suffix_decoding_max_tree_depth :]
    best: tuple[list[int], float] = ([], 0.0)
    for is_own, candidates in ((True, [history]), (False, list(reversed(responses)))):
        for m in range(len(tail), 0, -1):
            limit = min(k, options.suffix_decoding_max_tree_depth, m * options.suffix_decoding_max_spec_factor + 1e-6)
            places = [
                (text, last)
                for text in candidates
                for last in range(len(text) - (2 if is_own else 1), m - 2, -1)
                if text[last - m + 1 : last + 1] == tail[-m:]
            ]
            path = count_down(places, int(limit), is_own, options.suffix_decoding_min_token_prob)
            if path[1] > best[1]:
                best = path
    return best


def count_down(places: list[tuple[list[int], int]], limit: int, is_own: bool, floor: float) -> tuple[list[int], float]:
    tokens: list[int] = []
    probability, score = 1.0, 0.0
    while len(tokens) < limit:
        step = len(tokens)
        nexts = [
            extended[last + 1 + step] if last + 1 + step < len(extended) else None
            for text, last in places
            for extended in ([*text, *tokens] if is_own else text,)
        ]
        known = [token for token in nexts if token is not None]
        if not known:
            break
        token = max(dict.fromkeys(known), key=known.count)
        probability *= known.count(token) / len(places)
        if probability < floor:
            break
        tokens.append(token)
        score += probability
        places = [place for place, found in zip(places, nexts, strict=True) if found == token]
    return tokens, score


def propose(drafter: Suffix, history: list[int], k: int, seq_id: int = 0) -> Draft:
    return drafter.propose([DraftRequest(seq_id, history, 1, k, True)], never_stop)[0]


def finish(drafter: Suffix, seq_id: int, prompt: list[int], response: list[int], salt: bytes = b"") -> None:
    drafter.commit([Committed(seq_id, prompt + response, len(prompt), len(response), 0, salt=salt)])
    drafter.stop(seq_id)


@given(histories, st.lists(texts, max_size=4), st.integers(1, 9), all_options)
def test_equals_brute_force(history: list[int], responses: list[list[int]], k: int, options: Suffix.Options) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(suffix, "MAX_PLACES", 1000)   # the cap on places is the one approximation
        drafter = Suffix(options)
        for number, response in enumerate(responses, 1):
            finish(drafter, number, [7], response)
        assert propose(drafter, history, k).tokens == brute_force(history, responses, k, options)[0]


@given(histories, st.lists(st.tuples(st.integers(1, 60), st.booleans()), max_size=8))
def test_catches_up_after_any_gap(history: list[int], growth: list[tuple[int, bool]]) -> None:
    drafter, live = Suffix(), history[:1]
    for length, ask in growth:
        live += history[len(live) : len(live) + length]
        drafter.commit([Committed(0, live, 1, length, 0)])
        if ask:
            assert propose(drafter, live, 6) == propose(Suffix(), live, 6)


def test_the_most_frequent_continuation_wins() -> None:
    history = [1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 4, 9, 1, 2]
    draft = propose(Suffix(), history, 8)
    assert draft.tokens == [3, 0]   # two tokens match, so two are drafted; 3 follows in two of three places
    assert draft.confidence is not None
    assert draft.confidence[0] < draft.confidence[1] < 1.0


@pytest.mark.parametrize(("factor", "length"), [(0.5, 2), (1.0, 5), (2.0, 10), (0.0, 0)])
def test_draft_length_follows_the_match(factor: float, length: int) -> None:
    history = [*range(100, 105), *range(20), 999, *range(100, 105)]
    assert len(propose(Suffix(Suffix.Options(suffix_decoding_max_spec_factor=factor)), history, 16).tokens) == length


def test_never_longer_than_k_or_the_depth() -> None:
    history = [*range(60), *range(40)]
    assert len(propose(Suffix(), history, 3).tokens) == 3
    assert len(propose(Suffix(), history, 99).tokens) == 24
    assert len(propose(Suffix(Suffix.Options(suffix_decoding_max_tree_depth=6)), history, 99).tokens) == 6


def test_stops_where_the_path_gets_improbable() -> None:
    history = [1, 2, 3, 4, 9, 1, 2, 3, 5, 9, 1, 2, 3, 6, 9, 1, 2, 3, 4, 8, 1, 2, 3]
    lengths = [
        len(propose(Suffix(Suffix.Options(suffix_decoding_min_token_prob=floor)), history, 9).tokens) for floor in (0.0, 0.25, 0.5, 0.51)
    ]
    assert lengths == [3, 3, 1, 0]   # 4 follows in 2 of 4 places, 8 in 1 of these 2, ...


def test_confidence_is_conditional_on_the_positions_before() -> None:
    history = [1, 2, 3, 4, 8, 1, 2, 3, 5, 9, 1, 2, 3]
    confidence = propose(Suffix(), history, 9).confidence
    assert confidence is not None
    assert confidence[0] < 0.5 < confidence[1] < confidence[2]   # one of two places; then one place is left and always agrees


@given(histories, st.integers(1, 8))
def test_confidence_is_made_from_the_prefix_only(history: list[int], k: int) -> None:
    """The draft is a function of the prefix, and each estimate is a probability."""
    draft = propose(Suffix(), history, k)
    assert draft.probs is None
    assert draft.confidence is not None
    assert len(draft.confidence) == len(draft.tokens) <= k
    assert all(0.0 < value < 1.0 for value in draft.confidence)


# -- the cache of past responses ------------------------------------------------------------------------------------


def test_a_finished_response_serves_other_sequences() -> None:
    drafter = Suffix()
    drafter.commit([Committed(1, [0, 50, 51, 52, 53], 1, 4, 0)])
    assert propose(drafter, [7, 8, 50, 51], 4, seq_id=2).tokens == []
    drafter.stop(1)
    assert propose(drafter, [7, 8, 50, 51], 4, seq_id=2).tokens == [52, 53]


def test_only_the_response_is_kept_not_the_prompt() -> None:
    drafter = Suffix()
    finish(drafter, 1, [50, 51, 52, 53], [60, 61])
    assert propose(drafter, [50, 51], 4, seq_id=2).tokens == []


def test_drafts_do_not_run_from_one_response_into_the_next() -> None:
    drafter = Suffix()
    finish(drafter, 1, [0], [1, 2, 3])
    finish(drafter, 2, [0], [7, 8, 9])
    assert propose(drafter, [5, 1, 2, 3], 4, seq_id=3).tokens == []
    assert propose(drafter, [5, 1, 2], 4, seq_id=3).tokens == [3]
    assert propose(drafter, [3, 7], 4, seq_id=4).tokens == [8]   # the match does not reach back over the seam either


def test_the_own_history_wins_ties_and_the_larger_score_wins() -> None:
    drafter = Suffix()
    finish(drafter, 1, [0], [1, 2, 30, 31, 32])
    assert propose(drafter, [1, 2, 40, 41, 1, 2], 4, seq_id=2).tokens == [40, 41]
    assert propose(drafter, [2, 40, 41, 1, 2], 4, seq_id=3).tokens == [30, 31]


def test_no_cached_requests_switches_the_cache_off() -> None:
    drafter = Suffix(Suffix.Options(suffix_decoding_max_cached_requests=0))
    finish(drafter, 1, [0], [1, 2, 3])
    assert drafter.cache is None
    assert propose(drafter, [5, 1, 2], 4, seq_id=2).tokens == []


def test_a_response_that_was_never_drafted_for_is_cached_and_an_empty_one_is_not() -> None:
    drafter = Suffix()
    finish(drafter, 1, [0], [])
    drafter.stop(99)
    assert drafter.cache is not None
    assert len(drafter.cache) == 0
    finish(drafter, 2, [0], [1])
    assert len(drafter.cache) == 1


def test_stop_forgets_the_sequence() -> None:
    drafter = Suffix()
    drafter.commit([Committed(1, [1, 2, 1, 2], 2, 2, 0)])
    propose(drafter, [1, 2, 1, 2], 4, seq_id=1)
    drafter.stop(1)
    assert not drafter._indices
    assert not drafter._committed


def test_the_oldest_responses_leave_first() -> None:
    drafter = Suffix(Suffix.Options(suffix_decoding_max_cached_requests=2))
    for number in (1, 2, 3):
        finish(drafter, number, [0], [10 * number, 10 * number + 1])
    assert [propose(drafter, [10 * number], 1, seq_id=9 + number).tokens for number in (1, 2, 3)] == [[], [21], [31]]


@given(st.lists(texts, min_size=1, max_size=25), histories, st.integers(1, 6))
def test_equals_brute_force_while_old_responses_are_overwritten(responses: list[list[int]], history: list[int], max_responses: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(suffix, "MAX_PLACES", 1000)
        drafter = Suffix()
        drafter.cache = ResponseCache(max_responses, max_tokens=64)
        for response in responses:
            drafter.cache.add(response)
        assert propose(drafter, history, 8).tokens == brute_force(history, responses[-len(drafter.cache) :], 8, drafter.options)[0]


def holds(cache: ResponseCache, token: int) -> bool:
    places = [*cache.index.occurrences([token], 1, cache.index.end)]
    return any(cache.index.match_lengths(places, [token]))


@given(st.lists(st.integers(1, 90), min_size=1, max_size=60), st.integers(1, 8))
def test_the_cache_is_bounded_in_responses_tokens_and_bytes(lengths: list[int], max_responses: int) -> None:
    cache = ResponseCache(max_responses, max_tokens=64)
    size = cache.index.nbytes
    responses: list[list[int]] = []
    for number, length in enumerate(lengths):
        responses.append([1000 * (number + 1) + i for i in range(length)])
        cache.add(responses[-1])
        alive = responses[-len(cache) :]
        assert 1 <= len(cache) <= max_responses
        assert sum(len(r) + 1 for r in alive[1:]) + min(len(alive[0]) + 1, 63) < 64
        assert cache.index.nbytes == size
        assert not any(holds(cache, response[-1]) for response in responses[: -len(cache)])
        assert all(holds(cache, response[-1]) for response in alive)


def test_what_the_documentation_says_about_memory() -> None:
    drafter = Suffix()
    assert drafter.cache is not None
    assert drafter.cache.index.nbytes == 40 * suffix.CACHE_TOKENS


@pytest.mark.parametrize("length", [62, 63, 64, 500])
def test_a_response_longer_than_the_cache_keeps_its_end(length: int) -> None:
    cache = ResponseCache(10, max_tokens=64)
    cache.add([1, 2, 3])
    cache.add(list(range(1000, 1000 + length)))
    assert len(cache) == 1
    assert holds(cache, 999 + length)


# -- salts ----------------------------------------------------------------------------------------------------------

SALTS = [b"", b"a", b"b"]


@given(st.lists(st.tuples(st.sampled_from(SALTS), texts), max_size=12), histories, st.integers(1, 9))
def test_drafts_are_those_of_a_drafter_that_saw_this_salt_alone(
    responses: list[tuple[bytes, list[int]]], history: list[int], k: int
) -> None:
    shared, alone = Suffix(), {salt: Suffix() for salt in SALTS}
    for number, (salt, response) in enumerate(responses, 1):
        finish(shared, number, [7], response, salt)
        finish(alone[salt], number, [7], response)
    for salt in SALTS:
        found = shared.propose([DraftRequest(100, history, 1, k, True, salt=salt)], never_stop)[0]
        shared.stop(100)
        assert found == propose(alone[salt], history, k)


def test_places_of_other_salts_do_not_count() -> None:
    drafter = Suffix()
    finish(drafter, 0, [0], [1, 2, 3, 4, 5], b"mine")
    for number in range(1, 2 * suffix.MAX_PLACES):
        finish(drafter, number, [0], [1, 2, 3, 9, 9], b"theirs")
    found = drafter.propose([DraftRequest(1000, [1, 2, 3], 1, 2, True, salt=b"mine")], never_stop)
    assert found[0].tokens == [4, 5]


def test_a_salt_is_forgotten_with_its_last_response() -> None:
    cache = ResponseCache(3, max_tokens=64)
    for number in range(50):
        cache.add([1, 2, 3], b"%d" % number)
        assert len(cache._offsets) == len(cache._num_responses) == len(cache) <= 3
    assert cache.offset(b"49") is not None
    assert cache.offset(b"46") is None


# -- options --------------------------------------------------------------------------------------------------------


def test_options_reach_the_drafter() -> None:
    given_options: dict[str, Any] = {
        "suffix_decoding_max_tree_depth": 12, "suffix_decoding_max_cached_requests": 3,
        "suffix_decoding_max_spec_factor": 2, "suffix_decoding_min_token_prob": 0.5,
    }  # fmt: skip
    config = SpeculativeConfig.parse({"method": "suffix", **given_options})
    assert config is not None
    assert config.build_drafter().options == Suffix.Options(**given_options)
    assert Suffix.Options() == Suffix.Options(24, 10000, 1.0, 0.1)


@pytest.mark.parametrize(
    ("key", "value", "accepted"),
    [
        ("suffix_decoding_max_tree_depth", 0, ">= 1"),
        ("suffix_decoding_max_cached_requests", -1, ">= 0"),
        ("suffix_decoding_max_spec_factor", -0.1, ">= 0"),
        ("suffix_decoding_max_spec_factor", float("nan"), ">= 0"),
        ("suffix_decoding_min_token_prob", 1.1, r"in \[0, 1\]"),
        ("suffix_decoding_min_token_prob", float("nan"), r"in \[0, 1\]"),
        ("suffix_decoding_max_tree_depth", 2.5, "an integer"),
        ("suffix_decoding_max_cached_requests", True, "an integer"),
    ],
)
def test_bad_options(key: str, value: Any, accepted: str) -> None:
    with pytest.raises(ConfigError, match=f"{key} must be {accepted}, got"):
        SpeculativeConfig.parse({"method": "suffix", key: value})
