"""`headway vllm config` prints the flags that bring Headway into vLLM, `headway vllm check` says what would come of server_flags."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from typing import Any

from headway.cli.flags import positive_int
from headway.cli.settings import policy_from_text
from headway.vllm import check, server_flags

EPILOG = """examples:
  headway vllm config Qwen/Qwen3-8B
  headway vllm config meta-llama/Llama-3.1-8B-Instruct --method eagle3 --draft-model yuhuili/EAGLE3-LLaMA3.1-Instruct-8B
  headway vllm check Qwen/Qwen3-8B --scheduler-cls headway.vllm.Scheduler -sc '{"method": "ngram", "num_speculative_tokens": 8}' -tp 2

docs/vllm.md is the guide.
"""
CHECK_EPILOG = """FLAGS are those of `vllm serve`, as they would be given to it. With vLLM installed they are resolved by vLLM itself (that
takes seconds and reads the model's configuration); else they are judged by the rules of the tested versions.

Exit code 2: it would not work.
"""
SIGNS = {check.OK: "ok     ", check.NOTE: "note   ", check.WARNING: "warning", check.ERROR: "ERROR  "}
EXIT_WOULD_NOT_WORK = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(dest="kind", metavar="KIND", required=True)
    config = kinds.add_parser("config", help="print the flags to paste", description="Print the flags that bring Headway into vLLM.")
    config.set_defaults(run=_config, parser=config)
    config.add_argument("model_name", metavar="MODEL", help="what `vllm serve` is given")
    methods = "; ".join(f"{name}: {method.help}" for name, method in server_flags.METHODS.items())
    default = server_flags.DEFAULT_METHOD
    config.add_argument("--method", default=default, metavar="NAME", help=f"{methods} (default: {default})")
    config.add_argument("--draft-model", metavar="MODEL", help="for the methods that have one")
    config.add_argument("--max-k", type=positive_int, metavar="N", help="upper bound on drafts per request and step")
    config.add_argument("--policy", metavar="NAME[:KEY=VALUE,...]", help="see `headway list policies` (default: goodput)")
    config.add_argument("--trace", metavar="FILE", help="let the server write a trace for `headway replay` and `headway tune`")
    config.add_argument("--json", action="store_true", help="print one JSON object: flag -> value")
    text = "Say what will work with these flags, what will not, and why."
    raw = argparse.RawDescriptionHelpFormatter
    checker = kinds.add_parser("check", help="judge `vllm serve` flags", description=text, epilog=CHECK_EPILOG, formatter_class=raw)
    checker.set_defaults(run=_check, parser=checker, passes_on=True)
    checker.add_argument("--json", action="store_true", help="print one JSON object")
    checker.add_argument("--assume", metavar="VERSION", help="judge for this version of vLLM, whatever is installed")
    checker.add_argument("flags", nargs="*", metavar="FLAGS", help="[vllm serve] [MODEL] and the flags of `vllm serve`")


def main(args: argparse.Namespace) -> int:
    return int(args.run(args))


def _config(args: argparse.Namespace) -> int:
    settings: dict[str, Any] = {}
    if args.policy:
        policy = policy_from_text(args.policy)
        settings["policy"] = policy if len(policy) > 1 else policy["name"]
    if args.trace:
        settings["trace"] = args.trace
    found = server_flags.serve_flags(method=args.method, draft_model=args.draft_model, max_k=args.max_k, settings=settings)
    if args.json:
        print(json.dumps(found, indent=2))
        return 0
    print(server_flags.command(args.model_name, found))
    for note in server_flags.notes(args.method):
        print(f"# {note}", file=sys.stderr)
    return 0


def _check(args: argparse.Namespace) -> int:
    facts, findings = check.check(_passed_on(args.argv), assume=args.assume)
    failed = any(finding.level == check.ERROR for finding in findings)
    if args.json:
        known = dataclasses.asdict(dataclasses.replace(facts, environment={}))
        del known["environment"]
        print(json.dumps({"works": not failed, "findings": [dataclasses.asdict(each) for each in findings], "facts": known}, indent=2))
    else:
        for finding in findings:
            print(f"{SIGNS[finding.level]}  {finding.what}\n         {finding.why}")
        print("\nThis would not work." if failed else "\nThis works.")
    return EXIT_WOULD_NOT_WORK if failed else 0


def _passed_on(argv: Sequence[str]) -> list[str]:
    """The words after `check` that are not this command's own: argparse cannot tell a foreign flag's value from a positional."""
    words = list(argv[argv.index("check") + 1 :])
    kept: list[str] = []
    while words:
        word = words.pop(0)
        if word == "--assume":
            words = words[1:]
        elif word not in ("--json", "--") and not word.startswith("--assume="):
            kept.append(word)
    return kept[2:] if kept[:2] == ["vllm", "serve"] else kept
