"""What a tuned schedule is worth in vLLM itself: vLLM with the table `headway tune` wrote, beside vLLM without it, the same load in turns.

    headway tune smollm2-135m --workload code-edit --concurrencies 1,4,16 --drafter ngram --output tuned
    python studies/tuned_vllm.py --vllm VENV/bin/vllm --tuned tuned/vllm.json --output results/tuned-vllm/MACHINE.json

`tuned` is the file as it is; `untuned` is the same drafter with one k at every load, as vLLM's documentation shows it; `--off` adds vLLM
without speculation. Each server runs in a session of its own; those that are not being measured are stopped (SIGSTOP), since an idle
worker polls.
Every repeat has prompts of its own, which are not those the table was tuned on (--seed of `headway tune` is 0; here seeds begin at
1000), and the next repeat runs in the opposite order. Prints a line per cell, and writes what there is after each. Needs a vLLM
installation and memory for all servers.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import subprocess
from pathlib import Path
from typing import Any

from record import origin, write
from servers import BIN, Server, vllm_env

from headway.models import hub

FIRST_SEED = 1000
FIRST_PORT = 8111
UNTUNED_K = 4
PLAIN = ("method", "prompt_lookup_max", "prompt_lookup_min", "num_speculative_tokens")


def untuned(tuned: dict[str, Any]) -> dict[str, Any]:
    """The same drafter with one k for every load."""
    config = {key: value for key, value in tuned.items() if key in PLAIN}
    return {**config, "num_speculative_tokens": UNTUNED_K}


def measure(server: Server, workload: str, concurrency: int, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    command = [
        str(BIN / "headway"), "bench", "serve", "--base-url", server.url, "--workload", workload, "--concurrency", str(concurrency),
        "--num-prompts", str(max(options.min_prompts, 2 * concurrency)), "--output-len", str(options.output_len), "--seed", str(seed),
        "--warmup", "1",
    ]  # fmt: skip
    with server.awake(settle_s=1.0):
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    document: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return document


def summary(runs: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Medians, and tuned over each other one: median, least and largest ratio pair by pair."""
    rates = {name: [run["output_tokens_per_s"] for run in found] for name, found in runs.items()}
    result: dict[str, Any] = {name: round(statistics.median(found), 1) for name, found in rates.items()}
    for name, found in rates.items():
        if name != "tuned":
            ratios = [ours / theirs for ours, theirs in zip(rates["tuned"], found, strict=True)]
            result[f"tuned/{name}"] = [round(statistics.median(ratios), 3), round(min(ratios), 3), round(max(ratios), 3)]
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", required=True, help="the vllm executable")
    parser.add_argument("--tuned", type=Path, required=True, help="vllm.json of `headway tune`")
    parser.add_argument("--untuned", type=json.loads, help="speculative config to compare with; default: the same drafter, k = 4")
    parser.add_argument("--off", action="store_true", help="also vLLM without speculation")
    parser.add_argument("--model", default="smollm2-135m", help="anything `headway serve` takes")
    parser.add_argument("--dtype", default="bfloat16", help="vLLM's")
    parser.add_argument("--workloads", nargs="+", default=["code-edit"])
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--min-prompts", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--kv-cache-gib", type=int, default=1, help="each server's pool")
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    tuned = json.loads(options.tuned.read_text(encoding="utf-8"))
    if tuned is None:
        raise SystemExit(f"{options.tuned} says that speculation does not pay here: there is no table to compare")
    configs: dict[str, Any] = {"tuned": tuned, "untuned": options.untuned or untuned(tuned)} | ({"off": None} if options.off else {})
    signal.signal(signal.SIGTERM, signal.default_int_handler)   # servers must not outlive it
    servers: list[Server] = []
    cells: list[dict[str, Any]] = []
    try:
        for number, (name, config) in enumerate(configs.items()):
            servers.append(start(name, config, FIRST_PORT + number, options))
        for workload in options.workloads:
            for concurrency in options.concurrency:
                runs: dict[str, list[dict[str, Any]]] = {name: [] for name in configs}
                for repeat in range(options.repeats):
                    for server in servers[:: -1 if repeat % 2 else 1]:
                        runs[server.name].append(measure(server, workload, concurrency, FIRST_SEED + repeat, options))
                cells.append({"workload": workload, "concurrency": concurrency, **summary(runs), "runs": runs})
                print(json.dumps({key: value for key, value in cells[-1].items() if key != "runs"}), flush=True)
                ready_s = {server.name: server.ready_s for server in servers}
                what = {"benchmark": "tuned_vllm", "dtype": options.dtype, "configs": configs}
                write({**what, "ready_s": ready_s, "cells": cells, **origin()}, options.output)
    finally:
        for server in servers:
            server.stop()


def start(name: str, config: dict[str, Any] | None, port: int, options: argparse.Namespace) -> Server:
    """A vLLM server, stopped once it answers. One that refuses its speculative config ends here."""
    speculation = [] if config is None else ["--speculative-config", json.dumps(config)]
    model = str(hub.resolve(options.model))
    command = [options.vllm, "serve", model, "--dtype", options.dtype, "--max-model-len", "2048", "--max-num-seqs", "64"]
    env = vllm_env(options.vllm, options.kv_cache_gib, all_cores=False)
    server = Server(name, [*command, *speculation, "--port", str(port)], port, env)
    server.sleep()
    print(f"{name}: ready after {server.ready_s} s", flush=True)
    return server


if __name__ == "__main__":
    main()
