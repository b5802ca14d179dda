"""What a sweep says: every configuration against no speculation and against the best static k of each cell.

Throughput of a configuration in a cell is the median over its repeats; a ratio is one median over the other, on the same prompts, and
its spread the least and largest ratio of one repeat. The best static k is picked with hindsight, noise included: an oracle no user has.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from headway.bench.recovery import recoveries
from headway.bench.sweep import OFF, complete_blocks, is_static

Ratios = dict[tuple[str, str], float]
"""(configuration, cell) -> ratio"""

TABLE = "batch_table"


class Analysis:
    """Medians and ratios over the complete blocks of a sweep's document."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        self.configurations: list[str] = list(document["configurations"])
        self.cells: list[str] = []
        self.repeats: dict[str, list[dict[str, dict[str, Any]]]] = {}   # cell -> per repeat: configuration -> run
        for cell, _, runs in complete_blocks(dict(document)):
            self.repeats.setdefault(cell, []).append(runs)
        self.cells = [cell for cell in document["cells"] if cell in self.repeats]
        self.statics = [name for name in self.configurations if is_static(name)]
        self.adaptive = [name for name in self.configurations if not is_static(name)]

    def median(self, cell: str, name: str, read: str = "output_tokens_per_s") -> float:
        """Over the repeats; `read` may go one level deep: "tpot_ms.p50". 0.0 where nothing was measured."""
        key, _, sub = read.partition(".")
        values = [run[name][key][sub] if sub else run[name][key] for run in self.repeats[cell] if run[name].get(key) is not None]
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
        return max(self.statics, key=lambda name: self.median(cell, name), default=None)

    def against(self, base: str | None) -> Ratios:
        """Throughput over that of `base` (None: the best static k of the cell)."""
        found = {}
        for cell in self.cells:
            reference = base if base is not None else self.best_static(cell)
            if reference is not None and reference in self.configurations and self.median(cell, reference) > 0.0:
                for name in self.configurations:
                    found[name, cell] = self.median(cell, name) / self.median(cell, reference)
        return found

    def spread(self, cell: str, name: str, base: str) -> tuple[float, float]:
        """Least and largest ratio of one repeat."""
        pairs = [(run[name]["output_tokens_per_s"], run[base]["output_tokens_per_s"]) for run in self.repeats[cell]]
        ratios = [a / b for a, b in pairs if b > 0.0] or [0.0]
        return min(ratios), max(ratios)

    def summary(self) -> dict[str, dict[str, Any]]:
        """Per configuration that is not a static k: worst cell and mean over cells of both ratios; mean against each of the others."""
        off, best = self.against(OFF), self.against(None)
        return {
            name: {
                "against_off": _worst_and_mean(off, name, self.cells),
                "against_best_static": _worst_and_mean(best, name, self.cells),
                "mean_against": {
                    other: statistics.fmean(self.median(cell, name) / self.median(cell, other) for cell in self.cells)
                    for other in self.adaptive
                    if other != name and self.cells and all(self.median(cell, other) > 0.0 for cell in self.cells)
                },
            }
            for name in self.adaptive
        }

    def losses(self, floor: float = 1.0) -> list[dict[str, Any]]:
        """Every cell in which a configuration that is not a static k is below `floor` times the best static k, worst first."""
        found = []
        for (name, cell), ratio in self.against(None).items():
            base = self.best_static(cell)
            if name in self.adaptive and base is not None and ratio < floor:
                low, high = self.spread(cell, name, base)
                found.append({
                    "configuration": name, "cell": cell, "best_static": base, "ratio": ratio, "ratio_min": low, "ratio_max": high,
                    "against_off": self.against(OFF).get((name, cell)),
                    "output_tokens_per_s": self.median(cell, name), "best_output_tokens_per_s": self.median(cell, base),
                })
        return sorted(found, key=lambda loss: loss["ratio"])

    def recoveries(self) -> dict[str, list[dict[str, list[dict[str, Any]]]]]:
        """Drifting cell -> per repeat: configuration -> what `recovery.recoveries` says of each switch."""
        found = {cell: [recoveries(runs, self.statics) for runs in repeats] for cell, repeats in self.repeats.items()}
        return {cell: repeats for cell, repeats in found.items() if any(repeats)}

    def accounts(self, name: str) -> dict[str, dict[str, float | None]]:
        """Cell -> medians over repeats of where the configuration's time went and of its forecasts' errors; where that was recorded."""
        found: dict[str, dict[str, float | None]] = {}
        for cell in self.cells:
            runs = [run[name]["accounts"] for run in self.repeats[cell] if run[name].get("accounts")]
            if runs:
                columns = {key: [run[key] for run in runs if run[key] is not None] for key in runs[0]}
                found[cell] = {key: statistics.median(values) if values else None for key, values in columns.items()}
        return found

    def equal_outputs(self) -> float | None:
        """Share of runs that wrote exactly what plain decoding wrote in the same block; None without a plain configuration."""
        if OFF not in self.configurations:
            return None
        same = [
            runs[name]["output_hash"] == runs[OFF]["output_hash"]
            for repeats in self.repeats.values() for runs in repeats for name in self.configurations if name != OFF
        ]
        return sum(same) / len(same) if same else None

    def to_json(self) -> dict[str, Any]:
        return {
            "num_cells": len(self.cells),
            "num_blocks": sum(map(len, self.repeats.values())),
            "best_static": {cell: self.best_static(cell) for cell in self.cells},
            "median_output_tokens_per_s": {cell: {name: self.median(cell, name) for name in self.configurations} for cell in self.cells},
            "summary": self.summary(),
            "losses": self.losses(),
            "accounts": {name: self.accounts(name) for name in self.adaptive},
            "recoveries": self.recoveries(),
            "equal_outputs_share": self.equal_outputs(),
        }


def _worst_and_mean(ratios: Ratios, name: str, cells: Sequence[str]) -> dict[str, Any] | None:
    found = {cell: ratios[name, cell] for cell in cells if (name, cell) in ratios}
    if not found:
        return None
    worst = min(found, key=lambda cell: found[cell])
    return {"worst": found[worst], "worst_cell": worst, "mean": statistics.fmean(found.values())}
