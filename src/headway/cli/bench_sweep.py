"""`headway bench sweep`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from headway.bench.sweep import Sweep, SweepOptions
from headway.cli.bench_throughput import command_line, config_json
from headway.cli.flags import add_fields, read_fields
from headway.cli.settings import add_engine_arguments, engine_config
from headway.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_fields(parser.add_argument_group("sweep"), SweepOptions)
    text = (
        "results, rewritten after every run; an existing sweep is continued. FILE.html is the report, FILE.png its main plot where "
        "matplotlib is installed (default: results/sweep.json)"
    )
    parser.add_argument("--output", default="results/sweep.json", metavar="FILE.json", help=text)
    parser.add_argument("--report-only", action="store_true", help="write the report of what --output holds, measure nothing")
    add_engine_arguments(parser, skip=("seed", "trace"), speculation=False)


def main(args: argparse.Namespace) -> int:
    options = read_fields(args, SweepOptions)

    from headway.bench import report

    output = report.check_output(args.output)
    assert output is not None
    return _report_only(output) if args.report_only else _sweep(args, options, output)


def _sweep(args: argparse.Namespace, options: SweepOptions, output: Path) -> int:
    from headway.bench import environment, sweep
    from headway.engine.engine import Engine

    args.speculative_config = "off"   # a sweep chooses how to speculate itself
    args.sources["speculative_config"] = "default"
    config, settings = engine_config(args)
    most = max(cell.load.concurrency for cell in sweep.cells(options))
    if most > config.max_num_seqs:
        raise ConfigError(f"{most} requests in flight need --max-num-seqs {most}, it is {config.max_num_seqs}")
    shown = {key: value for key, value in config_json(settings).items() if not key.startswith("speculative")}
    head = sweep.head(options, shown, model=config.model)
    results = sweep.Results(output, head)
    engine = Engine(config, progress=True)
    results.document |= {
        "dtype": str(engine.model.dtype).removeprefix("torch."), "device": str(engine.model.device), "command": command_line(args),
        **environment.describe(),
    }
    num_runs = len(sweep.cells(options)) * len(head["configurations"]) * options.repeats
    print(f"{len(head['cells'])} cells x {len(head['configurations'])} configurations x {options.repeats} repeats = {num_runs} runs; "
          f"{len(results.runs)} are in {output} already", file=sys.stderr)
    try:
        with _bar(num_runs) as advance:
            Sweep(engine, options, results, advance).run()
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
    if not isinstance(document, dict) or document.get("benchmark") != "sweep":
        raise ConfigError(f"{output} is not a sweep")
    return _finish(document, output)


def _finish(document: dict[str, Any], output: Path) -> int:
    """Analysis, report and last line; exit code 1 when a run was invalid."""
    from headway.bench import png, report
    from headway.bench.sweep_analysis import Analysis
    from headway.bench.sweep_report import html

    analysis = Analysis(document)   # of whole blocks only
    errors = [error for run in document["runs"] for error in run["errors"]]
    document |= {"analysis": analysis.to_json(), "invalid": any(run["invalid"] for run in document["runs"]), "errors": errors[:5]}
    page = output.with_suffix(".html")
    page.write_text(html(document), encoding="utf-8")
    _print_summary(analysis)
    for item in document["left_out"]:
        needs = "" if item["needs_s"] is None else f", which need about {item['needs_s']:.0f} s"
        print(f"left out for time: {item['cell']}, repeat {item['repeat'] + 1}: {item['num_runs']} runs{needs}", file=sys.stderr)
    picture = output.with_suffix(".png")
    drawn = png.write(analysis, picture)
    print(f"report: {page}{f' and {picture}' if drawn else ''}", file=sys.stderr)
    code = report.finish({key: value for key, value in document.items() if key != "runs"}, None)
    output.write_text(json.dumps(document) + "\n", encoding="utf-8")
    return code


def _print_summary(analysis: Any) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{len(analysis.cells)} cells: output tokens/s, ratio of medians", title_justify="left", header_style="bold")
    for name in ("configuration", "/ off, worst", "mean", "/ best static k, worst", "mean", "worst cell"):
        table.add_column(name, justify="left" if name in ("configuration", "worst cell") else "right")
    for name, found in analysis.summary().items():
        off, best = found["against_off"], found["against_best_static"]
        cells = [f"{side[key]:.3f}" if side else "-" for side in (off, best) for key in ("worst", "mean")]
        table.add_row(name, *cells, best["worst_cell"] if best else "-")
    Console().print(table)


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
