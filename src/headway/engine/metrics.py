"""What the engine counts while it serves: plain numbers, no metrics library. The server turns them into Prometheus text.

One thread writes (the engine's), any thread may read: every structure that grows is copied in one operation before it is
walked, so a reader sees a state at most one step old. The hooks cost a few dictionary updates per sequence and step; all that can be
derived (per position, per drafter, means) is derived when it is read.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence

from headway.telemetry.counters import Histogram, StepCounters
from headway.types import Feedback, OutputDelta, Request

# Upper bounds in seconds; dense where interactive use lives.
LATENCY_BUCKETS = (0.1, 0.2, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0, 240.0, 480.0, 960.0)
TTFT_BUCKETS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0)
INTER_TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0)


class EngineMetrics(StepCounters):
    """Counters since the engine was built, of steps and of requests, and the load right now. Times in seconds unless a name says ms.

    time_to_first_token and e2e_latency count from `Request.arrival_time`. inter_token_latency gives each token of a step that
    wrote m tokens 1/m of the time since the sequence's previous tokens: its sum is decoding time, its count is tokens.
    """

    def __init__(self) -> None:
        super().__init__()
        self.num_running = 0                 # sequences
        self.num_waiting = 0
        self.kv_cache_usage = 0.0            # share of blocks held, in [0, 1]
        self.num_prompt_tokens = 0           # of requests that wrote their first token; cached tokens included
        self.num_generation_tokens = 0
        self.num_preemptions = 0
        self.prefix_cache_queries = 0        # tokens looked up
        self.prefix_cache_hits = 0           # tokens found
        self.finished: Counter[str] = Counter()   # finish reason -> sequences
        self.time_to_first_token = Histogram(TTFT_BUCKETS)
        self.inter_token_latency = Histogram(INTER_TOKEN_BUCKETS)
        self.e2e_latency = Histogram(LATENCY_BUCKETS)
        self._requests: dict[str, Request] = {}
        self._last_token: dict[str, dict[int, float]] = {}   # request id -> index -> when it last wrote

    # Hooks, in the order in which a request meets them. All are called by the engine's thread.

    def observe_request(self, request: Request) -> None:
        """The request was accepted (`Engine.add`)."""
        self._requests[request.request_id] = request

    def observe_prefix_cache(self, num_queries: int, num_hits: int) -> None:
        """Tokens looked up in the prefix cache and found there, since the engine was built."""
        self.prefix_cache_queries = num_queries
        self.prefix_cache_hits = num_hits

    def observe_step(self, feedback: Feedback, outputs: Sequence[OutputDelta], num_preempted: int = 0) -> None:
        """A step ended and wrote `outputs`."""
        self.observe_feedback(feedback)
        self.num_preemptions += num_preempted
        now = time.monotonic()
        for delta in outputs:
            self._observe_output(delta, now)

    def observe_load(self, num_running: int, num_waiting: int, kv_cache_usage: float) -> None:
        """The load right now: after each step, and whenever a request enters or leaves between steps."""
        self.num_running = num_running
        self.num_waiting = num_waiting
        self.kv_cache_usage = kv_cache_usage

    def observe_abort(self, request_id: str) -> None:
        """The request was aborted (`Engine.abort`). Unknown or finished ids are fine."""
        if request_id in self._requests:
            request = self._requests.pop(request_id)
            self.finished["abort"] += request.params.n - self._num_finished(request_id)
            self._last_token.pop(request_id, None)

    def _num_finished(self, request_id: str) -> int:
        return sum(when == float("inf") for when in self._last_token.get(request_id, {}).values())

    def _observe_output(self, delta: OutputDelta, now: float) -> None:
        request = self._requests.get(delta.request_id)
        if request is None:
            return
        num_tokens = len(delta.token_ids)
        last = self._last_token.get(delta.request_id)
        if last is None:
            last = self._last_token[delta.request_id] = {}
            self.num_prompt_tokens += len(request.prompt_token_ids)
        if num_tokens:
            self.num_generation_tokens += num_tokens
            if delta.index in last:
                self.inter_token_latency.observe((now - last[delta.index]) / num_tokens, num_tokens)
            else:
                self.time_to_first_token.observe(now - request.arrival_time)
            last[delta.index] = now
        if delta.finish_reason is not None:
            self.finished[delta.finish_reason] += 1
            self.e2e_latency.observe(now - request.arrival_time)
            last[delta.index] = float("inf")
            if self._num_finished(delta.request_id) == request.params.n:
                del self._requests[delta.request_id], self._last_token[delta.request_id]
