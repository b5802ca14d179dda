"""`headway bench sweep`."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.bench.sweep import OFF, SweepOptions
from headway.cli.bench_throughput import command_line, config_json
from headway.cli.flags import add_fields, read_fields
from headway.cli.settings import add_engine_arguments, engine_config
from headway.errors import ConfigError

if TYPE_CHECKING:
    from headway.bench.sweep_analysis import Analysis


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_fields(parser.add_argument_group("sweep"), SweepOptions)
    text = (
        "results, rewritten after every round; an existing sweep is continued. FILE.html is the report, FILE.png its main plot where "
        "matplotlib is installed (default: results/sweep.json)"
    )
    parser.add_argument("--output", default="results/sweep.json", metavar="FILE.json", help=text)
    parser.add_argument("--report-only", action="store_true", help="write the report of what --output holds, measure nothing")
    parser.add_argument("--picture", metavar="FILE.png", help="throughput against no speculation over load, by itself (needs matplotlib)")
    add_engine_arguments(parser, skip=("seed", "trace"), speculation=False)


def main(args: argparse.Namespace) -> int:
    options = read_fields(args, SweepOptions)

    from headway.bench import report

    output = report.check_output(args.output)
    assert output is not None
    code = _report_only(output) if args.report_only else _sweep(args, options, output)
    if args.picture:
        _draw(output, Path(args.picture))
    return code


def _sweep(args: argparse.Namespace, options: SweepOptions, output: Path) -> int:
    began = time.perf_counter()

    from headway.bench import environment, sweep, sweep_run

    args.speculative_config = "off"   # a sweep chooses how to speculate itself
    args.sources["speculative_config"] = "default"
    config, settings = engine_config(args)
    most = max(cell.load.concurrency for cell in sweep.cells(options))
    if most > config.max_num_seqs:
        raise ConfigError(f"{most} requests in flight need --max-num-seqs {most}, it is {config.max_num_seqs}")
    shown = {key: value for key, value in config_json(settings).items() if not key.startswith("speculative")}
    head = sweep.head(options, shown, model=config.model)
    results = sweep_run.Results(output, head)
    engines = sweep_run.engines(config, head["configurations"])
    model = next(iter(engines.values())).model
    results.document |= {
        "dtype": str(model.dtype).removeprefix("torch."), "device": str(model.device), "command": command_line(args),
        **environment.describe(),
    }
    cells = sweep.cells(options)
    num_runs = len(cells) * len(engines) * options.rounds
    print(f"{len(cells)} cells x {options.rounds} rounds x {len(engines)} configurations = {num_runs} runs; "
          f"{len(results.runs)} are in {output} already", file=sys.stderr)
    try:
        with _bar(num_runs) as advance:
            sweep_run.Sweep(engines, options, results, advance, began).run()
    except KeyboardInterrupt:
        print(f"interrupted: the same command continues {output}", file=sys.stderr)
        _finish(results.document, output)
        raise
    return _finish(results.document, output)


def _report_only(output: Path) -> int:
    try:
        document = json.loads(output.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read the sweep {output}: {error}") from error
    if not isinstance(document, dict) or document.get("benchmark") != "sweep" or "rounds" not in document.get("options", {}):
        raise ConfigError(f"{output} is not a sweep in rounds")
    return _finish(document, output)


def _draw(output: Path, picture: Path) -> None:
    from headway.bench import pictures
    from headway.bench.sweep_analysis import Analysis

    analysis = Analysis(json.loads(output.read_text(encoding="utf-8")))
    if not pictures.write_speedup(analysis, picture):
        raise ConfigError("--picture needs matplotlib (pip install headway[plots]) and cells at several loads with `off` beside them")


def _finish(document: dict[str, Any], output: Path) -> int:
    """Analysis, report and last line; exit code 1 when a run was invalid."""
    from headway.bench import pictures, report
    from headway.bench.sweep_analysis import Analysis
    from headway.bench.sweep_report import html

    analysis = Analysis(document)   # of whole rounds only
    errors = [error for run in document["runs"] for error in run["errors"]]
    document |= {"analysis": analysis.to_json(), "invalid": any(run["invalid"] for run in document["runs"]), "errors": errors[:5]}
    page = output.with_suffix(".html")
    page.write_text(html(document), encoding="utf-8")
    _print_summary(analysis)
    for item in document["left_out"]:
        needs = f", which need about {item['needs_s']:.0f} s" if item["needs_s"] else ""
        print(f"left out for time: {item['cell']}: {item['num_rounds']} rounds{needs}", file=sys.stderr)
    picture = output.with_suffix(".png")
    drawn = pictures.write_curves(analysis, picture)
    print(f"report: {page}{f' and {picture}' if drawn else ''}", file=sys.stderr)
    code = report.finish({key: value for key, value in document.items() if key != "runs"}, None)
    output.write_text(json.dumps(document) + "\n", encoding="utf-8")
    return code


def _print_summary(analysis: Analysis) -> None:
    from rich.console import Console
    from rich.table import Table

    def table(title: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
        found = Table(title=title, title_justify="left", header_style="bold")
        for column, name in enumerate(head):
            found.add_column(name, justify="right" if column else "left")
        for row in rows:
            found.add_row(*row)
        if found.row_count:
            Console().print(found)

    off, best = analysis.against(OFF), analysis.against(None)
    for base, ratios in (("none", off), ("the best static k", best)):
        rows = [[name, *(f"{ratios[name, cell]:.3f}" for cell in analysis.cells)] for name in analysis.configurations] if ratios else []
        table(f"output tokens/s against {base}, all rounds together", ("", *analysis.cells), rows)
    summary = analysis.summary()
    bases = {"off": "against_off", "best static k": "against_best_static", "chosen static k": "against_chosen_static"}
    columns = [column for base in bases for column in (f"/ {base}, worst", "mean")]
    head = ("configuration", *columns, *(f"mean / {name}" for name in analysis.adaptive))
    rows = []
    for name, found in summary.items():
        sides = [found[key] for key in bases.values()]
        rows.append([name, *(f"{side[key]:.3f}" if side else "-" for side in sides for key in ("worst", "mean")),
                     *(f"{found['mean_against'].get(other, 1.0):.3f}" for other in analysis.adaptive)])  # fmt: skip
    table(f"{len(analysis.cells)} cells", head, rows)
    table(
        "after a switch, until 95 % of the best static k again: medians over switches",
        ("cell", "configuration", "to", "recovered", "steps", "seconds"),
        [
            [cell, name, kind, f"{item['recovered']} of {item['switches']}",
             *("-" if item[key] is None else f"{item[key]:g}" for key in ("steps", "seconds"))]
            for cell, found in analysis.recoveries().items() for name in analysis.adaptive for kind, item in found.get(name, {}).items()
        ],
    )  # fmt: skip


@contextmanager
def _bar(total: int) -> Iterator[Callable[[int, str], None]]:
    """A bar on stderr with the time left; a line per run where stderr is not a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
    done = 0

    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=total)

        def advance(count: int, what: str) -> None:
            nonlocal done
            done += count
            bar.update(task, advance=count, description=what)
            if count and not console.is_terminal:
                print(f"{done}/{total} {what}", file=sys.stderr, flush=True)

        yield advance
