"""Never slower than plain decoding: a measured counterfactual, and an account for each drafter.

`Plain` knows what a step without drafts takes now: the cost model's prediction times what such steps turned out to take. When
none came by itself for a while it asks for one, at most one in 1 / PLAIN_SHARE steps.

`Account` adds up, in plain steps, what a drafter's accepted tokens would have taken and what its drafting and verification took
beyond a plain step. When it is in the red by more than noise explains, the drafter is switched off, for some steps at least and
then until shadow drafts promise a profit; each relapse doubles the wait.
"""

from __future__ import annotations

import math

PLAIN_SHARE = 0.01       # of the steps, made plain when the profit is in doubt
SURE_SHARE = 0.002       # when speculation is far ahead
SURE = 1.3               # this speed-up is far ahead
TOLERANCE = 0.01         # a loss, in plain steps per step, that counts as none
_MEMORY = 150.0          # steps an account remembers
_LEAST = 20.0            # steps before an account is judged
_FIRST_WAIT = 50
_LONGEST_WAIT = 800
_STALE = 0.15            # change of the machine's speed, as a logarithm, after which the last plain step says little
_STALE_STEPS = 20        # between two plain steps made for that reason
_FACTOR_SHARE = 0.25     # of one more plain step in the factor
_SURPRISE = 0.15         # difference from the factor, as a logarithm, after which the next plain step comes soon
_SOON = 5                # steps


class Mean:
    """A mean that forgets, and how sure it is."""

    def __init__(self, memory: float, start: float = 0.0, weight: float = 0.0) -> None:
        self._memory = memory
        self.value = start
        self.weight = weight
        self._square = 0.0     # mean square of the deviations

    def observe(self, value: float, weight: float = 1.0) -> None:
        if not math.isfinite(value) or weight <= 0.0:
            return
        self.weight = self.weight * max(0.0, 1.0 - weight / self._memory) + weight
        share = weight / self.weight
        gap = value - self.value
        self.value += share * gap
        self._square += share * (gap * gap * (1.0 - share) - self._square)

    @property
    def error(self) -> float:
        """Standard error of the mean; inf before anything was observed."""
        return math.sqrt(self._square / self.weight) if self.weight > 0.0 else math.inf


class Plain:
    def __init__(self) -> None:
        self.factor = 1.0      # what plain steps take, against what is predicted of them
        self._since = 0        # steps since the last plain one
        self._speed = 1.0      # of the machine, then
        self._next = math.inf  # steps until the next one after a surprise

    def is_due(self, speedup: float, speed: float) -> bool:
        """Also when the machine's speed has changed: what a plain step takes now is then a guess."""
        stale = self._since >= _STALE_STEPS and abs(math.log(speed / self._speed)) > _STALE
        return stale or self._since >= self._next or self._since * (SURE_SHARE if speedup > SURE else PLAIN_SHARE) >= 1.0

    def passed(self) -> None:
        """A step with drafts."""
        self._since += 1

    def observe(self, ratio: float, speed: float) -> None:
        """A step without drafts took `ratio` times what was predicted."""
        self._since, self._speed = 0, speed
        if math.isfinite(ratio) and ratio > 0.0:
            gap = math.log(min(2.0, max(0.5, ratio)) / self.factor)
            self.factor *= math.exp(_FACTOR_SHARE * gap)
            self._next = _SOON if abs(gap) > _SURPRISE else math.inf


class Account:
    def __init__(self) -> None:
        self.balance = Mean(_MEMORY)
        self.off = False
        self.until = 0         # step before which it stays off
        self._wait = _FIRST_WAIT
        self._num_good = 0

    def observe(self, saved: float, spent: float, num_rows: int, step: int) -> bool:
        """One step of `num_rows` sequences in which the drafter was at work; True when it is switched off now."""
        self.balance.observe(saved - spent)
        # Rare hits may not have come yet: one more accepted token would change the mean by this much.
        doubt = self.balance.error + 1.0 / (num_rows * self.balance.weight)
        self._num_good += 1
        if self._num_good > 10 * _FIRST_WAIT:
            self._wait = _FIRST_WAIT
        if self.balance.weight < _LEAST or self.balance.value + doubt >= -TOLERANCE:
            return False
        self.off, self.until = True, step + self._wait
        self._wait = min(_LONGEST_WAIT, 2 * self._wait)
        return True

    def reopen(self) -> None:
        self.off, self.balance, self._num_good = False, Mean(_MEMORY), 0
