"""When the requests of a run start, and how much each writes: the same for every configuration that is given the same load.

    closed    `concurrency` in flight, the next one starts when one ends
    poisson   open loop: `request_rate` requests per second with exponential gaps, however many are in flight
    ramp      a day: the number in flight climbs from 1 to `concurrency` and falls back, as the prompts are used up
    rollout   a reinforcement-learning rollout: all start together, and every eighth writes four times as much as the others

Requests that all write the same number of tokens start and end together, batch after batch: then one that is ahead of the others only waits
for the slowest. `output_range_ratio` spreads the lengths, so that they come and go one by one, as people's do.
"""

from __future__ import annotations

import math
import random
from itertools import accumulate

from headway.bench.load import LoadOptions

LONG_EVERY = 8
LONG_FACTOR = 4
_GOLDEN = (math.sqrt(5.0) - 1.0) / 2.0   # its multiples, modulo 1, are spread evenly however many there are


class Arrivals:
    """The arrivals of `num_prompts` requests under one load. Times in seconds since the first."""

    def __init__(self, load: LoadOptions, num_prompts: int) -> None:
        self._load = load
        self._num_prompts = num_prompts
        self._due: list[float] = []
        if load.arrivals == "poisson":
            assert load.request_rate is not None   # LoadOptions checks it
            rng = random.Random(load.seed)
            gaps = (rng.expovariate(load.request_rate) for _ in range(num_prompts - 1))
            self._due = list(accumulate(gaps, initial=0.0))

    def output_len(self, index: int) -> int:
        """Tokens that request `index` writes."""
        is_long = self._load.arrivals == "rollout" and index % LONG_EVERY == min(LONG_EVERY, self._num_prompts) - 1
        spread = 1.0 + self._load.output_range_ratio * (2.0 * ((index + 1) * _GOLDEN % 1.0) - 1.0)
        return max(1, round(self._load.output_len * spread)) * (LONG_FACTOR if is_long else 1)

    def due(self, index: int) -> float | None:
        """When request `index` arrives; None where that depends on the requests before it."""
        return self._due[index] if self._due else None

    def wait(self, index: int, num_in_flight: int, elapsed: float) -> float:
        """Seconds until request `index` may start: 0.0 now, infinity when one in flight has to end first."""
        if self._due:
            return max(0.0, self._due[index] - elapsed)
        return 0.0 if num_in_flight < self._limit(index) else math.inf

    def _limit(self, index: int) -> int:
        most = self._load.concurrency
        if self._load.arrivals == "rollout":
            return self._num_prompts
        if self._load.arrivals == "ramp":
            day = (index + 0.5) / self._num_prompts
            return 1 + round((most - 1) * math.sin(math.pi * day) ** 2)
        return most
