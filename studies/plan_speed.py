"""How far a plan's times are off on this machine: recorded at several loads, learned from some of them, asked about the others.

    python studies/plan_speed.py --output results/plan-speed/MACHINE.json

For every load and every number of verified drafts the median recorded step is held against the planned one: with general corrections, and
with those fitted to the other loads.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import record

from headway.bench import roofline
from headway.plan import calibration, configs, families, memory
from headway.plan.device import Device
from headway.plan.speed import PUBLISHED, Machine
from headway.telemetry.trace import Trace, read_trace

MODEL = "smollm2-135m"
LEARNED, ASKED = (1, 16), (4, 8)
MIN_STEPS = 5


def recorded(concurrency: int, folder: Path) -> Trace:
    path = folder / f"{concurrency}.jsonl"
    words = [
        "bench", "throughput", MODEL, "--dtype", "bfloat16", "--workload", "mixed", "--concurrency", str(concurrency), "--num-prompts",
        str(3 * concurrency), "--output-len", "64", "--spec-method", "suffix", "--spec-tokens", "4", "--no-profile", "--trace", str(path),
    ]  # fmt: skip
    subprocess.run([sys.executable, "-m", "headway.cli.main", *words], check=True, stdout=subprocess.DEVNULL)
    return read_trace(path)


def measured(trace: Trace) -> list[dict[str, Any]]:
    """Decoding steps of equal shape: the median of their times and contexts."""
    groups: dict[tuple[int, int], list[Any]] = defaultdict(list)
    for step in trace.steps:
        if not step.feedback.num_prefill_tokens and step.feedback.num_rows:
            groups[step.feedback.num_rows, step.feedback.num_tokens].append(step.feedback)
    return [
        {"rows": rows, "tokens": tokens, "steps": len(found), "context": statistics.median(fb.num_context_tokens for fb in found),
         "ms": statistics.median(fb.step_ms - fb.draft_ms for fb in found)}
        for (rows, tokens), found in sorted(groups.items()) if len(found) >= MIN_STEPS
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    probe = roofline.measure_device()
    device = Device("this-machine", probe.memory_bytes, probe.bandwidth, {"bf16": probe.flops}, 1.0, 0.0, "measured", probe.is_cpu)
    machine = Machine(families.read(configs.find(MODEL), MODEL), None, None, memory.Deployment(device))
    with tempfile.TemporaryDirectory() as folder:
        traces = {size: recorded(size, Path(folder)) for size in sorted((*LEARNED, *ASKED))}
    learned = replace(machine, corrections=calibration.corrections([traces[size] for size in LEARNED], machine))
    cells = []
    for size in ASKED:
        for cell in measured(traces[size]):
            shape = (cell["rows"], cell["tokens"], cell["context"])
            general, fitted = machine.verify_ms(*shape) / cell["ms"] - 1, learned.verify_ms(*shape) / cell["ms"] - 1
            cells.append({"concurrency": size, **cell, "general": general, "fitted": fitted})
    document = {
        "benchmark": "plan_speed", "bandwidth": probe.bandwidth, "flops": probe.flops, "learned_at": LEARNED, "cells": cells,
        "median_general": statistics.median(abs(cell["general"]) for cell in cells),
        "median_fitted": statistics.median(abs(cell["fitted"]) for cell in cells),
        "worst_fitted": max(abs(cell["fitted"]) for cell in cells),
        "fit_error": learned.corrections.error, "general_corrections": PUBLISHED.source, **record.origin(),
    }  # fmt: skip
    record.publish(document, args.output)


if __name__ == "__main__":
    main()
