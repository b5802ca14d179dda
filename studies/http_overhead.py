"""What HTTP costs: the same prompts written by an engine in process and by a server that streams to a client on this machine, in turns.

    python studies/http_overhead.py [--concurrency 1 4 16 32] [--repeats 3] [--output FILE.json]

Two processes load the model once each; the one that is not measured waits. Every pair of runs has prompts of its own. The client is that of
`headway bench serve`. It runs beside the server, on the engine's cores, so its CPU time is shown next to that of the server's event loop:
what the two take is about what the ratio is short of 1. The number of steps, their length and the time outside them say where the rest is:
in steps with fewer requests each, in steps that are held up, or between steps. Prints a line per number of requests; the last line is one
JSON document.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from record import origin, publish
from servers import BIN, Server

from headway.bench import client, http_load, records, workloads
from headway.config import EngineConfig, SpeculativeConfig
from headway.engine.tokenizer import Tokenizer
from headway.models import hub


def work(config: EngineConfig) -> None:
    """An engine that runs the loads it reads, one JSON line each, and answers with their summaries."""
    from headway.bench import throughput
    from headway.engine.engine import Engine

    engine = Engine(config)
    print("ready", flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        run = throughput.run(engine, asked["prompts"], records.LoadOptions(**asked["load"]))
        print(json.dumps(run.summary()), flush=True)


class InProcess:
    def __init__(self, arguments: list[str]) -> None:
        command = [sys.executable, __file__, "--child", *arguments]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._answer()

    def run(self, prompts: list[list[int]], load: records.LoadOptions) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"prompts": prompts, "load": dataclasses.asdict(load)}) + "\n")
        self.process.stdin.flush()
        found: dict[str, Any] = json.loads(self._answer())
        return found

    def _answer(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit("the engine in process ended")
        return line


def over_http(server: Server, model: str, prompts: list[list[int]], load: records.LoadOptions) -> dict[str, Any]:
    options = http_load.ServeOptions(base_url=server.url)
    loop_s = _main_thread_cpu_s(server.process.pid)
    run = client.run(http_load.run(prompts, model, load, options))
    loop_s = _main_thread_cpu_s(server.process.pid) - loop_s
    if run.errors:
        raise SystemExit(f"a request failed: {run.errors[0]}")
    return run.summary() | {"event_loop_cpu_share": loop_s / run.duration_s}


def _main_thread_cpu_s(pid: int) -> float:
    """CPU seconds of the process's main thread: the server's event loop (the engine has a thread of its own)."""
    nanoseconds = Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[0]
    return int(nanoseconds) / 1e9


def summary(pairs: list[dict[str, dict[str, Any]]]) -> dict[str, Any]:
    ratios = [pair["http"]["output_tokens_per_s"] / pair["in_process"]["output_tokens_per_s"] for pair in pairs]
    speed = {way: round(statistics.median(pair[way]["output_tokens_per_s"] for pair in pairs), 1) for way in ("in_process", "http")}
    spent: dict[str, float] = {}
    for name in ("event_loop_cpu_share", "client_cpu_share"):
        share = statistics.median(pair["http"][name] for pair in pairs)
        spent[name] = round(share, 4)
        per_token = statistics.median(pair["http"][name] / pair["http"]["output_tokens_per_s"] for pair in pairs)
        spent[name.replace("share", "us_per_token")] = round(per_token * 1e6, 1)
    steps = {
        way: {
            "num_steps": statistics.median(pair[way]["num_steps"] for pair in pairs),
            "step_ms": round(statistics.median(pair[way]["step_s"] / pair[way]["num_steps"] for pair in pairs) * 1e3, 2),
            "outside_steps": round(statistics.median(1.0 - pair[way]["step_s"] / pair[way]["duration_s"] for pair in pairs), 4),
        }
        for way in ("in_process", "http")
    }
    return {
        "steps": steps, "output_tokens_per_s": speed, "ratio": [round(of(ratios), 3) for of in (statistics.median, min, max)], **spent,
        "outputs_counted": all(pair["http"]["num_output_tokens"] == pair["in_process"]["num_output_tokens"] for pair in pairs),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--spec", default="off", help="off, default, or JSON as for --speculative-config")
    parser.add_argument("--workload", default="code-edit")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4, 16, 32])
    parser.add_argument("--prompts-per-request", type=int, default=2, help="prompts of a run, per request in flight")
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--port", type=int, default=8103)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        speculative = SpeculativeConfig.parse(args.spec)
        work(EngineConfig(model=args.model, dtype="bfloat16", device="cpu", max_model_len=2048, speculative=speculative))
        return
    directory = str(hub.resolve(args.model))
    tokenizer = Tokenizer(Path(directory))
    command = [str(BIN / "headway"), "serve", directory, "--dtype", "bfloat16", "--max-model-len", "2048", "--port", str(args.port)]
    speculation = {"off": ["--spec", "off"], "default": []}.get(args.spec, ["--speculative-config", args.spec])
    server = Server("headway", [*command, *speculation], args.port, {})
    in_process = InProcess(["--model", directory, "--spec", args.spec])
    cells = []
    try:
        model = client.run(http_load.served_model(http_load.ServeOptions(base_url=server.url).target()))
        for concurrency in args.concurrency:
            size = concurrency * args.prompts_per_request
            prompts = [prompt.encode(tokenizer) for prompt in workloads.load(args.workload, size * (args.repeats + 1), seed=concurrency)]
            load = records.LoadOptions(
                workload=args.workload, num_prompts=size, output_len=args.output_len, concurrency=concurrency, warmup=0
            )
            pairs = []
            for repeat in range(args.repeats + 1):
                mine = prompts[repeat * size : (repeat + 1) * size]
                pairs.append({"in_process": in_process.run(mine, load), "http": over_http(server, model, mine, load)})
            cells.append({"concurrency": concurrency} | summary(pairs[1:]) | {"pairs": pairs[1:]})   # the first one warmed up
            print(json.dumps({key: value for key, value in cells[-1].items() if key != "pairs"}), flush=True)
    finally:
        server.stop()
        in_process.process.kill()
    publish({"benchmark": "http_overhead", "cells": cells, **origin()}, args.output)


if __name__ == "__main__":
    main()
