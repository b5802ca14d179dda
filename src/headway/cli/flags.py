"""Command-line flags made from dataclass fields, and where each value came from.

A field `max_num_seqs: int = option(64, "...")` is the flag `--max-num-seqs N`; a bool is `--x / --no-x`; a list is a flag that may be
repeated. A flag that was not given leaves no trace in the namespace, so that flag > file > default can be told apart.
`--config FILE.json` is read as flags too: the same names, types and errors.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import json
import re
import types
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from headway.errors import ConfigError, unknown_key

T = TypeVar("T")
ONE_THING = ({"speculative_config", "spec_method", "spec_model", "spec_tokens", "spec_policy"}, {"model", "model_name"})
UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


class Parser(argparse.ArgumentParser):
    """argparse, without abbreviations, with one-line errors that name the nearest flag. Errors exit with code 2."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**{"allow_abbrev": False, **kwargs})

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown and not getattr(parsed, "passes_on", False):   # a command that hands foreign flags on takes them from `argv`
            leaf: argparse.ArgumentParser = getattr(parsed, "parser", self)
            known = [name for action in leaf._actions for name in action.option_strings]
            near = difflib.get_close_matches(unknown[0].partition("=")[0], known, n=1)
            leaf.error(f"unknown argument {unknown[0]!r}." + (f" Did you mean {near[0]}?" if near else ""))
        return parsed

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\nTry: {self.prog} --help\n")


def add_fields(
    parser: argparse._ActionsContainer,
    cls: type[Any],
    *,
    skip: Iterable[str] = (),
    helps: Mapping[str, str] | None = None,
    defaults: Mapping[str, Any] | None = None,
) -> None:
    """One flag per field of the dataclass `cls`.

    helps     help of fields that carry none themselves
    defaults  what the help shows where a command's default is not the field's own
    """
    hints = typing.get_type_hints(cls)
    for spec in dataclasses.fields(cls):
        if spec.name not in skip:
            text = (helps or {}).get(spec.name) or spec.metadata.get("help", "")
            add_field(parser, spec, hints[spec.name], text, (defaults or {}).get(spec.name, spec.default))


def add_field(parser: argparse._ActionsContainer, spec: dataclasses.Field[Any], hint: Any, text: str, default: Any) -> None:
    if default is not dataclasses.MISSING and default not in (None, "", ()) and "default" not in text:
        text += f" (default: {'on' if default is True else 'off' if default is False else default})"
    alias = spec.metadata.get("alias", ())
    names = [spec.name, *((alias,) if isinstance(alias, str) else alias)]
    options = ["--" + name.replace("_", "-") for name in names]
    common: dict[str, Any] = {"dest": spec.name, "default": argparse.SUPPRESS, "help": text.replace("%", "%%")}
    kind, repeated = _kind(hint)
    if kind is bool:
        parser.add_argument(*options, action=argparse.BooleanOptionalAction, **common)
        return
    if repeated:
        common["action"] = "append"
    choices = spec.metadata.get("choices")
    parser.add_argument(
        *options, type=_converter(spec.name, kind), choices=choices, metavar=None if choices else _metavar(spec.name, kind), **common
    )


def _kind(hint: Any) -> tuple[type, bool]:
    """(the type of one value, whether the flag may be repeated); None in a union is what leaving the flag out means."""
    arms = [arm for arm in _arms(hint) if arm is not type(None)]
    for arm in arms:
        origin = typing.get_origin(arm) or arm
        if origin in (tuple, list):
            return next((item for item in typing.get_args(arm) if item is not Ellipsis), str), True
    if isinstance(arms[0], type) and arms[0] in (bool, int, float, str):
        return arms[0], False
    return dict, False


def _arms(hint: Any) -> tuple[Any, ...]:
    return typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)


def _metavar(name: str, kind: type) -> str:
    return {int: "BYTES" if name.endswith("_bytes") else "N", float: "X", dict: "JSON"}.get(kind, name.rsplit("_", 1)[-1].upper())


def _converter(name: str, kind: type) -> Any:
    if kind is int and name.endswith("_bytes"):
        return parse_bytes
    return parse_json if kind is dict else kind


def parse_bytes(text: str) -> int:
    """ "2G" and "2GiB" -> 2 * 2**30, "2g" -> 2 * 10**9, "1.5K" -> 1536 (vLLM's convention)."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([kmgtKMGT]?)(?:i?B)?", text.strip())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of bytes such as 2000000, 500M or 2GiB")
    return int(float(match[1]) * UNITS[match[2]])


def parse_json(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON: {error}") from error


def positive_int(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number >= 1")
    return int(text)


def merge_config_file(args: argparse.Namespace) -> None:
    """Reads `--config FILE` when there is one, below the flags, and notes in `args.sources` where every given value came from.

    Raises ConfigError.
    """
    args.sources = dict.fromkeys(vars(args), "flag")
    path: str | None = getattr(args, "config_file", None)
    if path is None:
        return
    leaf: Parser = args.parser
    underlay(args, leaf.parse_args(_file_as_flags(Path(path), leaf)), f"file {path}")


def underlay(args: argparse.Namespace, below: argparse.Namespace, source: str | None = None) -> None:
    """Fills what `args` does not have from `below`; `source` says where that came from (default: what `below` says itself).

    Several spellings of one thing count as one: any of them in `args` hides all of them in `below`.
    """
    given = set(vars(args))
    hidden = given.union(*(names for names in ONE_THING if given & names))
    for name, value in vars(below).items():
        if name in hidden:
            continue
        setattr(args, name, value)
        args.sources[name] = source or below.sources.get(name, "flag")


def read_fields(args: argparse.Namespace, cls: type[T]) -> T:
    """The dataclass `cls` from the flags that were given; the rest keeps its defaults."""
    names = [spec.name for spec in dataclasses.fields(cls)]   # type: ignore[arg-type]
    return cls(**{name: getattr(args, name) for name in names if hasattr(args, name)})


def _file_as_flags(path: Path, parser: Parser) -> list[str]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the config file {path}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"the config file {path} is not valid JSON: {error}") from error
    if not isinstance(document, dict):
        raise ConfigError(f"the config file {path} must hold one JSON object, with the names of the flags as keys")
    settings = [action for action in parser._actions if action.default is argparse.SUPPRESS and action.dest not in ("help", "config_file")]
    flags = {name[2:]: action for action in settings for name in action.option_strings if name.startswith("--")}
    accepted = [name for name in flags if not name.startswith("no-")]
    words: list[str] = []
    for key, value in document.items():
        name = key.replace("_", "-")
        if name not in accepted:
            raise ConfigError(unknown_key(f"key in the config file {path}:", key, accepted))
        words += _as_flag(name, value, flags[name])
    return words


def _as_flag(name: str, value: Any, action: argparse.Action) -> list[str]:
    if value is None:
        return []
    if isinstance(action, argparse.BooleanOptionalAction):
        if not isinstance(value, bool):
            raise ConfigError(f"{name} must be true or false, got {value!r}")
        return [f"--{name}" if value else f"--no-{name}"]
    values = value if isinstance(value, list) and isinstance(action, argparse._AppendAction) else [value]
    return [f"--{name}={item if isinstance(item, str) else json.dumps(item)}" for item in values]
