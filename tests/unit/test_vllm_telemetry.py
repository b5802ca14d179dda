"""The scheduler's counters on their way to the process that serves /metrics, without vLLM."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest

from headway.telemetry.counters import StepCounters, measurements
from headway.types import Feedback, Forecast, SequenceFeedback
from headway.vllm.telemetry import INTERVAL_S, Received, Sender, detach


class Counters(StepCounters):
    def __init__(self) -> None:
        super().__init__()
        self.policy, self.drafter, self.max_k, self.off = "goodput", "ngram", 4, ""
        self.num_errors = 0


def stats() -> SimpleNamespace:
    return SimpleNamespace(waiting_lora_adapters={"an-adapter": 2})


def feedback(rng: random.Random, step: int) -> Feedback:
    rows = []
    for seq_id in range(rng.randrange(1, 6)):
        k = rng.randrange(5)
        rows.append(SequenceFeedback(seq_id, "ngram" if k else "none", k, k, k, rng.randrange(k + 1), 100))
    tokens = len(rows) + sum(row.num_drafts for row in rows)
    forecast = Forecast(rng.uniform(5, 15), tokens, rng.uniform(5, 15)) if rng.random() < 0.5 else None
    times = (rng.random(), 9.0, 10.0)
    return Feedback(step, tuple(rows), 0, tokens, 500, *times, forecast=forecast, reason=f"reason {step // 9}", policy_ms=0.1)


def test_what_arrives_is_what_was_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    rng, clock = random.Random(7), [0.0]
    monkeypatch.setattr("headway.vllm.telemetry.time", SimpleNamespace(monotonic=lambda: clock[0]))
    counters, received = Counters(), Received()
    sender = Sender(counters)
    num_sent = 0
    for step in range(200):
        counters.observe_feedback(feedback(rng, step))
        counters.num_errors += step % 50 == 0
        clock[0] += 0.02
        message = stats()
        sender.attach(message, idle=step == 199)
        growth = detach(message)
        assert message == stats(), "what vLLM reads is as it was"
        num_sent += growth is not None
        if growth:
            received.absorb(growth)
    assert num_sent == pytest.approx(200 * 0.02 / INTERVAL_S, abs=3), "not with each step, and at the end"
    assert received.counters.snapshot() == pytest.approx({n: v for n, v in counters.snapshot().items() if n not in ("max_k", "num_errors")})
    assert received.counters.verified == counters.verified
    assert received.counters.chosen_k.counts == counters.chosen_k.counts
    assert received.counters.last_change == counters.last_change
    assert received.counters.step_time_error == counters.step_time_error
    assert received.others["num_errors"] == 4
    assert received.state["drafter"] == "ngram"
    there = {m.name: dict(m.values) for m in measurements(received.counters, ["ngram"], 4, "goodput")}
    here = {m.name: dict(m.values) for m in measurements(counters, ["ngram"], 4, "goodput")}
    assert there.keys() == here.keys()
    assert all(there[name] == pytest.approx(here[name]) for name in here)


def test_two_receivers_add_up() -> None:
    rng, counters = random.Random(3), Counters()
    sender, ends = Sender(counters), [Received(), Received()]
    for step in range(20):
        counters.observe_feedback(feedback(rng, step))
        message = stats()
        sender.attach(message, idle=True)
        growth = detach(message)
        assert growth is not None
        ends[step % 2].absorb(growth)
    assert sum(end.counters.num_steps for end in ends) == 20
    assert ends[0].counters.verified + ends[1].counters.verified == counters.verified


def test_nothing_counted_sends_nothing() -> None:
    counters = Counters()
    sender, message = Sender(counters), stats()
    sender.attach(message, idle=True)
    assert detach(message) is None
    sender.attach(None, idle=True)
    counters.observe_feedback(feedback(random.Random(0), 0))
    sender.attach(message, idle=True)
    assert detach(message) is not None
    assert detach(SimpleNamespace()) is None


def test_stats_of_an_unknown_shape_end_the_metrics_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    counters = Counters()
    counters.observe_feedback(feedback(random.Random(0), 0))
    sender = Sender(counters)
    for _ in range(3):
        sender.attach(SimpleNamespace(), idle=True)
    assert len(caplog.records) == 1
