"""What finding out about a drafter may cost.

Each drafter has one account, in plain steps of time:

    in      LOAN at the beginning; PROBE_SHARE of the time, over all drafters; what drafts that it has paid for win
    out     the price of each probe: drafts where asking does not seem to pay; what drafts that it has paid for lose

While a drafter is new, so many of its drafts are verified as the account could pay if all of them were wrong. Right ones fill it at once,
so what can be copied takes off in a few steps. What it does not cover is compared with what the target writes, for nothing. Text that can
be copied comes in bursts: where a probe has found something the next ones find more, and pay for themselves.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence

from headway.control import constants as const


class Budget:
    """One drafter's account."""

    def __init__(self) -> None:
        self._balance = const.LOAN                   # plain steps
        self._is_loan = True
        self._earned_at = 0                    # step
        self._price = math.inf                 # of the next probe, in plain steps

    def earn(self, step: int, price: float, num_tried: int) -> None:
        """Its part of the share of the time since the last call, of `num_tried` drafters, up to twice the price of a probe."""
        earned = (step - self._earned_at) * const.PROBE_SHARE / max(1, num_tried)
        self._earned_at, self._price = step, price
        self._balance = max(self._balance, min(self._balance + earned, 2.0 * price))

    def end_loan(self) -> None:
        """It is new no longer: what is left is not for probes."""
        self._balance, self._is_loan = 0.0 if self._is_loan else self._balance, False

    @property
    def can_probe(self) -> bool:
        return self._balance >= self._price

    def pay(self) -> None:
        """For a probe."""
        self._balance -= self._price

    def book(self, steps: float) -> None:
        """Plain steps won, or lost where negative, by drafts that it has paid for. It owes no more than LOAN: a larger loss was a wrong
        price."""
        if math.isfinite(steps):
            self._balance = max(-const.LOAN, min(self._balance + steps, max(self._balance, const.MOST_SAVED)))

    def num_covered(self, step_ms: Sequence[float], plain_ms: float) -> int:
        """How many drafts may be verified although all may be wrong. `step_ms`: of a step that verifies 0, 1, ... drafts; never falls."""
        return max(0, bisect_right(step_ms, step_ms[0] + self._balance * plain_ms) - 1)
