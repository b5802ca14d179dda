"""What the engine counts while it serves: plain numbers, no metrics library. The server turns them into Prometheus text.

One thread writes (the engine's), any thread may read: every structure that grows is copied in one operation before it is
walked, so a reader sees a state at most one step old. The hooks cost a few dictionary updates per sequence and step; all that can be
derived (per position, per drafter, means) is derived when it is read.
"""

from __future__ import annotations

import statistics
import time
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass

from headway.types import NO_DRAFT, Feedback, OutputDelta, Request, SpecDecodeMetrics

# Upper bounds in seconds; dense where interactive use lives.
LATENCY_BUCKETS = (0.1, 0.2, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0, 240.0, 480.0, 960.0)
TTFT_BUCKETS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0)
INTER_TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0)

NUM_ERRORS = 256   # forecasts that an error is the median of
# Every k that is common has a bucket of its own.
K_BUCKETS = (0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 12.0, 16.0, 32.0)


class Histogram:
    """Counts per bucket (not cumulative; the last one is for values above every bound) and the sum of the values."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    @property
    def num_values(self) -> int:
        return sum(list(self.counts))

    @property
    def mean(self) -> float:
        num_values = self.num_values
        return self.total / num_values if num_values else 0.0


@dataclass(slots=True)
class PositionCounts:
    """Drafts at one position: verified; of these, with every draft before them accepted; of these, accepted themselves.

    accepted / reached is the acceptance at this position given the ones before, accepted / drafted the unconditional one.
    """

    drafted: int = 0
    reached: int = 0
    accepted: int = 0


class EngineMetrics:
    """Counters since the engine was built, and the load right now. Times in seconds unless a name says ms.

    time_to_first_token and e2e_latency count from `Request.arrival_time`. inter_token_latency gives each token of a step that
    wrote m tokens 1/m of the time since the sequence's previous tokens: its sum is decoding time, its count is tokens.
    """

    def __init__(self) -> None:
        self.num_running = 0                 # sequences
        self.num_waiting = 0
        self.kv_cache_usage = 0.0            # share of blocks held, in [0, 1]
        self.num_prompt_tokens = 0           # of requests that wrote their first token; cached tokens included
        self.num_generation_tokens = 0
        self.num_preemptions = 0
        self.prefix_cache_queries = 0        # tokens looked up
        self.prefix_cache_hits = 0           # tokens found
        self.finished: Counter[str] = Counter()   # finish reason -> sequences
        self.num_steps = 0
        self.num_step_tokens = 0             # rows of the forward pass
        self.draft_ms = 0.0
        self.verify_ms = 0.0
        self.step_ms = 0.0
        self.num_sampling_rows = 0
        self.num_planned_drafts = 0          # sum of the k the policy asked for and the scheduler granted
        self.num_proposed_drafts = 0
        self.num_verified_drafts = 0
        self.chosen_k = Histogram(K_BUCKETS) # k granted, per sampling row; 0: plain
        self.policy_ms = 0.0
        # Only over steps whose cost the policy forecast and that computed no prompt: the comparison with plain decoding.
        self.compared_ms = 0.0               # what these steps took
        self.plain_equivalent_ms = 0.0       # what plain decoding would have taken to write the same tokens
        self.wasted_ms = 0.0                 # drafting and verifying what was then rejected
        self.num_forecast_tokens = 0.0       # tokens the policy expected to be written
        self.num_compared_tokens = 0         # tokens that were
        self.last_change: tuple[str, float] | None = None   # (reason, wall-clock time) of the policy's last change
        self.num_changes = 0
        self._step_errors: deque[float] = deque(maxlen=NUM_ERRORS)
        self.verified: Counter[tuple[str, int, int]] = Counter()   # (drafter, verified, accepted) -> rows; verified > 0
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
        self.num_steps += 1
        self.num_step_tokens += feedback.num_tokens
        self.num_preemptions += num_preempted
        self.draft_ms += feedback.draft_ms
        self.verify_ms += feedback.verify_ms
        self.step_ms += feedback.step_ms
        self.num_sampling_rows += len(feedback.sequences)
        for seq in feedback.sequences:
            self.chosen_k.observe(seq.k)
            if seq.drafter != NO_DRAFT:
                self.num_planned_drafts += seq.k
                self.num_proposed_drafts += seq.num_proposed
                self.num_verified_drafts += seq.num_drafts
                if seq.num_drafts:
                    self.verified[seq.drafter, seq.num_drafts, seq.num_accepted] += 1
        self._observe_policy(feedback)
        now = time.monotonic()
        for delta in outputs:
            self._observe_output(delta, now)

    def _observe_policy(self, feedback: Feedback) -> None:
        """Compares the step with the policy's forecast. Plain decoding would repeat the plain step until as many tokens are written."""
        self.policy_ms += feedback.policy_ms
        if feedback.reason and (self.last_change is None or self.last_change[0] != feedback.reason):
            self.last_change = feedback.reason, time.time()
            self.num_changes += 1
        forecast, num_rows = feedback.forecast, len(feedback.sequences)
        if forecast is None or num_rows == 0 or not (feedback.step_ms > 0.0 and forecast.plain_ms > 0.0 and forecast.step_ms > 0.0):
            return
        self._step_errors.append(abs(forecast.step_ms / feedback.step_ms - 1.0))
        if feedback.num_prefill_tokens:
            return
        num_accepted = sum(seq.num_accepted for seq in feedback.sequences)
        num_verified = sum(seq.num_drafts for seq in feedback.sequences)
        num_proposed = sum(seq.num_proposed for seq in feedback.sequences)
        self.compared_ms += feedback.step_ms
        self.plain_equivalent_ms += forecast.plain_ms * (num_rows + num_accepted) / num_rows
        self.num_forecast_tokens += forecast.num_tokens
        self.num_compared_tokens += num_rows + num_accepted
        if num_proposed:
            self.wasted_ms += feedback.draft_ms * (1.0 - num_accepted / num_proposed)
        if num_verified:
            added = max(0.0, feedback.step_ms - feedback.draft_ms - forecast.plain_ms)
            self.wasted_ms += added * (1.0 - num_accepted / num_verified)

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

    # Derived, for readers.

    @property
    def overhead_ms(self) -> float:
        """Time in steps outside drafting and verification: scheduling, commit, text."""
        return max(0.0, self.step_ms - self.draft_ms - self.verify_ms)

    @property
    def step_time_error(self) -> float | None:
        """Median relative error of the policy's latest forecasts of step time; None when it forecasts none."""
        errors = list(self._step_errors)
        return statistics.median(errors) if errors else None

    @property
    def token_error(self) -> float | None:
        """Tokens the policy expected over tokens written, less 1: its bias in acceptance; None when it forecasts none."""
        return self.num_forecast_tokens / self.num_compared_tokens - 1.0 if self.num_compared_tokens else None

    @property
    def mean_k(self) -> float:
        """Verified drafts per sampling row; 0 where a row did not speculate."""
        return self.num_verified_drafts / self.num_sampling_rows if self.num_sampling_rows else 0.0

    def speculation(self) -> dict[str, SpecDecodeMetrics]:
        """Per drafter: steps, drafts and acceptances, by position. `num_steps` counts speculative steps only."""
        result: dict[str, SpecDecodeMetrics] = {}
        for (drafter, num_drafts, num_accepted), rows in self.verified.copy().items():
            stats = result.setdefault(drafter, SpecDecodeMetrics())
            one = SpecDecodeMetrics()
            one.observe(num_drafts, num_accepted)
            for name in ("num_spec_steps", "num_steps", "num_draft_tokens", "num_accepted_tokens"):
                setattr(one, name, getattr(one, name) * rows)
            for name in ("num_drafts_per_pos", "num_reached_per_pos", "num_accepted_per_pos", "num_steps_per_k", "acceptance_histogram"):
                setattr(one, name, [count * rows for count in getattr(one, name)])
            stats.add(one)
        return result

    def positions(self) -> dict[str, list[PositionCounts]]:
        """Per drafter and draft position: drafted, reached, accepted."""
        result: dict[str, list[PositionCounts]] = {}
        for (drafter, num_drafts, num_accepted), rows in self.verified.copy().items():
            counts = result.setdefault(drafter, [])
            counts.extend(PositionCounts() for _ in range(num_drafts - len(counts)))
            for position in range(num_drafts):
                counts[position].drafted += rows
                counts[position].reached += rows * (num_accepted >= position)
                counts[position].accepted += rows * (num_accepted > position)
        return result

    def snapshot(self) -> dict[str, float]:
        """The plain counters by name: subtract two snapshots to measure an interval."""
        return {name: value for name, value in vars(self).items() if isinstance(value, (int, float))}
