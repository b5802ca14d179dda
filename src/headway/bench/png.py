"""The sweep's main plot as a picture: throughput and time per token against concurrency, one line per configuration. Needs matplotlib
(`pip install headway[plots]`); everything else in the report does without."""

from __future__ import annotations

from pathlib import Path

from headway.bench.svg import COLORS, GRAY
from headway.bench.sweep import OFF, is_static
from headway.bench.sweep_analysis import CURVES, Analysis


def write(analysis: Analysis, path: Path) -> bool:
    """False, and no file, without matplotlib or without a cell to show."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    by_workload = analysis.by_concurrency()
    if not by_workload:
        return False
    figure = Figure(figsize=(5.2 * len(by_workload), 8.0), layout="constrained")
    axes = figure.subplots(len(CURVES), len(by_workload), squeeze=False)
    for column, (workload, cells) in enumerate(by_workload.items()):
        for row, (label, read) in enumerate(CURVES):
            axis = axes[row][column]
            for name in analysis.configurations:
                points = [(load, read(analysis, cell, name)) for load, cell in cells]
                color = GRAY if name == OFF else COLORS[analysis.configurations.index(name) % len(COLORS)]
                width, dashes = (1.2 if is_static(name) and name != OFF else 2.4), "--" if name == OFF else "-"
                axis.plot(*zip(*points, strict=True), dashes, color=color, linewidth=width, marker="o", markersize=3, label=name)
            axis.set_xscale("log", base=2)
            axis.set_xticks([load for load, _ in cells], [str(load) for load, _ in cells])
            axis.set_ylim(bottom=0)
            axis.set_ylabel(label)
            axis.grid(alpha=0.3)
        axes[0][column].set_title(workload)
        axes[-1][column].set_xlabel("requests in flight")
    axes[0][0].legend(fontsize=7)
    FigureCanvasAgg(figure).print_png(str(path))
    return True
