"""`headway list`: the drafters, policies and models that are there, and the options each declares."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import inspect
import json
from typing import Any

from headway import plugins

EPILOG = """examples:
  headway list drafters
  headway list policies --json
"""
KINDS = {"drafters": "drafter", "policies": "policy"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("kind", choices=(*KINDS, "models"), help="what to list")
    parser.add_argument("--json", action="store_true", help="print one JSON array")


def main(args: argparse.Namespace) -> int:
    entries = _models() if args.kind == "models" else [_plugin(KINDS[args.kind], name) for name in plugins.names(KINDS[args.kind])]
    if args.json:
        print(json.dumps(entries, indent=2))
        return 0
    width = max((len(entry["name"]) for entry in entries), default=0)
    for entry in entries:
        print(f"{entry['name']:<{width}}  {entry['summary']}")
        for option in entry["options"]:
            default = "(required)" if option["required"] else f"= {json.dumps(option['default'])}"
            print(f"{'':<{width}}    {option['name']} {default}  {option['help']}")
    return 0


def _plugin(kind: str, name: str) -> dict[str, Any]:
    cls = plugins.load(kind, name)
    doc = inspect.getdoc(importlib.import_module(cls.__module__)) or inspect.getdoc(cls) or ""
    options = getattr(cls, "Options", None)
    return {
        "name": name,
        "summary": doc.partition("\n")[0],
        "options": [
            {
                "name": f.name,
                "type": str(f.type),
                "required": f.default is f.default_factory is dataclasses.MISSING,
                "default": _default(f),
                "help": f.metadata.get("help", ""),
            }
            for f in (dataclasses.fields(options) if options else ())
        ],
    }


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return None if field.default is dataclasses.MISSING else field.default


def _models() -> list[dict[str, Any]]:
    from headway.models import hub

    return [{"name": name, "summary": entry.description, "options": []} for name, entry in sorted(hub.BUILTIN.items())]
