"""The target's hidden states, kept until a drafter reads them.

A drafter that continues the target's hidden states can only draft behind positions whose hidden states it has seen. The engine hands
them over as it computes them (`Drafter.commit`), which a pause (k = 0) does not stop: keeping them costs a reference, so drafting
after a pause is drafting without one. A preempted sequence keeps what it has. Only a prefix-cache hit skips positions: the
target does not compute them again. So full blocks are also filed under the tokens they depend on, as the prefix cache itself does,
and a sequence that starts behind a hit takes them from there. Where one has been dropped for space, the sequence goes on from the
first position it has: its drafts then see less context, never wrong context.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

Hidden = tuple[Tensor, ...]
"""One tensor [n, hidden] per layer asked for."""


class FeatureStore:
    """Hidden states of full blocks by a hash of all tokens up to their end; the least recently used go first."""

    def __init__(self, block_size: int, max_bytes: int) -> None:
        self.block_size = block_size
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._blocks: OrderedDict[bytes, Hidden] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def get(self, key: bytes) -> Hidden | None:
        hidden = self._blocks.get(key)
        if hidden is not None:
            self._blocks.move_to_end(key)
        return hidden

    def put(self, key: bytes, hidden: Hidden) -> None:
        if key in self._blocks:
            self._blocks.move_to_end(key)
            return
        self._blocks[key] = hidden
        self.num_bytes += _num_bytes(hidden)
        while self.num_bytes > self.max_bytes:
            _, dropped = self._blocks.popitem(last=False)
            self.num_bytes -= _num_bytes(dropped)


class FeatureTrack:
    """One sequence's hidden states at positions [begin, end); those before `kept` have been read and let go.

    begin moves up only when positions in between were never seen. Sequences with the same `salt` share what is in the store.
    """

    def __init__(self, store: FeatureStore, salt: bytes = b"") -> None:
        self.store = store
        self._salt = salt
        self.begin = self.kept = self.end = 0
        self._filed = 0                               # blocks before it are in the store
        self._pieces: list[tuple[int, Hidden]] = []   # (position of the first row, rows), contiguous, ending at `end`
        self._hashes: list[bytes] = []                # of the leading full blocks of tokens

    def add(self, start: int, hidden: Hidden, token_ids: Sequence[int]) -> None:
        """Hidden states at positions start, start + 1, ...; those that are known already are skipped."""
        if start > self.end and not self._recall(start, token_ids):
            self.begin = self.kept = self.end = self._filed = start
            self._pieces.clear()
        known = self.end - start
        num_new = len(hidden[0]) - known
        if num_new <= 0:
            return
        self._pieces.append((self.end, tuple(layer[known:] for layer in hidden) if known else hidden))
        self.end += num_new
        self._file(token_ids)

    def take(self) -> Hidden:
        """Hidden states at [kept, end), read once."""
        parts: list[Hidden] = []
        for start, hidden in reversed(self._pieces):
            parts.insert(0, hidden if start >= self.kept else tuple(layer[self.kept - start :] for layer in hidden))
            if start <= self.kept:
                break
        self.kept = self.end
        self._drop_read()
        return tuple(torch.cat(layers) for layers in zip(*parts, strict=True)) if len(parts) > 1 else parts[0]

    def rewind(self, token_ids: Sequence[int]) -> None:
        """What was made of the rows read is lost: all are to be read again, or those that are left."""
        size = self.store.block_size
        rest = [(start, hidden) for start, hidden in self._pieces if start >= self._filed]
        self.begin = self.kept = min(self.kept, self._filed)
        if self._filed % size == 0:
            blocks = [self.store.get(self._hash(index, token_ids)) for index in range(self._filed // size)]
            if None not in blocks:
                self._pieces = [(index * size, hidden) for index, hidden in enumerate(blocks) if hidden is not None] + rest
                self.begin = self.kept = 0

    def _recall(self, start: int, token_ids: Sequence[int]) -> bool:
        """Fills [end, start) from the store; False when a block of it is not there."""
        size = self.store.block_size
        if start % size:
            return False
        found = []
        for index in range(self.end // size, start // size):
            hidden = self.store.get(self._hash(index, token_ids))
            if hidden is None:
                return False
            found.append((index * size, hidden))
        skip = self.end - found[0][0]
        found[0] = (self.end, tuple(layer[skip:] for layer in found[0][1]))
        self._pieces += found
        self.end = self._filed = start
        return True

    def _file(self, token_ids: Sequence[int]) -> None:
        """Copies full blocks out of the step's tensors into the store; the pieces then refer to the copies."""
        size = self.store.block_size
        first, whole = -(-self._filed // size) * size, self.end // size * size
        if whole <= first:
            return
        begin = self._filed
        loose = [hidden for start, hidden in self._pieces if start >= begin]
        merged = tuple(torch.cat(layers) for layers in zip(*loose, strict=True))
        self._pieces = [(start, hidden) for start, hidden in self._pieces if start < begin]
        bounds = [begin, *range(first, whole + 1, size), self.end]
        for at, stop in itertools.pairwise(bounds):
            if at == stop:
                continue
            rows = tuple(layer[at - begin : stop - begin] for layer in merged)
            if first <= at < whole:
                self.store.put(self._hash(at // size, token_ids), rows)
            self._pieces.append((at, rows if at < whole else tuple(layer.clone() for layer in rows)))
        self._filed = whole
        self._drop_read()

    def _drop_read(self) -> None:
        """Lets go of pieces that were read, except those of the block being filled."""
        needed = min(self.kept, self._filed)
        while self._pieces and (self._pieces[1][0] if len(self._pieces) > 1 else self.end) <= needed:
            del self._pieces[0]

    def _hash(self, index: int, token_ids: Sequence[int]) -> bytes:
        size = self.store.block_size
        while len(self._hashes) <= index:
            at = len(self._hashes)
            tokens = np.array(token_ids[at * size : (at + 1) * size], dtype=np.int64).tobytes()
            self._hashes.append(hashlib.blake2b((self._hashes[-1] if at else self._salt) + tokens, digest_size=16).digest())
        return self._hashes[index]


def _num_bytes(hidden: Hidden) -> int:
    return sum(layer.numel() * layer.element_size() for layer in hidden)
