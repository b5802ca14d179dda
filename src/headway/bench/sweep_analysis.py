"""What a sweep says: every configuration against no speculation, against the best static k of each cell, and against each other.

The throughput of a configuration in a cell is all tokens of its rounds over all their seconds, in the rounds that every configuration
has; a ratio is that of two such throughputs. A round of a large batch is a slice of it, in which one engine may read more prompts than
another: in the sum over rounds that evens out, in the median of a few ratios it does not. The spread of a ratio is the least and the
greatest of its ratios within rounds; where rounds differ in pace, and engines in what they wrote in which, the ratio may lie outside it.
The best static k is picked by the same throughput, with hindsight, noise included: an oracle no user has, and the largest of several noisy
figures is too large. Beside it stands a static k chosen beforehand: in each round the one that the cell's other rounds call best.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from headway.bench.sweep import OFF, complete_rounds, is_static

Ratios = dict[tuple[str, str], float]
"""(configuration, cell) -> ratio"""

TABLE = "batch_table"


class Analysis:
    """Throughputs and ratios over the complete rounds of a sweep's document."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        self.configurations: list[str] = list(document["configurations"])
        self.cells: list[str] = []
        self.rounds: dict[str, list[dict[str, dict[str, Any]]]] = {}   # cell -> per round: configuration -> run
        for cell, _, runs in complete_rounds(dict(document)):
            self.rounds.setdefault(cell, []).append(runs)
        self.cells = [cell for cell in document["cells"] if cell in self.rounds]
        self.statics = [name for name in self.configurations if is_static(name)]
        self.adaptive = [name for name in self.configurations if not is_static(name)]

    def tokens_per_s(self, cell: str, name: str) -> float:
        """Output tokens of all rounds over their seconds; 0.0 where nothing was written."""
        return _tokens_per_s([runs[name] for runs in self.rounds[cell]])

    def tpot_ms(self, cell: str, name: str) -> float:
        """The median request's, in the median over the rounds; 0.0 where nothing was measured."""
        values = [runs[name]["tpot_ms"]["p50"] for runs in self.rounds[cell] if runs[name].get("tpot_ms") is not None]
        return float(statistics.median(values)) if values else 0.0

    def by_concurrency(self) -> dict[str, list[tuple[int, str]]]:
        """Workload -> (requests in flight, cell), rising; patterns and drifting loads left out."""
        found: dict[str, list[tuple[int, str]]] = {}
        for cell in self.cells:
            workload, _, load = cell.rpartition("@")
            if load.isdigit() and not workload.startswith("drift"):
                found.setdefault(workload, []).append((int(load), cell))
        return {workload: sorted(cells) for workload, cells in found.items()}

    def best_static(self, cell: str) -> str | None:
        """The static k with the highest throughput."""
        return max(self.statics, key=lambda name: self.tokens_per_s(cell, name), default=None)

    def against(self, base: str | None) -> Ratios:
        """Throughput over that of `base` (None: of the best static k of the cell)."""
        found = {}
        for cell in self.cells:
            reference = base if base is not None else self.best_static(cell)
            if reference in self.configurations and (theirs := self.tokens_per_s(cell, str(reference))) > 0.0:
                found.update({(name, cell): self.tokens_per_s(cell, name) / theirs for name in self.configurations})
        return found

    def against_chosen(self) -> Ratios:
        """Throughput over that of the static k which, for each round, the others call best. Cells of one round have none."""
        found = {}
        for cell, rounds in self.rounds.items():
            if len(rounds) < 2 or not self.statics:
                continue
            theirs = []
            for runs in rounds:
                others = [other for other in rounds if other is not runs]
                chosen = max(self.statics, key=lambda name: _tokens_per_s([other[name] for other in others]))
                theirs.append(runs[chosen])
            if (speed := _tokens_per_s(theirs)) > 0.0:
                found.update({(name, cell): self.tokens_per_s(cell, name) / speed for name in self.configurations})
        return found

    def spread(self, cell: str, name: str, base: str) -> tuple[float, float]:
        """Least and greatest ratio to `base` within a round; rounds in which `base` wrote nothing have none."""
        pairs = [(_tokens_per_s([runs[name]]), _tokens_per_s([runs[base]])) for runs in self.rounds[cell]]
        ratios = [ours / theirs for ours, theirs in pairs if theirs > 0.0] or [0.0]
        return min(ratios), max(ratios)

    def _table(self, base: str | None) -> dict[str, dict[str, dict[str, Any]]]:
        """Cell -> configuration -> its ratio and the spread of it."""
        found: dict[str, dict[str, dict[str, Any]]] = {}
        for (name, cell), ratio in self.against(base).items():
            spread = self.spread(cell, name, base or str(self.best_static(cell)))
            found.setdefault(cell, {})[name] = {"ratio": ratio, "spread": spread}
        return found

    def summary(self) -> dict[str, dict[str, Any]]:
        """Per configuration that is not a static k: worst cell and mean over cells of each ratio; mean against each of the others."""
        off, best, chosen = self.against(OFF), self.against(None), self.against_chosen()
        return {
            name: {
                "against_off": _worst_and_mean(off, name, self.cells),
                "against_best_static": _worst_and_mean(best, name, self.cells),
                "against_chosen_static": _worst_and_mean(chosen, name, self.cells),
                "mean_against": {other: found["mean"] for other in self.adaptive if other != name
                                 if (found := _worst_and_mean(self.against(other), name, self.cells)) is not None},
            }
            for name in self.adaptive
        }

    def losses(self, floor: float = 1.0) -> list[dict[str, Any]]:
        """Every cell in which a configuration that is not a static k is below `floor` times the best static k, worst first."""
        found = []
        for (name, cell), ratio in self.against(None).items():
            base = self.best_static(cell)
            if name in self.adaptive and base is not None and ratio < floor:
                found.append({
                    "configuration": name, "cell": cell, "best_static": base, "ratio": ratio, "spread": self.spread(cell, name, base),
                    "against_off": self.against(OFF).get((name, cell)),
                    "output_tokens_per_s": self.tokens_per_s(cell, name), "best_output_tokens_per_s": self.tokens_per_s(cell, base),
                })
        return sorted(found, key=lambda loss: loss["ratio"])

    def recoveries(self) -> dict[str, dict[str, dict[str, dict[str, Any]]]]:
        """Drifting cell -> configuration -> workload it switched to -> how often, how often it recovered, and after how many steps and
        seconds: medians over the switches, None where fewer than half of them were made good before the phase ended."""
        found: dict[str, dict[str, dict[str, dict[str, Any]]]] = {}
        for cell, rounds in self.rounds.items():
            for name in self.configurations:
                switches = [switch for runs in rounds for switch in runs[name].get("recoveries", ())]
                for kind in sorted({switch["to"] for switch in switches}):
                    here = [switch for switch in switches if switch["to"] == kind]
                    done = [switch for switch in here if switch["steps"] is not None]
                    found.setdefault(cell, {}).setdefault(name, {})[kind] = {
                        "switches": len(here), "recovered": len(done),
                        "steps": _median_of_all(here, "steps"), "seconds": _median_of_all(here, "seconds"),
                    }  # fmt: skip
        return found

    def accounts(self, name: str) -> dict[str, dict[str, float | None]]:
        """Cell -> medians over rounds of where the configuration's time went and of its forecasts' errors; where that was recorded."""
        found: dict[str, dict[str, float | None]] = {}
        for cell in self.cells:
            runs = [run[name]["accounts"] for run in self.rounds[cell] if run[name].get("accounts")]
            if runs:
                columns = {key: [run[key] for run in runs if run[key] is not None] for key in runs[0]}
                found[cell] = {key: statistics.median(values) if values else None for key, values in columns.items()}
        return found

    def equal_outputs(self) -> float | None:
        """Share of answers that are exactly what plain decoding wrote; None where nothing was compared."""
        runs = [run for rounds in self.rounds.values() for each in rounds for run in each.values()]
        pairs = [run["equal_outputs"] for run in runs if "equal_outputs" in run]
        num_compared = sum(compared for _, compared in pairs)
        return sum(equal for equal, _ in pairs) / num_compared if num_compared else None

    def to_json(self) -> dict[str, Any]:
        return {
            "num_cells": len(self.cells),
            "num_rounds": {cell: len(self.rounds[cell]) for cell in self.cells},
            "best_static": {cell: self.best_static(cell) for cell in self.cells},
            "output_tokens_per_s": {cell: {name: self.tokens_per_s(cell, name) for name in self.configurations} for cell in self.cells},
            "against_off": self._table(OFF),
            "against_best_static": self._table(None),
            "summary": self.summary(),
            "losses": self.losses(),
            "accounts": {name: self.accounts(name) for name in self.adaptive},
            "recoveries": self.recoveries(),
            "equal_outputs_share": self.equal_outputs(),
        }


CURVES = (("output tokens/s", Analysis.tokens_per_s), ("TPOT ms, median", Analysis.tpot_ms))
"""What is drawn against concurrency: label, figure of a cell and configuration."""


def _worst_and_mean(ratios: Ratios, name: str, cells: Sequence[str]) -> dict[str, Any] | None:
    found = {cell: ratios[name, cell] for cell in cells if (name, cell) in ratios}
    if not found:
        return None
    worst = min(found, key=lambda cell: found[cell])
    return {"worst": found[worst], "worst_cell": worst, "mean": statistics.fmean(found.values())}


def _tokens_per_s(runs: Sequence[Mapping[str, Any]]) -> float:
    """Of these runs together."""
    seconds = sum(float(run["duration_s"]) for run in runs)
    return sum(run["num_output_tokens"] for run in runs) / seconds if seconds > 0.0 else 0.0


def _median_of_all(switches: Sequence[Mapping[str, Any]], key: str) -> float | None:
    """Those that were not made good count as the longest."""
    values = sorted(float("inf") if switch[key] is None else float(switch[key]) for switch in switches)
    middle = values[(len(values) - 1) // 2] if values else float("inf")
    return middle if middle != float("inf") else None
