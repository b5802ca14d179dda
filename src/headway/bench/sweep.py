"""Workload x concurrency x configuration, interleaved on one loaded model, and resumable.

A *cell* is a workload at a load. In one *block* every configuration answers the same prompts of a cell, one after the other, the next
repeat in the opposite order (A B C, C B A): a machine that drifts drifts for all of them. Between two runs drafters, policy and prefix
cache are built anew; the model stays, and so do measured costs and what a policy learned in its earlier runs, whatever their workload
was: a server keeps them, too. The results file is rewritten after every run and is also what a resumed sweep continues from.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway import plugins
from headway.bench import workloads
from headway.bench.arrivals import PATTERNS
from headway.bench.records import LoadOptions, Run
from headway.bench.recovery import StepLog
from headway.config import SpeculativeConfig, option
from headway.errors import ConfigError, unknown_key

if TYPE_CHECKING:
    from headway.engine.engine import Engine

OFF = "off"
FIXED_POLICIES = ("static", "batch_table", "disable_by_batch_size")   # the others adapt
SERIES_LEN = 80
# What two sittings of one sweep may differ in.
FREE_OPTIONS = ("repeats", "time_budget", "workloads", "concurrencies", "patterns")
KEPT = (
    "output_tokens_per_s", "requests_per_s", "duration_s", "num_requests", "num_prompt_tokens", "num_output_tokens", "ttft_ms", "tpot_ms",
    "e2el_ms", "mean_acceptance_length", "draft_acceptance_rate", "num_draft_tokens", "num_accepted_tokens", "mean_k", "time_shares",
    "output_hash", "num_steps", "num_preemptions", "invalid", "errors",
)


@dataclass(frozen=True)
class SweepOptions:
    """What to sweep; the command-line flags are made from these fields. Lists are separated by commas."""

    workloads: str = option("code-edit,chat,mixed", "workloads, each measured at every concurrency")
    concurrencies: str = option("1,4,16,64", "requests in flight, closed loop")
    patterns: str = option("", "further cells at pattern-concurrency: drift, ramp, rollout, poisson")
    pattern_concurrency: int = option(16, "requests in flight of the cells in --patterns (ramp: at its height)")
    pattern_workload: str = option("mixed", "workload of ramp, rollout and poisson")
    configurations: str = option(
        "", "off, DRAFTER-kN (always N), batch_table, and policies by name (default: off, every drafter at every static-k, batch_table, "
        "and every policy that adapts)",
    )
    drafters: str = option("suffix,ngram", "drafters: all of them for the policies that adapt, the first for batch_table")
    static_k: str = option("1,2,4,8", "the N of DRAFTER-kN in the default configurations; the largest bounds the policies that adapt")
    batch_table: str = option("[[1,4,4],[5,16,2],[17,64,0]]", "num_speculative_tokens_per_batch_size of the configuration batch_table")
    num_prompts: int = option(0, "requests per run; 0: twice those in flight, at most 16 more than them and at least 4")
    output_len: int = option(64, "tokens to write per request, on average")
    output_range_ratio: float = option(0.5, "lengths spread between output-len * (1 - ratio) and output-len * (1 + ratio); in [0, 1)")
    repeats: int = option(2, "blocks per cell, each with new prompts and in the opposite order")
    warmup: int = option(2, "requests before each run's clock starts; their prompts are not measured")
    seed: int = option(0, "chooses the prompts")
    temperature: float = option(0.0, "0: greedy")
    time_budget: float | None = option(None, "minutes; blocks that would not end in time are left out, and named")

    def __post_init__(self) -> None:
        for name, least in (("num_prompts", 0), ("output_len", 1), ("repeats", 1), ("warmup", 0), ("pattern_concurrency", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name} must be >= {least}, got {getattr(self, name)}")
        if self.time_budget is not None and not self.time_budget > 0.0:
            raise ConfigError(f"time_budget must be a number of minutes > 0, got {self.time_budget}")


@dataclass(frozen=True, slots=True)
class Cell:
    name: str
    load: LoadOptions
    needs_rate: bool = False   # poisson: the rate is measured first


def cells(options: SweepOptions) -> list[Cell]:
    """In the order of a spread: what a short budget leaves out is spread over the concurrencies. Raises ConfigError."""
    found = []
    for concurrency in _spread(_numbers("concurrencies", options.concurrencies)):
        for workload in _words(options.workloads):
            found.append(Cell(f"{workload}@{concurrency}", _load(options, workload, concurrency)))
    for pattern in _words(options.patterns):
        concurrency = options.pattern_concurrency
        if pattern == "drift":
            # Blocks long enough that the batch holds one kind for a while: code-edit, chat, code-edit.
            length = 2 * concurrency
            load = dataclasses.replace(_load(options, f"drift:{length}", concurrency), num_prompts=3 * length)
            found.append(Cell(f"drift@{concurrency}", load))
        elif pattern in PATTERNS and pattern != "closed":
            load = _load(options, options.pattern_workload, concurrency)
            if pattern != "poisson":
                load = dataclasses.replace(load, arrivals=pattern, num_prompts=load.num_prompts * (2 if pattern == "ramp" else 1))
            found.append(Cell(f"{options.pattern_workload}@{pattern}-{concurrency}", load, needs_rate=pattern == "poisson"))
        else:
            raise ConfigError(unknown_key("pattern", pattern, ("drift", "ramp", "rollout", "poisson")))
    if not found:
        raise ConfigError("nothing to sweep: --workloads and --patterns are both empty")
    return found


def _load(options: SweepOptions, workload: str, concurrency: int) -> LoadOptions:
    return LoadOptions(
        workload=workload, num_prompts=options.num_prompts or max(4, concurrency + min(concurrency, 16)), output_len=options.output_len,
        output_range_ratio=options.output_range_ratio,
        concurrency=concurrency, seed=options.seed, temperature=options.temperature, warmup=options.warmup,
    )


def configurations(options: SweepOptions) -> dict[str, dict[str, Any] | None]:
    """Name -> speculative config (None: off), checked. Raises ConfigError."""
    drafters = _words(options.drafters)
    static_k = _numbers("static_k", options.static_k)
    adaptive = [name for name in plugins.names("policy") if name not in FIXED_POLICIES]
    statics = [f"{drafter}-k{k}" for drafter in drafters for k in static_k]
    names = _words(options.configurations) or [OFF, *statics, "batch_table", *adaptive]
    return {name: _configuration(name, drafters, max(static_k), options.batch_table, adaptive) for name in names}


def _configuration(name: str, drafters: list[str], max_k: int, table: str, adaptive: list[str]) -> dict[str, Any] | None:
    drafter, _, k = name.rpartition("-k")
    config: dict[str, Any]
    if name == OFF:
        return None
    if drafter and k.isdigit():
        config = {"method": drafter, "num_speculative_tokens": int(k), "policy": "static"}
    elif name == "batch_table":
        try:
            rows = json.loads(table)
        except ValueError as error:
            raise ConfigError(f"batch_table is not JSON: {error}") from error
        config = {"method": drafters[0], "num_speculative_tokens": max_k, "num_speculative_tokens_per_batch_size": rows}
    elif name in adaptive or ":" in name:
        config = {"method": drafters if len(drafters) > 1 else drafters[0], "num_speculative_tokens": max_k, "policy": name}
    else:
        raise ConfigError(unknown_key("configuration", name, [OFF, *(f"{each}-kN" for each in drafters), "batch_table", *adaptive]))
    SpeculativeConfig.parse(config)
    return config


def is_static(name: str) -> bool:
    """One k for ever: no speculation is k = 0."""
    drafter, _, k = name.rpartition("-k")
    return name == OFF or bool(drafter and k.isdigit())


def _words(text: str) -> list[str]:
    return list(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))


def _numbers(name: str, text: str) -> list[int]:
    words = _words(text)
    if not words or not all(word.isdigit() and int(word) >= 1 for word in words):
        raise ConfigError(f"{name} must be whole numbers >= 1 separated by commas, got {text!r}")
    return [int(word) for word in words]


def _spread(items: Sequence[int]) -> list[int]:
    """Ends first, then middles, then the middles between those: [1, 2, 3, 4, 5] -> [1, 5, 3, 2, 4]."""
    if len(items) < 3:
        return list(items)
    order, gaps = [0, len(items) - 1], [(0, len(items) - 1)]
    while gaps:
        low, high = gaps.pop(0)
        middle = (low + high) // 2
        if low < middle < high:
            order.append(middle)
            gaps += [(low, middle), (middle, high)]
    return [items[i] for i in order]


class Series:
    """k and batch size over one run, in SERIES_LEN slices of equally many steps."""

    def __init__(self, engine: Engine) -> None:
        self._metrics = engine.metrics
        self._start = time.perf_counter()
        self._points: list[tuple[float, int, int]] = []
        self.observe()

    def observe(self) -> None:
        """After each step."""
        m = self._metrics
        self._points.append((time.perf_counter() - self._start, m.num_sampling_rows, m.num_verified_drafts))

    def to_json(self) -> dict[str, list[float]]:
        """t_s: the end of each slice; k: drafts verified per sequence and step in it; batch: sequences that wrote, per step."""
        steps = len(self._points) - 1
        ends = sorted({round(steps * i / min(SERIES_LEN, max(1, steps))) for i in range(min(SERIES_LEN, max(1, steps)) + 1)})
        series: dict[str, list[float]] = {"t_s": [], "k": [], "batch": []}
        for low, high in pairwise(ends):
            (_, rows_a, drafts_a), (t, rows_b, drafts_b) = self._points[low], self._points[high]
            series["t_s"].append(round(t, 3))
            series["k"].append(round((drafts_b - drafts_a) / max(1, rows_b - rows_a), 2))
            series["batch"].append(round((rows_b - rows_a) / (high - low), 2))
        return series


def accounts(before: dict[str, float], engine: Engine) -> dict[str, float | None]:
    """Where the time of a run went, and how far the policy's forecasts were off. Shares of step time; errors None without a forecast."""
    metrics, now = engine.metrics, engine.metrics.snapshot()
    spent = {key: value - before[key] for key, value in now.items()}
    step_ms, tokens = max(1e-9, spent["step_ms"]), spent["num_compared_tokens"]
    return {
        **{name: spent[f"{name}_ms"] / step_ms for name in ("policy", "draft", "wasted")},
        "step_time_error": metrics.step_time_error if tokens else None,
        "token_error": spent["num_forecast_tokens"] / tokens - 1.0 if tokens else None,
    }


class Results:
    """The results document, on disk after every run. Raises ConfigError for a file that is something else."""

    def __init__(self, path: Path, head: dict[str, Any]) -> None:
        self.path = path
        self.document: dict[str, Any] = {**head, "calibration": {}, "runs": [], "left_out": []}
        if path.exists():
            self._resume(head)

    def _resume(self, head: dict[str, Any]) -> None:
        try:
            old = json.loads(self.path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"cannot continue {self.path}: {error}") from error
        if not isinstance(old, dict) or old.get("benchmark") != "sweep":
            raise ConfigError(f"{self.path} exists and is not a sweep: choose another --output")
        new = json.loads(json.dumps(head))
        for section in ("options", "configurations", "config"):
            for key in sorted({*old.get(section, {}), *new[section]}):
                ours, theirs = new[section].get(key), old.get(section, {}).get(key)
                if ours != theirs and not (section == "options" and key in FREE_OPTIONS):
                    raise ConfigError(
                        f"{self.path} was begun with {key} = {json.dumps(theirs)}, now it is {json.dumps(ours)}: "
                        "give the same flags to continue it, or another --output"
                    )
        self.document |= {"calibration": old.get("calibration", {}), "runs": old.get("runs", [])}

    @property
    def runs(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.document["runs"]
        return found

    def has(self, cell: str, configuration: str, repeat: int) -> bool:
        return any((run["cell"], run["configuration"], run["repeat"]) == (cell, configuration, repeat) for run in self.runs)

    def add(self, run: dict[str, Any]) -> None:
        self.runs.append(run)
        self.save()

    def save(self) -> None:
        """Whole or not at all: a sweep that is killed while it writes keeps what it had."""
        temporary = self.path.with_name(self.path.name + ".part")
        temporary.write_text(json.dumps(self.document) + "\n", encoding="utf-8")
        temporary.replace(self.path)


class Sweep:
    """Runs what `results` does not hold yet. `advance(n)` is called with the number of runs that are done with or left out."""

    def __init__(self, engine: Engine, options: SweepOptions, results: Results, advance: Callable[[int, str], None]) -> None:
        self.engine = engine
        self.options = options
        self.results = results
        self.advance = advance
        self.cells = cells(options)
        self.configurations = configurations(options)
        self._encoded: dict[tuple[str, int], tuple[list[list[int]], ...]] = {}   # the last cell's prompts
        self._start = time.perf_counter()

    @property
    def num_runs(self) -> int:
        return len(self.cells) * len(self.configurations) * self.options.repeats

    def run(self) -> None:
        for repeat in range(self.options.repeats):
            for cell in self.cells:
                self._block(cell, repeat)

    def _block(self, cell: Cell, repeat: int) -> None:
        """Every configuration on the same prompts; nothing, or only its first run, when the rest would not end in time."""
        names = list(self.configurations)[:: -1 if repeat % 2 else 1]
        todo = [name for name in names if not self.results.has(cell.name, name, repeat)]
        self.advance(len(names) - len(todo), cell.name)
        needed = self._seconds_known(cell, todo)
        while todo:
            if not self._fits(needed):
                self._leave_out(cell, repeat, len(todo), needed)
                return
            name = todo.pop(0)
            begun = time.perf_counter()
            self.results.add({"cell": cell.name, "configuration": name, "repeat": repeat, **self._run(cell, name, repeat)})
            self.results.runs[-1]["wall_s"] = time.perf_counter() - begun
            self.advance(1, f"{cell.name} {name}")
            needed = self._seconds_known(cell, todo)
            if needed is None:
                needed = (time.perf_counter() - begun) * len(todo)

    def _seconds_known(self, cell: Cell, names: Sequence[str]) -> float | None:
        """What these runs took in an earlier repeat of the cell; for those unknown the mean of the others, None when all are."""
        took = {run["configuration"]: run["wall_s"] for run in self.results.runs if run["cell"] == cell.name and "wall_s" in run}
        if not took:
            return None
        mean = sum(took.values()) / len(took)
        return float(sum(took.get(name, mean) for name in names))

    def _fits(self, needed: float | None) -> bool:
        if self.options.time_budget is None:
            return True
        left = self.options.time_budget * 60.0 - (time.perf_counter() - self._start)
        return left > 0.0 if needed is None else needed <= left

    def _leave_out(self, cell: Cell, repeat: int, num_runs: int, needed: float | None) -> None:
        self.results.document["left_out"].append(
            {"cell": cell.name, "repeat": repeat, "num_runs": num_runs, "needs_s": None if needed is None else round(needed, 1)}
        )
        self.results.save()
        self.advance(num_runs, cell.name)

    def _run(self, cell: Cell, name: str, repeat: int) -> dict[str, Any]:
        load = self._rated(cell) if cell.needs_rate else cell.load
        run, observed = self._measure(load, self.configurations[name], repeat)
        summary = run.summary()
        return {key: summary[key] for key in KEPT if key in summary} | observed

    def _rated(self, cell: Cell) -> LoadOptions:
        """Poisson at the rate at which plain decoding answers a closed loop of the same concurrency: it just cannot keep up."""
        rates = self.results.document["calibration"]
        if cell.name not in rates:
            run, _ = self._measure(cell.load, None, 0)
            rates[cell.name] = run.summary()["requests_per_s"]
        return dataclasses.replace(cell.load, arrivals="poisson", request_rate=rates[cell.name])

    def _measure(self, load: LoadOptions, configuration: dict[str, Any] | None, repeat: int) -> tuple[Run, dict[str, Any]]:
        from headway.bench import throughput

        engine = self.engine
        engine.speculate(SpeculativeConfig.parse(configuration))
        prompts, warmup = self._prompts(load)
        size = load.num_prompts
        throughput.run(engine, warmup, dataclasses.replace(load, arrivals="closed", request_rate=None), label="warm-up")
        series, before = Series(engine), engine.metrics.snapshot()
        log = StepLog(engine, int(load.workload.partition(":")[2])) if load.workload.startswith("drift:") else None

        def observe() -> None:
            series.observe()
            if log is not None:
                log.observe()

        run = throughput.run(engine, prompts[repeat * size : (repeat + 1) * size], load, on_step=observe)
        observed = {"series": series.to_json(), "accounts": accounts(before, engine)}
        return run, observed | ({"steps": log.to_json()} if log is not None else {})

    def _prompts(self, load: LoadOptions) -> tuple[list[list[int]], list[list[int]]]:
        """Token ids of all repeats' prompts, and of the warm-up's."""
        key = (load.workload, load.num_prompts)
        if key not in self._encoded:
            number = load.num_prompts * self.options.repeats
            tokenizer = self.engine.tokenizer
            found = workloads.load_with_warmup(load.workload, number, load.warmup, load.seed, tokenizer.vocab_size)
            self._encoded = {key: tuple([prompt.encode(tokenizer) for prompt in prompts] for prompts in found)}
        prompts, warmup = self._encoded[key]
        return prompts, warmup


def head(options: SweepOptions, config: dict[str, Any], **more: Any) -> dict[str, Any]:
    """The part of the document that is known before the first run."""
    return {
        "benchmark": "sweep", **more, "options": dataclasses.asdict(options), "config": config,
        "configurations": configurations(options), "cells": {cell.name: dataclasses.asdict(cell.load) for cell in cells(options)},
    }


def complete_blocks(document: dict[str, Any]) -> Iterator[tuple[str, int, dict[str, dict[str, Any]]]]:
    """(cell, repeat, configuration -> run) of the blocks in which every configuration has a valid run."""
    blocks: dict[tuple[str, int], dict[str, dict[str, Any]]] = {}
    for run in document["runs"]:
        if not run["invalid"]:
            blocks.setdefault((run["cell"], run["repeat"]), {})[run["configuration"]] = run
    for (cell, repeat), runs in sorted(blocks.items()):
        if runs.keys() >= document["configurations"].keys():
            yield cell, repeat, runs
