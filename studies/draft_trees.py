"""Trees of drafts against chains, at the same number of verified draft tokens: tokens per step, and what a step costs.

    python studies/draft_trees.py [--method eagle] [--draft DIR] [--budgets 4 8 16] [--temperature 0] [--output FILE.json]

One request at a time, the same prompts for every configuration, in turns. A chain of `budget` tokens is compared with trees of as many
(`num_draft_tokens`) whose levels continue `topk` tokens each; a tree is at most as deep as the chain, and at most --depth levels. Every
draft is verified whole (policy static). Tokens per step count accepted drafts and the target's own token; the interval is a 95 %
bootstrap over prompts of the ratio to the chain. These are counts, the same on a busy machine, and all that the file has. The times
are for the eye: `moved` is what K/V of accepted nodes takes to get to its place, per step. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from record import origin, publish, timed

from headway.bench import workloads
from headway.config import EngineConfig, SpeculativeConfig
from headway.engine.engine import Engine
from headway.sampling_params import SamplingParams
from headway.types import Request


@dataclass
class Cell:
    """One configuration. Per prompt: tokens and steps of decoding; in all: milliseconds of decoding steps and of their parts."""

    tokens: list[int] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    step_ms: float = 0.0
    draft_ms: float = 0.0
    moved_ms: float = 0.0

    @property
    def tokens_per_step(self) -> float:
        return sum(self.tokens) / sum(self.steps)


def run(engine: Engine, prompt: list[int], params: SamplingParams, cell: Cell) -> list[int]:
    """Adds one request to the cell; returns what it wrote."""
    moved = [0.0]
    engine.runner.compact = timed(type(engine.runner).compact.__get__(engine.runner), moved)   # type: ignore[method-assign]
    engine.add(Request("one", prompt, params))
    written: list[int] = []
    tokens = steps = 0
    while engine.has_work():
        decoding = any(seq.is_decoding for seq in engine.scheduler.running)
        before, moved[0], began = engine.metrics.draft_ms, 0.0, time.perf_counter()
        new = [token for delta in engine.step() for token in delta.token_ids]
        written += new
        if decoding:
            tokens, steps = tokens + len(new), steps + 1
            cell.step_ms += (time.perf_counter() - began) * 1e3
            cell.draft_ms += engine.metrics.draft_ms - before
            cell.moved_ms += moved[0] * 1e3
    cell.tokens.append(tokens)
    cell.steps.append(steps)
    return written


def interval(cell: Cell, chain: Cell) -> tuple[float, float]:
    """95 % bootstrap over prompts of the ratio of tokens per step."""
    random, n = np.random.default_rng(0), len(chain.tokens)
    chosen = random.integers(0, n, (2000, n))
    mine, theirs = ((np.array(c.tokens)[chosen].sum(1) / np.array(c.steps)[chosen].sum(1)) for c in (cell, chain))
    low, high = np.quantile(mine / theirs, [0.025, 0.975])
    return float(low), float(high)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--method", default="eagle")
    parser.add_argument("--draft", default="speculators/smollm2-135m-eagle3", help="the drafter's network")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--budgets", type=int, nargs="+", default=[4, 8, 16], help="draft tokens verified per step")
    parser.add_argument("--topk", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--depth", type=int, default=6, help="levels of a tree at most")
    parser.add_argument("--workload", default="chat")
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=128, help="written per prompt")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--sample-method", nargs="+", default=["probabilistic"], help="draft_sample_method, where requests sample")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    engine = Engine(EngineConfig(model=args.model, dtype=args.dtype, profile=False))
    prompts = [prompt.encode(engine.tokenizer) for prompt in workloads.load(args.workload, args.prompts, seed=0)]
    shapes = [
        (method, budget, topk) for method in (args.sample_method if args.temperature > 0 else ["greedy"])
        for budget in args.budgets for topk in (1, *args.topk)
    ]  # fmt: skip
    cells = {shape: Cell() for shape in shapes}
    told: dict[int, list[int]] = {}
    differ = 0
    for part in range(0, len(prompts), 4):
        for method, budget, topk in shapes:
            depth = budget if topk == 1 else min(budget, args.depth)
            tree = {} if topk == 1 else {"topk": topk, "num_draft_tokens": budget}
            engine.speculate(SpeculativeConfig.parse({
                "method": args.method, "model": args.draft, "num_speculative_tokens": depth, "policy": "static",
                "draft_sample_method": method, **tree,
            }))  # fmt: skip
            for i, prompt in enumerate(prompts[part : part + 4], start=part):
                params = SamplingParams(temperature=args.temperature, seed=i, max_tokens=args.tokens, ignore_eos=True)
                written = run(engine, prompt, params, cells[method, budget, topk])
                differ += args.temperature == 0.0 and told.setdefault(i, written) != written
    rows = []
    print(f"{'drafts':>14} {'budget':>6} {'topk':>4} {'tokens/step':>11} {'against the chain':>25} {'step':>8} {'draft':>8} {'moved':>9}")
    for (method, budget, topk), cell in cells.items():
        chain = cells[method, budget, 1]
        ratio, (low, high) = cell.tokens_per_step / chain.tokens_per_step, interval(cell, chain)
        steps = sum(cell.steps)
        step, draft, moved = (ms / steps for ms in (cell.step_ms, cell.draft_ms, cell.moved_ms))
        rows.append({
            "draft_sample_method": method, "budget": budget, "topk": topk, "steps": steps, "tokens_per_step": cell.tokens_per_step,
            "ratio": ratio, "ratio_low": low, "ratio_high": high,
        })  # fmt: skip
        print(f"{method:>14} {budget:6} {topk:4} {cell.tokens_per_step:11.3f} {ratio:8.3f} [{low:.3f}, {high:.3f}]  "
              f"{step:5.2f} ms {draft:5.2f} ms {moved:6.3f} ms")
    if args.temperature == 0.0:
        print(f"greedy texts that differ between configurations: {differ}")
    about = {"workload": args.workload, "prompts": len(prompts), "tokens_per_prompt": args.tokens, "temperature": args.temperature}
    publish({**about, "rows": rows, "texts_that_differ": differ, **origin()}, args.output)


if __name__ == "__main__":
    main()
