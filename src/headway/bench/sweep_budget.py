"""What a sweep with a time budget still has time for.

Loading counts, and so does the lead-in of each cell, which takes as long as a round or two. What a cell will take that has not begun is
told from the one measured before whose concurrency is nearest, by the tokens to be written and to be read.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from headway.bench.sweep import Cell

# A token read over one that is written alone. With a written one as 1 / sqrt(concurrency) this forecasts each cell of the sweeps published
# for CPUs from the cells before it within 0.7x to 2x, 1.3x in the root mean square; by the number of requests it would be 0.2x to 5x.
READ = 0.15


@dataclass(frozen=True)
class Planned:
    """A cell with rounds to measure; `prompts` are token ids."""

    cell: Cell
    prompts: list[list[int]]
    todo: list[int]

    @property
    def request_work(self) -> float:
        """Of one request, in tokens written alone."""
        written = self.cell.load.output_len / math.sqrt(self.cell.load.concurrency)
        return written + READ * sum(map(len, self.prompts)) / len(self.prompts)


class TimeBudget:
    """`began`: what `time.perf_counter` said when the command began. `paces` is written to: cell -> concurrency, and seconds per unit of
    work of all engines together."""

    def __init__(self, minutes: float | None, began: float, paces: dict[str, dict[str, Any]]) -> None:
        self._end = math.inf if minutes is None else began + 60.0 * minutes
        self._paces = paces

    def learn(self, planned: Planned, num_rounds: int, seconds: float) -> None:
        """What a lead-in and so many rounds took."""
        num_requests = planned.cell.lead_in_work + num_rounds * planned.cell.load.num_prompts
        pace = seconds / (num_requests * planned.request_work)
        self._paces[planned.cell.name] = {"concurrency": planned.cell.load.concurrency, "s_per_work": pace}

    def forecast(self, planned: Planned) -> tuple[float, float]:
        """Seconds of the lead-in and of a round; 0.0 while nothing is measured. Of several cells that are as near the slowest counts: a
        round that is left out can be measured by continuing, time that was overrun is gone."""
        cell = planned.cell
        own = {name: pace for name, pace in self._paces.items() if name == cell.name}
        by_distance: dict[float, list[float]] = {}
        for pace in (own or self._paces).values():
            by_distance.setdefault(abs(math.log(pace["concurrency"] / cell.load.concurrency)), []).append(pace["s_per_work"])
        per_request = max(by_distance[min(by_distance)]) * planned.request_work if by_distance else 0.0
        return per_request * cell.lead_in_work, per_request * cell.load.num_prompts

    def has_time_for_first(self, planned: Planned) -> bool:
        """For the lead-in and a round, whatever the cell's share: no cell is left out because it is dear while there is time."""
        return time.perf_counter() + sum(self.forecast(planned)) <= self._end

    def has_time_for_more(self, seconds: float, began: float, later: Iterable[Planned]) -> bool:
        """For another round of a cell that began then, within an equal share of what was left, and with time for the first round of all
        `later` cells; those for which there is none whatever happens here keep nothing from others."""
        now = time.perf_counter()
        reserved = [needed for needed in (sum(self.forecast(each)) for each in later) if now + needed <= self._end]
        share = began + (self._end - began) / (1 + len(reserved))
        return now + seconds <= min(share, self._end - sum(reserved))
