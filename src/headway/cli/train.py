"""`headway train`: a speculator for a user's own model."""

from __future__ import annotations

import argparse
import shlex

from headway.cli.flags import add_fields, read_fields
from headway.errors import ConfigError, unknown_key
from headway.train.options import METHODS, TrainOptions

EPILOG = """\
examples:
  headway train eagle3 --target smollm2-135m --out my-speculator
  headway train eagle3 --target ./my-model --data traffic.jsonl --minutes 30 --out my-speculator
  headway train confidence_head --target ./my-model --drafter ./my-small-model --minutes 15 --out my-head

Ctrl-C stops at the next step; the same command goes on where it stopped.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("method", metavar="METHOD", help=f"what to train: {', '.join(METHODS)}")
    add_fields(parser, TrainOptions)


def main(args: argparse.Namespace) -> int:
    if args.method not in METHODS:
        raise ConfigError(unknown_key("training method", args.method, METHODS))
    options = read_fields(args, TrainOptions)

    from headway.train import confidence, run
    from headway.train.screen import Screen

    screen, command = Screen(), shlex.join(["headway", *args.argv])
    try:
        if args.method == "confidence_head":
            confidence.train(options, command, screen)
            return 0
        live = run.train(options, command, screen)
    except KeyboardInterrupt:
        screen.say(f"stopped; the same command goes on from {options.out}/run")
        raise
    screen.say(f"{options.out}: {live.stats.mean_acceptance_length:.2f} tokens per step with {len(live.rates)} drafts")
    return 0
