"""A sweep as PNG pictures. Needs matplotlib (`pip install headway[plots]`); everything else in the report does without."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from headway.bench.svg import COLORS, GRAY
from headway.bench.sweep import OFF, is_static
from headway.bench.sweep_analysis import CURVES, Analysis

Read = Callable[[Analysis, str, str], float]


def write_curves(analysis: Analysis, path: Path) -> bool:
    """Throughput and time per token over load. False, and no file, without matplotlib or without a cell to show."""
    return _write(analysis, path, [(label, read, None) for label, read in CURVES], 4.0)


def write_speedup(analysis: Analysis, path: Path) -> bool:
    """Throughput against no speculation over load: what the policy does where fixed lengths lose. False as above, or without `off`."""
    ratios = analysis.against(OFF)
    return bool(ratios) and _write(
        analysis, path, [("output tokens/s, times no speculation", lambda _, cell, name: ratios[name, cell], 0.5)], 3.6
    )


def _write(analysis: Analysis, path: Path, rows: list[tuple[str, Read, float | None]], height: float) -> bool:
    """A column per workload, a row per (label, what to show of a cell and configuration, where its axis begins)."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    by_workload = analysis.by_concurrency()
    if not by_workload:
        return False
    figure = Figure(figsize=(4.6 * len(by_workload), height * len(rows)), layout="constrained", dpi=110)
    axes = figure.subplots(len(rows), len(by_workload), squeeze=False, sharey="row")
    for column, (workload, cells) in enumerate(by_workload.items()):
        for row, (label, read, _) in enumerate(rows):
            axis = axes[row][column]
            for name in analysis.configurations:
                axis.plot(*zip(*[(load, read(analysis, cell, name)) for load, cell in cells], strict=True), **_style(analysis, name))
            axis.set_xscale("log", base=2)
            axis.set_xticks([load for load, _ in cells], [str(load) for load, _ in cells])
            axis.grid(alpha=0.3)
            if column == 0:
                axis.set_ylabel(label)
        axes[0][column].set_title(workload)
        axes[-1][column].set_xlabel("requests in flight")
    for row, (_, _, bottom) in enumerate(rows):
        axes[row][0].set_ylim(bottom=bottom or 0.0)   # all columns are drawn: they share it
    axes[0][-1].legend(fontsize=8)
    FigureCanvasAgg(figure)   # the figure draws on it
    figure.savefig(path)
    return True


def _style(analysis: Analysis, name: str) -> dict[str, Any]:
    """Plain decoding grey and dashed, fixed lengths thin, policies strong."""
    color = GRAY if name == OFF else COLORS[analysis.configurations.index(name) % len(COLORS)]
    return {
        "color": color, "linestyle": "--" if name == OFF else "-", "linewidth": 1.2 if is_static(name) else 2.8, "marker": "o",
        "markersize": 3, "label": "no speculation" if name == OFF else name if is_static(name) else f"{name}, policy decides",
    }  # fmt: skip
