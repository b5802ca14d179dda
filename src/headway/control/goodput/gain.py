"""What asking a drafter brings, for each request: tokens gained by one ask, net of verifying them and of drafting beyond the first token.

An answer without a draft is a gain of 0, so a drafter that is often silent gains little however good its drafts are. The mean over all
requests (`pool`) starts high enough to be tried. A request's own mean counts as far as it has predicted gains so far: of
pool + trust * (own - pool), the `trust` with the least squared error is used. So requests that are alike are not told apart by noise. A
request that is not asked drifts back to the pool.

Numbers, not arrays: most batches are small, and then an array takes longer than the arithmetic.
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
class RequestGain:
    """What is known of one request."""

    mean: float             # tokens net per ask
    num_asks: float         # how many that is made of, the prior's included
    asked_at: int = -1      # step of the last ask; -1: never
    num_seen: int = 0       # known tokens at the last ask

    def note_ask(self, step: int, num_seen: int) -> None:
        self.asked_at, self.num_seen = step, num_seen

    def learn(self, gain: float) -> None:
        self.num_asks += 1.0
        self.mean += max(_OWN_SHARE, 1.0 / self.num_asks) * (gain - self.mean)

    def restart(self, mean: float) -> None:
        self.mean, self.num_asks = mean, _PRIOR_ASKS

    def raise_to(self, mean: float) -> bool:
        """Whether `mean` is more than was known; then it is believed at once."""
        higher = mean > self.mean
        self.mean = max(self.mean, mean)
        return higher


class Gain:
    """One drafter's gain for any number of requests."""

    def __init__(self) -> None:
        self.pool = FIRST
        self.num_learned = 0
        self._trust = _TRUST[0]
        self._loss = [0.0] * len(_TRUST)
        self._requests: dict[int, RequestGain] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def of(self, seq_id: int) -> RequestGain:
        request = self._requests.get(seq_id)
        if request is None:
            request = self._requests[seq_id] = RequestGain(self.pool, _PRIOR_ASKS)
        return request

    def predict(self, request: RequestGain, step: int) -> float:
        """Tokens net of one more ask."""
        gap = request.mean - self.pool
        idle = step - request.asked_at
        return float(self.pool + self._trust * (gap if idle < 8 else gap * 0.5 ** (idle / _DRIFT_STEPS)))

    def learn(self, seq_id: int, gain: float, *, probed: bool = False) -> None:
        """Tokens net that asking brought. The pool learns more from a probe: there are few of them."""
        request = self.of(seq_id)
        gap, keep = request.mean - self.pool, 1.0 - 1.0 / _TRUST_MEMORY
        missed = self.pool - gain
        loss = self._loss = [keep * loss + (missed + trust * gap) ** 2 for loss, trust in zip(self._loss, _TRUST, strict=True)]
        self._trust = _TRUST[loss.index(min(loss))]
        request.learn(gain)
        self.num_learned += 1
        share = _PROBED_SHARE if probed else _POOL_SHARE
        self.pool += max(share, 1.0 / (self.num_learned + _PRIOR_ASKS)) * (gain - self.pool)

    def restart(self, pool: float) -> None:
        """Forgets what the asks gained; everybody starts at `pool`."""
        self.pool, self.num_learned = pool, 0
        for request in self._requests.values():
            request.restart(pool)

    def forget(self, live: set[int]) -> None:
        if len(self._requests) > 2 * len(live) + 64:
            self._requests = {seq_id: request for seq_id, request in self._requests.items() if seq_id in live}
