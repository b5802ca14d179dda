"""What steps did, counted: drafts by position, chosen k, what speculation won over plain decoding. Plain numbers, made of `Feedback` alone.

The embedded engine's metrics are these and its requests' (`engine/metrics.py`); inside vLLM the scheduler counts them: both servers say the
same on /metrics. One thread writes, any thread may read: every structure that grows is copied in one operation before it is walked. What
can be derived (per position, per drafter, means) is derived when it is read.
"""

from __future__ import annotations

import statistics
import time
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from headway.spec_decode_metrics import SpecDecodeMetrics
from headway.types import NO_DRAFT, Feedback

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

    def add(self, counts: Sequence[int], total: float) -> None:
        """What another histogram of the same bounds counted."""
        self.counts = [a + b for a, b in zip(self.counts, counts, strict=True)]
        self.total += total

    def since(self, before: Histogram) -> Histogram:
        """What was counted since this was as `before`."""
        grown = Histogram(self.bounds)
        grown.add([a - b for a, b in zip(self.counts, before.counts, strict=True)], self.total - before.total)
        return grown

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

    def add(self, rows: int, *, reached: bool, accepted: bool) -> None:
        self.drafted += rows
        self.reached += rows * reached
        self.accepted += rows * accepted


class StepCounters:
    """Counters since they were made. Times in milliseconds."""

    def __init__(self) -> None:
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
        self.verified: Counter[tuple[str, int, int, int]] = Counter()   # (drafter, verified, accepted, depth) -> rows; verified > 0
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

    def observe_plain(self, num_rows: int, num_tokens: int, step_ms: float) -> None:
        """A step ended that nobody drafted for and no policy was asked about; `num_rows` sequences wrote."""
        self.num_steps += 1
        self.num_step_tokens += num_tokens
        self.verify_ms += step_ms
        self.step_ms += step_ms
        self.num_sampling_rows += num_rows
        self.chosen_k.observe(0, num_rows)

    def observe_feedback(self, feedback: Feedback) -> None:
        """A step ended."""
        self.num_steps += 1
        self.num_step_tokens += feedback.num_tokens
        self.draft_ms += feedback.draft_ms
        self.verify_ms += feedback.verify_ms
        self.step_ms += feedback.step_ms
        self.num_sampling_rows += len(feedback.sequences)
        num_plain = 0
        for seq in feedback.sequences:
            if seq.k:
                self.chosen_k.observe(seq.k)
            else:
                num_plain += 1
            if seq.drafter != NO_DRAFT:
                self.num_planned_drafts += seq.k
                self.num_proposed_drafts += seq.num_proposed
                self.num_verified_drafts += seq.num_drafts
                if seq.num_drafts:
                    self.verified[seq.drafter, seq.num_drafts, seq.num_accepted, seq.depth] += 1
        self.chosen_k.observe(0, num_plain)
        self._observe_policy(feedback)

    def set_last_change(self, reason: str, when: float) -> None:
        self.last_change = reason, when

    def _observe_policy(self, feedback: Feedback) -> None:
        """Compares the step with the policy's forecast. Plain decoding would repeat the plain step until as many tokens are written."""
        self.policy_ms += feedback.policy_ms
        if feedback.reason and (self.last_change is None or self.last_change[0] != feedback.reason):
            self.set_last_change(feedback.reason, time.time())
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

    def set_step_time_error(self, error: float) -> None:
        """For counters that were counted elsewhere: the median as it was there."""
        self._step_errors.clear()
        self._step_errors.append(error)

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
        for (drafter, num_drafts, num_accepted, depth), rows in self.verified.copy().items():
            stats = result.setdefault(drafter, SpecDecodeMetrics())
            one = SpecDecodeMetrics()
            one.observe(num_drafts, num_accepted, depth)
            for name in ("num_spec_steps", "num_steps", "num_draft_tokens", "num_accepted_tokens"):
                setattr(one, name, getattr(one, name) * rows)
            for name in ("num_drafts_per_pos", "num_reached_per_pos", "num_accepted_per_pos", "num_steps_per_k", "acceptance_histogram"):
                setattr(one, name, [count * rows for count in getattr(one, name)])
            stats.add(one)
        return result

    def positions(self) -> dict[str, list[PositionCounts]]:
        """Per drafter and draft position: drafted, reached, accepted."""
        result: dict[str, list[PositionCounts]] = {}
        for (drafter, _, num_accepted, depth), rows in self.verified.copy().items():
            counts = result.setdefault(drafter, [])
            counts.extend(PositionCounts() for _ in range(depth - len(counts)))
            for position in range(depth):
                counts[position].add(rows, reached=num_accepted >= position, accepted=num_accepted > position)
        return result

    def snapshot(self) -> dict[str, float]:
        """The plain counters by name: subtract two snapshots to measure an interval."""
        return {name: value for name, value in vars(self).items() if isinstance(value, (int, float))}


@dataclass(frozen=True, slots=True)
class Measurement:
    """One family of /metrics: label values -> value, in the order of `labels`."""

    name: str
    help: str
    values: Mapping[tuple[str, ...], float]
    labels: tuple[str, ...] = ()
    gauge: bool = False


def measurements(counters: StepCounters, drafters: Sequence[str], num_positions: int, policy: str) -> Iterator[Measurement]:
    """Everything but the histogram `chosen_k`. Drafters and positions are there before they were used."""
    c, positions = counters, counters.positions()
    values: dict[tuple[str, ...], float]
    for kind, meaning in (
        ("drafted", "Drafts verified"),
        ("reached", "Drafts verified whose predecessors were all accepted"),
        ("accepted", "Drafts accepted"),
    ):
        values = {(name, str(at)): 0 for name in drafters for at in range(num_positions)}
        values |= {(name, str(at)): getattr(counts, kind) for name, found in positions.items() for at, counts in enumerate(found)}
        help = f"{meaning}, by drafter and position; accepted / reached is the conditional acceptance."
        yield Measurement(f"headway:{kind}_per_pos", help, values, ("drafter", "position"))
    yield Measurement("headway:steps", "Engine steps.", {(): c.num_steps})
    yield Measurement("headway:step_tokens", "Rows of all forward passes: known tokens and drafts.", {(): c.num_step_tokens})
    values = {("draft",): c.draft_ms / 1e3, ("verify",): c.verify_ms / 1e3, ("overhead",): c.overhead_ms / 1e3}
    yield Measurement("headway:step_seconds", "Time in steps, by what it went to.", values, ("phase",))
    yield Measurement("headway:sampling_rows", "Sequences that wrote, summed over steps.", {(): c.num_sampling_rows})
    yield Measurement("headway:planned_drafts", "Drafts the policy asked for.", {(): c.num_planned_drafts})
    yield Measurement("headway:proposed_drafts", "Drafts the drafters proposed.", {(): c.num_proposed_drafts})
    rejected = sum((num_drafts - accepted) * rows for (_, num_drafts, accepted, _), rows in c.verified.copy().items())
    help = "Drafts that became no token: trimmed by the policy after they were proposed, or verified and rejected."
    values = {("trimmed",): c.num_proposed_drafts - c.num_verified_drafts, ("rejected",): rejected}
    yield Measurement("headway:wasted_drafts", help, values, ("stage",))
    yield Measurement("headway:mean_k", "Drafts verified per sequence and step since the start.", {(): c.mean_k}, gauge=True)
    # What speculation won and wasted, over the steps whose cost the policy forecast: plain_equivalent / compared is the gain.
    yield Measurement("headway:policy_seconds", "Time the policy took to decide and to learn.", {(): c.policy_ms / 1e3})
    yield Measurement("headway:compared_seconds", "Time of the steps that are compared with plain decoding.", {(): c.compared_ms / 1e3})
    help = "Time plain decoding would have taken to write what these steps wrote."
    yield Measurement("headway:plain_equivalent_seconds", help, {(): c.plain_equivalent_ms / 1e3})
    yield Measurement("headway:wasted_seconds", "Of the compared time: drafting and verifying what was rejected.", {(): c.wasted_ms / 1e3})
    if (error := c.step_time_error) is not None:
        help = "Median relative error of the policy's latest forecasts of step time."
        yield Measurement("headway:step_time_error", help, {(): error}, gauge=True)
    if (error := c.token_error) is not None:
        yield Measurement("headway:token_error", "Tokens the policy expected over tokens written, less 1.", {(): error}, gauge=True)
    yield Measurement("headway:policy_changes", "Times the policy changed what it does.", {(): c.num_changes})
    reason, when = c.last_change or ("", 0.0)
    help = "When the policy last changed what it does, and why; 0: never."
    label = reason.partition(":")[0]   # what follows are numbers: each would be a series of its own for ever
    yield Measurement("headway:policy_last_change_timestamp_seconds", help, {(policy, label): when}, ("policy", "reason"), gauge=True)


CHOSEN_K = ("headway:chosen_k", "Drafts the policy asked for, per sequence and step; 0: plain decoding.")
