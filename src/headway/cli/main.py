"""`headway COMMAND ...`: one module per command, each with `add_arguments(parser)` and `main(args) -> int`.

Only the command that was asked for is imported, and what is heavy (torch, the server) is imported inside its `main`, so that help
is instant. Exit codes: 0 done, 1 a benchmark whose numbers do not count, a fault that an audit found, or output that could not be written,
2 bad input, 130 interrupted, 141 the reader went away.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import importlib
import os
import sys
from collections.abc import Sequence

from headway import __version__
from headway.cli.flags import Parser, merge_config_file
from headway.errors import HeadwayError

COMMANDS = {
    "serve": "serve a model over an OpenAI-compatible API",
    "generate": "continue a prompt, and see which tokens were drafted",
    "chat": "talk to a model in the terminal",
    "bench": "measure throughput and latency",
    "tune": "find the k of each load by measuring, and write it for Headway, vLLM, SGLang, TensorRT-LLM and llama.cpp",
    "replay": "decide a recorded trace again by another policy, without a model",
    "audit": "test whether a server's output is the same with speculation as without: Headway, vLLM, SGLang, llama.cpp",
    "top": "watch a running server: load, speed, speculation",
    "train": "train a speculator for a model",
    "pull": "download a model and print its directory",
    "list": "list drafters, policies or models",
    "vllm": "bring Headway into vLLM: print the flags, and check them before a server starts",
    "config": "print the resolved configuration and where each value came from",
}
EXIT_NOT_WRITTEN = 1
EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141
CANNOT_WRITE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS}


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
    command = next((word for word in argv if not word.startswith("-")), None)
    try:
        try:
            return _run(build_parser(command), argv)
        finally:
            if sys.stdout is not None:   # it is None where it was closed before the start
                sys.stdout.flush()       # what cannot be written must show here, not when the interpreter ends
    except BrokenPipeError:
        _discard_output()
        return EXIT_BROKEN_PIPE
    except OSError as error:
        if error.errno not in CANNOT_WRITE:
            raise
        _discard_output()
        _complain(f"headway {command or ''}".rstrip() + f": error: cannot write {error.filename or 'the output'}: {error.strerror}")
        return EXIT_NOT_WRITTEN


def _run(parser: Parser, argv: list[str]) -> int:
    args = parser.parse_args(argv)
    args.argv = argv
    try:
        merge_config_file(args)
        return int(args.main(args))
    except HeadwayError as error:
        _complain(f"headway {args.command}: error: {error}")
        return EXIT_BAD_INPUT
    except KeyboardInterrupt:
        _complain("interrupted")
        return EXIT_INTERRUPTED


def _complain(message: str) -> None:
    """On stderr, where that can be written: the exit code says the rest."""
    with contextlib.suppress(OSError):
        print(message, file=sys.stderr, flush=True)


def _discard_output() -> None:
    """The interpreter flushes both streams once more when it ends, and would complain again."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(nowhere, stream.fileno())


if __name__ == "__main__":
    sys.exit(main())
