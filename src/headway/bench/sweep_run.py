"""Runs a sweep: engines that share a model, rounds in turns, results on disk after every round, and continued from there."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from headway.bench import throughput
from headway.bench.records import LoadOptions, Run
from headway.bench.recovery import StepLog, recoveries
from headway.bench.sweep import DRIFT_PHASES, OFF, Cell, SweepOptions, cells, is_static
from headway.bench.workloads import DRIFT_KINDS, Prompts
from headway.config import EngineConfig, SpeculativeConfig
from headway.engine.engine import Engine
from headway.engine.memory import kv_bytes_each
from headway.errors import ConfigError
from headway.models.loader import load_model

SERIES_LEN = 80
# What two sittings of one sweep may differ in.
FREE_OPTIONS = ("rounds", "time_budget", "workloads", "concurrencies", "patterns")
KEPT = (
    "output_tokens_per_s", "requests_per_s", "duration_s", "num_requests", "num_prompt_tokens", "num_output_tokens", "ttft_ms", "tpot_ms",
    "e2el_ms", "mean_acceptance_length", "draft_acceptance_rate", "num_draft_tokens", "num_accepted_tokens", "mean_k", "time_shares",
    "output_hash", "num_steps", "num_preemptions", "invalid", "errors",
)


def engines(config: EngineConfig, configurations: Mapping[str, dict[str, Any] | None]) -> dict[str, Engine]:
    """One engine per configuration around one loaded model, each with K/V cache, drafters and policy of its own."""
    model = load_model(config.model, dtype=config.dtype, device=config.device, quantization=config.quantization, progress=True)
    config = dataclasses.replace(config, kv_cache_memory_bytes=kv_bytes_each(config, model, len(configurations)))
    return {
        name: Engine(dataclasses.replace(config, speculative=SpeculativeConfig.parse(how)), model=model)
        for name, how in configurations.items()
    }


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
    """The results document, on disk after every round. Raises ConfigError for a file that is something else."""

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
        if not isinstance(old, dict) or old.get("benchmark") != "sweep" or "rounds" not in old.get("options", {}):
            raise ConfigError(f"{self.path} exists and is not a sweep in rounds: choose another --output")
        new = json.loads(json.dumps(head))
        for section in ("options", "configurations", "config"):
            for key in sorted({*old.get(section, {}), *new[section]}):
                ours, theirs = new[section].get(key), old.get(section, {}).get(key)
                if ours != theirs and not (section == "options" and key in FREE_OPTIONS):
                    raise ConfigError(
                        f"{self.path} was begun with {key} = {json.dumps(theirs)}, now it is {json.dumps(ours)}: "
                        "give the same flags to continue it, or another --output"
                    )
        self.document |= {
            "cells": {**old.get("cells", {}), **self.document["cells"]}, "calibration": old.get("calibration", {}),
            "runs": old.get("runs", []),
        }

    @property
    def runs(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.document["runs"]
        return found

    def rounds(self, cell: str) -> set[int]:
        """Those of the cell that are done."""
        return {run["round"] for run in self.runs if run["cell"] == cell}

    def add(self, runs: list[dict[str, Any]]) -> None:
        """A whole round. k over time is kept of the last one only."""
        for run in self.runs:
            if run["cell"] == runs[0]["cell"]:
                run.pop("series", None)
        self.runs.extend(runs)
        self.save()

    def save(self) -> None:
        """Whole or not at all: a sweep that is killed while it writes keeps what it had."""
        temporary = self.path.with_name(self.path.name + ".part")
        temporary.write_text(json.dumps(self.document) + "\n", encoding="utf-8")
        temporary.replace(self.path)


class Sweep:
    """Runs what `results` does not hold yet. `advance(n, what)` is called with the number of runs that are done with or left out."""

    def __init__(
        self, engines: Mapping[str, Engine], options: SweepOptions, results: Results, advance: Callable[[int, str], None]
    ) -> None:
        self.engines = engines
        self.options = options
        self.results = results
        self.advance = advance
        self.cells = cells(options)
        self._start = time.perf_counter()

    def run(self) -> None:
        prompts = self._prompts()
        warm = False
        for place, cell in enumerate(self.cells):
            until = self._share(len(self.cells) - place)
            todo = [number for number in range(self.options.rounds) if number not in self.results.rounds(cell.name)]
            self.advance((self.options.rounds - len(todo)) * len(self.engines), cell.name)
            took = 0.0
            for done, number in enumerate(todo):
                began = time.perf_counter()
                if until is not None and began + took > until:
                    self._leave_out(cell, len(todo) - done, took)
                    break
                if not warm:
                    self._warm_up()
                    warm = True
                load = self._rated(cell, prompts[cell.name][-1]) if cell.needs_rate else cell.load
                self._round(cell, load, number, prompts[cell.name][number])
                took = time.perf_counter() - began

    def _prompts(self) -> dict[str, list[list[list[int]]]]:
        """Per cell and round; those to measure a cell's rate with come last."""
        tokenizer = next(iter(self.engines.values())).tokenizer
        prompts = Prompts(self.options.seed, tokenizer.vocab_size)
        self._warm_prompts = [prompt.encode(tokenizer) for prompt in prompts.take("chat", self.options.warmup)]
        return {
            cell.name: [
                [prompt.encode(tokenizer) for prompt in prompts.take(cell.load.workload, cell.load.num_prompts)]
                for _ in range(self.options.rounds + cell.needs_rate)
            ]
            for cell in self.cells
        }

    def _share(self, num_cells: int) -> float | None:
        """Until when a cell may take, with `num_cells` to go; None without a budget."""
        if self.options.time_budget is None:
            return None
        now = time.perf_counter()
        return now + (self._start + 60.0 * self.options.time_budget - now) / num_cells

    def _leave_out(self, cell: Cell, num_rounds: int, needed: float) -> None:
        self.results.document["left_out"].append({"cell": cell.name, "num_rounds": num_rounds, "needs_s": round(needed * num_rounds, 1)})
        self.results.save()
        self.advance(num_rounds * len(self.engines), cell.name)

    def _warm_up(self) -> None:
        for engine in self.engines.values():
            throughput.run(engine, self._warm_prompts, LoadOptions(output_len=self.options.output_len), label="warm-up")

    def _rated(self, cell: Cell, prompts: list[list[int]]) -> LoadOptions:
        """Poisson at the rate at which plain decoding answers a closed loop of the same concurrency: it just cannot keep up."""
        rates = self.results.document["calibration"]
        if cell.name not in rates:
            run, _ = self._measure(OFF if OFF in self.engines else next(iter(self.engines)), cell.load, prompts)
            rates[cell.name] = run.summary()["requests_per_s"]
        return dataclasses.replace(cell.load, arrivals="poisson", request_rate=rates[cell.name])

    def _round(self, cell: Cell, load: LoadOptions, number: int, prompts: list[list[int]]) -> None:
        names = list(self.engines)
        first = number % len(names)
        found: dict[str, dict[str, Any]] = {}
        for name in (*names[first:], *names[:first]):
            run, observed = self._measure(name, load, prompts)
            summary = run.summary()
            about = {"cell": cell.name, "configuration": name, "round": number}
            found[name] = about | {key: summary[key] for key in KEPT if key in summary} | observed
            self.advance(1, f"{cell.name} {name}")
        logs = {name: {"steps": run.pop("steps", None)} for name, run in found.items()}
        switches = recoveries(logs, [name for name in names if is_static(name)])
        for name, items in switches.items():
            kinds = [DRIFT_KINDS[(number * DRIFT_PHASES + item["phase"]) % len(DRIFT_KINDS)] for item in items]
            found[name]["recoveries"] = [{"to": kind, **item} for kind, item in zip(kinds, items, strict=True)]
        self.results.add(list(found.values()))

    def _measure(self, name: str, load: LoadOptions, prompts: list[list[int]]) -> tuple[Run, dict[str, Any]]:
        engine = self.engines[name]
        series, before = Series(engine), engine.metrics.snapshot()
        log = StepLog(engine, int(load.workload.partition(":")[2])) if load.workload.startswith("drift:") else None

        def observe() -> None:
            series.observe()
            if log is not None:
                log.observe()

        run = throughput.run(engine, prompts, load, on_step=observe)
        observed = {"series": series.to_json(), "accounts": accounts(before, engine)}
        return run, observed | ({"steps": log.to_json()} if log is not None else {})
