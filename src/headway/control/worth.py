"""What asking one drafter is worth, for each request: tokens gained by an ask, net of the price of verifying them.

The answer "nothing to propose" is a gain of 0, so the worth of a drafter that is often silent is small whatever its drafts are worth when
there are any. The pool's mean starts high enough to be tried. A request's own mean is believed as far as that has predicted gains: of
pool + trust * (own - pool), the `trust` with the least squared error so far is used, so that requests that are alike are
not told apart by noise. A request that is not asked drifts back to the pool.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

_FIRST = 1.0            # tokens, before anything is known
_POOL_SHARE = 0.01      # of one more ask in the pool's mean, once it has 1 / _POOL_SHARE of them
_OWN_SHARE = 0.08       # of one more ask in a request's mean, once it has 1 / _OWN_SHARE of them
_PRIOR_ASKS = 3.0       # that the pool's mean counts for in a new request's
_TRUST = np.array([0.1, 0.5, 1.0])
_TRUST_MEMORY = 1000.0  # asks
_DRIFT_STEPS = 300.0    # until a request that is not asked has come back half the way to the pool


class Worth:
    # Arrays by slot.
    own: FloatArray          # tokens net per ask
    asks: FloatArray         # how many that is made of, the prior's included
    asked_at: IntArray       # step of the last ask; -1: never
    seen: IntArray           # known tokens at the last ask

    def __init__(self) -> None:
        self.pool = _FIRST
        self.num_learned = 0
        self._loss = np.zeros(len(_TRUST))
        self._slots: dict[int, int] = {}
        self._free: list[int] = []
        self._resize(64)

    def of(self, seq_ids: Iterable[int]) -> IntArray:
        """[n] where the requests' entries are in the arrays; new ones are made."""
        get = self._slots.get
        return np.array([slot if (slot := get(seq_id)) is not None else self._give(seq_id) for seq_id in seq_ids], dtype=np.int64)

    def predict(self, slots: IntArray, step: int) -> FloatArray:
        """[n] tokens net of one more ask."""
        trust = _TRUST[int(self._loss.argmin())] * 0.5 ** (np.maximum(0, step - self.asked_at[slots]) / _DRIFT_STEPS)
        predicted: FloatArray = self.pool + trust * (self.own[slots] - self.pool)
        return predicted

    def ask(self, slots: IntArray, context: IntArray, step: int) -> None:
        self.asked_at[slots] = step
        self.seen[slots] = context

    def learn(self, seq_ids: Sequence[int], gains: FloatArray) -> None:
        """[n] tokens net that asking brought."""
        slots = self.of(seq_ids)
        own = self.own[slots]
        self._loss *= max(0.0, 1.0 - len(slots) / _TRUST_MEMORY)
        self._loss += ((self.pool + _TRUST[:, None] * (own - self.pool) - gains) ** 2).sum(axis=1)
        self.asks[slots] += 1.0
        self.own[slots] += np.maximum(_OWN_SHARE, 1.0 / self.asks[slots]) * (gains - own)
        self.num_learned += len(slots)
        share = max(_POOL_SHARE, 1.0 / (self.num_learned + _PRIOR_ASKS))
        self.pool += (1.0 - (1.0 - share) ** len(slots)) * (float(gains.mean()) - self.pool)

    def restart(self, pool: float) -> None:
        """Forgets what the asks were worth; everybody starts at `pool`."""
        self.pool, self.num_learned = pool, 0
        self.own[:], self.asks[:] = pool, _PRIOR_ASKS

    def forget(self, live: set[int]) -> None:
        if len(self._slots) > 2 * len(live) + 64:
            for seq_id in self._slots.keys() - live:
                self._free.append(self._slots.pop(seq_id))

    def _give(self, seq_id: int) -> int:
        if not self._free:
            self._resize(2 * len(self.own))
        slot = self._slots[seq_id] = self._free.pop()
        self.own[slot], self.asks[slot], self.asked_at[slot], self.seen[slot] = self.pool, _PRIOR_ASKS, -1, 0
        return slot

    def _resize(self, size: int) -> None:
        old = len(self._slots)
        grown = (np.zeros(size), np.zeros(size), np.zeros(size, dtype=np.int64), np.zeros(size, dtype=np.int64))
        if old:
            for new, array in zip(grown, (self.own, self.asks, self.asked_at, self.seen), strict=True):
                new[:old] = array
        self.own, self.asks, self.asked_at, self.seen = grown
        self._free = list(range(size - 1, old - 1, -1))
