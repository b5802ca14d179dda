"""Headway beside vLLM on this machine: both serve the same directory, and the same load is put on them in turns.

    python benchmarks/against_vllm.py --vllm VENV/bin/vllm --output results/vllm.json

Each server runs in a session of its own; the one that is not being measured is stopped (SIGSTOP), since an idle vLLM worker still polls.
Prints a line per cell and writes every run's document. Needs a vLLM installation; nothing else in the project does.
"""

from __future__ import annotations

import argparse
import json
import re
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from servers import BIN, Server

from headway.bench.environment import describe
from headway.models import hub

NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4, "prompt_lookup_min": 2}


def measure(server: Server, others: list[Server], concurrency: int, options: argparse.Namespace, seed: int) -> dict[str, Any]:
    for other in others:
        other.signal(signal.SIGSTOP)
    server.signal(signal.SIGCONT)
    time.sleep(1.0)
    command = [
        str(BIN / "headway"), "bench", "serve", "--base-url", server.url, "--workload", options.workload, "--concurrency", str(concurrency),
        "--num-prompts", str(max(options.min_prompts, concurrency)), "--output-len", str(options.output_len), "--seed", str(seed),
        "--warmup", "1",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    document: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return document


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", required=True, help="the vllm executable")
    parser.add_argument("--model", default="smollm2-135m", help="anything `headway serve` takes")
    parser.add_argument("--spec", choices=("off", "ngram"), default="off")
    parser.add_argument("--workload", default="code-edit")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4, 16, 32])
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--min-prompts", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    directory = str(hub.resolve(options.model))
    speculation = [] if options.spec == "off" else ["--speculative-config", json.dumps(NGRAM)]
    common = ["--max-model-len", "2048", "--max-num-seqs", "64", *(["--port", "8101"])]
    vllm = Server(
        "vllm", [options.vllm, "serve", directory, "--dtype", "bfloat16", *common, *speculation], 8101, {"VLLM_CPU_KVCACHE_SPACE": "2"}
    )
    vllm.signal(signal.SIGSTOP)
    common[-1] = "8102"
    headway = Server(
        "headway",
        [str(BIN / "headway"), "serve", directory, "--dtype", "bfloat16", *common, *(speculation or ["--spec", "off"])],
        8102,
        {},
    )
    cells: list[dict[str, Any]] = []
    try:
        for concurrency in options.concurrency:
            cell: dict[str, Any] = {"concurrency": concurrency, "vllm": [], "headway": []}
            for seed in range(options.repeats):
                for server, other in ((vllm, headway), (headway, vllm)):
                    cell[server.name].append(measure(server, [other], concurrency, options, seed))
            cells.append(cell | summary(cell))
            print(json.dumps({key: value for key, value in cells[-1].items() if key not in ("vllm", "headway")}), flush=True)
    finally:
        for server in (vllm, headway):
            server.stop()
    document = {
        "benchmark": "against_vllm", "spec": options.spec, "ready_s": {"vllm": vllm.ready_s, "headway": headway.ready_s}, "cells": cells,
        "command": " ".join(["benchmarks/against_vllm.py", *(re.sub(r"/[^ :]*/", "", word) for word in sys.argv[1:])]),
        **describe(),
    }  # fmt: skip
    options.output.parent.mkdir(exist_ok=True)
    options.output.write_text(json.dumps(document, indent=1) + "\n")


def summary(cell: dict[str, Any]) -> dict[str, Any]:
    """Medians of both, and the median, least and largest of the ratios pair by pair."""
    result: dict[str, Any] = {}
    for key, path in (("output_tokens_per_s", None), ("tpot_ms", "p50"), ("ttft_ms", "p50"), ("mean_acceptance_length", None)):
        values = {
            name: [run[key][path] if path else run[key] for run in cell[name] if run.get(key) is not None] for name in ("vllm", "headway")
        }
        if not all(values.values()):
            continue
        ratios = [ours / theirs for ours, theirs in zip(values["headway"], values["vllm"], strict=True)]
        result[key] = {
            **{name: round(statistics.median(found), 2) for name, found in values.items()},
            "ratio": [round(statistics.median(ratios), 3), round(min(ratios), 3), round(max(ratios), 3)],
        }
    return result


if __name__ == "__main__":
    main()
