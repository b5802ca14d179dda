"""What the policy predicts, against what happens: step times, acceptance, and how soon it sees that the machine became slower.

    python studies/calibration.py [--workloads chat code-edit mixed] [--concurrencies 1 8 32] [--slowdowns 3] [--output FILE.json]

step_error    median of |predicted / measured - 1| over steps, each predicted before it was learned from; the first ones are left out
calibration   expected calibration error over ten bins: P(the draft is accepted up to here) of every verified draft token, as the policy
              believed when it chose it, against whether it was. The first 500 drafts are left out
slowdown      a busy process with a nice value starts beside; steps until the median error of the next WINDOW steps is 10 % or less
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from record import origin, publish

from headway.bench.flow import Flow
from headway.bench.load import LoadOptions
from headway.bench.workloads import Prompts
from headway.config import EngineConfig, SpeculativeConfig
from headway.control.costs import CostModel
from headway.control.policies.goodput import Goodput
from headway.control.policy import BatchView, DraftView, Setup
from headway.engine.engine import Engine
from headway.types import Feedback

SKIPPED_STEPS, SKIPPED_DRAFTS, BINS = 20, 500, 10
NEAR, WINDOW, BESIDE = 0.10, 20, 300   # relative error; steps
BUSY = "while True: pass"


class Watched(Goodput):
    """The default policy; says what it believed of every step and every verified draft."""

    def start(self, setup: Setup) -> None:
        super().start(setup)
        self.costs: CostModel = setup.costs
        self.steps: list[tuple[float, float]] = []          # (predicted, measured) milliseconds, drafting left out
        self.judged: list[list[tuple[float, bool]]] = []    # of each draft: (believed, accepted) by position
        self._believed: dict[int, Sequence[float]] = {}

    def select(self, drafts: Sequence[DraftView], view: BatchView) -> Mapping[int, int]:
        self._believed = {draft.seq_id: self._by_name[draft.drafter].reach(draft) for draft in drafts}
        return super().select(drafts, view)

    def observe(self, feedback: Feedback) -> None:
        drafting = sum(part.draft_ms for part in feedback.drafters)
        rows, prefill = feedback.num_rows, feedback.num_prefill_tokens
        predicted = float(self.costs.predict(rows, feedback.num_tokens, feedback.num_context_tokens, prefill))
        self.steps.append((predicted, feedback.step_ms - drafting))
        for seq in feedback.sequences:
            if seq.num_drafts:
                believed = self._believed[seq.seq_id][: seq.num_drafts]
                self.judged.append([(p, seq.num_accepted > position) for position, p in enumerate(believed)])
        self._believed = {}
        super().observe(feedback)


def errors(policy: Watched, first: int = 0) -> np.ndarray[Any, np.dtype[np.float64]]:
    """[steps] |predicted / measured - 1|"""
    predicted, measured = np.array(policy.steps[first:]).T
    return np.abs(predicted / measured - 1.0)


def calibration(judged: Sequence[Sequence[tuple[float, bool]]]) -> dict[str, Any]:
    """Expected calibration error, and the reliability table it is made of."""
    believed, accepted = np.array([token for draft in judged for token in draft], dtype=np.float64).reshape(-1, 2).T
    bins = np.minimum((believed * BINS).astype(int), BINS - 1)
    table = [
        {"believed": float(believed[mine].mean()), "accepted": float(accepted[mine].mean()), "tokens": int(mine.sum())}
        for each in range(BINS) if (mine := bins == each).any()
    ]
    total = max(1, len(believed))
    return {
        "num_drafts": len(judged), "num_tokens": len(believed), "table": table,
        "error": sum(row["tokens"] * abs(row["believed"] - row["accepted"]) for row in table) / total if judged else None,
    }


@contextmanager
def busy(nice: int) -> Iterator[None]:
    process = subprocess.Popen(["nice", "-n", str(nice), sys.executable, "-c", BUSY])
    try:
        yield
    finally:
        process.kill()
        process.wait()


class Bench:
    def __init__(self, args: argparse.Namespace) -> None:
        speculative = SpeculativeConfig.parse({"method": args.drafters, "num_speculative_tokens": 8, "policy": "__main__:Watched"})
        self.engine = Engine(EngineConfig(
            model=args.model, max_num_seqs=max(args.concurrencies), num_threads=args.num_threads, speculative=speculative,
        ))  # fmt: skip
        assert isinstance(self.engine.policy, Watched)
        self.policy, self.args = self.engine.policy, args
        self._source = Prompts(args.seed, self.engine.tokenizer.vocab_size)

    def flow(self, workload: str, concurrency: int, num_prompts: int) -> Flow:
        args = self.args
        load = LoadOptions(
            workload=workload, num_prompts=num_prompts, output_len=args.output_len, output_range_ratio=0.5, concurrency=concurrency,
            warmup=0,
        )  # fmt: skip
        prompts = self._source.take(workload, num_prompts + 2 * concurrency)
        return Flow(self.engine, load, [prompt.encode(self.engine.tokenizer) for prompt in prompts])

    def cell(self, workload: str, concurrency: int) -> dict[str, Any]:
        requests = max(self.args.requests, 2 * concurrency)
        first = max(len(self.policy.steps), SKIPPED_STEPS)
        flow = self.flow(workload, concurrency, requests)
        flow.turn(requests)
        flow.stop()
        found = errors(self.policy, first)
        return {"num_steps": len(found), "step_error": float(np.median(found)), "step_error_p90": float(np.quantile(found, 0.9))}

    def slowdown(self, flow: Flow) -> dict[str, Any]:
        """One busy process, that comes and goes."""
        policy = self.policy
        flow.turn(4)
        start = len(policy.steps)
        before = statistics.median(ms for _, ms in policy.steps[-BESIDE:])
        with busy(self.args.nice):
            while len(policy.steps) < start + BESIDE + WINDOW:
                flow.turn(1)
        wrong = errors(policy, start)
        near = (step for step in range(BESIDE) if np.median(wrong[step : step + WINDOW]) <= NEAR)
        return {
            "step_ms_before": before, "step_ms_beside": statistics.median(ms for _, ms in policy.steps[start : start + BESIDE]),
            "first_error": float(np.median(wrong[:WINDOW])), "steps_until_near": next(near, None),
            "last_error": float(np.median(wrong[BESIDE - WINDOW : BESIDE])),
        }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--drafters", nargs="+", default=["suffix", "ngram"])
    parser.add_argument("--workloads", nargs="+", default=["chat", "code-edit", "mixed"])
    parser.add_argument("--concurrencies", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--requests", type=int, default=16, help="that end in a cell, at least twice those in flight")
    parser.add_argument("--output-len", type=int, default=96)
    parser.add_argument("--slowdowns", type=int, default=3)
    parser.add_argument("--nice", type=int, default=5, help="of the busy process")
    parser.add_argument("--seed", type=int, default=11, help="chooses the prompts")
    parser.add_argument("--num-threads", type=int)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    bench = Bench(args)
    document: dict[str, Any] = {"benchmark": "calibration", **origin(), "cells": {}, "calibration": {}, "slowdowns": []}
    for workload in args.workloads:
        first = max(len(bench.policy.judged), SKIPPED_DRAFTS)
        for concurrency in args.concurrencies:
            document["cells"][f"{workload}@{concurrency}"] = found = bench.cell(workload, concurrency)
            print(f"{workload}@{concurrency}: {found}", flush=True)
        document["calibration"][workload] = calibration(bench.policy.judged[first:])
    document["calibration"]["all"] = calibration(bench.policy.judged[SKIPPED_DRAFTS:])
    publish(document, args.output)   # the slowdowns take as long again
    flow = bench.flow("mixed", 8, 120 * args.slowdowns)
    document["slowdowns"] = [bench.slowdown(flow) for _ in range(args.slowdowns)]
    flow.stop()
    publish(document, args.output)


if __name__ == "__main__":
    main()
