"""`headway serve`: the OpenAI-compatible server."""

from __future__ import annotations

import argparse

from headway.cli.flags import add_fields
from headway.cli.settings import add_engine_arguments, engine_config, server_options
from headway.server.options import ServerOptions

EPILOG = """examples:
  headway serve
  headway serve smollm2-135m --port 9000 --spec-method ngram --spec-tokens 4
  headway serve ./model --speculative-config '{"method": "ngram", "num_speculative_tokens_per_batch_size": [[1, 8, 4], [9, 64, 1]]}'
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_engine_arguments(parser)
    add_fields(parser.add_argument_group("server"), ServerOptions)


def main(args: argparse.Namespace) -> int:
    config, _ = engine_config(args)
    options = server_options(args)

    from headway.server.serve import serve

    serve(config, options)
    return 0
