"""Drafters against no speculation, in turns of a few prompts: what is left of a machine whose speed changes from minute to minute.

    python benchmarks/side_by_side.py [--configurations off,eagle-k4,suffix,eagle+suffix] [--workloads chat mixed] [--concurrency 1 8]
                                      [--minutes 8] [--output results/side-by-side.json]

One engine per configuration stays up, so policies go on learning. A round is a few new prompts that every engine answers, one engine after
the other; who begins rotates. No prompt comes twice, at whatever load: `suffix` remembers answers. Cells (workload x requests in flight)
take turns too, so each has rounds from beginning to end. Shown: the median over rounds of a configuration's speed over that of `off` in
the same round, with the quartiles; the first round of a cell is not counted.

Configurations: off; NAME: the drafter under the default policy; NAME-kN: always N drafts; names joined by + draft side by side.
"""

from __future__ import annotations

import argparse
import itertools
import re
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from record import origin, publish, write

from headway.bench import throughput, workloads
from headway.bench.records import LoadOptions
from headway.config import EngineConfig, SpeculativeConfig
from headway.engine.engine import Engine

MOST_ROUNDS = 64
HEADS = {"eagle": "speculators/smollm2-135m-eagle3"}
NAME = re.compile(r"([a-z_+]+?)(?:-k([1-9]\d*))?")


def speculation(name: str) -> dict[str, Any] | None:
    """The speculative config of a configuration's name; SystemExit for one that is none."""
    if name == "off":
        return None
    matched = NAME.fullmatch(name)
    if matched is None:
        raise SystemExit(f"{name!r} is not off, NAME or NAME-kN, with names joined by +")
    names, k = matched[1].split("+"), matched[2]
    found: dict[str, Any] = {"method": [{"name": each, "model": HEADS[each]} if each in HEADS else each for each in names]}
    return found | ({"num_speculative_tokens": int(k), "policy": "static"} if k else {"num_speculative_tokens": 8})


class Cell:
    """One workload at one load: its prompts, and what each configuration took for them round after round."""

    def __init__(self, workload: str, concurrency: int, options: argparse.Namespace, prompts: Iterator[list[int]]) -> None:
        self.workload, self.concurrency, self.prompts = workload, concurrency, prompts
        self.size = 2 if concurrency == 1 else concurrency + concurrency // 2
        self.load = LoadOptions(
            workload=workload, concurrency=concurrency, num_prompts=self.size, output_len=options.output_len, warmup=0,
            output_range_ratio=0.0 if concurrency == 1 else 0.5,
        )  # fmt: skip
        self.rounds: list[dict[str, dict[str, float]]] = []

    def run(self, engines: dict[str, Engine]) -> None:
        """One more round, while there are prompts."""
        prompts = list(itertools.islice(self.prompts, self.size))
        if len(prompts) < self.size:
            return
        names = list(engines)
        turn = len(self.rounds) % len(names)
        found: dict[str, dict[str, float]] = {}
        for name in (*names[turn:], *names[:turn]):
            run = throughput.run(engines[name], prompts, self.load)
            stats = run.speculation
            found[name] = {
                "output_tokens_per_s": run.summary()["output_tokens_per_s"], "num_drafts": stats.num_draft_tokens,
                "num_accepted": sum(stats.num_accepted_per_pos), "num_steps": stats.num_steps, "num_drafted_steps": stats.num_spec_steps,
            }  # fmt: skip
        self.rounds.append(found)

    def ratios(self, name: str) -> list[float]:
        return [found[name]["output_tokens_per_s"] / found["off"]["output_tokens_per_s"] for found in self.rounds[1:]]

    def summary(self, names: list[str]) -> dict[str, Any]:
        cell: dict[str, Any] = {"workload": self.workload, "concurrency": self.concurrency, "rounds": self.rounds, "ratios": {}}
        for name in names:
            if len(ratios := self.ratios(name)) > 1:
                low, high = np.quantile(ratios, [0.25, 0.75])
                drafted = sum(found[name]["num_drafted_steps"] for found in self.rounds[1:])
                accepted = sum(found[name]["num_accepted"] for found in self.rounds[1:])
                cell["ratios"][name] = {
                    "median": statistics.median(ratios), "quartiles": [float(low), float(high)],
                    "tokens_per_drafted_step": 1.0 + accepted / drafted if drafted else 1.0,
                }  # fmt: skip
        return cell


def table(cells: list[dict[str, Any]], names: list[str]) -> str:
    titles = [f"{cell['workload']} @{cell['concurrency']} ({max(0, len(cell['rounds']) - 1)} rounds)" for cell in cells]
    lines = ["| tokens/s against none | " + " | ".join(titles) + " |", "|---" * (1 + len(cells)) + "|"]
    for name in names:
        shown = []
        for cell in cells:
            ratio = cell["ratios"].get(name)
            shown.append(f"{ratio['median']:.2f}x ({ratio['quartiles'][0]:.2f}-{ratio['quartiles'][1]:.2f})" if ratio else "")
        lines.append(f"| {name} | " + " | ".join(shown) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--configurations", default="off,eagle-k4,suffix,eagle,eagle+suffix")
    parser.add_argument("--workloads", nargs="+", default=["chat", "mixed"])
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--prompts", type=int, default=80, help="different prompts of a workload at most")
    parser.add_argument("--seed", type=int, default=11)
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--num-threads", type=int)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    names = options.configurations.split(",")
    if names[0] != "off":
        parser.error("--configurations begins with off, which the others are compared with")
    engines = {
        name: Engine(EngineConfig(
            model=options.model, max_num_seqs=max(options.concurrency), kv_cache_memory_bytes=1 << 30, num_threads=options.num_threads,
            speculative=SpeculativeConfig.parse(speculation(name)),
        ))
        for name in names
    }  # fmt: skip
    streams = {}
    for workload in options.workloads:
        prompts = workloads.load(workload, options.prompts, options.seed)
        streams[workload] = iter([prompt.encode(engines["off"].tokenizer) for prompt in prompts])
    cells = [Cell(workload, num, options, streams[workload]) for num in options.concurrency for workload in options.workloads]
    until = time.monotonic() + 60.0 * options.minutes
    document: dict[str, Any] = {"configurations": names, "cells": [], **origin()}
    for _ in range(MOST_ROUNDS):
        for cell in cells:
            for _ in range(2 if cell.concurrency == 1 else 1):   # its rounds are short
                if time.monotonic() < until:
                    cell.run(engines)
        document["cells"] = [cell.summary(names[1:]) for cell in cells]
        if options.output:
            write(document, options.output)
    print(table(document["cells"], names[1:]))
    publish(document, options.output)


if __name__ == "__main__":
    main()
