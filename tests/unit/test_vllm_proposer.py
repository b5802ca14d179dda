"""The proposer that vLLM loads: rows of token ids in, drafts out, with requests recognised by what they say. Needs no vLLM."""

from __future__ import annotations

import pickle
from types import SimpleNamespace

import numpy as np
import pytest

from headway.errors import ConfigError
from headway.vllm.proposer import Proposer, ScoredDraft

MAX_LEN = 256


def make(max_k: int = 4, cached: int = 10000, **additional: object) -> Proposer:
    return Proposer(SimpleNamespace(
        speculative_config=SimpleNamespace(num_speculative_tokens=max_k, suffix_decoding_max_cached_requests=cached),
        model_config=SimpleNamespace(max_model_len=MAX_LEN),
        additional_config=additional,
    ))  # fmt: skip


class Batch:
    """vLLM's arrays: a row per running request, moved as vLLM moves them."""

    def __init__(self, proposer: Proposer, size: int = 8) -> None:
        self.proposer = proposer
        self.token_ids = np.zeros((size, MAX_LEN), dtype=np.int32)
        self.lengths = np.zeros(size, dtype=np.int32)

    def step(self, *rows: tuple[list[int], int]) -> list[ScoredDraft]:
        """Row i is (its text, how many of it this step wrote)."""
        for i, (text, _) in enumerate(rows):
            self.token_ids[i, : len(text)], self.lengths[i] = text, len(text)
        sampled = [text[len(text) - count :] for text, count in rows]
        return self.proposer.propose(sampled, self.lengths, self.token_ids, slot_mappings=None)


CYCLE = [5, 6, 7, 8, 9] * 4
OTHER = [21, 22, 23, 24, 25, 26] * 4


def test_drafts_what_followed() -> None:
    drafts = Batch(make()).step((CYCLE, 1), (OTHER, 1), ([1, 2, 3, 4], 1))
    assert drafts == [[5, 6, 7, 8], [21, 22, 23, 24], []]


def test_rows_may_move() -> None:
    batch = Batch(proposer := make())
    batch.step((CYCLE, 1), (OTHER, 1))
    ids = [known.seq_id for known in proposer._rows if known]
    assert batch.step(([*OTHER, 21, 22], 2), ([*CYCLE, 5], 1)) == [[23, 24, 25, 26], [6, 7, 8, 9]]
    assert [known.seq_id for known in proposer._rows if known] == ids[::-1]
    assert proposer._rows[0] is not None
    assert proposer._rows[0].token_ids == [*OTHER, 21, 22]


def test_a_row_that_writes_nothing_is_not_drafted_for_and_kept() -> None:
    batch = Batch(proposer := make())
    batch.step((CYCLE, 1), (OTHER, 1))
    assert batch.step((CYCLE, 0), ([*OTHER, 21], 1)) == [[], [22, 23, 24, 25]]
    assert [known.seq_id for known in proposer._rows if known] == [0, 1]


def test_what_ended_is_forgotten_and_remembered_as_a_response() -> None:
    batch = Batch(proposer := make())
    response = [31, 32, 33, 34, 35, 36]
    batch.step(([1, 2, 31], 1))
    for end in range(2, len(response) + 1):
        batch.step(([1, 2, *response[:end]], 1))
    batch.step(([40, 41], 1))
    suffix = proposer._drafters[0]
    assert len(suffix.cache) == 1   # type: ignore[attr-defined]
    assert len(suffix._indices) == len(suffix._committed) == 1   # type: ignore[attr-defined]
    assert batch.step(([40, 41, 31, 32], 2))[0][:1] == [33]


def test_no_response_is_kept_where_vllm_is_told_to_cache_none() -> None:
    batch = Batch(make(cached=0))
    batch.step(([1, 2, 31, 32, 33, 34], 4))
    batch.step(([40, 41], 1))
    assert batch.step(([40, 41, 31, 32], 2)) == [[]]


def test_memory_is_of_the_live_requests() -> None:
    batch = Batch(proposer := make())
    rng = np.random.default_rng(0)
    for _ in range(200):
        batch.step(*[(rng.integers(0, 50, 30).tolist(), 1) for _ in range(4)])
    for drafter in proposer._drafters:
        assert len(drafter._indices) <= 4   # type: ignore[attr-defined]
    assert len(proposer._rows) == 4


def test_never_beyond_the_context_limit() -> None:
    text = (CYCLE * 20)[: MAX_LEN - 3]
    assert len(Batch(make()).step((text, 1))[0]) <= 2
    assert Batch(make()).step(((CYCLE * 20)[: MAX_LEN - 1], 1)) == [[]]


def test_two_requests_that_say_the_same() -> None:
    batch = Batch(make())
    assert batch.step((CYCLE, 1), (CYCLE, 1)) == [[5, 6, 7, 8]] * 2
    assert batch.step(([*CYCLE, 5], 1), ([*CYCLE, 9, 9], 2))[0] == [6, 7, 8, 9]


def test_confidence_travels_with_the_drafts() -> None:
    drafts = Batch(make()).step((CYCLE, 1), ([1, 2], 1))
    there = pickle.loads(pickle.dumps(drafts))
    assert there == [[5, 6, 7, 8], []]
    assert [len(draft.confidence) for draft in there] == [4, 0]
    assert all(0.0 < value < 1.0 for value in there[0].confidence)
    assert there[0].draft_ms > 0.0


def test_trust_follows_what_was_kept() -> None:
    batch = Batch(proposer := make())
    for _ in range(20):   # what followed never follows again
        text = list(CYCLE)
        batch.step((text, 1))
        batch.step(([*text, 99, 98], 2))
    assert proposer._kept[0] / proposer._promised[0] < 0.2


def test_a_wrong_key_is_an_error() -> None:
    with pytest.raises(ConfigError, match="enabled"):
        make(headway={"enable": True})
