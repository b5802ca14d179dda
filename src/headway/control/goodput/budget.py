"""What finding out about one drafter may cost: one account, in plain steps of time.

A new drafter begins with a small loan: its drafts are verified as far as the account could pay if all of them were wrong. Right ones fill
it at once, so what can be copied takes off in a few steps. What it does not cover is compared with what the target writes, for nothing.

Later it pays for probes: drafts where asking does not seem to pay. It earns a share of the time, and what comes of a probe goes back into
it: text that can be copied comes in bursts, so where a probe has found something the next ones find more, and pay for themselves.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence

LOAN = 1.0               # plain steps that verifying a new drafter's drafts may lose
SHARE = 0.005            # of the time goes into finding out, over all drafters
NETWORK_SHARE = 0.01     # the same for one that reads what it drafts for: a first look at a request takes half a step, and finds more
FOUND_ASKS = 16          # asks of a request, after a probe that found something, that count as what the probe brought
_MOST = 10.0             # plain steps that can be saved up


class Budget:
    def __init__(self, *, is_network: bool = False) -> None:
        self._share = NETWORK_SHARE if is_network else SHARE
        self._balance = LOAN                   # plain steps
        self._is_loan = True
        self._earned_at = 0                    # step
        self._price = math.inf                 # of the next probe, in plain steps
        self._following: dict[int, int] = {}   # seq_id -> asks to come that count as what a probe brought

    def earn(self, step: int, price: float, num_tried: int) -> None:
        """Its part of the share of the time since the last call, of `num_tried` drafters, up to twice the price of a probe."""
        earned = (step - self._earned_at) * self._share / max(1, num_tried)
        self._earned_at, self._price = step, price
        self._balance = max(self._balance, min(self._balance + earned, 2.0 * price))

    def end_loan(self) -> None:
        """It is new no longer: what is left is not for probes."""
        self._balance, self._is_loan = 0.0 if self._is_loan else self._balance, False

    @property
    def can_probe(self) -> bool:
        return self._balance >= self._price

    @property
    def can_repeat(self) -> bool:
        """Another probe is paid for already, after one that had a price."""
        return self._balance >= self._price > 0.0

    def pay(self) -> None:
        """For a probe."""
        self._balance -= self._price

    def book(self, steps: float) -> None:
        """Plain steps won, or lost where negative, by drafts that it has paid for."""
        if math.isfinite(steps):
            self._balance = max(0.0, min(self._balance + steps, max(self._balance, _MOST)))

    def grant_probe(self) -> None:
        """A shadow draft would have paid: another one is granted."""
        self._balance = max(self._balance, self._price)

    def num_covered(self, step_ms: Sequence[float], plain_ms: float) -> int:
        """How many drafts may be verified although all may be wrong. `step_ms`: of a step that verifies 0, 1, ... drafts; never falls."""
        return max(0, bisect_right(step_ms, step_ms[0] + self._balance * plain_ms) - 1)

    def follow(self, seq_id: int) -> None:
        """A probe of this request brought something: its next asks count as what the probe brought."""
        self._following[seq_id] = FOUND_ASKS

    def follows(self, seq_id: int) -> bool:
        """Whether this ask counts as what a probe brought."""
        left = self._following.pop(seq_id, 0)
        if left > 1:
            self._following[seq_id] = left - 1
        return left > 0

    def forget(self, live: set[int]) -> None:
        """Drops every request that is not in `live`."""
        self._following = {seq_id: left for seq_id, left in self._following.items() if seq_id in live}
