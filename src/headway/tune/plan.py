"""From replays at several loads to one schedule: which k at which batch size, and why."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

# A longer draft has to gain this much: the prediction is not better than that, and k drafts are cheaper to be wrong about.
MARGIN = 0.01
# What an engine that adapts by itself may choose from: lengths that lose less than this.
CANDIDATE_MARGIN = 0.05


@dataclass(frozen=True, slots=True)
class Point:
    """One load. goodput: k -> predicted output tokens per second; 0: plain decoding."""

    concurrency: int
    goodput: Mapping[int, float]

    @property
    def k(self) -> int:
        """The smallest k within MARGIN of the best."""
        best = max(self.goodput.values())
        return min(k for k, value in self.goodput.items() if value >= (1.0 - MARGIN) * best)

    @property
    def candidates(self) -> list[int]:
        """Every k within CANDIDATE_MARGIN of the best, the chosen one included."""
        best = max(self.goodput.values())
        return sorted({self.k, *(k for k, value in self.goodput.items() if value >= (1.0 - CANDIDATE_MARGIN) * best)})

    @property
    def gain(self) -> float:
        """Over plain decoding."""
        return self.goodput[self.k] / self.goodput[0] if self.goodput[0] > 0.0 else 1.0

    @property
    def reason(self) -> str:
        best = max(self.goodput, key=lambda k: self.goodput[k])
        if self.k == 0:
            longest = max((k for k in self.goodput if k), key=lambda k: self.goodput[k], default=0)
            return f"the best draft length, {longest}, is {1.0 - self.goodput[longest] / self.goodput[0]:.1%} behind plain decoding"
        said = f"{self.gain:.2f}x plain decoding"
        if best != self.k:
            said += f"; {best} would gain {self.goodput[best] / self.goodput[self.k] - 1.0:.1%} more"
        longer = min((k for k in self.goodput if k > best), default=None)
        if longer is None:
            return f"{said}; the longest tried"
        return f"{said}; {longer} loses {1.0 - self.goodput[longer] / self.goodput[best]:.1%}"


@dataclass(frozen=True, slots=True)
class Range:
    """Batch sizes first..last (both included) take k; `candidates` is what an adaptive engine may choose from there."""

    first: int
    last: int
    k: int
    candidates: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """The schedule for one drafter, from batch size 1 to `max_batch_size`."""

    drafter: str
    points: tuple[Point, ...]
    ranges: tuple[Range, ...]

    @property
    def max_k(self) -> int:
        return max(part.k for part in self.ranges)


def plan(drafter: str, points: Sequence[Point], max_batch_size: int) -> Plan:
    """Between two loads the schedule changes at their geometric middle: cost and gain follow ratios of the batch size."""
    points = sorted(points, key=lambda point: point.concurrency)
    edges = [math.isqrt(low.concurrency * high.concurrency) for low, high in pairwise(points)]
    ranges: list[Range] = []
    firsts, lasts = [1, *(edge + 1 for edge in edges)], [*edges, max(max_batch_size, points[-1].concurrency)]
    for point, first, last in zip(points, firsts, lasts, strict=True):
        before = ranges[-1] if ranges else None
        if before is not None and before.k == point.k:
            ranges[-1] = Range(before.first, last, point.k, tuple(sorted({*before.candidates, *point.candidates})))
        elif last >= first:
            ranges.append(Range(first, last, point.k, tuple(point.candidates)))
    return Plan(drafter, tuple(points), tuple(ranges))
