"""Headway's scheduler and proposer inside vLLM, against vLLM alone: real `vllm serve` servers, `vllm bench serve` as the load.

    python studies/vllm_plugin.py --vllm VENV/bin/vllm --output results/vllm-plugin/MACHINE.json --time-budget SECONDS
    python studies/vllm_plugin.py --report --output results/vllm-plugin/MACHINE.json

One server per configuration; all but the one that is measured are stopped (SIGSTOP), since an idle vLLM polls. A cell is a workload and a
number of requests at a time, the last one a load that changes from code-edit to chat and back (--drift). In one round of a cell every
configuration answers the same new prompts, one after the other; the next round goes the other way round. After one round of each cell the
cell that took least time so far has the next one, until --time-budget is used up or every cell has had --rounds. Ratios are taken within
rounds, so a machine that drifts from round to round does not matter. Headway's servers begin cold: they know what --warmup requests taught
them. The output is rewritten after each run; the same command continues it.

Configurations: none, kN (ngram, always N), table (ngram, --table), headway (its scheduler over ngram), proposer (its proposer, always
--max-k), headway+proposer.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import signal
import statistics
import subprocess
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from against_vllm import NGRAM
from record import origin, write
from servers import Server, vllm_env, vllm_version

import headway
from headway.bench import workloads
from headway.models import hub

SOURCE = Path(headway.__file__).resolve().parents[1]
FIRST_SEED = 7000       # of the measured prompts: none of these were looked at while anything was tuned
PORT = 8201
GENERATOR = Path(__file__).with_name("vllm_load.py")
OURS = ("headway", "headway+proposer")
SELF = (*OURS, "proposer")
ENTRY_POINTS = {"vllm.general_plugins": "headway.vllm.runner:register", "vllm.stat_logger_plugins": "headway.vllm.stat_logger:StatLogger"}


def speculation(name: str, options: argparse.Namespace) -> list[str]:
    """The flags that make a configuration."""
    def flags(config: dict[str, Any], *more: str) -> list[str]:
        return ["--speculative-config", json.dumps(config), *more]

    proposer = {"method": "custom_class", "model": "headway.vllm.Proposer", "num_speculative_tokens": options.max_k}
    scheduler = ("--scheduler-cls", "headway.vllm.Scheduler")
    if name == "none":
        return []
    if re.fullmatch(r"k[1-9]\d*", name):
        return flags({**NGRAM, "num_speculative_tokens": int(name[1:])})
    if name == "table":
        table = json.loads(options.table)
        k = max(entry[2] for entry in table)
        return flags({**NGRAM, "num_speculative_tokens": k, "num_speculative_tokens_per_batch_size": table})
    if name == "headway":
        return flags({**NGRAM, "num_speculative_tokens": options.max_k}, *scheduler)
    if name == "proposer":
        return flags(proposer)
    if name == "headway+proposer":
        return flags(proposer, *scheduler)
    raise SystemExit(f"unknown configuration {name!r}: none, kN, table, headway, proposer, headway+proposer")


def start(name: str, index: int, directory: str, folder: str, options: argparse.Namespace) -> Server:
    """Ready, and asleep."""
    port = PORT + index
    command = [
        options.vllm, "serve", directory, "--served-model-name", "model", "--dtype", options.dtype, "--max-model-len", "2048",
        "--max-num-seqs", "64", "--port", str(port), *shlex.split(options.serve_args), *speculation(name, options),
    ]  # fmt: skip
    home = {"HEADWAY_HOME": f"{folder}/{name}", "PYTHONPATH": str(SOURCE)}   # nothing that was learned before
    server = Server(name, command, port, vllm_env(options.vllm, 1, options.vllm_all_cores) | home)
    server.sleep()
    print(f"{name}: ready after {server.ready_s} s", flush=True)
    return server


def start_all(directory: str, folder: str, options: argparse.Namespace) -> tuple[list[Server], BaseException | None]:
    """A few at a time: most of a start is one thread's work. Returns those that are ready, and why not all are."""
    names = dict.fromkeys([*options.configurations.split(","), *(options.drift_configurations.split(",") if options.drift else [])])
    with ThreadPoolExecutor(options.start_together) as pool:
        waiting = [pool.submit(start, name, index, directory, folder, options) for index, name in enumerate(names)]
    errors = [one.exception() for one in waiting]
    ready = [one.result() for one, error in zip(waiting, errors, strict=True) if error is None]
    return ready, next((error for error in errors if error is not None), None)


class Load:
    """vLLM's load generator, in a process of its own."""

    def __init__(self, options: argparse.Namespace, directory: str, folder: Path) -> None:
        self._options, self._directory, self._folder = options, directory, folder
        python = str(Path(options.vllm).with_name("python"))
        self._errors = folder / "load.log"
        with self._errors.open("w") as errors:
            self._process = subprocess.Popen(
                [python, str(GENERATOR)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
            )

    def run(self, server: Server, prompts: list[str], concurrency: int) -> dict[str, Any]:
        path = self._folder / "prompts.jsonl"
        # Of different lengths, as answers are: equal ones end together, and who gets ahead only waits for the others.
        shares = [0.5 + (7 * i % len(prompts)) / len(prompts) for i in range(len(prompts))]
        lengths = [max(1, round(self._options.output_len * share)) for share in shares]
        lines = [{"prompt": prompt, "output_tokens": length} for prompt, length in zip(prompts, lengths, strict=True)]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        words = [
            "--backend", "openai-chat", "--base-url", server.url, "--endpoint", "/v1/chat/completions", "--model", "model",
            "--tokenizer", self._directory, "--dataset-name", "custom", "--dataset-path", str(path), "--skip-chat-template",
            "--custom-output-len", "-1", "--num-prompts", str(len(prompts)), "--disable-shuffle",
            "--max-concurrency", str(concurrency), "--ignore-eos", "--temperature", "0", "--disable-tqdm",
        ]  # fmt: skip
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(words) + "\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith("RESULT "):
                result: dict[str, Any] = json.loads(line.removeprefix("RESULT "))
                if result.get("failed") or result["completed"] != len(prompts):
                    raise SystemExit(f"{server.name}: {result}")
                return result
        raise SystemExit(f"the load generator ended: {shlex.join([GENERATOR.name, *words])}\n{self._errors.read_text()[-2000:]}")

    def close(self) -> None:
        self._process.kill()


def deal(options: argparse.Namespace) -> tuple[list[str], list[list[list[str]]]]:
    """Prompts of the warm-up, and of each cell in each round. None comes twice: who remembers answers would only have to copy them."""
    prompts = workloads.Prompts(FIRST_SEED)

    def take(workload: str, count: int) -> list[str]:
        return [prompt.text or str((prompt.messages or ({},))[-1]["content"]) for prompt in prompts.take(workload, count)]

    cells = [(workload, num_prompts(workload, concurrency, options)) for workload, concurrency, _ in cells_of(options)]
    return take("mixed", options.warmup), [[take(*cell) for cell in cells] for _ in range(options.rounds)]


def num_prompts(workload: str, concurrency: int, options: argparse.Namespace) -> int:
    """Several for each request in flight: where nobody waits, the slowest request decides how long it takes and a faster one gains nothing.
    Fewer of the workloads with long prompts, on which a CPU spends most of the time. Three phases of a drifting load."""
    if workload == "drift":
        return 3 * workloads.DRIFT_LEN
    waves = 3.0 if workload == "chat" else 2.0 if concurrency <= 16 else 1.5
    return max(options.min_prompts, int(waves * concurrency))


class Results:
    """Every run, on disk as soon as it is done."""

    def __init__(self, path: Path, options: argparse.Namespace) -> None:
        self.path = path
        asked = {name: getattr(options, name) for name in ("output_len", "min_prompts", "max_k", "table", "dtype", "model", "serve_args")}
        self.document: dict[str, Any] = {"benchmark": "vllm_plugin", "asked": asked, "runs": []}
        if path.exists():
            self.document = json.loads(path.read_text())
            if self.document["asked"] != asked:
                raise SystemExit(f"{path} was measured with {self.document['asked']}; now {asked} is asked for")
        self.document |= origin() | {"vllm": vllm_version(options.vllm)}

    def has(self, **key: Any) -> bool:
        return any(all(run[name] == value for name, value in key.items()) for run in self.document["runs"])

    def seconds(self, **key: Any) -> float:
        return sum(run["duration"] for run in self.document["runs"] if all(run[name] == value for name, value in key.items()))

    def add(self, **run: Any) -> None:
        self.document["runs"].append(run)
        self.write()

    def write(self) -> None:
        self.document["summary"] = summary(self.document["runs"])
        self.document["overall"] = overall(self.document["summary"])
        partial = self.path.with_suffix(".partial")
        write(self.document, partial)
        partial.replace(self.path)


def summary(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Per cell: median output tokens per second of each configuration; ours over each of the others within rounds (median, least,
    greatest); `over_best`: over the one of the others that comes out best."""
    cells: dict[tuple[str, int], dict[int, dict[str, float]]] = {}
    for run in runs:
        one = cells.setdefault((run["workload"], run["concurrency"]), {}).setdefault(run["round"], {})
        one[run["configuration"]] = run["output_throughput"]
    found = []
    for (workload, concurrency), rounds in cells.items():
        names = list(dict.fromkeys(name for one in rounds.values() for name in one))
        medians = {name: statistics.median(one[name] for one in rounds.values() if name in one) for name in names}
        cell: dict[str, Any] = {"workload": workload, "concurrency": concurrency, "rounds": len(rounds), "output_tokens_per_s": medians}
        for ours in OURS:
            over = {}
            for other in [name for name in names if name not in SELF]:
                ratios = [one[ours] / one[other] for one in rounds.values() if ours in one and other in one]
                if ratios:
                    over[other] = [round(pick(ratios), 3) for pick in (statistics.median, min, max)]
            if over:
                best = min(over, key=lambda other: over[other][0])
                cell[ours] = {"best": best, "over_best": over[best][0], "over": over}
        found.append(cell)
    return found


def overall(cells: list[dict[str, Any]]) -> dict[str, Any]:
    """Over all cells but the drifting one, which stands by itself."""
    found: dict[str, Any] = {}
    for ours in OURS:
        mine = [cell[ours] for cell in cells if ours in cell and cell["workload"] != "drift"]
        if mine:
            ratios = [ratio["over_best"] for ratio in mine]
            found[ours] = {"cells": len(mine), "worst_over_best": min(ratios), "mean_over_best": round(statistics.fmean(ratios), 3)}
            plain = [ratio["over"]["none"][0] for ratio in mine if "none" in ratio["over"]]
            if plain:
                found[ours]["worst_over_none"] = min(plain)
    found["proposer_over_ngram"] = {
        f"{cell['workload']}@{cell['concurrency']}": round(speed["headway+proposer"] / speed["headway"], 3)
        for cell in cells
        if {*OURS} <= (speed := cell["output_tokens_per_s"]).keys()
    }
    return found


def table(document: dict[str, Any]) -> str:
    """Markdown: output tokens/s, medians over the rounds; the last columns: ours over the best of the others, least and greatest ratio of a
    round behind it."""
    cells = document["summary"]
    names = list(dict.fromkeys(name for cell in cells for name in cell["output_tokens_per_s"]))
    ours = [name for name in OURS if name in names]
    lines = [["workload @ requests", "rounds", *names, *(f"{name} / best" for name in ours)]]
    lines.append(["---"] * len(lines[0]))
    for cell in cells:
        speed = cell["output_tokens_per_s"]
        ratios = [_ratio(cell[name]) if name in cell else "" for name in ours]
        shown = [f"{speed[name]:.1f}" if name in speed else "" for name in names]
        lines.append([f"{cell['workload']} @ {cell['concurrency']}", str(cell["rounds"]), *shown, *ratios])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _ratio(ours: dict[str, Any]) -> str:
    middle, least, most = ours["over"][ours["best"]]
    return f"{middle:.2f}x of {ours['best']}" + (f" ({least:.2f} to {most:.2f})" if least < most else "")


def cells_of(options: argparse.Namespace) -> list[tuple[str, int, list[str]]]:
    """(workload, concurrency, configurations)"""
    names = options.configurations.split(",")
    cells = [(workload, concurrency, names) for workload in options.workloads.split(",") for concurrency in options.concurrency]
    return cells + [("drift", concurrency, options.drift_configurations.split(",")) for concurrency in options.drift]


def measure(
    servers: list[Server], load: Load, results: Results, prompts: list[list[list[str]]], ends: float, options: argparse.Namespace
) -> None:
    cells = cells_of(options)
    spent, num_rounds = [0.0] * len(cells), [0] * len(cells)
    while min(num_rounds) < options.rounds:
        # Whatever was measured before: first every cell once, then the one that took least time.
        index = min(range(len(cells)), key=lambda i: (num_rounds[i] >= options.rounds, num_rounds[i] > 0, spent[i]))
        number, before = num_rounds[index], spent[index] / max(1, num_rounds[index])
        if time.monotonic() + before > ends:
            print("the time is up; the same command goes on from here", flush=True)
            return
        spent[index] += one_round(servers, load, results, cells[index], index, number, prompts[number][index])
        num_rounds[index] += 1


def one_round(
    servers: list[Server], load: Load, results: Results, cell: tuple[str, int, list[str]], index: int, number: int, prompts: list[str]
) -> float:
    """Every configuration answers the prompts of round `number` of cell `index`. Returns the seconds that takes; what is there is kept."""
    workload, concurrency, names = cell
    asked = [server for server in servers if server.name in names]
    first = index % len(asked)
    order = asked[first:] + asked[:first]
    for server in order if number % 2 == 0 else order[::-1]:
        key = {"workload": workload, "concurrency": concurrency, "round": number, "configuration": server.name}
        if not results.has(**key):
            with server.awake():
                found = load.run(server, prompts, concurrency)
            results.add(**key, **found)
            print(f"{workload} x {concurrency}, {server.name}: {found['output_throughput']:.1f} tokens/s", flush=True)
    return results.seconds(workload=workload, concurrency=concurrency, round=number)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", help="the vllm executable; needed for measuring")
    parser.add_argument("--model", default="smollm2-135m", help="anything `headway serve` takes")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--configurations", default="none,k2,k4,headway,headway+proposer", help="of every cell but the drifting one")
    parser.add_argument("--workloads", default="code-edit,chat,mixed")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--drift", type=int, nargs="*", default=[16], help="concurrency of the drifting load; none: leave it out")
    parser.add_argument("--drift-configurations", default="k4,table,headway,headway+proposer")
    parser.add_argument("--rounds", type=int, default=3, help="of each cell at most")
    parser.add_argument("--output-len", type=int, default=96, help="tokens per answer on average; from half of it to half as many more")
    parser.add_argument("--min-prompts", type=int, default=4)
    parser.add_argument("--max-k", type=int, default=16, help="num_speculative_tokens of Headway's configurations")
    parser.add_argument("--table", default="[[1,8,4],[9,64,0]]")
    parser.add_argument("--serve-args", default="", help="more flags for every server")
    parser.add_argument("--start-together", type=int, default=3, help="servers that start at the same time")
    parser.add_argument("--warmup", type=int, default=24, help="requests of the mixed workload before anything is measured")
    parser.add_argument("--vllm-all-cores", action="store_true", help="compute on the core that vLLM leaves to its scheduler, too")
    parser.add_argument("--time-budget", type=float, default=0.0, help="seconds in all, starts included; 0: no limit")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--report", action="store_true", help="measure nothing: print what --output holds as a table")
    options = parser.parse_args()
    if options.report:
        report(json.loads(options.output.read_text()))
        return
    if not options.vllm:
        parser.error("--vllm is needed for measuring")
    check_installed(options.vllm)
    ends = time.monotonic() + options.time_budget if options.time_budget else float("inf")
    warmup, prompts = deal(options)
    results = Results(options.output, options)
    directory = str(hub.resolve(options.model))
    servers: list[Server] = []
    signal.signal(signal.SIGTERM, signal.default_int_handler)   # servers must not outlive it
    with tempfile.TemporaryDirectory() as folder:
        load = Load(options, directory, Path(folder))
        try:
            servers, failed = start_all(directory, folder, options)
            if failed is not None:
                raise failed
            for server in servers:
                with server.awake():
                    load.run(server, warmup, 8)
            measure(servers, load, results, prompts, ends, options)
        finally:
            load.close()
            for server in servers:
                server.stop()
    results.write()
    report(results.document)


def report(document: dict[str, Any]) -> None:
    print(table(document))
    print(json.dumps(document["overall"], indent=1))


def check_installed(vllm: str) -> None:
    """vLLM finds the plugin by its entry points. An installation from before they existed would be measured without it."""
    code = "from importlib.metadata import entry_points as e; print([p.value for g in GROUPS for p in e(group=g) if p.name == 'headway'])"
    code = f"GROUPS = {tuple(ENTRY_POINTS)!r}; {code}"
    environment = os.environ | {"PYTHONPATH": str(SOURCE)}
    shown = subprocess.run([str(Path(vllm).with_name("python")), "-c", code], env=environment, capture_output=True, text=True, check=True)
    if shown.stdout.strip() != repr(list(ENTRY_POINTS.values())):
        raise SystemExit(f"vLLM finds {shown.stdout.strip()} of Headway's entry points; install it again: pip install -e {SOURCE.parent}")


if __name__ == "__main__":
    main()
