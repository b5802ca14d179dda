"""`headway generate`: one prompt, streamed as it is written; with --show-drafts, which tokens were drafted."""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from headway.cli.sampling import add_sampling_arguments, sampling_params
from headway.cli.settings import add_engine_arguments, engine_config
from headway.cli.terminal import DraftWriter, colored, legend
from headway.errors import ConfigError
from headway.spec_decode_metrics import SpecDecodeMetrics
from headway.structured_outputs import StructuredOutputsParams
from headway.types import Request

if TYPE_CHECKING:
    from headway.engine.engine import Engine

EPILOG = """examples:
  headway generate -p "The three laws of robotics are"
  headway generate --chat --show-drafts -p "Repeat after me, twice: the quick brown fox jumps over the lazy dog."
  cat prompt.txt | headway generate --spec-method ngram --spec-tokens 4 --max-tokens 64
"""
DEFAULTS = {"max_tokens": 256, "temperature": 0.0}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-p", "--prompt", default=None, metavar="TEXT", help="the prompt; without it, standard input is read to its end")
    parser.add_argument("--chat", action="store_true", help="send the prompt as a user's message, through the model's chat template")
    parser.add_argument("--show-drafts", action="store_true", help="mark accepted and rejected draft tokens")
    parser.add_argument("--json-schema", default=None, metavar="FILE", help="write JSON that keeps to the schema in this file")
    add_engine_arguments(parser)
    add_sampling_arguments(parser, DEFAULTS)


def main(args: argparse.Namespace) -> int:
    config, _ = engine_config(args)
    params = sampling_params(args, DEFAULTS)
    if args.json_schema is not None:
        params = dataclasses.replace(params, structured_outputs=StructuredOutputsParams(json=_read(args.json_schema)))
    prompt = args.prompt if args.prompt is not None else _read_stdin()

    from headway.engine.engine import Engine

    engine = Engine(config, progress=True)
    messages = [{"role": "user", "content": prompt}]
    token_ids = engine.tokenizer.apply_chat_template(messages) if args.chat else engine.tokenizer.encode(prompt)
    request = Request("generate", token_ids, params, prompt=prompt)
    if args.show_drafts:
        print(legend(colored(sys.stderr)), file=sys.stderr)
    else:
        print("" if args.chat else prompt, end="", flush=True)
    _, stats, seconds = write(engine, request, show_drafts=args.show_drafts)
    print(flush=True)
    print(summary(stats, seconds), file=sys.stderr)
    return 0


def write(engine: Engine, request: Request, *, show_drafts: bool) -> tuple[str, SpecDecodeMetrics, tuple[int, float, float]]:
    """Runs one request and streams it to stdout.

    Returns its text, its speculation counters and (tokens, seconds to the first one, seconds in all). On Ctrl-C the request is
    aborted and KeyboardInterrupt goes on. Exits with 1 when the text could not be written.
    """
    writer = DraftWriter(engine.tokenizer, sys.stdout, colored(sys.stdout)) if show_drafts else None
    text, stats, num_tokens, first = "", SpecDecodeMetrics(), 0, 0.0
    start = time.perf_counter()
    engine.add(request)
    try:
        while engine.has_work():
            for delta in engine.step():
                num_tokens += len(delta.token_ids)
                first = first or time.perf_counter() - start
                text += delta.text
                stats = delta.stats or stats
                if writer:
                    writer.write(delta)
                else:
                    sys.stdout.write(delta.text)
                sys.stdout.flush()
                if delta.finish_reason == "error":
                    sys.exit("headway: the rest of the text could not be written")
    finally:
        engine.abort(request.request_id)
    return text, stats, (num_tokens, first, time.perf_counter() - start)


def summary(stats: SpecDecodeMetrics, seconds: tuple[int, float, float]) -> str:
    num_tokens, first, total = seconds
    decoding = total - first
    speed = f"{(num_tokens - 1) / decoding:.1f} tokens/s" if decoding > 0 and num_tokens > 1 else "-"
    line = f"{num_tokens} tokens in {total:.2f} s: first after {first * 1e3:.0f} ms, then {speed}"
    if not stats.num_draft_tokens:
        return line + "; nothing drafted"
    return (
        f"{line}; {stats.num_accepted_tokens} of {stats.num_draft_tokens} drafts accepted ({stats.draft_acceptance_rate:.0%}), "
        f"{num_tokens / max(1, stats.num_steps):.2f} tokens per step"
    )


def _read(file: str) -> str:
    try:
        return Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--json-schema {file}: {error}") from None


def _read_stdin() -> str:
    if sys.stdin.isatty():
        print("reading the prompt from standard input; end with Ctrl-D", file=sys.stderr)
    text = sys.stdin.read()
    if not text.strip():
        raise ConfigError("no prompt: give --prompt TEXT or write it to standard input")
    return text
