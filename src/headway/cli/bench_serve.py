"""`headway bench serve`."""

from __future__ import annotations

import argparse
import dataclasses
from typing import TYPE_CHECKING

from headway.bench.http_load import ServeOptions
from headway.bench.load import LoadOptions
from headway.bench.workloads import Prompt
from headway.cli.bench_throughput import add_load_arguments, command_line
from headway.cli.flags import add_fields, read_fields
from headway.errors import ConfigError, ModelError

if TYPE_CHECKING:
    from headway.engine.tokenizer import Tokenizer

ServerPrompt = Prompt | list[int]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model_name", nargs="?", metavar="MODEL", help="the model's name on the server (default: the first it lists)")
    add_load_arguments(parser)
    add_fields(parser.add_argument_group("server"), ServeOptions)
    add_tokenizer_argument(parser)


def add_tokenizer_argument(parser: argparse.ArgumentParser) -> None:
    text = "writes prompts as token ids for the endpoint completions (default: the served model, when it can be found here)"
    parser.add_argument("--tokenizer", default=None, metavar="MODEL", help=text)


def main(args: argparse.Namespace) -> int:
    load, serve = read_fields(args, LoadOptions), read_fields(args, ServeOptions)
    if load.request_rate is not None and "concurrency" in args.sources:
        raise ConfigError("--request-rate (open loop) and --concurrency (closed loop) exclude each other")

    from headway.bench import client, report
    from headway.bench import http_load as bench

    output = report.check_output(args.output)
    model = args.model_name or client.run(bench.served_model(serve.target()))
    runs, warmup = prompts_for(model, load, serve, args.tokenizer)
    client.run(bench.warm_up(warmup, model, load, serve))
    with report.progress_bar("requests", load.num_prompts) as advance:
        run = client.run(bench.run(runs[0], model, load, serve, advance))
    report.print_table(f"{serve.base_url}, {load}", {"": run})
    result = report.document(
        "serve", command_line(args), **run.summary(), model=model, load=dataclasses.asdict(load),
        server={"base_url": serve.base_url, "endpoint": serve.endpoint},
    )
    return report.finish(result, output)


def prompts_for(
    model: str, load: LoadOptions, serve: ServeOptions, tokenizer_name: str | None, num_runs: int = 1
) -> tuple[list[list[ServerPrompt]], list[ServerPrompt]]:
    """(the prompts of each run, the warm-up prompts), as token ids for completions unless all of them are plain text."""
    from headway.bench import workloads

    tokenizer = None
    num_prompts = load.num_prompts * num_runs
    if serve.endpoint == "completions" and (tokenizer_name is not None or not _is_plain_text(load.workload, num_prompts)):
        tokenizer = load_tokenizer(tokenizer_name or model)
    vocab_size = tokenizer.vocab_size if tokenizer else None
    prompts, warmup = workloads.load_with_warmup(load.workload, num_prompts, load.warmup, load.seed, vocab_size)

    def ready(prompt: Prompt) -> ServerPrompt:
        if tokenizer is not None:
            return prompt.encode(tokenizer)
        if serve.endpoint == "completions" and prompt.messages is not None:
            return Prompt(text=str(prompt.messages[-1]["content"]))   # a warm-up prompt; the measured ones are text already
        return prompt

    measured = [ready(prompt) for prompt in prompts]
    return [measured[start : start + load.num_prompts] for start in range(0, num_prompts, load.num_prompts)], list(map(ready, warmup))


def _is_plain_text(workload: str, num_prompts: int) -> bool:
    from headway.bench import workloads

    return workload.startswith("jsonl:") and all(prompt.text is not None for prompt in workloads.load(workload, num_prompts, 0))


def load_tokenizer(name: str) -> Tokenizer:
    """Raises ConfigError that says how to do without."""
    from headway.engine.tokenizer import Tokenizer
    from headway.models import hub

    try:
        return Tokenizer(hub.resolve(name))
    except ModelError as error:
        raise ConfigError(f"no tokenizer for {name!r}: name one with --tokenizer, or use --endpoint chat ({error})") from error
