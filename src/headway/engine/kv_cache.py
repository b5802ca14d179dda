"""Block pool: which sequence owns which block of the K/V cache. Pure bookkeeping, no tensors.

Every block is in exactly one of two states:

    held    reference count >= 1: in the block table of that many sequences
    free    reference count 0: in `_free`, oldest first; a free block with a hash still holds valid K/V and is found
            by `match` until `allocate` takes it for something else

Only full blocks of committed tokens get a hash, so a draft that is rejected can never be found as a prefix.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf


def chain_hash(parent: bytes, token_ids: SequenceOf[int]) -> bytes:
    """128-bit hash of a block's tokens and of everything before it."""
    return hashlib.blake2b(parent + array("q", token_ids).tobytes(), digest_size=16).digest()


class BlockPool:
    """`num_blocks` blocks of `block_size` tokens with reference counts and a prefix cache."""

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool = True) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0
        self.generations = [0] * num_blocks   # how often `allocate` gave each block out
        self._ref_counts = [0] * num_blocks
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._block_of_hash: dict[bytes, int] = {}
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def usage(self) -> float:
        return 1.0 - len(self._free) / self.num_blocks

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def allocate(self, count: int) -> list[int]:
        """Takes `count` free blocks, those without valid K/V first, then the least recently used. Raises if too few are free."""
        if count > len(self._free):
            raise RuntimeError(f"asked for {count} blocks, {len(self._free)} are free")
        blocks = []
        for _ in range(count):
            block, _ = self._free.popitem(last=False)
            self._forget(block)
            self._ref_counts[block] = 1
            self.generations[block] += 1
            blocks.append(block)
        return blocks

    def release(self, blocks: SequenceOf[int]) -> None:
        """Gives back one reference to each block. Later blocks of a sequence are reused before earlier ones."""
        for block in reversed(blocks):
            self._ref_counts[block] -= 1
            if self._ref_counts[block] == 0:
                self._free[block] = None
                if self._hashes[block] is None:
                    self._free.move_to_end(block, last=False)

    def match(self, token_ids: SequenceOf[int], salt: bytes = b"") -> tuple[list[int], list[bytes]]:
        """Takes a reference to the longest cached chain of full blocks that prefixes `token_ids`.

        At least one token is left to compute, since a step needs one to sample from. A chain of another `salt` is never found: its
        hashes begin elsewhere. Returns (blocks, their hashes).
        """
        blocks: list[int] = []
        hashes: list[bytes] = []
        if not self.enable_prefix_caching:
            return blocks, hashes
        parent = salt
        for index in range((len(token_ids) - 1) // self.block_size):
            parent = chain_hash(parent, token_ids[index * self.block_size : (index + 1) * self.block_size])
            block = self._block_of_hash.get(parent)
            if block is None:
                break
            blocks.append(block)
            hashes.append(parent)
        for block in blocks:
            if self._ref_counts[block] == 0:
                del self._free[block]
            self._ref_counts[block] += 1
        self.num_queried_tokens += len(token_ids)
        self.num_hit_tokens += len(blocks) * self.block_size
        return blocks, hashes

    def publish(
        self, token_ids: SequenceOf[int], num_computed: int, block_table: SequenceOf[int], hashes: list[bytes], salt: bytes = b""
    ) -> None:
        """Makes the full blocks among the first `num_computed` tokens findable by this `salt`; extends the sequence's `hashes`."""
        if not self.enable_prefix_caching:
            return
        for index in range(len(hashes), num_computed // self.block_size):
            parent = hashes[-1] if hashes else salt
            digest = chain_hash(parent, token_ids[index * self.block_size : (index + 1) * self.block_size])
            hashes.append(digest)
            block = block_table[index]
            # A twin computed by another sequence at the same time stays anonymous: one block per hash.
            if digest not in self._block_of_hash and self._hashes[block] is None:
                self._block_of_hash[digest] = block
                self._hashes[block] = digest

    def clear_cache(self) -> None:
        """Forgets every cached prefix that no sequence holds."""
        for block in self._free:
            self._forget(block)

    def check(self, block_tables: Iterable[SequenceOf[int]]) -> None:
        """Raises AssertionError unless free + held == total and reference counts equal the tables that hold each block."""
        held: Counter[int] = Counter()
        for table in block_tables:
            assert len(set(table)) == len(table), f"a block twice in one table: {table}"
            held.update(table)
        counts = {block: count for block, count in enumerate(self._ref_counts) if count}
        assert counts == dict(held), f"reference counts {counts} but tables hold {dict(held)}"
        assert not held.keys() & self._free.keys(), "a block both held and free"
        assert len(self._free) + len(held) == self.num_blocks, f"{len(self._free)} free + {len(held)} held != {self.num_blocks}"
        for digest, block in self._block_of_hash.items():
            assert self._hashes[block] == digest, f"block {block} is listed under a hash it does not have"

    def _forget(self, block: int) -> None:
        digest = self._hashes[block]
        if digest is not None:
            del self._block_of_hash[digest]
            self._hashes[block] = None
