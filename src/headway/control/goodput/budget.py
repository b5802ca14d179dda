"""What may be spent on finding out: verifying the drafts of a new drafter, and probes of one that does not seem worth asking.

Nothing is known of a new drafter but what it says of itself, and where a verified token costs as much as a plain step, believing it is
expensive. So its drafts are verified on credit, counted in plain steps. Right ones raise it at once: what can be copied takes off in a few
steps, as far as it costs little from the first. What credit does not cover is compared with what the target writes, for nothing.

What drafting took is no part of it: it is paid whether the drafts are verified or not, and leaving them out for that would lose them, too.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

import numpy as np

LOAN = 1.0               # plain steps that verifying its drafts may lose
SHARE = 0.01             # of the time, further on
PROBE_SHARE = 0.005      # of the time may go into trying drafters where they do not seem to pay
NETWORK_SHARE = 0.01     # one that reads what it drafts for: a first look at a request takes it half a step, and finds more
FOUND_ASKS = 16          # of a request, after a probe that found something, that count as what the probe brought
_MOST_SAVED = 10.0       # plain steps' time that can be saved up for probes that way
_MOST_OWED = 2.0         # that can be owed: more was no loss but a wrong price
_LONGEST_REST = 8        # steps between two decisions that count as time to earn probes


class Budget:
    """One drafter's account for finding out."""

    def __init__(self, is_network: bool) -> None:
        self.credit = LOAN         # plain steps
        self._probe_share = NETWORK_SHARE if is_network else PROBE_SHARE
        self._booked_at: int | None = None
        self._probes_ms = 0.0      # milliseconds that may go into probes
        self._price_ms = 0.0       # of the last probe
        self._probed_at = 0
        self._following: dict[int, int] = {}   # seq_id -> asks to come that count as what a probe brought

    # -- while it is new ------------------------------------------------------------------------------------------

    def book(self, saved: float, spent: float, step: int) -> None:
        """What accepted tokens saved and what verifying cost in a step, in plain steps."""
        elapsed = 1 if self._booked_at is None else max(1, step - self._booked_at)
        self._booked_at = step
        self.credit += SHARE * elapsed + saved - spent

    def num_covered(self, step_ms: Sequence[float], plain_ms: float) -> int:
        """How many drafts may be verified although all may be wrong. `step_ms`: of a step that verifies 0, 1, ... drafts; never falls."""
        return max(0, bisect_right(step_ms, step_ms[0] + self.credit * plain_ms) - 1)

    # -- probes ---------------------------------------------------------------------------------------------------

    def pays(self, step: int, price_ms: float, plain_ms: float, *, wanted: bool) -> bool:
        """Whether a probe that takes `price_ms` is paid for, now, where it is `wanted`. `plain_ms`: its part of a plain step."""
        elapsed = max(1, min(_LONGEST_REST, step - self._probed_at))
        self._probed_at = step
        self._probes_ms = max(self._probes_ms, -_MOST_OWED * plain_ms)
        self._probes_ms = max(self._probes_ms, min(self._probes_ms + elapsed * self._probe_share * plain_ms, 2.0 * price_ms))
        self._price_ms = price_ms
        if not wanted or self._probes_ms < price_ms:
            return False
        self._probes_ms -= price_ms
        return True

    def refund(self, ms: float, plain_ms: float) -> None:
        """Asking where probes led to saved so much time, net of verification. What can be copied comes in bursts: where a probe has found
        something the next ones find more, so they are paid for by what they bring, and together never cost more than that. What verifying
        them lost is owed, and earned before the next one."""
        if np.isfinite(ms):
            self._probes_ms = max(-_MOST_OWED * plain_ms, min(self._probes_ms + ms, max(self._probes_ms, _MOST_SAVED * plain_ms)))

    def grant_another(self) -> None:
        """A shadow draft would have paid: another one is granted. What was read for it need not be read again, and where such drafts
        gain nothing few of them would have paid, so that probes cost little more than they may."""
        self._probes_ms = max(self._probes_ms, self._price_ms)

    @property
    def can_probe(self) -> bool:
        """Another probe is paid for already."""
        return self._probes_ms >= self._price_ms > 0.0

    def found(self, seq_id: int) -> None:
        """A probe of this request brought something: its next asks count as what the probe brought."""
        self._following[seq_id] = FOUND_ASKS

    def follows(self, seq_id: int) -> bool:
        """Whether this ask counts as what a probe brought."""
        left = self._following.get(seq_id, 0)
        if left > 1:
            self._following[seq_id] = left - 1
        elif left:
            del self._following[seq_id]
        return left > 0

    def forget(self, live: set[int]) -> None:
        self._following = {seq_id: left for seq_id, left in self._following.items() if seq_id in live}


def most_valuable(values: Sequence[Sequence[float]], lengths: Sequence[int], count: int) -> list[int]:
    """[n] of the first lengths[i] positions of each draft, how many are among the `count` most valuable ones of all.

    values   one sequence per draft, non-increasing
    """
    if sum(lengths) <= count:
        return list(lengths)
    chosen = sorted([(-value, position, i) for i, length in enumerate(lengths) for position, value in enumerate(values[i][:length])])
    kept = [0] * len(lengths)
    for _, _, i in chosen[:count]:
        kept[i] += 1
    return kept
