"""Corrections and acceptance from recorded steps (telemetry/trace.py), instead of general ones."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from headway.errors import ConfigError
from headway.plan.speed import Corrections, Load, Machine
from headway.telemetry.trace import Trace, TraceStep

MIN_STEPS = 40
# Steps that took much longer than the others of their kind were interrupted; they are none of the roofline's business.
WORST_SHARE = 0.05
FIXED_TRIED = np.linspace(0.0, 0.98, 50)
# An acceptance that fewer drafts stand behind says little.
MIN_DRAFTS = 30


def corrections(traces: Sequence[Trace], machine: Machine) -> Corrections:
    """Fitted to every other step; the error is that on the steps between. Raises ConfigError for too few steps."""
    steps = [step for trace in traces for step in trace.steps if step.feedback.num_tokens and step.feedback.step_ms > 0]
    if len(steps) < MIN_STEPS:
        raise ConfigError(f"the recording has {len(steps)} steps: at least {MIN_STEPS} are needed to learn from")
    memory, compute, took = _columns(steps, machine)
    fitted = _fit(memory[::2], compute[::2], took[::2])
    off = np.abs(_predict(fitted, memory[1::2], compute[1::2]) / took[1::2] - 1.0)
    fixed, slow_memory, slow_compute = fitted
    unseen = [name for name, slow in (("memory", slow_memory), ("products", slow_compute)) if slow <= 0.0]
    error = float(np.median(off))
    source = f"fitted to {len(took)} recorded steps"
    if unseen:
        source += f"; the recording says nothing of {unseen[0]}, for which the general correction stands"
    found = replace(
        machine.corrections, fixed_ms=float(fixed), error=error, source=source,
        bandwidth=1.0 / slow_memory if slow_memory > 0 else machine.corrections.bandwidth,
        compute=1.0 / slow_compute if slow_compute > 0 else machine.corrections.compute,
    )  # fmt: skip
    return _with_drafting(steps, replace(machine, corrections=found))


def acceptance(traces: Sequence[Trace]) -> list[float]:
    """Of each draft position, given that the ones before it were accepted; empty where too few drafts were verified."""
    tried: dict[int, int] = {}
    right: dict[int, int] = {}
    for trace in traces:
        for step in trace.steps:
            for seq in step.feedback.sequences:
                for position in range(min(seq.num_drafts, seq.num_accepted + 1) if seq.parents is None else 0):
                    tried[position] = tried.get(position, 0) + 1
                    right[position] = right.get(position, 0) + (seq.num_accepted > position)
    found = []
    for position in range(len(tried)):
        if tried.get(position, 0) < MIN_DRAFTS:
            break
        found.append(right[position] / tried[position])
    return found


def _columns(steps: Sequence[TraceStep], machine: Machine) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """(memory, products, measured without drafting and communication), in milliseconds, one entry per step."""
    rows = []
    for step in steps:
        fb = step.feedback
        parts = machine.target_parts(
            max(1, fb.num_rows), fb.num_tokens, fb.num_context_tokens, sum(1 + seq.num_drafts for seq in fb.sequences)
        )
        rows.append((parts.memory, parts.compute, fb.step_ms - fb.draft_ms - parts.communication))
    table = np.array(rows, dtype=np.float64)
    return table[:, 0], table[:, 1], np.maximum(table[:, 2], 1e-3)


Fitted = tuple[float, float, float]
"""(fixed milliseconds, factor of the memory's time, factor of the products' time)"""


def _predict(fitted: Fitted, memory: NDArray[np.float64], compute: NDArray[np.float64]) -> NDArray[np.float64]:
    fixed, slow_memory, slow_compute = fitted
    return fixed + np.hypot(memory * slow_memory, compute * slow_compute)


def _fit(memory: NDArray[np.float64], compute: NDArray[np.float64], took: NDArray[np.float64]) -> Fitted:
    """Least relative squares, for each of many values of the fixed part; the worst steps are left out of a second round."""
    kept = np.ones(len(took), dtype=bool)
    best: Fitted = (0.0, 1.0, 1.0)
    for _ in range(2):
        least = math.inf
        for share in FIXED_TRIED:
            fixed = share * float(np.quantile(took[kept], 0.02))
            factors = _factors(memory[kept], compute[kept], np.maximum(took[kept] - fixed, 1e-6))
            candidate = (fixed, *factors)
            error = float(np.mean((_predict(candidate, memory[kept], compute[kept]) / took[kept] - 1.0) ** 2))
            if error < least:
                least, best = error, candidate
        off = np.abs(_predict(best, memory, compute) / took - 1.0)
        kept = off <= np.quantile(off, 1.0 - WORST_SHARE)
    return best


def _factors(memory: NDArray[np.float64], compute: NDArray[np.float64], rest: NDArray[np.float64]) -> tuple[float, float]:
    """x, y >= 0 with x^2 memory^2 + y^2 compute^2 = rest^2, in relative least squares."""
    a, b = (memory / rest) ** 2, (compute / rest) ** 2
    aa, ab, bb, a1, b1 = (float(np.sum(value)) for value in (a * a, a * b, b * b, a, b))
    determinant = aa * bb - ab * ab
    if determinant > 1e-9 * aa * bb:
        x, y = (bb * a1 - ab * b1) / determinant, (aa * b1 - ab * a1) / determinant
        if x > 0.0 and y > 0.0:
            return math.sqrt(x), math.sqrt(y)
    alone = [(math.sqrt(a1 / aa), 0.0), (0.0, math.sqrt(b1 / bb))]
    errors = [float(np.sum((x * x * a + y * y * b - 1.0) ** 2)) for x, y in alone]
    return alone[int(np.argmin(errors))]


def _with_drafting(steps: Sequence[TraceStep], machine: Machine) -> Corrections:
    """What drafting took, where the recording has drafts of a drafter of this kind."""
    drafted = [
        (seqs, step.feedback.draft_ms)
        for step in steps
        if step.feedback.draft_ms > 0 and (seqs := [seq for seq in step.feedback.sequences if seq.k > 0])
    ]
    if machine.drafting is None or len(drafted) < MIN_STEPS:
        return machine.corrections
    if machine.drafting.network is None:
        return replace(machine.corrections, lookup_ms=float(np.median([took for _, took in drafted])))
    loads = [Load(len(seqs), round(sum(seq.num_context for seq in seqs) / len(seqs)), 0) for seqs, _ in drafted]
    expected = [machine.draft_ms(load, max(seq.k for seq in seqs)) for load, (seqs, _) in zip(loads, drafted, strict=True)]
    ratios = np.array([took for _, took in drafted]) / np.array(expected)
    return replace(machine.corrections, draft_scale=float(np.median(ratios)))
