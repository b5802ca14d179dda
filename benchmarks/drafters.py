"""What each drafter is worth: acceptance by position, what a draft pass costs, speed-up against no speculation, memory.

    python benchmarks/drafters.py table      [--minutes 15] [--output results/drafters.json]
    python benchmarks/drafters.py sampling   acceptance at temperature 1: drawn drafts against the likeliest tokens
    python benchmarks/drafters.py acceptance what is accepted by position, greedy
    python benchmarks/drafters.py layer_skip DEL's choice against fixed exits and lengths
    python benchmarks/drafters.py confidence stopping by confidence against fixed k, draft_model (--model TARGET --draft MODEL)
    python benchmarks/drafters.py show FILE  the Markdown tables of a results file

In one block every configuration answers the same prompts, one after the other; the next block of a cell has new prompts and the opposite
order. Ratios are within a block, their median is shown. With --model TARGET --draft MODEL, `draft_model` and `cascade` take the place of
`eagle`. The file is rewritten after every run; the same command goes on where it stopped, and leaves out what does not fit the time.
`sampling` and `acceptance` count only: their files have no times and are the same on a busy machine. `acceptance` and `confidence` ask for
code (code.jsonl, found from the root of the repository).
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from record import origin, write

from headway.bench import throughput, workloads
from headway.bench.records import LoadOptions
from headway.config import EngineConfig, SpeculativeConfig
from headway.engine.engine import Engine

Config = dict[str, Any] | None
EXITS, LENGTHS = (15, 22, 28), (1, 2, 4)
CODE = "jsonl:benchmarks/code.jsonl"
COUNTING = ("sampling", "acceptance")
MODES = ("table", *COUNTING, "layer_skip", "confidence")


def configurations(args: argparse.Namespace) -> dict[str, Config]:
    """By name, "off" first."""
    def fixed(method: str, k: int, **more: Any) -> Config:
        return {"method": method, "num_speculative_tokens": k, "policy": "static", **more}

    eagle, draft = {"model": args.eagle}, {"model": args.draft}
    if args.mode == "layer_skip":
        found: dict[str, Config] = {"DEL": fixed("layer_skip", max(LENGTHS))}
        found |= {f"exit {exit}, k={k}": fixed("layer_skip", k, layer_skip_exit=exit) for exit in EXITS for k in LENGTHS}
    elif args.mode == "confidence":
        found = {f"k={k}": fixed("draft_model", k, **draft) for k in (2, 3, 4, 6, 8)}
        more = {"confidence_head": args.confidence_head} if args.confidence_head else {}
        for threshold in (0.3, 0.5):
            policy = {"name": "confidence", "rejection_threshold": threshold}
            found[f"confidence {threshold}"] = {"method": "draft_model", "num_speculative_tokens": 12, "policy": policy, **draft, **more}
    elif args.mode in COUNTING:
        name, model = ("draft_model", draft) if args.draft else ("eagle", eagle)
        ways = ("probabilistic", "greedy") if args.mode == "sampling" else ("greedy",)
        return {f"{name}, {how}": fixed(name, 4, draft_sample_method=how, **model) for how in ways}
    else:
        own = {"draft_model": draft, "cascade": draft} if args.draft else {"eagle": eagle} if args.eagle else {}
        found = {f"{name}, k=4": fixed(name, 4, **model) for name, model in own.items()}
        found |= {name: {"method": name, "num_speculative_tokens": 8, **own.get(name, {})} for name in ("ngram", "suffix", *own)}
        if "eagle" in own:
            found["eagle + suffix"] = {"method": [{"name": "eagle", **eagle}, "suffix"], "num_speculative_tokens": 16}
        found["layer_skip"] = {"method": "layer_skip", "num_speculative_tokens": 4}
        found["layer_skip, exit 20, k=2"] = fixed("layer_skip", 2, layer_skip_exit=20)
    return {"off": None, **found}


def blocks(args: argparse.Namespace) -> Iterator[tuple[str, int, int]]:
    """(workload, requests in flight, repeat); a short time leaves out repeats, then the largest load."""
    for repeat in range(args.repeats):
        for concurrency in args.concurrencies:
            for workload in args.workloads:
                yield workload, concurrency, repeat


class Costs:
    """Watches an engine's feedback: the time of drafting, and how many passes it was."""

    def __init__(self, engine: Engine) -> None:
        self.ms: dict[str, float] = {}
        self.passes: dict[str, int] = {}
        if engine.policy is not None:
            observe = engine.policy.observe

            def watched(feedback: Any) -> None:
                for each in feedback.drafters:
                    self.ms[each.drafter] = self.ms.get(each.drafter, 0.0) + each.draft_ms
                    # Fewer than k where the drafts stop early.
                    made = [seq.num_proposed for seq in feedback.sequences if seq.drafter == each.drafter]
                    self.passes[each.drafter] = self.passes.get(each.drafter, 0) + max(made, default=0)
                observe(feedback)

            engine.policy.observe = watched   # type: ignore[method-assign]


def measure(engine: Engine, config: Config, load: LoadOptions, repeat: int) -> dict[str, Any]:
    engine.speculate(SpeculativeConfig.parse(config))
    size = load.num_prompts
    prompts, warmup = workloads.load_with_warmup(load.workload, size * (repeat + 1), load.warmup, load.seed)
    throughput.run(engine, [prompt.encode(engine.tokenizer) for prompt in warmup], load, label="warm-up")
    costs = Costs(engine)
    run = throughput.run(engine, [prompt.encode(engine.tokenizer) for prompt in prompts[repeat * size :]], load)
    stats = run.speculation
    return {
        "acceptance_by_position": stats.conditional_acceptance,
        "judged_by_position": stats.num_reached_per_pos,
        "mean_acceptance_length": stats.mean_acceptance_length,
        "mean_k": stats.num_draft_tokens / max(1, stats.num_steps),
        "output_tokens_per_s": run.summary()["output_tokens_per_s"],
        "ms_per_draft_pass": {name: ms / max(1, costs.passes[name]) for name, ms in costs.ms.items()},
        "memory_bytes": {
            name: weights + engine.memory.drafter_kv_bytes[name] for name, weights in engine.memory.drafter_weight_bytes.items()
        },
    }


def run_all(args: argparse.Namespace) -> dict[str, Any]:
    document: dict[str, Any] = {"mode": args.mode, "runs": [], "left_out": [], **origin()}
    if args.output and args.output.exists():
        document |= {"runs": json.loads(args.output.read_text())["runs"]}
    done = {(run["workload"], run["concurrency"], run["repeat"], run["configuration"]) for run in document["runs"]}
    wanted = configurations(args)
    engine = Engine(EngineConfig(
        model=args.model, max_num_seqs=max(args.concurrencies), kv_cache_memory_bytes=args.kv_cache_bytes, num_threads=args.num_threads,
    ))  # fmt: skip
    began = time.monotonic()
    seconds: dict[int, float] = {}   # of a block, by load
    for workload, concurrency, repeat in blocks(args):
        prompts = args.prompts or max(4, concurrency + min(concurrency, 8))
        missing = [name for name in wanted if (workload, concurrency, repeat, name) not in done]
        start = time.monotonic()
        if missing and start - began + seconds.get(concurrency, max(seconds.values(), default=0.0)) > args.minutes * 60.0:
            document["left_out"].append([workload, concurrency, repeat])
            continue
        load = LoadOptions(
            workload=workload, concurrency=concurrency, num_prompts=prompts, output_len=args.output_len, temperature=args.temperature,
            warmup=0 if args.mode in COUNTING else 1,
        )  # fmt: skip
        for name in missing if repeat % 2 == 0 else reversed(missing):
            run = {"workload": workload, "concurrency": concurrency, "repeat": repeat, "configuration": name}
            found = measure(engine, wanted[name], load, repeat)
            if args.mode in COUNTING:
                del found["output_tokens_per_s"], found["ms_per_draft_pass"]
            document["runs"].append(run | found)
            print(f"{workload:>10} @{concurrency:<3} {name:<26} {found['mean_acceptance_length']:6.2f} tokens per drafted step "
                  f"{found.get('output_tokens_per_s', float('nan')):8.1f} tokens/s", flush=True)
            if args.output:
                write(document, args.output)
        if len(missing) == len(wanted):
            seconds[concurrency] = max(seconds.get(concurrency, 0.0), time.monotonic() - start)
    return document


def show(document: dict[str, Any]) -> Iterator[str]:
    """Markdown: speed-up by workload and load, then acceptance, cost and memory."""
    runs = document["runs"]
    names = list(dict.fromkeys(run["configuration"] for run in runs if run["configuration"] != "off"))
    cells = sorted({(run["workload"], run["concurrency"]) for run in runs}, key=lambda cell: (cell[0], cell[1]))
    if document["mode"] not in COUNTING:
        yield from _speeds(runs, names, cells)
    least = min(num for _, num in cells)
    titles = ("workload", "acceptance by position", "tokens per drafted step", "drafts per step", "ms per draft pass", "memory")
    yield f"| {least} request{'s' * (least > 1)} | " + " | ".join(titles) + " |"
    yield "|---" * (1 + len(titles)) + "|"
    for name in names:
        for cell in (cell for cell in cells if cell[1] == least):
            mine = [run for run in runs if _is(run, name, cell)]
            if mine:
                yield _details(name, cell[0], mine)


def _speeds(runs: list[dict[str, Any]], names: list[str], cells: list[tuple[str, int]]) -> Iterator[str]:
    off = {_block(run): run["output_tokens_per_s"] for run in runs if run["configuration"] == "off"}
    yield "| tokens/s against none | " + " | ".join(f"{workload} @{num}" for workload, num in cells) + " |"
    yield "|---" * (1 + len(cells)) + "|"
    for name in names:
        ratios = [
            [run["output_tokens_per_s"] / off[_block(run)] for run in runs if _is(run, name, cell) and _block(run) in off] for cell in cells
        ]
        yield f"| {name} | " + " | ".join(f"{statistics.median(each):.2f}x" if each else "" for each in ratios) + " |"
    yield ""


def _details(name: str, workload: str, runs: list[dict[str, Any]]) -> str:
    def median(key: str) -> float:
        return statistics.median(run[key] for run in runs)

    known = [run["acceptance_by_position"][:4] for run in runs]
    rates = [statistics.median(each[j] for each in known if len(each) > j) for j in range(max(map(len, known)))]
    passes = [run.get("ms_per_draft_pass", {}) for run in runs]
    drafters = dict.fromkeys(drafter for each in passes for drafter in each)
    costs = {drafter: statistics.median(each[drafter] for each in passes if drafter in each) for drafter in drafters}
    each = ", ".join(f"{ms:.2f}" if len(costs) == 1 else f"{drafter} {ms:.2f}" for drafter, ms in costs.items())
    memory = sum(runs[0]["memory_bytes"].values()) / 2**20
    return (
        f"| {name} | {workload} | {' / '.join(f'{rate:.2f}' for rate in rates)} | {median('mean_acceptance_length'):.2f} "
        f"| {median('mean_k'):.1f} | {each} | {memory:.0f} MiB |"
    )


def _block(run: dict[str, Any]) -> tuple[str, int, int]:
    return run["workload"], run["concurrency"], run["repeat"]


def _is(run: dict[str, Any], name: str, cell: tuple[str, int]) -> bool:
    return run["configuration"] == name and (run["workload"], run["concurrency"]) == cell


DEFAULTS: dict[str, dict[str, Any]] = {
    "table": {"workloads": ["chat", "code-edit", "summarize", "reasoning"], "concurrencies": [1, 8, 32], "repeats": 3},
    "sampling": {"workloads": ["chat", "reasoning"], "concurrencies": [8], "repeats": 3, "temperature": 1.0},
    "acceptance": {"workloads": [CODE], "concurrencies": [8], "repeats": 1},
    "layer_skip": {"workloads": ["chat", "code-edit", "reasoning"], "concurrencies": [1], "repeats": 2},
    "confidence": {"workloads": [CODE], "concurrencies": [1], "repeats": 3},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mode", choices=(*MODES, "show"))
    parser.add_argument("file", nargs="?", type=Path, help="show: a results file")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--eagle", default="speculators/smollm2-135m-eagle3", help="EAGLE head of the model")
    parser.add_argument("--draft", help="draft model of the model; then the EAGLE head is left out")
    parser.add_argument("--confidence-head", help="acceptance head for --draft")
    parser.add_argument("--workloads", nargs="+")
    parser.add_argument("--concurrencies", type=int, nargs="+")
    parser.add_argument("--repeats", type=int)
    parser.add_argument("--temperature", type=float)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--prompts", type=int, help="in a block; default: 4, or twice the requests in flight up to 16")
    parser.add_argument("--minutes", type=float, default=15.0)
    parser.add_argument("--num-threads", type=int)
    parser.add_argument("--kv-cache-bytes", type=int, default=2 << 30)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    if args.mode == "show":
        if args.file is None:
            parser.error("show needs a results file")
        print("\n".join(show(json.loads(args.file.read_text()))))
        return
    if args.mode == "confidence" and not args.draft:
        parser.error("confidence needs --draft")
    for name, value in {"temperature": 0.0, **DEFAULTS[args.mode]}.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    print("\n".join(show(run_all(args))))


if __name__ == "__main__":
    main()
