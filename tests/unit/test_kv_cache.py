"""Block pool: reference counts, prefix cache, nothing leaks."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from headway.engine.kv_cache import BlockPool
from headway.errors import InvalidRequestError
from headway.types import Request

BLOCK = 4


def filled(pool: BlockPool, tokens: list[int], salt: bytes = b"") -> list[int]:
    """A block table whose full blocks are published, as after a prefill."""
    blocks, hashes = pool.match(tokens, salt)
    blocks += pool.allocate(pool.blocks_for(len(tokens)) - len(blocks))
    pool.publish(tokens, len(tokens), blocks, hashes, salt)
    return blocks


def test_a_released_prefix_is_found_again() -> None:
    pool = BlockPool(8, BLOCK)
    first = filled(pool, list(range(10)))
    pool.release(first)
    assert pool.num_free == 8
    blocks, hashes = pool.match([*range(8), 99, 98])
    assert blocks == first[:2]
    assert len(hashes) == 2
    pool.check([blocks])


def test_one_token_is_always_left_to_compute() -> None:
    pool = BlockPool(8, BLOCK)
    pool.release(filled(pool, list(range(8))))
    assert len(pool.match(list(range(8)))[0]) == 1   # 8 tokens fill two blocks, the second must be computed again


def test_equal_blocks_behind_different_prefixes_are_different() -> None:
    pool = BlockPool(8, BLOCK)
    filled(pool, [1, 1, 1, 1, 5, 5, 5, 5, 0])
    assert pool.match([2, 2, 2, 2, 5, 5, 5, 5, 0])[0] == []


def test_a_prefix_of_another_salt_is_not_found() -> None:
    pool = BlockPool(12, BLOCK)
    tokens = [1] * 9
    tables = {salt: filled(pool, tokens, salt) for salt in (b"", b"a" * 16, b"b" * 16)}
    assert len({block for table in tables.values() for block in table}) == 9
    for salt, table in tables.items():
        assert pool.match(tokens, salt)[0] == table[:2]


def test_the_salt_of_a_request_is_a_digest_of_fixed_length() -> None:
    salts = [Request("r", [1], cache_salt=text).salt for text in (None, "a", "b", "a" * 1000, "\ud800")]
    assert len(set(salts)) == 5
    assert [len(salt) for salt in salts] == [0, 16, 16, 16, 16]
    for wrong in ("", 5):
        with pytest.raises(InvalidRequestError, match="cache_salt must be a non-empty string"):
            Request("r", [1], cache_salt=wrong)   # type: ignore[arg-type]


def test_shared_blocks_are_free_only_when_the_last_holder_lets_go() -> None:
    pool = BlockPool(8, BLOCK)
    first = filled(pool, list(range(9)))
    second = filled(pool, list(range(9)))
    assert second[:2] == first[:2]
    assert second[2] != first[2]
    pool.check([first, second])
    pool.release(first)
    pool.check([second])
    pool.release(second)
    pool.check([])


def test_blocks_without_a_prefix_go_first_then_the_oldest_prefix() -> None:
    pool = BlockPool(4, BLOCK)
    old = filled(pool, [1] * 5)       # one cached block, one anonymous
    new = filled(pool, [2] * 5)
    pool.release(old)
    pool.release(new)
    assert set(pool.allocate(2)) == {old[1], new[1]}
    assert pool.allocate(1) == [old[0]]
    assert pool.match([1] * 5)[0] == []
    assert pool.match([2] * 5)[0] == [new[0]]


def test_prefix_caching_can_be_off() -> None:
    pool = BlockPool(8, BLOCK, enable_prefix_caching=False)
    pool.release(filled(pool, list(range(9))))
    assert pool.match(list(range(9))) == ([], [])


def test_clear_cache_forgets_what_nobody_holds() -> None:
    pool = BlockPool(8, BLOCK)
    pool.release(filled(pool, list(range(9))))
    pool.clear_cache()
    assert pool.match(list(range(9)))[0] == []


def test_asking_for_too_much_is_an_error_and_takes_nothing() -> None:
    pool = BlockPool(2, BLOCK)
    with pytest.raises(RuntimeError, match="asked for 3 blocks, 2 are free"):
        pool.allocate(3)
    pool.check([])


def test_check_sees_a_leak() -> None:
    pool = BlockPool(4, BLOCK)
    pool.allocate(1)
    with pytest.raises(AssertionError, match="reference counts"):
        pool.check([])


class PoolMachine(RuleBasedStateMachine):
    """Random sequences over three tokens and two salts, so that prefixes collide often, against the pool's own invariants and a content
    model."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(12, 2)
        self.live: list[tuple[list[int], list[int], list[bytes], bytes]] = []
        self.content: dict[int, tuple[bytes | int, ...]] = {}   # block -> its salt and all tokens up to its end, as a cache would hold

    @rule(tokens=st.lists(st.integers(0, 2), min_size=1, max_size=10), salt=st.sampled_from([b"", b"x" * 16]))
    def start(self, tokens: list[int], salt: bytes) -> None:
        blocks, hashes = self.pool.match(tokens, salt)
        for index, block in enumerate(blocks):
            assert self.content[block] == (salt, *tokens[: 2 * index + 2]), "a prefix hit with the wrong content"
        missing = self.pool.blocks_for(len(tokens)) - len(blocks)
        if missing > self.pool.num_free:
            self.pool.release(blocks)
            return
        blocks += self.pool.allocate(missing)
        self._write(tokens, blocks, salt)
        self.pool.publish(tokens, len(tokens), blocks, hashes, salt)
        self.live.append((tokens, blocks, hashes, salt))

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 100), more=st.lists(st.integers(0, 2), min_size=1, max_size=5))
    def extend(self, which: int, more: list[int]) -> None:
        tokens, blocks, hashes, salt = self.live[which % len(self.live)]
        missing = self.pool.blocks_for(len(tokens) + len(more)) - len(blocks)
        if missing > self.pool.num_free:
            return
        tokens += more
        blocks += self.pool.allocate(missing)
        self._write(tokens, blocks, salt)
        self.pool.publish(tokens, len(tokens), blocks, hashes, salt)

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 100))
    def stop(self, which: int) -> None:
        _, blocks, _, _ = self.live.pop(which % len(self.live))
        self.pool.release(blocks)

    @invariant()
    def nothing_leaks(self) -> None:
        self.pool.check(blocks for _, blocks, _, _ in self.live)

    def _write(self, tokens: list[int], blocks: list[int], salt: bytes) -> None:
        for index, block in enumerate(blocks):
            self.content[block] = (salt, *tokens[: 2 * index + 2])


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
