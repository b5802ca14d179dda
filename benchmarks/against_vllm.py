"""Headway beside vLLM on this machine: both serve the same directory, and the same load is put on them in turns.

    python benchmarks/against_vllm.py --vllm VENV/bin/vllm --output results/vllm.json
    python benchmarks/against_vllm.py --vllm VENV/bin/vllm --prompt-tokens 1500 --output-len 32 --output results/vllm-long-prompts.json

`--prompt-tokens N` takes prompts of N tokens from the standard library's sources instead of a workload: what a first token costs.
Each server runs in a session of its own; the one that is not being measured is stopped (SIGSTOP), since an idle vLLM worker still polls.
Prints a line per cell and writes every run's document. Needs a vLLM installation; nothing else in the project does.
"""

from __future__ import annotations

import argparse
import itertools
import json
import signal
import statistics
import subprocess
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from record import origin, write
from servers import BIN, Server, vllm_env

from headway.engine.tokenizer import Tokenizer
from headway.models import hub

NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4, "prompt_lookup_min": 2}


def long_prompts(tokenizer: Tokenizer, num_tokens: int) -> Iterator[str]:
    """Texts of `num_tokens` tokens (a token more or less), one after the other from the standard library's sources."""
    library = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(library.glob("*.py")):
        token_ids = tokenizer.encode(path.read_text(encoding="utf-8", errors="replace"))
        for begin in range(0, len(token_ids) - num_tokens, num_tokens):
            yield tokenizer.decode(token_ids[begin : begin + num_tokens])


def write_workload(prompts: Iterator[str], count: int, path: Path) -> str:
    """The next `count` prompts as a workload that `headway bench` reads."""
    path.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in itertools.islice(prompts, count)))
    return f"jsonl:{path}"


def measure(
    server: Server, others: list[Server], concurrency: int, options: argparse.Namespace, seed: int, workload: str
) -> dict[str, Any]:
    for other in others:
        other.signal(signal.SIGSTOP)
    server.signal(signal.SIGCONT)
    time.sleep(1.0)
    command = [
        str(BIN / "headway"), "bench", "serve", "--base-url", server.url, "--workload", workload, "--concurrency", str(concurrency),
        "--num-prompts", str(num_prompts(options, concurrency)), "--output-len", str(options.output_len), "--seed", str(seed),
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
    parser.add_argument("--prompt-tokens", type=int, help="prompts of so many tokens, instead of a workload")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4, 16, 32])
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--min-prompts", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--kv-cache-gib", type=int, default=2, help="vLLM's pool; Headway's is sized from free memory")
    parser.add_argument("--vllm-all-cores", action="store_true", help="compute on the core that vLLM leaves to its scheduler, too")
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    directory = str(hub.resolve(options.model))
    prompts = long_prompts(Tokenizer(Path(directory)), options.prompt_tokens) if options.prompt_tokens else iter(())
    vllm, headway = start_servers(options, directory)
    cells: list[dict[str, Any]] = []
    scratch = tempfile.TemporaryDirectory()
    try:
        for concurrency in options.concurrency:
            cell: dict[str, Any] = {"concurrency": concurrency, "vllm": [], "headway": []}
            for seed in range(options.repeats):
                workload = options.workload
                if options.prompt_tokens:   # each repeat has prompts of its own, and one more to warm up with
                    workload = write_workload(prompts, num_prompts(options, concurrency) + 1, Path(scratch.name) / "prompts.jsonl")
                for server, other in ((vllm, headway), (headway, vllm)):
                    cell[server.name].append(measure(server, [other], concurrency, options, seed, workload))
            cells.append(cell | summary(cell))
            print(json.dumps({key: value for key, value in cells[-1].items() if key not in ("vllm", "headway")}), flush=True)
    finally:
        for server in (vllm, headway):
            server.stop()
        scratch.cleanup()
    document = {
        "benchmark": "against_vllm", "spec": options.spec, "prompt_tokens": options.prompt_tokens,
        "vllm_all_cores": options.vllm_all_cores,
        "ready_s": {"vllm": vllm.ready_s, "headway": headway.ready_s}, "cells": cells,
        **origin(),
    }  # fmt: skip
    write(document, options.output)


def start_servers(options: argparse.Namespace, directory: str) -> tuple[Server, Server]:
    """vLLM, stopped, and Headway."""
    speculation = [] if options.spec == "off" else ["--speculative-config", json.dumps(NGRAM)]
    common = ["serve", directory, "--dtype", "bfloat16", "--max-model-len", "2048", "--max-num-seqs", "64", *speculation]
    pool = vllm_env(options.vllm, options.kv_cache_gib, options.vllm_all_cores)
    vllm = Server("vllm", [options.vllm, *common, "--port", "8101"], 8101, pool)
    vllm.signal(signal.SIGSTOP)
    off = [] if speculation else ["--spec", "off"]
    return vllm, Server("headway", [str(BIN / "headway"), *common, *off, "--port", "8102"], 8102, {})


def num_prompts(options: argparse.Namespace, concurrency: int) -> int:
    return int(max(options.min_prompts, concurrency))


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
