"""What one run leaves to the next: measured costs and what policies learned, in one file per model and machine.

It is a first guess only: policies test it and go on learning. A file is either whole and plausible or ignored with one line in the log; one
that cannot be written costs the next start some time, nothing else. The store builds nothing and starts nothing: it hands over `costs` and
`learned`, and takes back what the policy it follows has learned.
"""

from __future__ import annotations

import json
import logging
import math
import time
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headway.control.costs import CostModel
from headway.control.policy import Policy

LEAST_STEPS = 200     # observed, before they are worth a file
SAVE_IDLE_S = 60.0    # between two saves while there is no work
SAVE_BUSY_S = 600.0   # while there is: a server that never rests may be killed, too
MOST = 1e12           # no number that was learned is larger
DEEPEST = 16          # levels of what was learned

# What a policy may raise for what it cannot read.
UNREADABLE = (ValueError, TypeError, KeyError, AttributeError, IndexError, OverflowError)

logger = logging.getLogger("headway.learned")


class LearnedState:
    """`costs` is the running policy's own; what is learned is saved under a key that names the policy and its drafters."""

    def __init__(self, path: Path | None) -> None:
        """Reads `path`; None: nothing is kept."""
        self._path = path
        self._policy: Policy | None = None
        self._key = ""
        self._learned: dict[str, Any] = {}    # in this process
        self.costs, self._found = _read(path) if path is not None else (None, {})
        self._num_saved = self.costs.num_observed if self.costs is not None else 0
        self._saved_at = time.monotonic()

    def learned(self, key: str) -> Mapping[str, Any] | None:
        """What a policy under this key may start with."""
        value = self._learned.get(key, self._found.get(key, self._found.get(ANY)))
        return value if isinstance(value, Mapping) else None

    def measured(self, costs: CostModel) -> None:
        """A new profile: replaces `costs`, and is saved at once."""
        self.costs, self._num_saved = costs, costs.num_observed
        self._write()

    def follow(self, key: str, policy: Policy, costs: CostModel) -> None:
        """From now on what `policy` learns is saved under `key`, with the `costs` that it was started with."""
        self.release()
        self._key, self._policy, self.costs = key, policy, costs

    def release(self) -> None:
        """Takes over what the policy that is followed has learned, and follows it no longer."""
        self._take()
        self._policy = None

    def save_now_and_then(self, *, idle: bool) -> None:
        if time.monotonic() - self._saved_at >= (SAVE_IDLE_S if idle else SAVE_BUSY_S):
            self.save()

    def save(self) -> None:
        """Writes the file when enough was learned since it was written. Never raises."""
        self._saved_at = time.monotonic()
        if self.costs is None or self._path is None or self.costs.num_observed < self._num_saved + LEAST_STEPS:
            return
        self._num_saved = self.costs.num_observed
        self._take()
        self._write()

    def _take(self) -> None:
        if self._policy is not None and (learned := self._policy.learned()):
            self._learned[self._key] = learned

    def _write(self) -> None:
        if self._path is None or self.costs is None:
            return
        partial = self._path.with_name(f"{self._path.name}.partial")
        try:
            others = _read(self._path)[1] if self._path.exists() else {}   # other processes learn, too
            body = {"costs": self.costs.to_json(), "learned": others | self._learned}
            self._path.parent.mkdir(parents=True, exist_ok=True)
            partial.write_text(json.dumps(body | {"checksum": _checksum(body)}), encoding="utf-8")
            partial.replace(self._path)
        except OSError as error:
            logger.warning("cannot keep what was learned in %s: %s", self._path, error.strerror)


ANY = "*"   # of a file whose learned state says no key


def _read(path: Path) -> tuple[CostModel | None, dict[str, Any]]:
    """(costs, learned by key); (None, {}) for a file that is not there or not valid."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"), parse_constant=_refuse)
        if not isinstance(document, dict):
            raise ValueError("it is no object")
        body = _body(document, path)
        _check(body, DEEPEST)
        costs, learned = CostModel.from_json(body["costs"]), body["learned"]
        _check_predictions(costs)
        if not isinstance(learned, dict):
            raise ValueError("`learned` is no object")
    except FileNotFoundError:
        return None, {}
    except (OSError, ValueError, KeyError, RecursionError) as error:
        logger.warning("ignoring what was learned before: %s is not valid: %s", path, str(error) or type(error).__name__)
        return None, {}
    return costs, learned


def _body(document: dict[str, Any], path: Path) -> dict[str, Any]:
    """Without the checksum, which must fit. Files of earlier versions have none: a cost model alone with policies in a file beside it, or
    both in one with the policy's state unnamed."""
    if "checksum" in document:
        body = {key: value for key, value in document.items() if key != "checksum"}
        if document["checksum"] != _checksum(body):
            raise ValueError("its checksum does not fit")
        return body
    if "target" in document:
        beside = path.with_name(f"{path.stem}-policies.json")
        learned = json.loads(beside.read_text(encoding="utf-8"), parse_constant=_refuse) if beside.exists() else {}
        return {"costs": document, "learned": learned}
    if document.keys() != {"costs", "learned"}:
        raise ValueError(f"its keys are {', '.join(map(repr, document))[:100]}")
    return {"costs": document["costs"], "learned": {ANY: document["learned"]}}


def _checksum(body: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(body, sort_keys=True).encode())


def _refuse(constant: str) -> float:
    raise ValueError(f"{constant} is not a number that is learned")


def _check(value: Any, depth: int) -> None:
    """Raises ValueError for a number that is not finite or too large, and for what lies too deep."""
    if depth == 0:
        raise ValueError("it is nested too deeply")
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list):
        for each in value:
            _check(each, depth - 1)
    elif isinstance(value, (int, float)) and not abs(value) <= MOST:
        raise ValueError(f"{value:.3g} is out of range")


def _check_predictions(costs: CostModel) -> None:
    for num_rows, num_tokens, num_context in ((1, 1, 32), (1, 5, 512), (16, 80, 8192), (64, 64, 32768)):
        ms = float(costs.predict(num_rows, num_tokens, num_context))
        if not (math.isfinite(ms) and ms >= 0.0):
            raise ValueError(f"it predicts {ms} ms for {num_tokens} tokens")
