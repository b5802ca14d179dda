"""JSON that others wrote, read by key and type: what is wrong with it is said with its file and its key."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headway.errors import HeadwayError

REQUIRED: Any = object()   # the default of a key that must be there
LARGEST = 1 << 53          # whole numbers up to here are exact as floats, too


class JsonObject:
    """One object of a JSON document. A key that is missing or null has the default's value; without a default it is an error."""

    def __init__(self, values: Any, where: str, error: type[HeadwayError]) -> None:
        """
        values  the object; Raises `error` for anything else
        where   how messages begin: the file, and the place in it
        error   what is raised
        """
        if not isinstance(values, Mapping):
            raise error(f"{where} must hold a JSON object, not {shown(values)}")
        self.values: Mapping[str, Any] = values
        self.where = where
        self._error = error

    @classmethod
    def read(cls, path: Path, error: type[HeadwayError], expected: str = "") -> JsonObject:
        """The object that the file holds. Raises `error`; `expected` is said of a file that is not there."""
        try:
            return cls(json.loads(path.read_text(encoding="utf-8")), str(path), error)
        except FileNotFoundError:
            raise error(f"{path} does not exist{'; ' if expected else ''}{expected}") from None
        except HeadwayError:
            raise
        except (OSError, ValueError, RecursionError) as wrong:
            raise error(f"{path} is not readable JSON: {wrong}") from wrong

    def has(self, key: str) -> bool:
        return self.values.get(key) is not None

    def wrong(self, key: str, accepted: str) -> HeadwayError:
        """The error for a value that is not what is `accepted`."""
        return self._error(f"{self.where}: {key} must be {accepted}, got {shown(self.values.get(key))}")

    def integer(self, key: str, default: int = REQUIRED, *, least: int = 0, most: int = LARGEST) -> int:
        value = self._value(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise self.wrong(key, f"a whole number >= {least}" + (f" and <= {most}" if most < LARGEST else ""))
        return value

    def number(self, key: str, default: float = REQUIRED, *, least: float = -math.inf, most: float = math.inf) -> float:
        """A finite one."""
        value = self._value(key, default)
        if not is_number(value) or not least <= value <= most:
            bounds = [f"{sign} {bound:g}" for sign, bound in ((">=", least), ("<=", most)) if math.isfinite(bound)]
            raise self.wrong(key, " and ".join([f"a number {bounds[0]}", *bounds[1:]]) if bounds else "a number")
        return float(value)

    def text(self, key: str, default: str = REQUIRED) -> str:
        value = self._value(key, default)
        if not isinstance(value, str):
            raise self.wrong(key, "a string")
        return value

    def flag(self, key: str, default: bool = REQUIRED) -> bool:
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise self.wrong(key, "true or false")
        return value

    def list_of(self, kind: type, key: str, default: list[Any] = REQUIRED) -> list[Any]:
        """A list whose entries are all of this JSON type: int, float (whole numbers, too), str, dict, or object for any."""
        value = self._value(key, default)
        if not isinstance(value, list):
            raise self.wrong(key, "a list")
        if not all(map(_is_of[kind], value)):
            raise self.wrong(key, f"a list of {_NAMES[kind]}")
        return value

    def child(self, key: str) -> JsonObject:
        """The object under `key`; an empty one when there is none. Messages name its keys after it."""
        value = self.values.get(key)
        if value is not None and not isinstance(value, Mapping):
            raise self.wrong(key, "a JSON object")
        return JsonObject(value or {}, f"{self.where}, {key}", self._error)

    def _value(self, key: str, default: Any) -> Any:
        value = self.values.get(key)
        return default if value is None and default is not REQUIRED else value


def is_number(value: Any) -> bool:
    """A finite one that a float can hold."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def shown(value: Any) -> str:
    """A value as JSON has it, for a message: not longer than a line."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        text = type(value).__name__
    return text if len(text) <= 80 else f"{text[:80]}..."


_is_of = {
    int: lambda value: isinstance(value, int) and not isinstance(value, bool), float: is_number, str: lambda value: isinstance(value, str),
    dict: lambda value: isinstance(value, dict), object: lambda value: True,
}  # fmt: skip
_NAMES = {int: "whole numbers", float: "numbers", str: "strings", dict: "objects", object: "values"}
