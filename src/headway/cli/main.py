"""`headway COMMAND ...`: one module per command, each with `add_arguments(parser)` and `main(args) -> int`.

Only the command that was asked for is imported, and what is heavy (torch, the server) is imported inside its `main`, so that help
is instant. Exit codes: 0 done, 1 a benchmark whose numbers do not count or a text that could not be written, 2 bad input,
130 interrupted, 141 the reader went away.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

from headway.cli.flags import Parser, merge_config_file
from headway.errors import HeadwayError
from headway.version import __version__

COMMANDS = {
    "serve": "serve a model over an OpenAI-compatible API",
    "generate": "continue a prompt, and see which tokens were drafted",
    "chat": "talk to a model in the terminal",
    "bench": "measure throughput and latency",
    "tune": "find the k of each load by measuring, and write it for Headway, vLLM, SGLang, TensorRT-LLM and llama.cpp",
    "replay": "decide a recorded trace again by another policy, without a model",
    "top": "watch a running server: load, speed, speculation",
    "train": "train a speculator for a model",
    "pull": "download a model and print its directory",
    "list": "list drafters, policies or models",
    "vllm": "bring Headway into vLLM: print the flags, and check them before a server starts",
    "config": "print the resolved configuration and where each value came from",
}
EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141


def build_parser(chosen: str | None) -> Parser:
    """The parser of every command; only the chosen one gets its flags."""
    parser = Parser(prog="headway", description="Speculative decoding that pays at every load.")
    parser.add_argument("--version", action="version", version=f"headway {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, summary in COMMANDS.items():
        command = commands.add_parser(
            name, help=summary, description=summary[0].upper() + summary[1:] + ".", formatter_class=argparse.RawDescriptionHelpFormatter
        )
        if name == chosen:
            module = importlib.import_module(f"headway.cli.{name}")
            command.epilog = module.EPILOG
            command.set_defaults(main=module.main, parser=command)
            module.add_arguments(command)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code; argparse's own exits (help, usage errors) raise SystemExit."""
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = build_parser(next((word for word in argv if not word.startswith("-")), None))
    args = parser.parse_args(argv)
    args.argv = argv
    try:
        merge_config_file(args)
        return int(args.main(args))
    except HeadwayError as error:
        print(f"headway {args.command}: error: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The interpreter flushes stdout once more at exit and would complain again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE


if __name__ == "__main__":
    sys.exit(main())
