"""What asking one drafter is worth, for each request: tokens gained by an ask, net of verifying them and of drafting beyond the first.

The answer "nothing to propose" is a gain of 0, so the worth of a drafter that is often silent is small whatever its drafts are worth when
there are any. The pool's mean starts high enough to be tried. A request's own mean is believed as far as that has predicted gains: of
pool + trust * (own - pool), the `trust` with the least squared error so far is used, so that requests that are alike are
not told apart by noise. A request that is not asked drifts back to the pool.

Numbers, not arrays: most batches are small, and then an array costs more than what it holds.
"""

from __future__ import annotations

from dataclasses import dataclass

FIRST = 1.0             # tokens, before anything is known
_POOL_SHARE = 0.003     # of one more ask in the pool's mean, once it has 1 / _POOL_SHARE of them
_PROBED_SHARE = 0.03
_OWN_SHARE = 0.08       # of one more ask in a request's mean, once it has 1 / _OWN_SHARE of them
_PRIOR_ASKS = 3.0       # that the pool's mean counts for in a new request's
_TRUST = (0.1, 0.5, 1.0)
_TRUST_MEMORY = 1000.0  # asks
_DRIFT_STEPS = 300.0    # until a request that is not asked has come back half the way to the pool


@dataclass(slots=True)
class Own:
    """One request."""

    mean: float             # tokens net per ask
    asks: float             # how many that is made of, the prior's included
    asked_at: int = -1      # step of the last ask; -1: never
    seen: int = 0           # known tokens at the last ask
    found: int = 0          # asks to come that count as what a probe brought


class Worth:
    def __init__(self) -> None:
        self.pool = FIRST
        self.num_learned = 0
        self._trust = _TRUST[0]
        self._loss = [0.0] * len(_TRUST)
        self._own: dict[int, Own] = {}

    def __len__(self) -> int:
        return len(self._own)

    def of(self, seq_id: int) -> Own:
        own = self._own.get(seq_id)
        if own is None:
            own = self._own[seq_id] = Own(self.pool, _PRIOR_ASKS)
        return own

    def predict(self, own: Own, step: int) -> float:
        """Tokens net of one more ask."""
        gap = own.mean - self.pool
        idle = step - own.asked_at
        return float(self.pool + self._trust * (gap if idle < 8 else gap * 0.5 ** (idle / _DRIFT_STEPS)))

    def learn(self, seq_id: int, gain: float, *, probed: bool = False) -> None:
        """Tokens net that asking brought. Of a probe the pool learns more: there are few of them."""
        own = self.of(seq_id)
        gap, keep = own.mean - self.pool, 1.0 - 1.0 / _TRUST_MEMORY
        missed = self.pool - gain
        loss = self._loss = [keep * loss + (missed + trust * gap) ** 2 for loss, trust in zip(self._loss, _TRUST, strict=True)]
        self._trust = _TRUST[loss.index(min(loss))]
        own.asks += 1.0
        own.mean += max(_OWN_SHARE, 1.0 / own.asks) * (gain - own.mean)
        self.num_learned += 1
        share = _PROBED_SHARE if probed else _POOL_SHARE
        self.pool += max(share, 1.0 / (self.num_learned + _PRIOR_ASKS)) * (gain - self.pool)

    def restart(self, pool: float) -> None:
        """Forgets what the asks were worth; everybody starts at `pool`."""
        self.pool, self.num_learned = pool, 0
        for own in self._own.values():
            own.mean, own.asks = pool, _PRIOR_ASKS

    def forget(self, live: set[int]) -> None:
        if len(self._own) > 2 * len(live) + 64:
            self._own = {seq_id: own for seq_id, own in self._own.items() if seq_id in live}
