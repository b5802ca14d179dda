"""`headway tune MODEL --workload W`: measure, replay, and write the schedule for Headway, vLLM, SGLang, TensorRT-LLM and llama.cpp."""

from __future__ import annotations

import argparse
import dataclasses
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.bench.load import LoadOptions
from headway.cli.bench_throughput import command_line
from headway.cli.flags import add_fields, read_fields
from headway.cli.settings import add_engine_arguments, engine_config
from headway.config import SpeculativeConfig, option
from headway.errors import ConfigError

if TYPE_CHECKING:
    from headway.engine.engine import Engine
    from headway.telemetry.trace import Trace
    from headway.tune.files import File
    from headway.tune.plan import Plan, Point
    from headway.tune.source import Source

EPILOG = """examples:
  headway tune --workload code-edit
  headway tune smollm2-135m --workload jsonl:prompts.jsonl --concurrencies 1,4,16,64 --output tuned
  headway tune --trace monday.jsonl --trace tuesday.jsonl

Each load is recorded twice: drafting max-k tokens, and plainly. Every shorter k is then replayed from the recording. Tune on the machine
and with prompts like those that will be served: acceptance belongs to the workload, cost to the machine.
With --trace nothing is measured: what a server recorded (`headway serve --trace`, or Headway inside vLLM) is replayed at each load.
"""


@dataclass(frozen=True)
class TuneOptions:
    """The command-line flags are made from these fields."""

    workload: str = option("mixed", "code-edit, summarize, chat, reasoning, mixed, drift, random or jsonl:PATH")
    concurrencies: str = option("1,4,16,64", "requests in flight to measure at; the schedule changes between them")
    drafter: str = option("ngram", "whose drafts to measure; ngram and suffix need no network and other engines have them, too")
    draft_model: str | None = option(None, "network of a drafter that has one; with --trace, where the recording does not name it")
    max_k: int = option(8, "longest draft to consider")
    num_prompts: int = option(0, "requests per load; 0: two per request in flight, at least 8")
    output_len: int = option(64, "tokens to write per request")
    seed: int = option(0, "chooses the prompts")
    trace: list[str] | None = option(None, "learn from this recorded traffic instead of measuring; may be given more than once")
    output: str = option("tuned", "directory for the files, made when it is not there")

    def __post_init__(self) -> None:
        for name, least in (("max_k", 1), ("num_prompts", 0), ("output_len", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name} must be >= {least}, got {getattr(self, name)}")

    def loads(self) -> list[LoadOptions]:
        words = [word.strip() for word in self.concurrencies.split(",") if word.strip()]
        if not words or not all(word.isdigit() and int(word) >= 1 for word in words):
            raise ConfigError(f"concurrencies must be whole numbers >= 1 separated by commas, got {self.concurrencies!r}")
        return [
            LoadOptions(workload=self.workload, num_prompts=self.num_prompts or max(8, 2 * concurrency), output_len=self.output_len,
                        concurrency=concurrency, seed=self.seed)
            for concurrency in sorted(set(map(int, words)))
        ]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_fields(parser.add_argument_group("tuning"), TuneOptions)
    add_engine_arguments(parser, skip=("seed", "trace"), speculation=False)


def main(args: argparse.Namespace) -> int:
    options = read_fields(args, TuneOptions)
    loads = options.loads()
    if options.trace:
        return _from_traces(options, [load.concurrency for load in loads], args)
    model = {} if options.draft_model is None else {"model": options.draft_model}
    static = SpeculativeConfig.parse({"method": options.drafter, "num_speculative_tokens": options.max_k, "policy": "static", **model})
    assert static is not None
    [drafter] = static.methods if len(static.methods) == 1 else [None]
    if drafter is None:
        raise ConfigError(f"tune measures one drafter at a time, got {options.drafter!r}")
    args.speculative_config = "off"
    args.sources["speculative_config"] = "default"
    config, _ = engine_config(args)
    if loads[-1].concurrency > config.max_num_seqs:
        raise ConfigError(f"{loads[-1].concurrency} requests in flight need --max-num-seqs {loads[-1].concurrency}")
    folder = _folder(options)

    from headway.engine.engine import Engine
    from headway.tune import plan
    from headway.tune.source import of_headway

    source = of_headway(drafter, static.spelled_out(drafter))
    engine = Engine(config, progress=True)
    points = _points(loads, *_record(engine, loads, static), options, drafter)
    return _write(plan.plan(drafter, points, config.max_num_seqs), source, options, folder, args)


def _from_traces(options: TuneOptions, concurrencies: list[int], args: argparse.Namespace) -> int:
    """The recorded sequences, so many at a time, with the recorded costs. Raises ConfigError for traces that do not belong together."""
    from headway.telemetry.trace import read_trace
    from headway.tune import plan, replay
    from headway.tune.source import of_traces

    traces = [read_trace(path) for path in options.trace or ()]
    drafter, source = of_traces(traces, options.draft_model)
    folder = _folder(options)
    costs = replay.fitted(*traces)
    max_k = min(options.max_k, max(trace.max_k for trace in traces))
    points = []
    for concurrency in concurrencies:
        worlds = [replay.World(trace, max_k=max_k, seed=options.seed, costs=costs, in_flight=concurrency) for trace in traces]
        found = {}
        for k in (0, *(k for k in replay.LENGTHS if k <= max_k)):
            outcomes = [replay.run(replay.Fixed(drafter, k), world) for world in worlds]
            found[k] = sum(out.num_tokens for out in outcomes) / sum(out.ms for out in outcomes) * 1e3
        points.append(plan.Point(concurrency, found))
    most = max(int(trace.header.get("max_num_seqs") or concurrencies[-1]) for trace in traces)
    return _write(plan.plan(drafter, points, most), source, dataclasses.replace(options, workload="recorded traffic"), folder, args)


def _folder(options: TuneOptions) -> Path:
    folder = Path(options.output)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot make the directory {folder}: {error.strerror}") from error
    return folder


def _write(found: Plan, source: Source, options: TuneOptions, folder: Path, args: argparse.Namespace) -> int:
    from headway.tune import emit

    files, left_out = emit.emit(found, source)
    for file in files:
        (folder / file.name).write_text(file.text, encoding="utf-8")
    (folder / "plan.svg").write_text(_chart(found, options), encoding="utf-8")
    _print(found, files, left_out, folder, command_line(args))
    return 0


def _record(engine: Engine, loads: list[LoadOptions], static: SpeculativeConfig) -> tuple[list[Trace], list[Trace]]:
    """(traces with drafts, traces without), one of each per load."""
    from headway.bench import report

    drafted, plain = [], []
    with report.progress_bar("requests", 2 * sum(load.num_prompts for load in loads)) as advance:
        for load in loads:
            print(f"measuring {load}", file=sys.stderr)
            drafted.append(_trace(engine, load, static, advance))
            plain.append(_trace(engine, load, None, advance))
    return drafted, plain


def _trace(engine: Engine, load: LoadOptions, speculative: SpeculativeConfig | None, advance: Any) -> Trace:
    """One run, recorded; its warm-up is not."""
    from headway.bench import throughput
    from headway.telemetry.trace import TraceWriter, read_trace

    engine.speculate(speculative)
    [prompts] = throughput.prepare(engine, load)
    with tempfile.TemporaryDirectory() as folder:
        header = {"max_k": engine.scheduler.max_k, "drafters": list(engine.drafters), "max_num_seqs": engine.config.max_num_seqs,
                  "max_num_batched_tokens": engine.config.max_num_batched_tokens}
        engine.trace = TraceWriter(Path(folder) / "trace.jsonl", header)
        try:
            throughput.run(engine, prompts, load, advance)
        finally:
            engine.trace.close()
            engine.trace = None
        return read_trace(Path(folder) / "trace.jsonl")


def _points(loads: list[LoadOptions], drafted: list[Trace], plain: list[Trace], options: TuneOptions, drafter: str) -> list[Point]:
    """Every k at every load, replayed with costs learned from all recordings."""
    from headway.tune import plan, replay

    costs = replay.fitted(*plain, *drafted)
    points = []
    for load, trace in zip(loads, drafted, strict=True):
        world = replay.World(trace, max_k=options.max_k, seed=options.seed, costs=costs)
        found = {k: replay.run(replay.Fixed(drafter, k), world).goodput for k in (0, *replay.LENGTHS) if k <= options.max_k}
        points.append(plan.Point(load.concurrency, found))
    return points


def _chart(found: Plan, options: TuneOptions) -> str:
    from headway.bench.svg import COLORS, GRAY, Line, line_chart

    lengths = sorted(found.points[0].goodput)
    lines = [
        Line("plain" if k == 0 else f"k = {k}", [(point.concurrency, point.goodput[k]) for point in found.points],
             GRAY if k == 0 else COLORS[index % len(COLORS)], dashed=k == 0, strong=k == 0)
        for index, k in enumerate(lengths)
    ]
    return line_chart(f"{options.workload}, {found.drafter}: predicted", "requests in flight", "output tokens/s", lines, log_x=True)


def _print(found: Plan, files: list[File], left_out: list[str], folder: Path, command: str) -> None:
    from rich.console import Console
    from rich.table import Table

    from headway.cli.top_view import bar

    lengths = sorted(found.points[0].goodput)
    table = Table(title=f"output tokens/s predicted with {found.drafter}, by k", title_justify="left", header_style="bold")
    table.add_column("in flight", justify="right")
    for k in lengths:
        table.add_column("plain" if k == 0 else str(k), justify="right")
    for point in found.points:
        cells = [f"[bold green]{point.goodput[k]:.0f}[/]" if k == point.k else f"{point.goodput[k]:.0f}" for k in lengths]
        table.add_row(str(point.concurrency), *cells)
    Console().print(table)
    most = max(point.goodput[k] for point in found.points for k in lengths)
    for point in found.points:
        print(f"{point.concurrency:>5} in flight  plain  {bar(point.goodput[0] / most, 40)} {point.goodput[0]:.0f}")
        print(f"{'':>16} k={point.k:<4} {bar(point.goodput[point.k] / most, 40)} {point.goodput[point.k]:.0f}  {point.reason}")
    print()
    for part in found.ranges:
        print(f"batch size {part.first} to {part.last}: k = {part.k}")
    print()
    for file in files:
        print(f"{folder / file.name}\n    {file.usage}")
        for note in file.notes:
            print(f"    note: {note}")
    for reason in left_out:
        print(f"not written: {reason}")
    print(f"{folder / 'plan.svg'}\n    the chart\nmade by: {command}")
