"""`headway pull`: download (and convert) a model; the last line on stdout is the local directory."""

from __future__ import annotations

import argparse

from headway.config import EngineConfig

EPILOG = """examples:
  headway pull
  vllm serve "$(headway pull smollm2-135m)"
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    accepted = f"a built-in name, a hub id, or a GGUF file (default: {EngineConfig.model})"
    parser.add_argument("name", nargs="?", default=EngineConfig.model, metavar="NAME", help=accepted)


def main(args: argparse.Namespace) -> int:
    from headway.models import hub

    print(hub.resolve(args.name, progress=True))
    return 0
