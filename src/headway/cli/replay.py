"""`headway replay TRACE`: what another policy would have made of it."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from headway.cli.flags import positive_int
from headway.cli.settings import policy_from_text
from headway.config import SpeculativeConfig
from headway.errors import ConfigError

if TYPE_CHECKING:
    from headway.control.policy import Policy
    from headway.tune.replay import Outcome, World

EPILOG = """examples:
  headway bench throughput --spec-method ngram --spec-tokens 8 --spec-policy static --trace run.jsonl
  headway replay run.jsonl
  headway replay run.jsonl --policy goodput --policy 'batch_table:num_speculative_tokens_per_batch_size=[[1,8,4],[9,64,0]]'

Record with a large k: what was drafted and verified is known, the rest is drawn from the trace's own statistics. No model is loaded.
"""
DEFAULT_POLICY = SpeculativeConfig().policy


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("trace", metavar="TRACE", help="file written with --trace")
    text = f"a policy to decide by; may be given more than once (default: {DEFAULT_POLICY})"
    parser.add_argument("--policy", action="append", default=None, metavar="NAME[:KEY=VALUE,...]", help=text)
    parser.add_argument("--max-k", type=int, default=None, metavar="N", help="largest k (default: the trace's)")
    parser.add_argument("--in-flight", type=positive_int, default=None, metavar="N", help="sequences at a time (default: as in the trace)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the draws for what the trace does not know")
    parser.add_argument("--split", action="store_true", help="where goodput loses against the best fixed k: four more replays")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def main(args: argparse.Namespace) -> int:
    from headway.telemetry.trace import read_trace
    from headway.tune import replay

    if args.max_k is not None and args.max_k < 1:
        raise ConfigError(f"--max-k must be >= 1, got {args.max_k}")
    trace = read_trace(args.trace)
    names = args.policy or [DEFAULT_POLICY]
    world = replay.World(trace, max_k=args.max_k, seed=args.seed, in_flight=args.in_flight)
    policies = {name: build(name, world.max_k) for name in names}
    fixed = world.fixed()
    best = max(fixed, key=lambda name: fixed[name].goodput)
    found = {name: replay.run(policy, world) for name, policy in policies.items()}
    result = {
        "trace": args.trace, "num_steps": len(trace.steps), "num_sequences": len(world.evidence.sequences),
        "known_positions": world.evidence.known, "step_time_error": world.costs.error, "num_plain_steps": world.num_plain_steps,
        "recorded": _json(world.recorded), "best_fixed": best, "fixed": {name: _json(out) for name, out in fixed.items()},
        "policies": {name: {**_json(out), "regret": 1.0 - out.goodput / fixed[best].goodput} for name, out in found.items()},
    }
    if args.split:
        from headway.tune.regret import split

        result["regret_split"] = split(world, fixed[best].goodput)
    if args.json:
        print(json.dumps(result))
        return 0
    _print(world, fixed, found, best)
    if args.split:
        parts = ", ".join(f"{name} {part:+.1%}" for name, part in result["regret_split"].items())
        print(f"regret of goodput from a cold start: {parts}")
        told = 1.0 - result["regret_split"]["choice"]
        print(f"told beforehand which drafts are right, with nothing to try out: {told:.3f} of the best fixed k")
    return 0


def build(text: str, max_k: int) -> Policy:
    """The policy that `--policy TEXT` names. Raises ConfigError."""
    config = SpeculativeConfig.parse({"method": "suffix", "num_speculative_tokens": max_k, "policy": policy_from_text(text)})
    assert config is not None
    policy: Policy = config.build_policy()
    return policy


def _json(out: Outcome) -> dict[str, Any]:
    return {
        "goodput": out.goodput, "mean_k": out.mean_k, "acceptance": out.acceptance, "num_steps": out.num_steps,
        "num_tokens": out.num_tokens, "seconds": out.ms / 1e3,
    }


def _print(world: World, fixed: dict[str, Outcome], found: dict[str, Outcome], best: str) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="predicted from the trace, output tokens/s", title_justify="left", header_style="bold")
    for column in ("", "tokens/s", "/ best k", "mean k", "accepted", "tokens/row", "steps"):
        table.add_column(column, justify="right" if column else "left")
    reference = fixed[best].goodput

    def add(name: str, out: Outcome, style: str | None = None) -> None:
        accepted = "-" if out.acceptance is None else f"{out.acceptance:.0%}"
        tokens = f"{out.num_tokens / max(1, out.num_rows):.2f}"
        ratio = f"{out.goodput / reference:.3f}"
        table.add_row(name, f"{out.goodput:.1f}", ratio, f"{out.mean_k:.2f}", accepted, tokens, str(out.num_steps), style=style)

    for name, out in fixed.items():
        add(name, out, "bold" if name == best else None)
    table.add_section()
    for name, out in found.items():
        add(name, out, "green")
    table.add_section()
    add("as recorded", world.recorded, "dim")
    Console().print(table)
    for name, out in found.items():
        regret = 1.0 - out.goodput / reference
        print(f"{name}: {out.goodput:.1f} output tokens/s predicted, regret {regret:.1%} against the best fixed k ({best})")
    known = ", ".join(f"{name} {share:.0%}" for name, share in world.evidence.known.items())
    print(f"step time is predicted within {world.costs.error:.1%} (median); of the tokens written, drafts are known for: {known}")
    if not world.num_plain_steps:
        print("no step of the trace was plain: what plain decoding costs is extrapolated")
