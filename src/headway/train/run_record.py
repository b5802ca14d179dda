"""What a later run needs to know of the one it resumes, and Ctrl-C at a clean point."""

from __future__ import annotations

import dataclasses
import json
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from headway.errors import ConfigError
from headway.train.options import TrainOptions


class RunRecord:
    """run/plan.json: the options it was started with, and decisions that must not change when it is resumed."""

    def __init__(self, path: Path, values: dict[str, Any]) -> None:
        self.path, self.values = path, values

    def number(self, key: str, decide: Callable[[], int]) -> int:
        if key not in self.values:
            self.set(key, decide())
        return int(self.values[key])

    def set(self, key: str, value: Any) -> None:
        self.values[key] = value
        self.path.write_text(json.dumps(self.values, indent=2) + "\n", encoding="utf-8")


# What may change between a run and its resumption.
_FREE = {"minutes", "num_threads", "cache_bytes", "out"}


def open_record(run: Path, options: TrainOptions) -> RunRecord:
    run.mkdir(parents=True, exist_ok=True)
    given = {key: value for key, value in dataclasses.asdict(options).items() if key not in _FREE}
    path = run / "plan.json"
    values = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"options": given}
    changed = [key for key in given if values["options"].get(key, given[key]) != given[key]]
    if changed:
        key = changed[0]
        raise ConfigError(
            f"{run} was started with {key}={values['options'].get(key)!r}, now it is {given[key]!r}; give the same, or another --out"
        )
    return RunRecord(path, values)


@contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Ctrl-C asks for a stop at the next clean point; a second one does not wait."""
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield asked.is_set
        return

    def ask(_signal: int, _frame: object) -> None:
        if asked.is_set():
            raise KeyboardInterrupt
        asked.set()

    before = signal.signal(signal.SIGINT, ask)
    try:
        yield asked.is_set
    finally:
        signal.signal(signal.SIGINT, before)


def check(stopped: Callable[[], bool]) -> None:
    if stopped():
        raise KeyboardInterrupt
