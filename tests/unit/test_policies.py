"""static, batch_table, disable_by_batch_size: who drafts how much, at every batch size."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway import plugins
from headway.config import SpeculativeConfig
from headway.control.costs import CostModel
from headway.control.policies.batch_table import BatchTable
from headway.control.policies.disable_by_batch_size import DisableByBatchSize
from headway.control.policies.static import Static
from headway.control.policy import BatchView, DrafterView, DraftView, Policy, SequenceView, Setup
from headway.errors import ConfigError
from headway.types import Choice

TABLE = "num_speculative_tokens_per_batch_size"


def sequence(seq_id: int, *, decoding: bool = True, max_k: int = 100) -> SequenceView:
    return SequenceView(seq_id, 50, 5, decoding, max_k, greedy=True, priority=0, num_drafts=0, num_accepted=0)


def view(*sequences: SequenceView, max_k: int = 8) -> BatchView:
    return BatchView(0, sequences, num_waiting=3, num_free_blocks=10, token_budget=512, drafters=("suffix", "ngram"), max_k=max_k)


def batch(num_decoding: int, max_k: int = 8) -> BatchView:
    """`num_decoding` sequences that decode and three that do not."""
    return view(*(sequence(i) for i in range(num_decoding)), *(sequence(1000 + i, decoding=False) for i in range(3)), max_k=max_k)


def ks(policy: Policy, num_decoding: int, max_k: int = 8) -> int:
    """The k that all decoding sequences of a batch get."""
    plan = policy.plan(batch(num_decoding, max_k))
    found = {plan[i].k if i in plan else 0 for i in range(num_decoding)}
    assert len(found) == 1
    assert all(seq_id < 1000 for seq_id in plan)
    return found.pop()


def make(config: dict[str, Any]) -> Policy:
    parsed = SpeculativeConfig.parse({"method": "ngram", **config})
    assert parsed is not None
    policy: Policy = parsed.build_policy()
    return policy


# -- static ---------------------------------------------------------------------------------------------------------


def test_static_asks_the_first_drafter_for_k() -> None:
    plan = Static().plan(view(sequence(1), sequence(2, max_k=3), sequence(3, max_k=0), sequence(4, decoding=False)))
    assert plan == {1: Choice("suffix", 8), 2: Choice("suffix", 3)}


def test_static_asks_nobody_when_nobody_runs() -> None:
    assert isinstance(make({"policy": "static"}), Static)
    assert Static().plan(view()) == {}


def test_select_verifies_everything_by_default() -> None:
    policy = Static()
    assert policy.select([DraftView(1, "suffix", 3, True, None)], batch(1)) == {}


# -- batch_table ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        ([[1, 4, 5], [5, 16, 2], [17, 64, 0]], {1: 5, 4: 5, 5: 2, 16: 2, 17: 0, 64: 0}),
        ([[1, 4, 5], [10, 16, 2]], {4: 5, 5: 5, 9: 5, 10: 2, 16: 2, 17: 2, 500: 2}),     # gaps and the end carry forward
        ([[10, 16, 2], [1, 4, 5]], {4: 5, 9: 5, 10: 2}),                                  # any order
        ([[1, 1, 100], [2, 2, 3]], {1: 8, 2: 3, 3: 3}),                                   # never above num_speculative_tokens
        ([[1, 10**9, 1]], {1: 1, 300: 1}),
    ],
)  # fmt: skip
def test_batch_table(table: list[list[int]], expected: dict[int, int]) -> None:
    policy = make({TABLE: table})
    assert {size: ks(policy, size) for size in expected} == expected


def dense(table: list[tuple[int, int, int]], largest: int, max_k: int) -> list[int]:
    """k of every batch size, written out: ranges first, then everything else takes what stands before it."""
    ks_by_size: list[int | None] = [None] * (largest + 1)
    for first, last, k in table:
        for size in range(first, min(last, largest) + 1):
            ks_by_size[size] = k
    for size in range(2, largest + 1):
        if ks_by_size[size] is None:
            ks_by_size[size] = ks_by_size[size - 1]
    return [min(max_k, k or 0) for k in ks_by_size]


@given(st.data())
def test_batch_table_equals_the_dense_table(data: st.DataObject) -> None:
    table: list[tuple[int, int, int]] = []
    next_first = 1
    for _ in range(data.draw(st.integers(1, 5))):
        first = next_first + (data.draw(st.integers(0, 6)) if table else 0)
        last = first + data.draw(st.integers(0, 6))
        table.append((first, last, data.draw(st.integers(0, 9))))
        next_first = last + 1
    max_k = data.draw(st.integers(1, 8))
    policy = BatchTable(BatchTable.Options(tuple(data.draw(st.permutations(table)))))
    expected = dense(table, 60, max_k)
    assert [ks(policy, size, max_k) for size in range(1, 61)] == expected[1:]
    assert policy.plan(batch(0)) == {}


def test_batch_size_is_who_decodes() -> None:
    policy = make({TABLE: [[1, 2, 4], [3, 9, 1]]})
    prefilling = [sequence(10 + i, decoding=False) for i in range(5)]
    assert policy.plan(view(sequence(1), sequence(2), *prefilling)) == {1: Choice("suffix", 4), 2: Choice("suffix", 4)}


def test_a_sequence_may_have_less_than_the_table_gives() -> None:
    policy = make({TABLE: [[1, 9, 4]]})
    plan = policy.plan(view(sequence(1, max_k=1), sequence(2, max_k=0), sequence(3)))
    assert plan == {1: Choice("suffix", 1), 3: Choice("suffix", 4)}


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ([], "is needed"),
        ([[2, 4, 1]], "the first range must start at batch size 1"),
        ([[0, 4, 1]], "1 <= first <= last"),
        ([[1, 4, 1], [7, 6, 1]], "1 <= first <= last"),
        ([[1, 4, -1]], "num_speculative_tokens must be >= 0"),
        ([[1, 4, 3], [4, 8, 1]], r"must not overlap, got \[1, 4, 3\] and \[4, 8, 1\]"),
        ([[1, 4, 3], [1, 4, 3]], "must not overlap"),
        ([[1, 4]], "a list, each entry"),
        ([[1, 4, 2, 2]], "a list, each entry"),
        ([[1, 4, 2.0]], "a list, each entry"),
        ([[1, 4, True]], "a list, each entry"),
        ({"1": 4}, "a list, each entry"),
        ("1-4:2", "a list, each entry"),
    ],
)
def test_bad_tables(table: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=f"{TABLE}.*{message}"):
        make({TABLE: table})


# -- disable_by_batch_size ------------------------------------------------------------------------------------------


def test_disable_above_the_batch_size() -> None:
    policy = make({"disable_by_batch_size": 4})
    assert isinstance(policy, DisableByBatchSize)
    assert {size: ks(policy, size) for size in (1, 4, 5, 64)} == {1: 8, 4: 8, 5: 0, 64: 0}
    assert ks(policy, 4) == 8   # and back


@pytest.mark.parametrize("value", [0, -3])
def test_disable_needs_a_positive_number(value: int) -> None:
    with pytest.raises(ConfigError, match=f"disable_by_batch_size is needed and must be >= 1, got {value}"):
        make({"disable_by_batch_size": value})


@pytest.mark.parametrize("name", ["batch_table", "disable_by_batch_size"])
def test_a_policy_that_needs_an_option_says_so(name: str) -> None:
    with pytest.raises(ConfigError, match="is needed"):
        make({"policy": name})


# -- all of them ----------------------------------------------------------------------------------------------------

REQUIRED: dict[str, dict[str, Any]] = {
    "batch_table": {TABLE: [[1, 3, 9], [4, 4, 0]]},
    "disable_by_batch_size": {"disable_by_batch_size": 2},
}


@given(
    st.lists(st.builds(lambda decoding, max_k: (decoding, max_k), st.booleans(), st.integers(0, 6)), max_size=8),
    st.integers(1, 8),
    st.sampled_from(plugins.names("policy")),
)
def test_a_plan_stays_within_what_is_allowed(sequences: list[tuple[bool, int]], max_k: int, name: str) -> None:
    policy = make({"policy": {"name": name, **REQUIRED.get(name, {})}})
    policy.start(Setup((DrafterView("suffix", True), DrafterView("ngram", True)), max_k, CostModel()))
    shown = view(*(sequence(i, decoding=decoding, max_k=most) for i, (decoding, most) in enumerate(sequences)), max_k=max_k)
    for seq_id, choice in policy.plan(shown).items():
        decoding, most = sequences[seq_id]
        assert decoding
        assert 0 <= choice.k <= min(most, max_k)
        assert choice.drafter in shown.drafters
