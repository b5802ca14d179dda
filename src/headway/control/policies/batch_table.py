"""k from a table of batch sizes: vLLM's num_speculative_tokens_per_batch_size.

The table is a list of (first, last, k), both ends included: [[1, 4, 4], [5, 16, 2], [17, 64, 0]]. Ranges may come in any order, must not
overlap, and one must start at 1. A batch size between two ranges, or above the last one, takes the k of the nearest range
below it; no k exceeds num_speculative_tokens. The batch size is the number of requests that decode; prefill chunks in the same step do
not count (vLLM counts them).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from headway.config import option
from headway.control.policies.static import same_for_all
from headway.control.policy import BatchView, Policy
from headway.errors import ConfigError
from headway.types import Choice

NAME = "num_speculative_tokens_per_batch_size"


class BatchTable(Policy):
    @dataclass(frozen=True)
    class Options:
        num_speculative_tokens_per_batch_size: tuple[tuple[int, int, int], ...] = option(
            (), "list of [first batch size, last batch size, num_speculative_tokens]; the first range starts at 1"
        )

        def __post_init__(self) -> None:
            table = sorted(self.num_speculative_tokens_per_batch_size)
            if not table:
                raise ConfigError(f"{NAME} is needed: a list of [first, last, num_speculative_tokens], such as [[1, 8, 4], [9, 64, 0]]")
            for entry in table:
                first, last, k = entry
                if not 1 <= first <= last:
                    raise ConfigError(f"{NAME}: a range needs 1 <= first <= last, got {list(entry)}")
                if k < 0:
                    raise ConfigError(f"{NAME}: num_speculative_tokens must be >= 0, got {list(entry)}")
            for below, above in pairwise(table):
                if above[0] <= below[1]:
                    raise ConfigError(f"{NAME}: ranges must not overlap, got {list(below)} and {list(above)}")
            if table[0][0] != 1:
                raise ConfigError(f"{NAME}: the first range must start at batch size 1, got {list(table[0])}")

    def __init__(self, options: Options) -> None:
        table = sorted(options.num_speculative_tokens_per_batch_size)
        self._firsts = [first for first, _, _ in table]
        self._ks = [k for _, _, k in table]

    def plan(self, view: BatchView) -> Mapping[int, Choice]:
        batch_size = view.num_decoding
        if batch_size == 0:
            return {}
        k = self._ks[bisect_right(self._firsts, batch_size) - 1]
        return same_for_all(view, min(k, view.max_k))
