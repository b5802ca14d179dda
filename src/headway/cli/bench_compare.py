"""`headway bench compare`: A B A B ..., so that a machine that drifts drifts for both."""

from __future__ import annotations

import argparse
import dataclasses
import shlex
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from headway.bench.http_load import ServeOptions
from headway.bench.load import LoadOptions
from headway.cli.bench_serve import ServerPrompt, add_tokenizer_argument, prompts_for
from headway.cli.bench_throughput import add_load_arguments, command_line, config_json
from headway.cli.flags import Parser, add_fields, positive_int, read_fields, underlay
from headway.cli.settings import add_engine_arguments, engine_config
from headway.errors import ConfigError

if TYPE_CHECKING:
    from headway.bench.records import Run
    from headway.engine.engine import Engine

Advance = Callable[[int], None]


@dataclasses.dataclass(frozen=True, slots=True)
class Arm:
    """One side of the comparison: (repeat, progress) -> its run."""

    name: str
    run: Callable[[int, Advance], Run]
    description: dict[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    for arm in "ab":
        text = f"engine and speculation flags of configuration {arm.upper()}, over the common ones below"
        parser.add_argument(f"--{arm}", metavar="FLAGS", default=None, help=text)
    for arm in "ab":
        parser.add_argument(f"--base-url-{arm}", metavar="URL", default=None, help=f"server {arm.upper()}, to compare two running servers")
    text = "runs of each, with new prompts each time (default: 3)"
    parser.add_argument("--repeats", type=positive_int, default=3, metavar="N", help=text)
    add_load_arguments(parser)
    add_engine_arguments(parser, skip=("seed",))
    add_fields(parser.add_argument_group("servers"), ServeOptions, skip=("base_url",))
    add_tokenizer_argument(parser)


def main(args: argparse.Namespace) -> int:
    load = read_fields(args, LoadOptions)
    flags, urls = (args.a, args.b), (args.base_url_a, args.base_url_b)
    given = flags if urls == (None, None) else urls
    if None in given or (given is urls and flags != (None, None)):
        raise ConfigError('give two configurations (--a "--spec off" --b "--spec default") or two servers (--base-url-a, --base-url-b)')

    from headway.bench import report

    output = report.check_output(args.output)
    arms = _engines(args, load) if given is flags else _servers(args, load)
    runs: tuple[list[Run], list[Run]] = ([], [])
    with report.progress_bar("requests", 2 * args.repeats * load.num_prompts) as advance:
        for repeat in range(args.repeats):
            for arm, found in zip(arms, runs, strict=True):
                found.append(arm.run(repeat, advance))
    result = report.compare(*runs)
    title = f"last of {args.repeats} runs: {load}"
    report.print_table(title, {f"{letter}: {arm.name}": found[-1] for letter, arm, found in zip("AB", arms, runs, strict=True)})
    print(
        f"B / A = {result['ratio']:.3f} in output tokens/s (neighbouring runs: {result['ratio_min']:.3f} to {result['ratio_max']:.3f}); "
        f"{result['equal_outputs_share']:.1%} of outputs equal"
    )
    for letter, arm in zip("ab", arms, strict=True):
        result[letter].update(arm.description)
    return report.finish(report.document("compare", command_line(args), **result, load=dataclasses.asdict(load)), output)


def _engines(args: argparse.Namespace, load: LoadOptions) -> list[Arm]:
    """Two engines, both loaded before anything runs. Raises ConfigError for flags that cannot work."""
    configs = [engine_config(_arm_flags(args, letter)) for letter in "ab"]
    if len(traces := {config.trace for config, _ in configs} - {None}) == 1 and all(config.trace for config, _ in configs):
        raise ConfigError(f"both configurations would write the trace {traces.pop()}: give --trace inside --a and --b")

    from headway.bench import throughput
    from headway.engine.engine import Engine

    arms = []
    for letter, (config, settings) in zip("ab", configs, strict=True):
        if letter == "a":
            # On a GPU the first of two must leave the memory of the second.
            config = dataclasses.replace(config, gpu_memory_utilization=config.gpu_memory_utilization / 2)
        engine = Engine(config, progress=True)
        prompts = throughput.prepare(engine, load, args.repeats)
        flags = getattr(args, letter)
        arms.append(Arm(flags, partial(_run_engine, engine, prompts, load), {"flags": flags, "config": config_json(settings)}))
    return arms


def _run_engine(engine: Engine, prompts: list[list[list[int]]], load: LoadOptions, repeat: int, advance: Advance) -> Run:
    from headway.bench import throughput

    return throughput.run(engine, prompts[repeat], load, advance)


def _arm_flags(args: argparse.Namespace, letter: str) -> argparse.Namespace:
    """The flags of one arm over the common ones."""
    parser = Parser(prog=f"headway bench compare --{letter}")
    add_engine_arguments(parser, skip=("seed",))
    try:
        words = shlex.split(getattr(args, letter))
    except ValueError as error:
        raise ConfigError(f"--{letter}: {error}") from error
    own = argparse.Namespace()
    parser.parse_args(words, own)
    own.sources = dict.fromkeys(vars(own), "flag")
    underlay(own, args)
    return own


def _servers(args: argparse.Namespace, load: LoadOptions) -> list[Arm]:
    from headway.bench import client
    from headway.bench import http_load as bench

    arms = []
    for url in (args.base_url_a, args.base_url_b):
        options = dataclasses.replace(read_fields(args, ServeOptions), base_url=url)
        model = getattr(args, "model_name", None) or client.run(bench.served_model(options.target()))
        runs, warmup = prompts_for(model, load, options, args.tokenizer, args.repeats)
        client.run(bench.warm_up(warmup, model, load, options))
        arms.append(Arm(url, partial(_run_server, runs, model, load, options), {"base_url": url, "model": model}))
    return arms


def _run_server(
    runs: list[list[ServerPrompt]], model: str, load: LoadOptions, options: ServeOptions, repeat: int, advance: Advance
) -> Run:
    from headway.bench import client
    from headway.bench import http_load as bench

    return client.run(bench.run(runs[repeat], model, load, options, advance))
