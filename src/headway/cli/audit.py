"""`headway audit`: is a server's output the same with speculation as without?"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from headway.cli.flags import parse_json
from headway.errors import ConfigError

EPILOG = """examples:
  headway audit http://127.0.0.1:8000
  headway audit http://127.0.0.1:8000 http://127.0.0.1:8001 --budget 5 --junit audit.xml
  headway audit http://127.0.0.1:8080 --plain '{"speculative.n_max": 0}'

One URL: a server whose requests can turn speculation off (Headway's can). Two: the same model served with speculation and without.
Exit code 0: nothing found, 1: a fault, 2: bad input, or servers that cannot be audited.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("url", metavar="URL", help="the server that speculates")
    parser.add_argument("plain_url", nargs="?", metavar="URL2", default=None, help="the same model served without speculation")
    text = "fields that make a request to URL decode plainly, for servers that have such a switch"
    parser.add_argument("--plain", type=parse_json, metavar="JSON", default=None, help=text)
    parser.add_argument("--budget", type=_minutes, metavar="MINUTES", default=10.0, help="how long it may take (default: 10)")
    parser.add_argument("--seed", type=int, metavar="N", default=0, help="of the requests and of what is tried next (default: 0)")
    parser.add_argument("--fail-fast", action="store_true", help="end at the first fault")
    parser.add_argument("--api-key", metavar="KEY", default=None, help="sent as a bearer token")
    parser.add_argument("--json", type=Path, metavar="FILE", default=None, help="write the report as JSON")
    parser.add_argument("--junit", type=Path, metavar="FILE", default=None, help="write the report as JUnit's XML")


def _minutes(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.0 < value <= 24 * 60:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of minutes above 0, of a day at most")
    return value


def main(args: argparse.Namespace) -> int:
    from headway.audit import report as forms
    from headway.audit.run import AuditTarget, audit
    from headway.bench.client import run

    if args.plain is not None and not isinstance(args.plain, dict):
        raise ConfigError(f"--plain must be a JSON object of request fields, got {args.plain!r}")
    if args.plain is not None and args.plain_url is not None:
        raise ConfigError("give a second URL or --plain, not both")
    for path in (args.json, args.junit):
        if path is not None and not path.parent.is_dir():
            raise ConfigError(f"{path.parent} is no directory to write {path.name} to")
    target = AuditTarget(args.url, args.plain_url, args.plain, args.api_key)
    found = run(audit(target, args.budget, args.seed, _say, args.fail_fast))
    print(forms.page(found))
    for path, form in ((args.json, forms.as_json), (args.junit, forms.as_junit)):
        if path is not None:
            path.write_text(form(found), encoding="utf-8")
    return 1 if found.faults else 0


def _say(what: str) -> None:
    print(f"{what} ...", file=sys.stderr, flush=True)
