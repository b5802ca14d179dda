"""`headway bench`: throughput in process, load on a server, two configurations against each other, or many at many loads."""

from __future__ import annotations

import argparse
import importlib

KINDS = {
    "throughput": "measure this engine in process",
    "serve": "put load on a running OpenAI-compatible server",
    "compare": "run two configurations (or two servers) in turns and print their ratio",
    "sweep": "run many configurations at many loads in turns and write a report",
}
EPILOG = """examples:
  headway bench throughput --workload code-edit --concurrency 4
  headway bench serve --base-url http://127.0.0.1:8000 --request-rate 2
  headway bench compare --a "--spec off" --b "--spec-method ngram --spec-tokens 4" --repeats 3
  headway bench sweep --concurrencies 1,8,64 --time-budget 30

The last line of the output is one JSON document. Exit code 1: a request failed, so the numbers do not count.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(dest="kind", metavar="KIND", required=True)
    for name, summary in KINDS.items():
        module = importlib.import_module(f"headway.cli.bench_{name}")
        kind = kinds.add_parser(name, help=summary, description=summary[0].upper() + summary[1:] + ".")
        kind.set_defaults(run=module.main, parser=kind)
        module.add_arguments(kind)


def main(args: argparse.Namespace) -> int:
    return int(args.run(args))
