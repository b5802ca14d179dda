"""What each drafter is worth: acceptance by position, what a draft pass costs, speed-up against no speculation, memory.

    python studies/drafters.py table      [--minutes 15] [--output FILE.json]
    python studies/drafters.py sampling   acceptance at temperature 1: drawn drafts against the likeliest tokens
    python studies/drafters.py acceptance what is accepted by position, greedy
    python studies/drafters.py layer_skip DEL's choice against fixed exits and lengths
    python studies/drafters.py confidence stopping by confidence against fixed k, draft_model (--model TARGET --draft MODEL)
    python studies/drafters.py show FILE  the Markdown tables of a results file

A sweep (`headway bench sweep`) with configurations of its own: one engine each around one loaded target, which answer the same prompts in
turns; ratios are of totals over rounds, in brackets the least and the greatest within one. With --model TARGET --draft MODEL, `draft_model`
and `cascade` take the place of `eagle`. The file is rewritten after every round; the same command goes on where it stopped, and leaves out
what does not fit the time. `sampling` and `acceptance` count only: their files have no times and are the same on a busy machine.
`acceptance` and `confidence` ask for code (code.jsonl, found from the root of the repository).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

from record import origin, write

from headway.bench import sweep
from headway.bench.records import Run
from headway.bench.sweep_analysis import Analysis
from headway.bench.sweep_run import KEPT, Full, Results, Sweep, Turns, engines
from headway.config import EngineConfig
from headway.engine.engine import Engine

Config = dict[str, Any] | None
EXITS, LENGTHS = (15, 22, 28), (1, 2, 4)
CODE = "jsonl:studies/code.jsonl"
COUNTING = ("sampling", "acceptance")
MODES = ("table", *COUNTING, "layer_skip", "confidence")
COUNTS = ("acceptance_by_position", "judged_by_position", "tokens_per_drafted_step", "drafts_per_step")
TIMED = ("ms_per_draft_pass",)


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
        for threshold in (0.1, 0.3, 0.5):
            policy = {"name": "confidence", "rejection_threshold": threshold}
            found[f"confidence {threshold}"] = {"method": "draft_model", "num_speculative_tokens": 12, "policy": policy, **draft, **more}
        found["goodput"] = {"method": "draft_model", "num_speculative_tokens": 8, **draft, **more}
    elif args.mode in COUNTING:
        name, model = ("draft_model", draft) if args.draft else ("eagle", eagle)
        ways = ("probabilistic", "greedy") if args.mode == "sampling" else ("greedy",)
        return {f"{name}, {how}": fixed(name, 4, draft_sample_method=how, **model) for how in ways}
    else:
        own = {"draft_model": draft, "cascade": draft} if args.draft else {"eagle": eagle} if args.eagle else {}
        found = {f"{name}, k=4": fixed(name, 4, **model) for name, model in own.items()}
        found |= {name: {"method": name, "num_speculative_tokens": 8, **own.get(name, {})} for name in ("ngram", "suffix", *own)}
        if "eagle" in own:
            found["eagle + suffix"] = {"method": [{"name": "eagle", **eagle}, "suffix"], "num_speculative_tokens": 8}
        found["layer_skip"] = {"method": "layer_skip", "num_speculative_tokens": 4}
    return {sweep.OFF: None, **found}


class Costs:
    """Watches an engine's feedback: the time of drafting, and how many passes it was."""

    def __init__(self, engine: Engine) -> None:
        self.ms: dict[str, float] = {}
        self.passes: dict[str, int] = {}
        if engine.drafters:
            observe = engine.policy.observe

            def watched(feedback: Any) -> None:
                for each in feedback.drafters:
                    self.ms[each.drafter] = self.ms.get(each.drafter, 0.0) + each.draft_ms
                    # Fewer than k where the drafts stop early.
                    made = [seq.num_proposed for seq in feedback.sequences if seq.drafter == each.drafter]
                    self.passes[each.drafter] = self.passes.get(each.drafter, 0) + max(made, default=0)
                observe(feedback)

            engine.policy.observe = watched   # type: ignore[method-assign]

    def take(self) -> dict[str, float]:
        """Milliseconds per pass of each drafter since the last call."""
        found = {name: ms / max(1, self.passes[name]) for name, ms in self.ms.items()}
        self.ms, self.passes = {}, {}
        return found


class Drafters(Sweep):
    kept = (*KEPT, *COUNTS, *TIMED)

    def turns(self, cell: sweep.Cell, prompts: list[list[int]], first_round: int) -> Turns:
        return _Watched(self.engines, cell, prompts, first_round)


class _Watched(Full):
    """Turns whose runs say what was accepted by position and what a draft pass took."""

    def __init__(self, engines: dict[str, Engine], cell: sweep.Cell, prompts: list[list[int]], first_round: int) -> None:
        super().__init__(engines, cell, prompts, first_round)
        self._costs = {name: Costs(engine) for name, engine in engines.items()}

    def measure(self, name: str, number: int, on_step: Callable[[], None]) -> Generator[None, None, Run]:
        self._costs[name].take()
        run = yield from super().measure(name, number, on_step)
        stats = run.speculation
        run.extra.update(
            acceptance_by_position=stats.conditional_acceptance, judged_by_position=stats.num_reached_per_pos,
            tokens_per_drafted_step=stats.mean_acceptance_length, drafts_per_step=stats.num_draft_tokens / max(1, stats.num_steps),
            ms_per_draft_pass=self._costs[name].take(),
        )  # fmt: skip
        return run


def measure(args: argparse.Namespace) -> dict[str, Any]:
    began = time.perf_counter()
    options = sweep.SweepOptions(
        workloads=",".join(args.workloads), concurrencies=",".join(map(str, args.concurrencies)), configurations=sweep.OFF,
        num_prompts=args.prompts, output_len=args.output_len, rounds=args.rounds, temperature=args.temperature, time_budget=args.minutes,
    )  # fmt: skip
    wanted = configurations(args)
    results = Results(args.output, sweep.head(options, {}, model=args.model, mode=args.mode) | {"configurations": wanted})
    config = EngineConfig(
        model=args.model, max_num_seqs=max(args.concurrencies), kv_cache_memory_bytes=args.kv_cache_bytes, num_threads=args.num_threads,
    )  # fmt: skip
    up = engines(config, wanted)
    results.document |= origin() | {"memory_bytes": {
        name: sum(engine.memory.drafter_weight_bytes.values()) + sum(engine.memory.drafter_kv_bytes.values()) for name, engine in up.items()
    }}  # fmt: skip
    Drafters(up, options, results, lambda num, what: print(what, file=sys.stderr, flush=True), began).run()
    if args.mode in COUNTING:
        counts = ("cell", "configuration", "round", "invalid", "num_output_tokens", *COUNTS)
        results.document |= {"runs": [{key: run[key] for key in counts} for run in results.runs], "paces": {}}
    write(results.document, args.output)
    return results.document


def show(document: dict[str, Any]) -> Iterator[str]:
    """Markdown: speed-up by workload and load, then acceptance, cost and memory."""
    found = Analysis(document)
    names = [name for name in found.configurations if name != sweep.OFF]
    if document["mode"] not in COUNTING:
        yield "| tokens/s against none | " + " | ".join(found.cells) + " |"
        yield "|---" * (1 + len(found.cells)) + "|"
        ratios = found.against(sweep.OFF)
        for name in names:
            yield f"| {name} | " + " | ".join(f"{ratios[name, cell]:.2f}x ({_spread(found, cell, name)})" for cell in found.cells) + " |"
        yield ""
    least = min(int(cell.rpartition("@")[2]) for cell in found.cells)
    titles = ("workload", "acceptance by position", "tokens per drafted step", "drafts per step", "ms per draft pass", "memory")
    yield f"| {least} request{'s' * (least > 1)} | " + " | ".join(titles) + " |"
    yield "|---" * (1 + len(titles)) + "|"
    for name in names:
        for cell in found.cells:
            if cell.endswith(f"@{least}"):
                yield _details(document, name, cell, [runs[name] for runs in found.rounds[cell]])


def _spread(found: Analysis, cell: str, name: str) -> str:
    return "-".join(f"{ratio:.2f}" for ratio in found.spread(cell, name, sweep.OFF))


def _details(document: dict[str, Any], name: str, cell: str, runs: list[dict[str, Any]]) -> str:
    def median(key: str) -> float:
        return statistics.median(run[key] for run in runs)

    known = [run["acceptance_by_position"][:4] for run in runs]
    rates = [statistics.median(each[j] for each in known if len(each) > j) for j in range(max(map(len, known)))]
    passes = [run.get("ms_per_draft_pass", {}) for run in runs]
    drafters = dict.fromkeys(drafter for each in passes for drafter in each)
    costs = {drafter: statistics.median(each[drafter] for each in passes if drafter in each) for drafter in drafters}
    each = ", ".join(f"{ms:.2f}" if len(costs) == 1 else f"{drafter} {ms:.2f}" for drafter, ms in costs.items())
    return (
        f"| {name} | {cell.rpartition('@')[0]} | {' / '.join(f'{rate:.2f}' for rate in rates)} | {median('tokens_per_drafted_step'):.2f} "
        f"| {median('drafts_per_step'):.1f} | {each} | {document['memory_bytes'][name] / 2**20:.0f} MiB |"
    )


DEFAULTS: dict[str, dict[str, Any]] = {
    "table": {"workloads": ["chat", "code-edit", "summarize", "reasoning"], "concurrencies": [1, 8, 32], "rounds": 3},
    "sampling": {"workloads": ["chat", "reasoning"], "concurrencies": [8], "rounds": 3, "temperature": 1.0},
    "acceptance": {"workloads": [CODE], "concurrencies": [8], "rounds": 1},
    "layer_skip": {"workloads": ["chat", "code-edit", "reasoning"], "concurrencies": [1], "rounds": 3},
    "confidence": {"workloads": [CODE], "concurrencies": [1], "rounds": 3},
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
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--temperature", type=float)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--prompts", type=int, default=0, help="in a round; 0: 4 and half as many as in flight")
    parser.add_argument("--minutes", type=float, default=15.0)
    parser.add_argument("--num-threads", type=int)
    parser.add_argument("--kv-cache-bytes", type=int, help="of each configuration; default: from free memory")
    parser.add_argument("--output", type=Path, help="default: drafters-MODE.json")
    args = parser.parse_args()
    if args.mode == "show":
        if args.file is None:
            parser.error("show needs a results file")
        print("\n".join(show(json.loads(args.file.read_text()))))
        return
    if args.mode == "confidence" and not args.draft:
        parser.error("confidence needs --draft")
    for name, value in {"temperature": 0.0, "output": Path(f"drafters-{args.mode}.json"), **DEFAULTS[args.mode]}.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    print("\n".join(show(measure(args))))


if __name__ == "__main__":
    main()
