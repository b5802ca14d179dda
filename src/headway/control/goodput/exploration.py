"""What verifying may lose while a drafter is new: a small loan and a share of the time, beside what it brings.

Nothing is known of a new drafter but what it says of itself, and where a verified token costs as much as a plain step, believing it is
dear. So its drafts are verified on credit, counted in plain steps. Right ones raise it at once: what can be copied takes off in a few
steps, as far as it costs little from the first. What credit does not cover is compared with what the target writes, for nothing.

What drafting took is no part of it: it is paid whether the drafts are verified or not, and leaving them out for that would lose them, too.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

LOAN = 1.0      # plain steps that verifying its drafts may lose
SHARE = 0.01    # of the time, further on


class Trial:
    """The account of one new drafter."""

    def __init__(self) -> None:
        self.credit = LOAN   # plain steps
        self._step: int | None = None

    def book(self, saved: float, spent: float, step: int) -> None:
        """What accepted tokens saved and what verifying cost in a step, in plain steps."""
        elapsed = 1 if self._step is None else max(1, step - self._step)
        self._step = step
        self.credit += SHARE * elapsed + saved - spent

    def num_covered(self, step_ms: Sequence[float], plain_ms: float) -> int:
        """How many drafts may be verified although all may be wrong. `step_ms`: of a step that verifies 0, 1, ... drafts; never falls."""
        return max(0, bisect_right(step_ms, step_ms[0] + self.credit * plain_ms) - 1)


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
