"""Recovery after a switch of the workload: steps and seconds until the best static k of the new phase is reached for good."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from headway.bench.recovery import StepLog, recoveries
from headway.bench.sweep_analysis import Analysis
from headway.bench.sweep_report import html
from tests.unit.test_sweep import SPEEDS, document


def log(*parts: tuple[int, int, float, int]) -> dict[str, Any]:
    """(phase, number of steps, milliseconds, tokens of each)"""
    steps: dict[str, list[Any]] = {"phase": [], "ms": [], "tokens": []}
    for phase, count, ms, tokens in parts:
        for name, value in zip(steps, (phase, ms, tokens), strict=True):
            steps[name] += [value] * count
    return {"steps": steps}


FAST, SLOW = log((0, 20, 10.0, 8), (1, 40, 10.0, 8)), log((0, 20, 10.0, 4), (1, 40, 10.0, 4))


def test_steps_and_seconds_until_it_stays_as_fast() -> None:
    lagging = log((0, 20, 10.0, 8), (-1, 3, 100.0, 1), (1, 15, 10.0, 4), (-1, 1, 50.0, 2), (1, 24, 10.0, 8))
    found = recoveries({"k4": FAST, "off": SLOW, "policy": lagging, "at once": FAST, "never": SLOW}, ["k4", "off"])
    # The 15 slow steps, the one with a prompt in it; two of the slow ones are within the 5 %.
    assert found["policy"] == [{"phase": 1, "steps": 13, "seconds": pytest.approx(0.13)}]
    assert found["at once"] == [{"phase": 1, "steps": 0, "seconds": 0.0}]
    assert found["never"] == [{"phase": 1, "steps": None, "seconds": None}]


def test_a_lucky_end_is_no_recovery() -> None:
    late = log((0, 5, 10.0, 8), (1, 40, 10.0, 4), (1, 5, 10.0, 8))
    assert recoveries({"k4": FAST, "policy": late}, ["k4"])["policy"][0]["steps"] is None


@pytest.mark.parametrize("broken", [{}, {"steps": {"phase": [], "ms": [], "tokens": []}}, log((1, 30, 0.0, 0)), log((-1, 9, 1.0, 1))])
def test_nothing_to_compare(broken: dict[str, Any]) -> None:
    for found in (recoveries({"k4": broken, "policy": broken}, ["k4"]), recoveries({"policy": broken}, [])):
        assert all(item["steps"] is None for items in found.values() for item in items)


def test_the_log_knows_the_phase_of_each_step() -> None:
    metrics = SimpleNamespace(step_ms=0.0, num_generation_tokens=0, num_sampling_rows=0, num_verified_drafts=0, num_step_tokens=0)
    engine = SimpleNamespace(metrics=metrics, scheduler=SimpleNamespace(running=[]))
    found = StepLog(engine, 4)   # type: ignore[arg-type]
    for indices, prompt_tokens in (([0, 1, 2, 3], 0), ([2, 3, 4, 5], 0), ([3, 4, 5, 6], 0), ([4, 5, 6, 7], 30), ([], 0)):
        engine.scheduler.running = [SimpleNamespace(request=SimpleNamespace(request_id=f"bench-{index}")) for index in indices]
        metrics.step_ms += 12.0
        metrics.num_generation_tokens += 6
        metrics.num_sampling_rows += 4
        metrics.num_verified_drafts += 5
        metrics.num_step_tokens += 9 + prompt_tokens
        found.observe()
    assert found.to_json() == {"phase": [0, -1, 1, -1, -1], "ms": [12.0] * 5, "tokens": [6] * 5}


def test_the_report_shows_recoveries_and_where_time_went() -> None:
    made = document({("drift@8", name): speeds for (cell, name), speeds in SPEEDS.items() if cell == "chat@8"})
    for run in made["runs"]:
        steps = {"off": None, "suffix-k4": 0, "policy": (7, None, 12)[run["round"]]}[run["configuration"]]
        run["recoveries"] = [{"to": "chat", "phase": 1, "steps": steps, "seconds": None if steps is None else steps / 10}]
        if run["configuration"] == "policy":
            run["accounts"] = {"policy": 0.004, "draft": 0.02, "wasted": 0.1, "step_time_error": 0.05, "token_error": 0.25}
    found = Analysis(made).to_json()
    assert found["recoveries"]["drift@8"]["policy"] == {"chat": {"switches": 3, "recovered": 2, "steps": 12.0, "seconds": 1.2}}
    assert found["recoveries"]["drift@8"]["off"]["chat"] == {"switches": 3, "recovered": 0, "steps": None, "seconds": None}
    assert found["accounts"]["policy"]["drift@8"]["wasted"] == 0.1
    page = html(made)
    assert "Recovery after the workload switched" in page
    assert "1.250" in page
