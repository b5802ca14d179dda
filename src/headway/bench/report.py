"""What a benchmark prints: a table for people, then one JSON document on the last line for programs."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from headway.bench import environment
from headway.bench.records import Run
from headway.errors import ConfigError


def document(kind: str, command: str, **sections: Any) -> dict[str, Any]:
    """The final document: what was measured, and everything one needs to measure it again."""
    return {"benchmark": kind, **sections, "command": command, **environment.describe()}


def check_output(path: str | None) -> Path | None:
    """Before minutes are spent: raises ConfigError when `path` cannot be written."""
    if path is None:
        return None
    target = Path(path)
    if target.is_dir():
        raise ConfigError(f"cannot write --output {path}: it is a directory")
    if not target.parent.is_dir():
        raise ConfigError(f"cannot write --output {path}: there is no directory {target.parent}")
    return target


def finish(result: Mapping[str, Any], output: Path | None) -> int:
    """Writes the file and the last line; returns the exit code: 1 when the numbers do not count."""
    if output is not None:
        try:
            output.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"cannot write --output {output}: {error.strerror}") from error
    for message in result["errors"]:
        print(f"invalid run: {message}", file=sys.stderr)
    print(json.dumps(result), flush=True)
    return 1 if result["invalid"] else 0


def print_table(title: str, columns: Mapping[str, Run]) -> None:
    """One column per run."""
    from rich.console import Console
    from rich.table import Table

    summaries = {name: run.summary() for name, run in columns.items()}
    table = Table(title=title, title_justify="left", header_style="bold")
    table.add_column("")
    for name in columns:
        table.add_column(name, justify="right")
    for label, read in ROWS:
        table.add_row(label, *(read(summary) for summary in summaries.values()))
    Console().print(table)


def _number(key: str, form: str = "{:.1f}") -> Callable[[Mapping[str, Any]], str]:
    return lambda summary: "-" if summary[key] is None else form.format(summary[key])


def _spread(key: str) -> Callable[[Mapping[str, Any]], str]:
    return lambda summary: "-" if summary[key] is None else f"{summary[key]['p50']:.1f} / {summary[key]['p99']:.1f}"


def _shares(summary: Mapping[str, Any]) -> str:
    shares = summary["time_shares"]
    return "-" if shares is None else "/".join(f"{shares[part]:.1%}" for part in ("draft", "verify", "overhead"))


ROWS: Sequence[tuple[str, Callable[[Mapping[str, Any]], str]]] = (
    ("output tokens/s", _number("output_tokens_per_s")),
    ("requests", _number("num_requests", "{:d}")),
    ("output tokens", _number("num_output_tokens", "{:d}")),
    ("duration s", _number("duration_s", "{:.2f}")),
    ("TTFT ms, p50 / p99", _spread("ttft_ms")),
    ("TPOT ms, p50 / p99", _spread("tpot_ms")),
    ("E2E ms, p50 / p99", _spread("e2el_ms")),
    ("mean acceptance length", _number("mean_acceptance_length", "{:.2f}")),
    ("drafts accepted", _number("draft_acceptance_rate", "{:.1%}")),
    ("accepted by position", lambda s: " ".join(f"{rate:.2f}" for rate in s["acceptance_by_position"][:4]) or "-"),
    ("mean k", _number("mean_k", "{:.2f}")),
    ("draft/verify/overhead", _shares),
)


@contextmanager
def progress_bar(label: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar on stderr when that is a terminal; yields the function that advances it."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(label, total=total)
        yield lambda count: bar.advance(task, count)


def compare(runs_a: Sequence[Run], runs_b: Sequence[Run]) -> dict[str, Any]:
    """b against a, in output tokens per second: the ratio of the medians, and the ratios of the neighbouring runs as its spread.

    The machine drifts; two runs next to each other drift alike, so the spread of their ratios is what the ratio can be trusted to.
    """
    ratios = [b.output_tokens_per_s / a.output_tokens_per_s if a.output_tokens_per_s else 0.0 for a, b in zip(runs_a, runs_b, strict=True)]
    medians = {name: statistics.median(run.output_tokens_per_s for run in runs) for name, runs in (("a", runs_a), ("b", runs_b))}
    errors = [error for run in (*runs_a, *runs_b) for error in run.errors]
    return {
        "ratio": medians["b"] / medians["a"] if medians["a"] else 0.0,
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
        "ratios": ratios,
        "median_output_tokens_per_s": medians,
        "outputs_equal": all(a.output_hash == b.output_hash for a, b in zip(runs_a, runs_b, strict=True)),
        "equal_outputs_share": _equal_share(runs_a, runs_b),
        "invalid": bool(errors),
        "errors": errors[:5],
        "a": {"runs": [run.summary() for run in runs_a]},
        "b": {"runs": [run.summary() for run in runs_b]},
    }


def _equal_share(runs_a: Sequence[Run], runs_b: Sequence[Run]) -> float:
    """Share of requests whose two outputs are equal."""
    pairs = [(x.output, y.output) for a, b in zip(runs_a, runs_b, strict=True) for x, y in zip(a.records, b.records, strict=True)]
    return sum(x == y for x, y in pairs) / len(pairs)
