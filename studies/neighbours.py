"""How much is left when other programs keep the cores busy: output tokens/s beside 0, 1, 2 ... of them, in turns.

    python studies/neighbours.py [--neighbours 0 1 2] [--requests 1 8 32] [--rounds 5] [--output FILE.json]

A neighbour is `while 1: pass` at the same priority. `share` is the speed beside it over the speed alone; `fair` is what the system's
scheduler owes: all cores while there are enough for everybody's threads, else our threads' part of all threads.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from record import origin, publish

from headway import LLM, SamplingParams

CONFIGURATIONS = {"off": None, "default": "default"}


@contextmanager
def neighbours(num: int) -> Iterator[None]:
    running = [subprocess.Popen([sys.executable, "-c", "while 1: pass"]) for _ in range(num)]
    time.sleep(0.2 if num else 0.0)   # they have started
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


def speed(llm: LLM, requests: int, tokens: int, serial: int) -> float:
    """Output tokens per second over prompts that never came before."""
    prompts = [f"Tell a story in which the number {serial * 1000 + i} matters." for i in range(requests)]
    began = time.perf_counter()
    outs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True))
    return sum(len(out.outputs[0].token_ids) for out in outs) / (time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--neighbours", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    engines = {name: LLM(options.model, speculative_config=config) for name, config in CONFIGURATIONS.items()}
    threads, cores = torch.get_num_threads(), len(os.sched_getaffinity(0))
    cells = []
    serial = 0
    for name, llm in engines.items():
        for requests in options.requests:
            speed(llm, requests, options.tokens, serial := serial + 1)
            found: dict[int, list[float]] = {num: [] for num in options.neighbours}
            for _ in range(options.rounds):
                for num in options.neighbours:
                    with neighbours(num):
                        found[num].append(speed(llm, requests, options.tokens, serial := serial + 1))
            alone = statistics.median(found[options.neighbours[0]])
            for num, values in found.items():
                fair = min(1.0, cores / (threads + num))
                cell = {
                    "speculation": name, "requests": requests, "neighbours": num, "output_tokens_per_s": statistics.median(values),
                    "all": values, "share": statistics.median(values) / alone, "fair": fair,
                }  # fmt: skip
                cells.append(cell)
                print(f"{name:8} {requests:3} requests, {num} neighbours: {cell['output_tokens_per_s']:7.1f} tokens/s, "
                      f"{cell['share']:.2f} of alone, fair {fair:.2f}", file=sys.stderr, flush=True)
    publish({"benchmark": "neighbours", "threads": threads, "cores": cores, "cells": cells, **origin()}, options.output)


if __name__ == "__main__":
    main()
