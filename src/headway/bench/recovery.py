"""How long a policy takes after the workload switched: steps and seconds until it is as fast as the best fixed k of the new phase.

In a drifting load (`workloads.py`: drift) each request belongs to a phase by its place in the queue. A step belongs to the phase that
most of its requests (MAJORITY) are of; steps that compute prompts count as time, not as evidence. The rate to reach is that of the
fastest static configuration of the same block over its own steps of the phase. A run has recovered at the first step from which on, to
the end of the phase, it reaches REACHED of that: one lucky step does not count, nor do fewer than LEAST_STEPS.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headway.engine.engine import Engine

MAJORITY = 0.75
REACHED = 0.95
LEAST_STEPS = 10


class StepLog:
    """Phase, time and tokens of every step of a drifting load. `phase_len`: requests of one phase."""

    def __init__(self, engine: Engine, phase_len: int) -> None:
        self._engine, self._phase_len = engine, phase_len
        self._phase: list[int] = []
        self._ms: list[float] = []
        self._tokens: list[int] = []
        self._before = self._counts()

    def observe(self) -> None:
        """After each step."""
        before, now = self._before, self._counts()
        self._before = now
        ms, tokens, rows, drafts, step_tokens = (b - a for a, b in zip(before, now, strict=True))
        places = [int(seq.request.request_id.rpartition("-")[2]) // self._phase_len for seq in self._engine.scheduler.running]
        dominant = max(places, key=places.count, default=-1)
        clear = bool(places) and places.count(dominant) >= MAJORITY * len(places) and step_tokens == rows + drafts
        self._phase.append(dominant if clear else -1)
        self._ms.append(round(ms, 3))
        self._tokens.append(int(tokens))

    def to_json(self) -> dict[str, Any]:
        """Per step: its phase, -1 where it has none or computed prompts; milliseconds; tokens written."""
        return {"phase": self._phase, "ms": self._ms, "tokens": self._tokens}

    def _counts(self) -> tuple[float, ...]:
        m = self._engine.metrics
        return m.step_ms, m.num_generation_tokens, m.num_sampling_rows, m.num_verified_drafts, m.num_step_tokens


def recoveries(runs: Mapping[str, Mapping[str, Any]], statics: Sequence[str]) -> dict[str, list[dict[str, Any]]]:
    """Configuration -> one entry per switch, in order: {phase, steps, seconds}; steps and seconds are None where it did not get there.

    `runs` is one block: configuration -> its run, with "steps" (`StepLog.to_json`).
    """
    logs = {name: run["steps"] for name, run in runs.items() if run.get("steps")}
    last = max((max(log["phase"], default=-1) for log in logs.values()), default=-1)
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in logs}
    for phase in range(1, last + 1):
        best = max((_rate(logs[name], phase) for name in statics if name in logs), default=0.0)
        for name, log in logs.items():
            found[name].append({"phase": phase, **_recovery(log, phase, REACHED * best)})
    return found


def _of_phase(log: Mapping[str, Any], phase: int) -> list[int]:
    return [step for step, of in enumerate(log["phase"]) if of == phase]


def _rate(log: Mapping[str, Any], phase: int) -> float:
    """Tokens per millisecond."""
    steps = _of_phase(log, phase)
    ms = sum(log["ms"][step] for step in steps)
    return float(sum(log["tokens"][step] for step in steps) / ms) if ms > 0.0 else 0.0


def _recovery(log: Mapping[str, Any], phase: int, rate: float) -> dict[str, Any]:
    steps = _of_phase(log, phase)
    # From each step to the end of the phase: what was written beyond the rate.
    beyond = list(accumulate(log["tokens"][step] - rate * log["ms"][step] for step in reversed(steps)))[::-1]
    for at, step in enumerate(steps[: max(0, len(steps) - LEAST_STEPS + 1)]):
        if rate > 0.0 and beyond[at] >= 0.0:
            return {"steps": step - steps[0], "seconds": round(sum(log["ms"][steps[0] : step]) * 1e-3, 3)}
    return {"steps": None, "seconds": None}
