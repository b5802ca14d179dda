"""K/V of a draft network, laid out beside the target's, block for block.

Position p of a sequence is in the same block and slot as in the target's cache. So a drafter allocates nothing and cannot run out, and
what the prefix cache shares is shared here, too: a prompt that another request brought needs no second pass of the draft
network. All there is to know is which slots hold K/V of this network: per block, how many of its leading slots, and for which
generation of the block, that is for which tokens. Preemption, pauses and aborts need no case of their own.
"""

from __future__ import annotations

from collections.abc import Sequence

from headway.drafters.drafter import Target
from headway.models.attention import KVCache
from headway.models.config import ModelConfig


class DraftCache:
    def __init__(self, config: ModelConfig, target: Target) -> None:
        beside = target.cache
        self.block_size = beside.block_size
        self.kv = KVCache(config, beside.num_blocks, beside.block_size, target.model.dtype, target.model.device)
        self._now = target.generations
        self._generation = [0] * beside.num_blocks
        self._num_filled = [0] * beside.num_blocks

    def num_filled(self, block_table: Sequence[int], limit: int) -> int:
        """How many leading positions of a sequence hold K/V, at most `limit`."""
        num = 0
        for block in block_table:
            filled = self._num_filled[block] if self._generation[block] == self._now[block] else 0
            num += filled
            if filled < self.block_size or num >= limit:
                break
        return min(num, limit)

    def fill(self, block_table: Sequence[int], start: int, stop: int) -> None:
        """Positions [start, stop), behind filled ones, now hold the K/V of committed tokens."""
        for index in range(start // self.block_size, -(-stop // self.block_size)):
            block = block_table[index]
            known = self._num_filled[block] if self._generation[block] == self._now[block] else 0
            # Two sequences that share a block may fill it in one pass, one of them further than the other.
            self._num_filled[block] = max(known, min(self.block_size, stop - index * self.block_size))
            self._generation[block] = self._now[block]
