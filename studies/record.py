"""What every benchmark of this folder says of itself, and how it hands its figures over."""

from __future__ import annotations

import json
import re
import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from headway.bench.environment import describe

# Folders of one machine mean nothing on another; an address is none.
_FOLDERS = re.compile(r"(?<![\w./])(?!(?<=:)//)/[^ :]*/")


def origin() -> dict[str, Any]:
    """The command, the commit, the versions and the machine that made a document."""
    return {"command": shlex.join(["python", *(_FOLDERS.sub("", word) for word in sys.argv)]), **describe()}


def write(document: dict[str, Any], output: Path) -> None:
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(_portable(document), indent=1) + "\n", encoding="utf-8")


def _portable(value: Any) -> Any:
    """`value` without the folders before the names of local files."""
    if isinstance(value, dict):
        return {key: _portable(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_portable(each) for each in value]
    return _FOLDERS.sub("", value) if isinstance(value, str) else value


def publish(document: dict[str, Any], output: Path | None) -> None:
    """Writes the file, where one is asked for, and the last line."""
    if output:
        write(document, output)
    print(json.dumps(document))


def timed(function: Callable[..., Any], spent: list[float]) -> Callable[..., Any]:
    """`function`, adding the seconds it takes to spent[0]."""

    def run(*args: Any) -> Any:
        began = time.perf_counter()
        result = function(*args)
        spent[0] += time.perf_counter() - began
        return result

    return run
