"""What asking a drafter brings, for each request: tokens gained by one ask, net of verifying them and of drafting beyond the first token.

An answer without a draft is a gain of 0, so a drafter that is often silent gains little however good its drafts are. The mean over all
requests (`pool`) starts high enough to be tried. Half of the difference between a request's own mean and the pool's is believed, so that
noise does not set apart requests that are alike.

Numbers, not arrays: most batches are small, and then an array takes longer than the arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass

from headway.control import constants as const


@dataclass(slots=True)
class RequestGain:
    """What is known of one request."""

    mean: float             # tokens net per ask
    num_asks: float         # how many that is made of, the prior's included
    num_seen: int = 0       # known tokens at the last ask

    def note_ask(self, num_seen: int) -> None:
        self.num_seen = num_seen

    def learn(self, gain: float) -> None:
        self.num_asks += 1.0
        self.mean += max(const.OWN_SHARE, 1.0 / self.num_asks) * (gain - self.mean)

    def restart(self, mean: float) -> None:
        self.mean, self.num_asks = mean, const.PRIOR_ASKS


class Gain:
    """One drafter's gain for any number of requests."""

    def __init__(self) -> None:
        self.pool = const.FIRST_GAIN
        self.num_learned = 0
        self._requests: dict[int, RequestGain] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def of(self, seq_id: int) -> RequestGain:
        request = self._requests.get(seq_id)
        if request is None:
            request = self._requests[seq_id] = RequestGain(self.pool, const.PRIOR_ASKS)
        return request

    def predict(self, request: RequestGain) -> float:
        """Tokens net of one more ask."""
        return self.pool + const.REQUEST_TRUST * (request.mean - self.pool)

    def learn(self, seq_id: int, gain: float) -> None:
        """Tokens net that asking brought."""
        self.of(seq_id).learn(gain)
        self.num_learned += 1
        self.pool += max(const.POOL_SHARE, 1.0 / (self.num_learned + const.PRIOR_ASKS)) * (gain - self.pool)

    def restart(self, pool: float) -> None:
        """Forgets what the asks gained; everybody starts at `pool`."""
        self.pool, self.num_learned = pool, 0
        for request in self._requests.values():
            request.restart(pool)

    def forget(self, live: set[int]) -> None:
        """Drops every request that is not in `live`."""
        self._requests = {seq_id: request for seq_id, request in self._requests.items() if seq_id in live}
