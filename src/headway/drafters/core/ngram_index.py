"""Where did this n-gram occur before? Hash chains over a token history, as LZ77 compressors keep them.

For each indexed order n, `heads` maps the hash of an n-gram to its most recent occurrence and `links` maps an occurrence
to the one before it. Appending one token costs O(largest order), a look-up costs one step per occurrence, memory is
8 + 16 * len(orders) bytes per token of capacity. N-grams with equal hashes share a chain, so what `occurrences` yields
still has to be compared with the tokens before the last one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

SEPARATOR = -1      # fills cells without a token and stands between texts; equal to no token
OWN_ESCAPE = 2.5    # fitted on code edits, code and prose; see `acceptance`
_NO_TOKEN = -2      # equal to neither a token nor a separator
_MASK64 = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15   # odd, so each of its powers permutes the 64-bit integers
_FEW = 16           # places up to which plain numbers are faster than arrays
_BULK = 48          # from this many tokens on, numpy is faster than one token at a time


class NgramIndex:
    """An append-only token history. Position p is absolute and lives in cell p % capacity.

    With `window` (a power of two) the history is a ring: its owner calls `drop_before` in time, so that at most `window` positions
    are alive. Without it the capacity doubles when needed.
    """

    def __init__(self, orders: Sequence[int], *, window: int | None = None) -> None:
        self.orders = tuple(sorted(orders))
        self.start = 0
        self.end = 0
        self._grows = window is None
        self._powers = [pow(_GOLDEN, i + 1, 1 << 64) for i in range(self.orders[-1])]
        self._allocate(window or 256)

    def _allocate(self, capacity: int) -> None:
        self._capacity = capacity
        self._shift = 64 - (capacity.bit_length() - 1)
        self._tokens = np.full(capacity, SEPARATOR, dtype=np.int64)
        # Positions are stored plus one and 0 means "none": zeroed pages take no memory before they are written.
        self._heads = {n: np.zeros(capacity, dtype=np.int64) for n in self.orders}
        self._links = {n: np.zeros(capacity, dtype=np.int64) for n in self.orders}
        # A memoryview reads and writes single elements several times faster than an array does.
        self._token_view = self._tokens.data
        self._views = {n: (self._heads[n].data, self._links[n].data) for n in self.orders}

    @property
    def nbytes(self) -> int:
        """Bytes of all tables, touched or not."""
        return self._tokens.nbytes + sum(table.nbytes for tables in (self._heads, self._links) for table in tables.values())

    def drop_before(self, start: int) -> None:
        """Positions before `start` are history no more."""
        self.start = start

    def extend(self, token_ids: Sequence[int]) -> None:
        """Appends tokens. In a ring, `drop_before` must already have made room for them."""
        size = self.end + len(token_ids)
        if self._grows and size >= self._capacity:   # one cell stays free: before position 0 there has to be a separator
            known = self._tokens[: self.end]
            self._allocate(1 << (size + size // 2).bit_length())
            self.end = 0
            self._append_many(known)
        if len(token_ids) < _BULK:
            for token_id in token_ids:
                self._append(token_id)
        else:
            self._append_many(np.asarray(token_ids, dtype=np.int64))

    def occurrences(self, tail: Sequence[int], order: int, before: int) -> Iterator[int]:
        """Positions < `before` of the last token of each probable occurrence of tail[-order:], most recent first.

        The last token is compared, so that tokens which only share a hash are not counted among the places.
        """
        code = 0
        for i in range(order):
            code += tail[-1 - i] * self._powers[i]
        heads, links = self._views[order]
        mask, start, tokens, last = self._capacity - 1, self.start, self._token_view, tail[-1]
        position = heads[(code & _MASK64) >> self._shift] - 1
        while position >= start:
            if position < before and tokens[position & mask] == last:
                yield position
            position = links[position & mask] - 1

    def match_lengths(self, positions: Sequence[int], tail: Sequence[int]) -> list[int]:
        """[n] how many tokens up to and including each position equal the end of `tail`; at most len(tail)."""
        mask = self._capacity - 1
        if len(positions) <= _FEW:   # most matches are short: then an array costs more than what it holds
            tokens, wanted, lengths = self._token_view, tail[::-1], []
            for position in positions:
                length = 0
                for token in wanted:
                    if tokens[(position - length) & mask] != token:
                        break
                    length += 1
                lengths.append(length)
            return lengths
        expected = np.array([*reversed(tail), _NO_TOKEN], dtype=np.int64)
        cells = (np.array(positions)[:, None] - np.arange(len(expected))) & mask
        found: list[int] = (self._tokens[cells] == expected).argmin(axis=1).tolist()
        return found

    def continuations(self, positions: Sequence[int], length: int) -> list[list[int]]:
        """[n][length] the tokens after each position. At the end of the history the copy goes on with what it has just
        copied: the next tokens of a periodic text."""
        mask, last = self._capacity - 1, self.end - 1
        if len(positions) * length <= 4 * _FEW:
            tokens = self._token_view
            return [[tokens[(position + 1 + j % (last - position)) & mask] for j in range(length)] for position in positions]
        places = np.array(positions)
        steps = np.arange(length) % (last - places)[:, None]
        continued: list[list[int]] = self._tokens[(places[:, None] + 1 + steps) & mask].tolist()
        return continued

    def _append(self, token_id: int) -> None:
        position, mask, shift = self.end, self._capacity - 1, self._shift
        tokens, views = self._token_view, self._views
        cell = position & mask
        tokens[cell] = token_id
        code = 0
        for i, power in enumerate(self._powers[: position + 1]):
            code += tokens[(position - i) & mask] * power
            if i + 1 in views:
                heads, links = views[i + 1]
                slot = (code & _MASK64) >> shift
                links[cell] = heads[slot]
                heads[slot] = position + 1
        self.end = position + 1

    def _append_many(self, new: NDArray[np.int64]) -> None:
        """The same as `_append` for each token, in whole arrays."""
        first, mask = self.end, self._capacity - 1
        positions = np.arange(first, first + len(new))
        self._tokens[positions & mask] = new
        self.end = first + len(new)
        context = min(self.orders[-1] - 1, first)   # earlier tokens that the first n-grams reach back to
        text = self._tokens[np.arange(first - context, self.end) & mask].astype(np.uint64)
        codes = np.zeros(len(new), dtype=np.uint64)
        for i, power in enumerate(self._powers):
            skip = max(0, i - context)              # at the beginning of a history there are no i tokens before
            if skip >= len(new):
                break
            codes[skip:] += text[skip + context - i : len(text) - i] * np.uint64(power)
            if i + 1 in self._views:
                self._chain(i + 1, positions[skip:], codes[skip:] >> np.uint64(self._shift))

    def _chain(self, order: int, positions: NDArray[np.int64], slots: NDArray[np.uint64]) -> None:
        heads, links = self._heads[order], self._links[order]
        by_slot = np.argsort(slots, kind="stable")
        positions, slots = positions[by_slot], slots[by_slot]
        first = np.ones(len(slots), dtype=np.bool_)   # of its slot: it follows what the chain had before
        first[1:] = slots[1:] != slots[:-1]
        earlier = np.empty_like(positions)
        earlier[1:] = positions[:-1] + 1
        earlier[first] = heads[slots[first]]
        links[positions & (self._capacity - 1)] = earlier
        last = np.roll(first, -1)
        heads[slots[last]] = positions[last] + 1


def acceptance(count: int, total: int, matched: int, escape: float = OWN_ESCAPE) -> float:
    """P(the next token is the one that followed `count` of `total` earlier occurrences of the last `matched` tokens).

    The share of the counts, with some of the mass left to tokens never seen here ("escape", as in prediction by partial
    matching); the longer the match, the less of it: count / (total + escape / matched).
    """
    return count / (total + escape / matched)
