"""JSON in pieces: writing a large value in one go would keep the interpreter from every other thread for as long as it takes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

PIECE_LENGTH = 2**16   # characters of a string at a time, a tenth of a millisecond
PIECE = 64             # items at a time: 64 positions with 20 alternatives each are 80 KB, a millisecond


@dataclass(frozen=True, slots=True)
class Mapped:
    """A list whose items are made as they are written: `make` of each of `items`."""

    items: Sequence[Any]
    make: Callable[[Any], Any]


def pieces(value: Any) -> Iterator[str]:
    """The JSON text of `value`, which may hold Mapped in its dicts and lists."""
    if isinstance(value, Mapped):
        yield from _in_slices(value.items, lambda items: [value.make(item) for item in items])
    elif isinstance(value, dict):
        yield from _joined("{", ((f"{json.dumps(key)}: ", inner) for key, inner in value.items()), "}")
    elif isinstance(value, list) and value and isinstance(value[0], (dict, list, Mapped)):
        yield from _joined("[", (("", inner) for inner in value), "]")
    elif isinstance(value, list):
        yield from _in_slices(value, list)
    elif isinstance(value, str):
        yield '"'
        yield from (json.dumps(value[start : start + PIECE_LENGTH])[1:-1] for start in range(0, len(value), PIECE_LENGTH))
        yield '"'
    else:
        yield json.dumps(value)


def text_of(value: Any) -> str:
    return "".join(pieces(value))


def _joined(begin: str, parts: Iterator[tuple[str, Any]], end: str) -> Iterator[str]:
    yield begin
    for index, (before, inner) in enumerate(parts):
        yield f", {before}" if index else before
        yield from pieces(inner)
    yield end


def _in_slices(items: Sequence[Any], make: Callable[[Sequence[Any]], list[Any]]) -> Iterator[str]:
    yield "["
    for start in range(0, len(items), PIECE):
        text = json.dumps(make(items[start : start + PIECE]))
        yield f", {text[1:-1]}" if start else text[1:-1]
    yield "]"
