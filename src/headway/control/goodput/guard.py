"""Never slower than plain decoding: plain steps are measured, and each drafter has an account against them.

`PlainSteps` asks for a step without drafts when none came by itself for a while: one in 1 / PLAIN_SHARE steps, and sooner when the
machine's speed has changed. The cost model learns from it what such a step takes now.

`Account` adds up, in plain steps, what a drafter's accepted tokens would have taken and what its drafting and verification took beyond a
plain step. When it has lost more than noise explains, the drafter is switched off: for some steps, and then until shadow drafts promise a
profit.
"""

from __future__ import annotations

import math

from headway.control import constants as const


class Mean:
    """A mean that forgets, and its standard error."""

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


class PlainSteps:
    """When the next plain step is due."""

    def __init__(self) -> None:
        self._since = 0        # steps since the last one
        self._speed = 1.0      # of the machine, then

    def is_due(self, speed: float) -> bool:
        stale = self._since >= const.STALE_STEPS and abs(math.log(speed / self._speed)) > const.STALE_SPEED
        return stale or self._since * const.PLAIN_SHARE >= 1.0

    def observe(self, speed: float, *, plain: bool) -> None:
        """One step, with drafts or `plain`."""
        self._since, self._speed = (0, speed) if plain else (self._since + 1, self._speed)


class Account:
    """Of one drafter."""

    def __init__(self) -> None:
        self.balance = Mean(const.ACCOUNT_MEMORY)   # plain steps won per step
        self.off = False
        self._until = 0                # step before which it stays off

    def observe(self, saved: float, spent: float, num_rows: int, step: int) -> bool:
        """One step of `num_rows` sequences in which the drafter was at work; True when it is switched off now."""
        self.balance.observe(saved - spent)
        # Rare hits may not have come yet: one more accepted token would change the mean by this much.
        doubt = self.balance.error + 1.0 / (num_rows * self.balance.weight)
        if self.balance.weight < const.ACCOUNT_LEAST or self.balance.value + doubt >= -const.TOLERANCE:
            return False
        self.off, self._until = True, step + const.OFF_STEPS
        return True

    def waits(self, step: int) -> bool:
        """Switched off too short a time ago to be tried again."""
        return self.off and step < self._until

    def reopen(self) -> None:
        self.off, self.balance = False, Mean(const.ACCOUNT_MEMORY)
