"""`headway chat`: a conversation in the terminal. The prefix cache keeps what was said, so a turn costs its new tokens only."""

from __future__ import annotations

import argparse
import contextlib
import sys
from typing import TYPE_CHECKING

from headway.cli.generate import summary, write
from headway.cli.sampling import add_sampling_arguments, sampling_params
from headway.cli.settings import add_engine_arguments, engine_config
from headway.cli.terminal import colored, legend
from headway.errors import InvalidRequestError
from headway.sampling_params import SamplingParams
from headway.types import Request

if TYPE_CHECKING:
    from headway.engine.engine import Engine

EPILOG = """in the conversation:
  /reset     forget what was said        Ctrl-C   stop the answer
  /exit      leave (also Ctrl-D)

example:
  headway chat --system "You answer in one sentence."
"""
DEFAULTS = {"max_tokens": 512, "temperature": 0.7}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--system", default=None, metavar="TEXT", help="the system message that opens the conversation")
    parser.add_argument("--show-drafts", action="store_true", help="mark accepted and rejected draft tokens")
    add_engine_arguments(parser)
    add_sampling_arguments(parser, DEFAULTS)


def main(args: argparse.Namespace) -> int:
    config, _ = engine_config(args)
    params = sampling_params(args, DEFAULTS)

    from headway.engine.engine import Engine

    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 (line editing and history for input(), where the platform has it)
    engine = Engine(config, progress=True)
    print(f"{config.model}: /reset to start over, /exit or Ctrl-D to leave", file=sys.stderr)
    if args.show_drafts:
        print(legend(colored(sys.stderr)), file=sys.stderr)
    opening = [{"role": "system", "content": args.system}] if args.system else []
    messages = list(opening)
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            return 0
        if line == "/exit":
            return 0
        if line == "/reset":
            messages = list(opening)
        elif line:
            messages = _turn(engine, [*messages, {"role": "user", "content": line}], params, show_drafts=args.show_drafts)


def _turn(engine: Engine, messages: list[dict[str, str]], params: SamplingParams, *, show_drafts: bool) -> list[dict[str, str]]:
    """Answers the last message; returns the conversation with the answer, without the question when it could not be answered."""
    try:
        request = Request("chat", engine.tokenizer.apply_chat_template(messages), params)
        text, stats, seconds = write(engine, request, show_drafts=show_drafts)
    except InvalidRequestError as error:
        print(f"{error} (/reset starts over)", file=sys.stderr)
        return messages[:-1]
    except KeyboardInterrupt:
        print(" (stopped; the question is forgotten)", file=sys.stderr)
        return messages[:-1]
    print(flush=True)
    print(summary(stats, seconds), file=sys.stderr)
    return [*messages, {"role": "assistant", "content": text}]
