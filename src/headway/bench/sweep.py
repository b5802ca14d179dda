"""What a sweep measures: workload x concurrency x configuration, in rounds; `sweep_run.py` runs it.

A *cell* is a workload at a load. One engine per configuration stays up around one loaded model. In a *round* every engine goes on with the
cell's load until so many requests have ended, half a second of each in turn; who begins rotates. A figure of a cell is a ratio of totals
over its rounds: a machine whose speed changes from one moment to the next changes it for both sides. A closed loop stays full from round to
round (`flow.py`); loads that begin and end (ramp, rollout, poisson) are a whole run each round. Policies go on learning from cell to cell,
and drafters remember earlier answers, as in a server; no prompt comes twice.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from headway import plugins
from headway.bench.load import PATTERNS, LoadOptions
from headway.config import SpeculativeConfig, option
from headway.errors import ConfigError, unknown_key

OFF = "off"
FIXED_POLICIES = ("static", "batch_table", "disable_by_batch_size")   # the others adapt
DRAFTING = re.compile(r"([^:]+?)(?:-k([1-9]\d*))?")


@dataclass(frozen=True)
class SweepOptions:
    """What to sweep; the command-line flags are made from these fields. Lists are separated by commas."""

    workloads: str = option("code-edit,chat,mixed", "workloads, each at every concurrency; WORKLOAD@N: at N only (drift@N, too)")
    concurrencies: str = option("1,4,16,64", "requests in flight, closed loop")
    patterns: str = option("", "further cells at pattern-concurrency: drift, ramp, rollout, poisson")
    pattern_concurrency: int = option(16, "requests in flight of the cells in --patterns (ramp: at its height)")
    pattern_workload: str = option("mixed", "workload of ramp, rollout and poisson")
    configurations: str = option(
        "", "off, DRAFTERS-kN (always N), DRAFTERS (under the default policy), batch_table, policies by name; DRAFTERS: names joined by + "
        "(default: off, every drafter at every static-k, batch_table, and every policy that adapts)",
    )
    drafters: str = option("suffix,ngram", "drafters: all of them for policies by name, the first for batch_table")
    speculators: str = option("", "draft networks, as DRAFTER=MODEL: eagle=FOLDER")
    static_k: str = option("1,2,4,8", "the N of DRAFTER-kN in the default configurations; the largest bounds the policies that adapt")
    batch_table: str = option("[[1,4,4],[5,16,2],[17,64,0]]", "num_speculative_tokens_per_batch_size of the configuration batch_table")
    num_prompts: int = option(
        0, "requests per round; 0: 4 and half as many as in flight (drift: requests per phase, a round is two; 0: twice those in flight. "
        "patterns: 0: half as many again as in flight)"
    )
    output_len: int = option(64, "tokens to write per request, on average")
    output_range_ratio: float = option(0.5, "lengths spread between output-len * (1 - ratio) and output-len * (1 + ratio); in [0, 1)")
    rounds: int = option(5, "rounds per cell, each with new prompts")
    seed: int = option(0, "chooses the prompts")
    temperature: float = option(0.0, "0: greedy")
    time_budget: float | None = option(
        None, "minutes, loading included; a cell gets an equal share of what is left, but a first round while there is time for one, and "
        "rounds that would not end in it are left out, and named"
    )

    def __post_init__(self) -> None:
        for name, least in (("num_prompts", 0), ("output_len", 1), ("rounds", 1), ("pattern_concurrency", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name} must be >= {least}, got {getattr(self, name)}")
        if self.time_budget is not None and not self.time_budget > 0.0:
            raise ConfigError(f"time_budget must be a number of minutes > 0, got {self.time_budget}")


@dataclass(frozen=True, slots=True)
class Cell:
    name: str
    load: LoadOptions
    needs_rate: bool = False   # poisson: the rate is measured first

    @property
    def is_closed(self) -> bool:
        return self.load.arrivals == "closed" and not self.needs_rate

    @property
    def lead_in(self) -> int:
        """Requests that end before the first round: until then those in flight are all equally far."""
        return (self.load.concurrency + 1) // 2

    @property
    def lead_in_work(self) -> int:
        """The lead-in in requests: when half of those in flight have ended, the others and their successors make up for the rest. Poisson:
        the load that gives the rate."""
        return self.load.concurrency if self.is_closed else self.needs_rate * self.load.num_prompts

    def num_needed(self, num_rounds: int) -> int:
        """Prompts for so many rounds, those in flight at the end or to measure a rate with included."""
        measured = num_rounds * self.load.num_prompts
        if self.is_closed:
            return measured + self.lead_in + 2 * self.load.concurrency   # a turn may end with more than were due
        return measured + self.needs_rate * self.load.num_prompts


def cells(options: SweepOptions) -> list[Cell]:
    """In the order of a spread: what a short budget leaves out is spread over the concurrencies. Raises ConfigError."""
    found = []
    words = _words(options.workloads)
    alone = [word for word in words if word.rpartition("@")[2].isdigit() and word.rpartition("@")[0]]
    for concurrency in _spread(_numbers("concurrencies", options.concurrencies)):
        found += [_closed(options, workload, concurrency) for workload in words if workload not in alone]
    for word in alone:
        workload, _, number = word.rpartition("@")
        found.append(_closed(options, workload, int(number)))
    for pattern in _words(options.patterns):
        concurrency = options.pattern_concurrency
        if pattern == "drift":
            found.append(_closed(options, pattern, concurrency))
        elif pattern in PATTERNS and pattern != "closed":
            load = _load(options, options.pattern_workload, concurrency, options.num_prompts or max(2, concurrency + concurrency // 2))
            if pattern != "poisson":
                load = dataclasses.replace(load, arrivals=pattern, num_prompts=load.num_prompts * (2 if pattern == "ramp" else 1))
            found.append(Cell(f"{options.pattern_workload}@{pattern}-{concurrency}", load, needs_rate=pattern == "poisson"))
        else:
            raise ConfigError(unknown_key("pattern", pattern, ("drift", "ramp", "rollout", "poisson")))
    if not found:
        raise ConfigError("nothing to sweep: --workloads and --patterns are both empty")
    return list({cell.name: cell for cell in found}.values())


def _closed(options: SweepOptions, workload: str, concurrency: int) -> Cell:
    name, size = f"{workload}@{concurrency}", options.num_prompts or 4 + concurrency // 2
    if workload == "drift":
        # Phases long enough that the batch holds one kind for a while.
        length = options.num_prompts or 2 * concurrency
        workload, size = f"drift:{length}", 2 * length
    return Cell(name, _load(options, workload, concurrency, size))


def _load(options: SweepOptions, workload: str, concurrency: int, num_prompts: int) -> LoadOptions:
    return LoadOptions(
        workload=workload, num_prompts=num_prompts, output_len=options.output_len, output_range_ratio=options.output_range_ratio,
        concurrency=concurrency, seed=options.seed, temperature=options.temperature, warmup=0,
    )


def configurations(options: SweepOptions) -> dict[str, dict[str, Any] | None]:
    """Name -> speculative config (None: off), checked. Raises ConfigError."""
    drafters = _words(options.drafters)
    statics = [f"{drafter}-k{k}" for drafter in drafters for k in _numbers("static_k", options.static_k)]
    names = _words(options.configurations) or [OFF, *statics, "batch_table", *_adaptive()]
    found = {name: _configuration(name, options) for name in names}
    for config in found.values():
        SpeculativeConfig.parse(config)
    return found


def _configuration(name: str, options: SweepOptions) -> dict[str, Any] | None:
    drafters, max_k = _words(options.drafters), max(_numbers("static_k", options.static_k))
    if name == OFF:
        return None
    if name == "batch_table":
        try:
            rows = json.loads(options.batch_table)
        except ValueError as error:
            raise ConfigError(f"batch_table is not JSON: {error}") from error
        found = {"num_speculative_tokens": max_k, "num_speculative_tokens_per_batch_size": rows}
        return {"method": _method(drafters[:1], options), **found}
    if name in _adaptive() or ":" in name:
        return {"method": _method(drafters, options), "num_speculative_tokens": max_k, "policy": name}
    matched = DRAFTING.fullmatch(name)
    asked, k = (matched[1].split("+"), matched[2]) if matched else ([], None)
    if not asked or not set(asked) <= set(plugins.names("drafter")):
        known = [OFF, *drafters, *(f"{each}-kN" for each in drafters), "batch_table", *_adaptive()]
        raise ConfigError(unknown_key("configuration", name, known))
    fixed = {"num_speculative_tokens": int(k), "policy": "static"} if k else {"num_speculative_tokens": max_k}
    return {"method": _method(asked, options), **fixed}


def _adaptive() -> list[str]:
    return [name for name in plugins.names("policy") if name not in FIXED_POLICIES]


def _method(drafters: list[str], options: SweepOptions) -> Any:
    """What `method` takes: names, and names with the draft network they read."""
    networks = dict(pair.partition("=")[::2] for pair in _words(options.speculators))
    method = [{"name": name, "model": networks[name]} if name in networks else name for name in drafters]
    return method[0] if len(method) == 1 and isinstance(method[0], str) else method


def is_static(name: str) -> bool:
    """One k for ever: no speculation is k = 0."""
    matched = DRAFTING.fullmatch(name)
    return name == OFF or bool(matched and matched[2])


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


def head(options: SweepOptions, config: dict[str, Any], **more: Any) -> dict[str, Any]:
    """The part of the document that is known before the first run."""
    return {
        "benchmark": "sweep", **more, "options": dataclasses.asdict(options), "config": config,
        "configurations": configurations(options), "cells": {cell.name: dataclasses.asdict(cell.load) for cell in cells(options)},
    }


def complete_rounds(document: dict[str, Any]) -> Iterator[tuple[str, int, dict[str, dict[str, Any]]]]:
    """(cell, round, configuration -> run) of the rounds in which every configuration has a valid run."""
    rounds: dict[tuple[str, int], dict[str, dict[str, Any]]] = {}
    for run in document["runs"]:
        if not run["invalid"]:
            rounds.setdefault((run["cell"], run["round"]), {})[run["configuration"]] = run
    for (cell, number), runs in sorted(rounds.items()):
        if runs.keys() >= document["configurations"].keys():
            yield cell, number, runs
