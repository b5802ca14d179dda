"""Masks for the step under way, computed on a thread of their own while the target runs: they depend on the drafts, not on its answer.

The library lets go of the interpreter while it computes one. Between `begin` and `wait` nobody else may ask the matchers.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence as SequenceOf
from concurrent.futures import Future, ThreadPoolExecutor

from headway.structured_outputs import Matcher
from headway.types import Draft, Row

Asked = list[tuple[Matcher, list[list[int]]]]


class MasksAhead:
    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None   # from the first constrained request on
        self._running: Future[None] | None = None

    def begin(self, rows: SequenceOf[Row], drafts: SequenceOf[Draft | None]) -> None:
        """For the rows that sample, and have a grammar."""
        self.wait()   # for those of a step that failed
        asked = [
            (row.seq.matcher, paths(draft)) for row, draft in zip(rows, drafts, strict=True)
            if row.seq.matcher is not None and row.samples
        ]  # fmt: skip
        if not asked:
            return
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="headway-masks")
            weakref.finalize(self, self._thread.shutdown, wait=False)
        self._running = self._thread.submit(_compute, asked)

    def wait(self) -> None:
        """Returns when they are there."""
        running, self._running = self._running, None
        if running is not None:
            running.result()


def paths(draft: Draft | None) -> list[list[int]]:
    """To each place of a draft that the target decides what follows; the first is before all of it."""
    found: list[list[int]] = [[]]
    if draft is None:
        return found
    for node, token in enumerate(draft.tokens):
        parent = node - 1 if draft.parents is None else draft.parents[node]
        found.append([*found[1 + parent], token])
    return found


def _compute(asked: Asked) -> None:
    for matcher, places in asked:
        for path in places:
            matcher.mask(path)
