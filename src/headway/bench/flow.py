"""A closed loop that can be paused: what engines that take turns are measured with.

A load that starts and ends leaves places empty at its end, until its slowest request is done: of a few requests that is most of the time,
and a request that got ahead then gains nothing. Here the next request starts whenever one ends, turn after turn, and a turn measures what
was written in it with all places taken. A turn is given in slices, so that others can have theirs in between: a machine that is slow for
some seconds is slow for all of them. Time stands still between turns and between slices.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping, Sequence

from headway.bench import throughput
from headway.bench.arrivals import Arrivals
from headway.bench.load import LoadOptions
from headway.bench.records import Record, Run, hash_outputs
from headway.engine.engine import Engine
from headway.spec_decode_metrics import SpecDecodeMetrics

SLICE_S = 0.5   # seconds: the caches that another engine emptied are full again after a step


class Flow:
    """`load.concurrency` requests in flight on one engine. `prompts[first]` comes first; request ids end in a prompt's index."""

    def __init__(self, engine: Engine, load: LoadOptions, prompts: Sequence[list[int]], first: int = 0) -> None:
        self.engine = engine
        self.outputs: dict[int, str] = {}   # of requests that ended: prompt index -> hash
        self._load = load
        self._prompts = prompts
        self._lengths = Arrivals(load, len(prompts))
        self._next = first
        self._running: dict[str, Record] = {}
        self._due = 0                       # requests that were to end by now
        self._away = 0.0                    # seconds in which others had their turns
        self._paused_at = time.perf_counter()

    def turn(self, num_requests: int, on_step: Callable[[], None] | None = None) -> Run:
        """Until so many more requests have ended; what ended beyond that counts for the next turn. The run's records are the requests that
        ended, its throughput is all that was written meanwhile.

        Raises InvalidRequestError when a prompt cannot be served, ValueError when there are not enough of them to keep all places taken.
        """
        return in_slices({"": self.slices(num_requests, on_step)})[""]

    def slices(self, num_requests: int, on_step: Callable[[], None] | None = None) -> Generator[None, None, Run]:
        """The same, stopping every SLICE_S."""
        before, num_tokens = self.engine.metrics.snapshot(), 0
        ended: list[Record] = []
        stats = SpecDecodeMetrics()
        self._resume()
        start = begun = self._now()
        self._due += num_requests
        while not num_tokens or len(self.outputs) < self._due:
            if self._now() - begun >= SLICE_S:
                self._paused_at = time.perf_counter()
                yield
                self._resume()
                begun = self._now()
            self._fill()
            for delta in self.engine.step():
                record = self._running[delta.request_id]
                record.observe(self._now(), delta.token_ids)
                num_tokens += len(delta.token_ids)
                if delta.finished:
                    ended.append(self._running.pop(delta.request_id))
                    self.outputs[int(delta.request_id.rpartition("-")[2])] = hash_outputs([record.output])
                    stats.add(delta.stats or SpecDecodeMetrics())
            if on_step:
                on_step()
        duration = self._now() - start
        self._paused_at = time.perf_counter()
        run = throughput.measured(self.engine, before, ended, stats)
        run.extra.update(output_tokens_per_s=num_tokens / duration, num_output_tokens=num_tokens, duration_s=duration)
        return run

    def stop(self) -> None:
        """Drops what is in flight."""
        for request_id in self._running:
            self.engine.abort(request_id)
        self._running = {}

    def _fill(self) -> None:
        while len(self._running) < self._load.concurrency:
            if self._next == len(self._prompts):
                raise ValueError(f"{self._load.concurrency} requests are to be in flight, and no prompt is left")
            token_ids, request_id = self._prompts[self._next], f"flow-{self._next}"
            throughput.add(self.engine, request_id, token_ids, self._next, self._lengths.output_len(self._next), self._load)
            self._running[request_id] = Record(len(token_ids), self._now())
            self._next += 1

    def _resume(self) -> None:
        self._away += time.perf_counter() - self._paused_at

    def _now(self) -> float:
        return time.perf_counter() - self._away


def in_slices(turns: Mapping[str, Generator[None, None, Run]]) -> dict[str, Run]:
    """All of them to their ends, a slice of each in turn."""
    ended: dict[str, Run] = {}
    while len(ended) < len(turns):
        for name, turn in turns.items():
            if name not in ended:
                try:
                    next(turn)
                except StopIteration as end:
                    ended[name] = end.value
    return ended
