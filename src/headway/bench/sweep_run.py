"""Runs a sweep: engines that share a model, rounds in turns, results on disk after every round, and continued from there."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Generator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from headway.bench import throughput
from headway.bench.flow import Flow, in_slices
from headway.bench.load import LoadOptions
from headway.bench.records import Run, hash_outputs
from headway.bench.recovery import StepLog, recoveries
from headway.bench.sweep import OFF, Cell, SweepOptions, cells, is_static
from headway.bench.sweep_budget import Planned, TimeBudget
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
    "num_steps", "num_preemptions", "invalid", "errors",
)


def engines(config: EngineConfig, configurations: Mapping[str, dict[str, Any] | None]) -> dict[str, Engine]:
    """One engine per configuration around one loaded model, each with K/V cache, drafters and policy of its own."""
    model = load_model(
        config.model, dtype=config.dtype, device=config.device, quantization=config.quantization, max_model_len=config.max_model_len,
        lora=config.lora, progress=True,
    )
    config = dataclasses.replace(config, kv_cache_memory_bytes=kv_bytes_each(config, model, len(configurations)))
    return {
        name: Engine(dataclasses.replace(config, speculative=SpeculativeConfig.parse(how)), model=model)
        for name, how in configurations.items()
    }


class Series:
    """k and batch size over one run, in SERIES_LEN slices of equally many steps."""

    def __init__(self, engine: Engine) -> None:
        self._metrics = engine.metrics
        self._start_ms = engine.metrics.step_ms
        self._points: list[tuple[float, int, int]] = []
        self.observe()

    def observe(self) -> None:
        """After each step."""
        m = self._metrics
        self._points.append(((m.step_ms - self._start_ms) / 1e3, m.num_sampling_rows, m.num_verified_drafts))

    def to_json(self) -> dict[str, list[float]]:
        """t_s: each slice's end, seconds of step; k: drafts verified per sequence and step in it; batch: sequences that wrote, per step."""
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
        self.document: dict[str, Any] = {**head, "calibration": {}, "paces": {}, "runs": [], "left_out": []}
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
            "paces": old.get("paces", {}), "runs": old.get("runs", []),
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


class Turns:
    """How the engines take turns in one cell."""

    def __init__(self, engines: Mapping[str, Engine]) -> None:
        self.engines = engines
        self._compared: set[int] = set()

    def measure(self, name: str, number: int, on_step: Callable[[], None]) -> Generator[None, None, Run]:
        """What one engine makes of round `number`; stops where another one may go on."""
        raise NotImplementedError

    def outputs(self, name: str) -> Mapping[int, str]:
        """Prompt -> what the engine wrote, of all that it has answered."""
        raise NotImplementedError

    def compare(self) -> dict[str, dict[str, Any]]:
        """Once all have had their turn: configuration -> what comparing says. equal_outputs: [written as by plain decoding, compared]."""
        if OFF not in self.engines:
            return {}
        theirs = {name: self.outputs(name) for name in self.engines}
        new = set.intersection(*(set(outputs) for outputs in theirs.values())) - self._compared
        self._compared |= new
        return {
            name: {"equal_outputs": [sum(outputs[index] == theirs[OFF][index] for index in new), len(new)]}
            for name, outputs in theirs.items() if name != OFF
        }

    def stop(self) -> None:
        """After the last round."""


class Full(Turns):
    """A closed loop that stays full from round to round."""

    def __init__(self, engines: Mapping[str, Engine], cell: Cell, prompts: list[list[int]], first_round: int) -> None:
        super().__init__(engines)
        self._size = cell.load.num_prompts
        self._flows = {name: Flow(engine, cell.load, prompts, first_round * self._size) for name, engine in engines.items()}
        phase_len = int(cell.load.workload.partition(":")[2]) if cell.load.workload.startswith("drift:") else None
        self._logs = {} if phase_len is None else {name: StepLog(engine, phase_len) for name, engine in engines.items()}
        self._num_told = 0   # switches that were reported
        in_slices({name: self._turn(name, cell.lead_in, lambda: None) for name in engines})

    def measure(self, name: str, number: int, on_step: Callable[[], None]) -> Generator[None, None, Run]:
        return self._turn(name, self._size, on_step)

    def _turn(self, name: str, num_requests: int, on_step: Callable[[], None]) -> Generator[None, None, Run]:
        log = self._logs.get(name)

        def observe() -> None:
            on_step()
            if log is not None:
                log.observe()

        return self._flows[name].slices(num_requests, observe)

    def outputs(self, name: str) -> Mapping[int, str]:
        return self._flows[name].outputs

    def compare(self) -> dict[str, dict[str, Any]]:
        found = super().compare()
        logs = {name: {"steps": log.to_json()} for name, log in self._logs.items()}
        num_over = min((max(log["steps"]["phase"], default=0) for log in logs.values()), default=1) - 1   # phases after the first
        for name, items in recoveries(logs, list(filter(is_static, logs))).items():
            new = [{"to": DRIFT_KINDS[item["phase"] % len(DRIFT_KINDS)], **item} for item in items[self._num_told : num_over]]
            found.setdefault(name, {})["recoveries"] = new
        self._num_told = max(self._num_told, num_over)
        return found

    def stop(self) -> None:
        for flow in self._flows.values():
            flow.stop()


class Whole(Turns):
    """A load from its beginning to its end in each round."""

    def __init__(self, engines: Mapping[str, Engine], load: LoadOptions, prompts: list[list[int]]) -> None:
        super().__init__(engines)
        self._load, self._prompts = load, prompts
        self._outputs: dict[str, dict[int, str]] = {name: {} for name in engines}

    def measure(self, name: str, number: int, on_step: Callable[[], None]) -> Generator[None, None, Run]:
        size = self._load.num_prompts
        run = throughput.run(self.engines[name], self._prompts[number * size : (number + 1) * size], self._load, on_step=on_step)
        self._outputs[name].update(enumerate([hash_outputs([record.output]) for record in run.records], start=number * size))
        yield from ()   # whole: nobody else in between
        return run

    def outputs(self, name: str) -> Mapping[int, str]:
        return self._outputs[name]


class Sweep:
    """Runs what `results` does not hold yet. `advance(n, what)` is called with the number of runs that are done with or left out; `began`
    is what `time.perf_counter` said when the command began."""

    kept: tuple[str, ...] = KEPT   # of a run's summary, in the results

    def __init__(
        self, engines: Mapping[str, Engine], options: SweepOptions, results: Results, advance: Callable[[int, str], None], began: float
    ) -> None:
        self.engines = engines
        self.options = options
        self.results = results
        self.advance = advance
        self.cells = cells(options)
        self._budget = TimeBudget(options.time_budget, began, results.document["paces"])

    def run(self) -> None:
        tokenizer = next(iter(self.engines.values())).tokenizer
        source = Prompts(self.options.seed, tokenizer.vocab_size)
        prompts = [source.take(cell.load.workload, cell.num_needed(self.options.rounds)) for cell in self.cells]
        plan = []
        for cell, texts in zip(self.cells, prompts, strict=True):
            todo = [number for number in range(self.options.rounds) if number not in self.results.rounds(cell.name)]
            self.advance((self.options.rounds - len(todo)) * len(self.engines), cell.name)
            if todo:
                plan.append(Planned(cell, [text.encode(tokenizer) for text in texts], todo))
        for place, planned in enumerate(plan):
            self._cell(planned, plan[place + 1 :])

    def _cell(self, planned: Planned, later: list[Planned]) -> None:
        """The rounds that are missing; those that there is no time for are left out and named."""
        cell, todo, budget = planned.cell, planned.todo, self._budget
        began = time.perf_counter()
        if not budget.has_time_for_first(planned):
            lead_in, took = budget.forecast(planned)
            self._leave_out(cell, len(todo), lead_in + took * len(todo))
            return
        turns = self.turns(cell, planned.prompts, todo[0])
        took = 0.0
        for done, number in enumerate(todo):
            if done and not budget.has_time_for_more(took, began, later):
                self._leave_out(cell, len(todo) - done, took * (len(todo) - done))
                break
            round_began = time.perf_counter()
            runs = self._round(turns, cell, number)
            now = time.perf_counter()
            took = now - round_began
            budget.learn(planned, done + 1, now - began)
            self.results.add(runs)
        turns.stop()

    def turns(self, cell: Cell, prompts: list[list[int]], first_round: int) -> Turns:
        if cell.is_closed:
            return Full(self.engines, cell, prompts, first_round)
        return Whole(self.engines, self._rated(cell, prompts), prompts)

    def _round(self, turns: Turns, cell: Cell, number: int) -> list[dict[str, Any]]:
        names = list(self.engines)
        first = number % len(names)
        order = (*names[first:], *names[:first])
        series = {name: Series(self.engines[name]) for name in order}
        before = {name: self.engines[name].metrics.snapshot() for name in order}
        runs = in_slices({name: turns.measure(name, number, series[name].observe) for name in order})
        found: dict[str, dict[str, Any]] = {}
        for name in order:
            summary = runs[name].summary()
            found[name] = {
                "cell": cell.name, "configuration": name, "round": number, **{key: summary[key] for key in self.kept if key in summary},
                "series": series[name].to_json(), "accounts": accounts(before[name], self.engines[name]),
            }  # fmt: skip
            self.advance(1, f"{cell.name} {name}")
        for name, more in turns.compare().items():
            found[name] |= more
        return list(found.values())

    def _rated(self, cell: Cell, prompts: list[list[int]]) -> LoadOptions:
        """Poisson at the rate at which plain decoding answers a closed loop of the same concurrency: it just cannot keep up."""
        if not cell.needs_rate:
            return cell.load
        rates = self.results.document["calibration"]
        if cell.name not in rates:
            plain = self.engines.get(OFF, next(iter(self.engines.values())))
            rates[cell.name] = throughput.run(plain, prompts[-cell.load.num_prompts :], cell.load).summary()["requests_per_s"]
        return dataclasses.replace(cell.load, arrivals="poisson", request_rate=rates[cell.name])

    def _leave_out(self, cell: Cell, num_rounds: int, needed: float) -> None:
        self.results.document["left_out"].append({"cell": cell.name, "num_rounds": num_rounds, "needs_s": round(needed, 1)})
        self.results.save()
        self.advance(num_rounds * len(self.engines), cell.name)
