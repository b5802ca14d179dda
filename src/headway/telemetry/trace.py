"""One line per step, engine-neutral: what ran, what was drafted and accepted, and what it cost. `headway replay` and `tune` read it.

A trace is JSON lines, UTF-8. The first line is the header:

    {"format": "headway-trace", "version": 1, "engine": "headway 0.1.0", "model": "...", "max_k": 16, "drafters": ["suffix"], ...}

`format` and `version` are needed; `max_k` is the largest k that could be asked for, `drafters` their names in order of preference,
`drafter_options` the options of each by its name, `model` (its network) among them.
Other keys say where the trace came from and are kept. Every further line is one step that ran (times in milliseconds, counts in tokens):

    step, at_ms                 number of the step; when it ended, counted from the start of the trace
    num_waiting                 requests that wait for admission
    num_rows                    sequences in the forward pass, prefill chunks included
    num_prefill_tokens          prompt tokens computed in the step
    num_tokens                  rows of the target's forward pass: known tokens plus verified drafts
    num_context_tokens          K/V entries read, summed over the rows' sequences
    draft_ms, verify_ms         drafting; target pass and accept/reject
    step_ms                     everything, scheduling and commit included

and columns, one entry per sequence that wrote tokens in the step, in the same order in every column:

    seq_id                      the same number in every step of one sequence
    num_context                 its known tokens before the step
    max_k                       what the request and the room it has left allowed
    drafter, k                  who was asked for how many drafts; "none" and 0 for nobody
    num_proposed, num_drafts    drafts proposed; drafts verified (<= num_proposed <= k)
    num_accepted                accepted drafts: the sequence wrote num_accepted + 1 tokens, fewer when it ended on the way
    confidence                  the drafter's confidence by position, null when it has none

Where a tree was verified, num_proposed and num_drafts are its depth and confidence is null; num_tokens counts its nodes.

A step may also carry the following; unknown keys are ignored. A foreign engine can write the format without importing this file.

    policy_ms, reason           the policy's own time; why it last changed what it does
    drafting                    per drafter, as in `DrafterFeedback`: [name, num_rows, num_steps, num_catch_up, num_proposed, draft_ms]
    shadows                     per draft that was compared with what the target wrote later instead of being verified, as in
                                `ShadowFeedback`: [seq_id, drafter, num_verified, num_drafts, num_confirmed, confidence, num_context];
                                num_context, its known tokens when it was drafted, may be left out
    lookups                     per drafter that was asked before another one and whose draft was not chosen, as in `LookupFeedback`:
                                [seq_id, drafter, k, num_proposed]; older traces call them `looks`
    forecast                    [step_ms, num_tokens, plain_ms]: what the policy expected of the step, and of the same step without drafts
"""

from __future__ import annotations

import atexit
import json
import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway.control.policy import BatchView
from headway.errors import ConfigError
from headway.json_object import LARGEST, JsonObject, is_number, shown
from headway.types import DrafterFeedback, Feedback, Forecast, LookupFeedback, SequenceFeedback, ShadowFeedback

FORMAT = "headway-trace"
VERSION = 1
# A step of 64 sequences takes about 3 kB: this is over 100,000 of them. A trace that was forgotten must not fill the disk.
MAX_BYTES = 512 * 1024 * 1024
FLUSH_BYTES = 1 << 16
FLUSH_S = 1.0

logger = logging.getLogger("headway.trace")

STEP_NUMBERS = ("num_waiting", "num_rows", "num_prefill_tokens", "num_tokens", "num_context_tokens")
STEP_TIMES = ("at_ms", "draft_ms", "verify_ms", "step_ms")
COLUMNS = ("seq_id", "num_context", "max_k", "drafter", "k", "num_proposed", "num_drafts", "num_accepted", "confidence")


@dataclass(frozen=True, slots=True)
class TraceStep:
    """One line: the feedback of the step, when it ended, and what the plan knew. `max_k[i]` belongs to `feedback.sequences[i]`."""

    at_ms: float
    max_k: tuple[int, ...]
    feedback: Feedback


@dataclass(frozen=True, slots=True)
class Trace:
    header: dict[str, Any]
    steps: tuple[TraceStep, ...]

    @property
    def max_k(self) -> int:
        """The largest k the recording engine could use; from the steps when the header does not say."""
        return int(self.header.get("max_k") or max((seq.k for step in self.steps for seq in step.feedback.sequences), default=0))

    @property
    def drafters(self) -> tuple[str, ...]:
        named = {seq.drafter: None for step in self.steps for seq in step.feedback.sequences if seq.num_drafts}
        return tuple(self.header.get("drafters") or named)


class TraceWriter:
    """Writes whole lines, in blocks: at most FLUSH_S of steps are lost when the process is killed, never half of one.

    Raises ConfigError when the file cannot be made. Later, a disk that is full ends the trace and not the engine.
    """

    def __init__(self, path: str | Path, header: Mapping[str, Any], max_bytes: int = MAX_BYTES) -> None:
        self.path = Path(path)
        try:
            self._file = self.path.open("wb", buffering=0)
        except OSError as error:
            raise ConfigError(f"cannot write the trace {path}: {error.strerror}") from error
        self._start = self._flushed = time.perf_counter()
        self._lines: list[bytes] = []
        self._num_held = self._num_bytes = 0
        self._max_bytes = max_bytes
        self._append({"format": FORMAT, "version": VERSION, **header})
        self.flush()
        atexit.register(self.close)

    def write(self, view: BatchView, feedback: Feedback) -> None:
        """One step that was planned on `view` and ended in `feedback`."""
        if self._file.closed:
            return
        now = time.perf_counter()
        self._append(_line(view, feedback, (now - self._start) * 1e3))
        if self._num_bytes >= self._max_bytes:
            logger.warning("the trace %s ends at %d bytes, its limit", self.path, self._num_bytes)
            self.close()
        elif self._num_held >= FLUSH_BYTES or now - self._flushed >= FLUSH_S:
            self._flushed = now
            self.flush()

    def flush(self) -> None:
        data = memoryview(b"".join(self._lines))
        self._lines.clear()
        self._num_held = 0
        try:
            while data:
                data = data[self._file.write(data) or 0 :]
        except OSError as error:
            logger.warning("the trace %s ends here: %s", self.path, error.strerror)
            self._file.close()

    def close(self) -> None:
        if not self._file.closed:
            self.flush()
            self._file.close()
        atexit.unregister(self.close)

    def _append(self, record: Mapping[str, Any]) -> None:
        # default: a policy may count in numpy integers
        line = json.dumps(record, separators=(",", ":"), allow_nan=False, default=int).encode() + b"\n"
        self._lines.append(line)
        self._num_held += len(line)
        self._num_bytes += len(line)


def _line(view: BatchView, feedback: Feedback, at_ms: float) -> dict[str, Any]:
    sequences, forecast = feedback.sequences, feedback.forecast
    allowed = {seq.seq_id: seq.max_k for seq in view.sequences}
    return {
        "step": feedback.step,
        "at_ms": _ms(at_ms),
        **{name: getattr(feedback, name) for name in STEP_NUMBERS},
        **{name: _ms(getattr(feedback, name)) for name in ("draft_ms", "verify_ms", "step_ms", "policy_ms")},
        "seq_id": [seq.seq_id for seq in sequences],
        "num_context": [seq.num_context for seq in sequences],
        "max_k": [allowed.get(seq.seq_id, 0) for seq in sequences],   # admitted in this step: its first token, never a draft
        "drafter": [seq.drafter for seq in sequences],
        "k": [seq.k for seq in sequences],
        "num_proposed": [seq.num_proposed if seq.parents is None else seq.depth for seq in sequences],
        "num_drafts": [seq.depth for seq in sequences],
        "num_accepted": [seq.num_accepted for seq in sequences],
        "confidence": [_ratios(seq.confidence) if seq.parents is None else None for seq in sequences],
        "reason": feedback.reason,
        "drafting": [
            [part.drafter, part.num_rows, part.num_steps, part.num_catch_up, part.num_proposed, _ms(part.draft_ms)]
            for part in feedback.drafters
        ],
        "shadows": [
            [
                part.seq_id, part.drafter, part.num_verified, part.num_drafts, part.num_confirmed, _ratios(part.confidence),
                part.num_context,
            ]
            for part in feedback.shadows
        ],
        "lookups": feedback.lookups,
        "forecast": None if forecast is None else [_ms(forecast.step_ms), _ms(forecast.num_tokens), _ms(forecast.plain_ms)],
    }


def _ms(value: float) -> float:
    return round(value, 3) if math.isfinite(value) else 0.0


def _ratios(confidence: tuple[float, ...] | None) -> list[float | None] | None:
    return None if confidence is None else [round(float(value), 3) if math.isfinite(value) else None for value in confidence]


def read_trace(path: str | Path) -> Trace:
    """The whole trace. Raises ConfigError that names the line: another format, a newer version, a damaged or cut line, no steps."""
    path = Path(path)
    try:
        with path.open("rb") as file:
            lines = enumerate(file.read().splitlines(keepends=True), start=1)
    except OSError as error:
        raise ConfigError(f"cannot read the trace {path}: {error.strerror}") from error
    header = _header(path, next(lines, (1, b"")))
    steps = tuple(_step(path, number, line) for number, line in lines)
    if not steps:
        raise ConfigError(f"the trace {path} holds no step: the engine that wrote it had nothing to do")
    return Trace(header, steps)


def _header(path: Path, first: tuple[int, bytes]) -> dict[str, Any]:
    try:
        header = json.loads(first[1])
    except (ValueError, RecursionError):
        header = None
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise ConfigError(
            f'{path} is not a trace: its first line must be a JSON object with "format": "{FORMAT}". Record one with --trace FILE '
            "on `headway serve`, `generate` or `bench throughput`"
        )
    version = header.get("version")
    if version != VERSION:
        raise ConfigError(f"{path} is a trace of version {version!r}; this Headway reads version {VERSION}")
    known = JsonObject(header, f"{path}, line 1", ConfigError)
    for key in ("max_k", "max_num_seqs", "max_num_batched_tokens"):
        known.integer(key, 0)
    known.list_of(str, "drafters", [])
    for key in ("engine", "model"):
        known.text(key, "")
    return header


def _step(path: Path, number: int, line: bytes) -> TraceStep:
    if not line.endswith(b"\n"):
        raise ConfigError(
            f"{path}, line {number}: the line is cut short, so its writer was stopped in the middle of it (a full disk?). "
            f"Whole steps before it: {number - 2}; drop the last line to use them (head -n -1 {path.name})"
        )
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}, line {number}: not JSON: {error}") from error
    if not isinstance(record, dict):
        raise ConfigError(f"{path}, line {number}: a step must be a JSON object")
    try:
        return _parse(record)
    except _Wrong as error:
        raise ConfigError(f"{path}, line {number}: {error}") from error


class _Wrong(ValueError):
    """What is wrong with one step."""


def _parse(record: Mapping[str, Any]) -> TraceStep:
    numbers: dict[str, Any] = {name: _count(record, name) for name in ("step", *STEP_NUMBERS)}
    numbers |= {name: _time(record, name) for name in STEP_TIMES}
    columns = {name: _list(record.get(name), name) for name in COLUMNS}
    lengths = {name: len(column) for name, column in columns.items()}
    if len(set(lengths.values())) != 1:
        raise _Wrong("the columns differ in length: " + ", ".join(f"{name} {length}" for name, length in lengths.items()))
    sequences = tuple(_sequence({name: column[i] for name, column in columns.items()}) for i in range(lengths["seq_id"]))
    at_ms = numbers.pop("at_ms")
    return TraceStep(at_ms, tuple(columns["max_k"]), Feedback(sequences=sequences, **numbers, **_extras(record)))


def _extras(record: Mapping[str, Any]) -> dict[str, Any]:
    """The keys that a step may carry."""
    forecast = record.get("forecast")
    return {
        "policy_ms": _time(record, "policy_ms") if "policy_ms" in record else 0.0,
        "reason": str(record.get("reason", "")),
        "drafters": tuple(map(_drafting, _list(record.get("drafting", []), "drafting"))),
        "shadows": tuple(map(_shadow, _list(record.get("shadows", []), "shadows"))),
        "lookups": tuple(map(_lookup, _list(record.get("lookups", record.get("looks", [])), "lookups"))),
        "forecast": None if forecast is None else Forecast(*_parts(forecast, "forecast", FORECAST)),
    }


# What the entries of a list of numbers and names are called, in order; `_ms`: a time, `drafter`: a name, else a count.
DRAFTING = ("drafter", "num_rows", "num_steps", "num_catch_up", "num_proposed", "draft_ms")
SHADOW = ("seq_id", "drafter", "num_verified", "num_drafts", "num_confirmed", "confidence", "num_context")
LOOKUP = ("seq_id", "drafter", "k", "num_proposed")
FORECAST = ("step_ms", "tokens_ms", "plain_ms")


def _parts(value: Any, what: str, names: Sequence[str], least: int = 0) -> list[Any]:
    """The entries of one list, each of its kind; those behind the first `least` may be left out where that is not 0."""
    given = _list(value, what)
    if not (least or len(names)) <= len(given) <= len(names):
        raise _Wrong(f"an entry of {what} must be [{', '.join(names)}], got {shown(value)}")
    record = dict(zip(names, given, strict=False))
    return [
        _time(record, name) if name.endswith("_ms") else _name(record, name) if name == "drafter"
        else _confidence(record[name]) if name == "confidence" else _count(record, name)
        for name in record
    ]  # fmt: skip


def _drafting(part: Any) -> DrafterFeedback:
    return DrafterFeedback(*_parts(part, "drafting", DRAFTING))


def _shadow(part: Any) -> ShadowFeedback:
    return ShadowFeedback(*_parts(part, "shadows", SHADOW, least=len(SHADOW) - 1))


def _lookup(part: Any) -> LookupFeedback:
    return LookupFeedback(*_parts(part, "lookups", LOOKUP))


def _sequence(row: Mapping[str, Any]) -> SequenceFeedback:
    names = ("seq_id", "num_context", "max_k", "k", "num_proposed", "num_drafts", "num_accepted")
    counts: dict[str, Any] = {name: _count(row, name) for name in names}
    if not counts["num_accepted"] <= counts["num_drafts"] <= counts["num_proposed"]:
        raise _Wrong(f"needs num_accepted <= num_drafts <= num_proposed, got {counts}")
    del counts["max_k"]
    return SequenceFeedback(drafter=_name(row, "drafter"), confidence=_confidence(row["confidence"]), **counts)


def _confidence(values: Any) -> tuple[float, ...] | None:
    """Null: none. One that was not a number is null in the list."""
    if values is None:
        return None
    for value in _list(values, "confidence"):
        if value is not None and not (is_number(value) and 0.0 <= value <= 1.0):
            raise _Wrong(f"confidence must be numbers from 0 to 1, got {shown(value)}")
    return tuple(math.nan if value is None else float(value) for value in values)


def _name(record: Mapping[str, Any], name: str) -> str:
    value = record.get(name)
    if not isinstance(value, str):
        raise _Wrong(f"{name} must be a name, got {shown(value)}")
    return value


def _count(record: Mapping[str, Any], name: str) -> int:
    value = record.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= LARGEST:
        raise _Wrong(f"{name} must be a whole number >= 0, got {shown(value)}")
    return value


def _time(record: Mapping[str, Any], name: str) -> float:
    value: Any = record.get(name)
    if not is_number(value) or not 0.0 <= value <= LARGEST:
        raise _Wrong(f"{name} must be a number of milliseconds >= 0, got {shown(value)}")
    return float(value)


def _list(value: Any, name: str) -> list[Any]:
    if not isinstance(value, list):
        raise _Wrong(f"{name} must be a list, got {shown(value)}")
    return value
