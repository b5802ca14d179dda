"""Name -> class. A drafter or policy is one file; the file's name is its name in every config.

Looked up in this order: a file in the built-in folder, an entry point (groups `headway.drafters`, `headway.policies`),
"package.module:Class". Files that start with an underscore and the interface files themselves are not listed.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import inspect
from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

from headway.errors import ConfigError, unknown_key

# kind -> (folder of the built-in ones, module and class of the interface)
FOLDERS = {
    "drafter": ("headway.drafters", "headway.drafters.drafter", "Drafter"),
    "policy": ("headway.control.policies", "headway.control.policy", "Policy"),
}


def names(kind: str) -> list[str]:
    """Built-in and installed names of a kind ("drafter" or "policy"), sorted."""
    return sorted(_built_in(kind) | set(_installed(kind)))


def load(kind: str, name: str) -> type[Any]:
    """The class called `name`. Raises ConfigError naming what is accepted."""
    if ":" in name:
        module_name, _, class_name = name.partition(":")
        if "=" in class_name:
            key = "method" if kind == "drafter" else "name"
            raise ConfigError(f'{kind} {name!r} is not a name: its options go beside it, {{"{key}": NAME, OPTION: VALUE}}')
        found = _import(kind, name, lambda: getattr(importlib.import_module(module_name), class_name))
    elif name in _built_in(kind):
        found = _only_class(kind, name)
    elif name in (installed := _installed(kind)):
        found = _import(kind, name, installed[name].load)
    else:
        raise ConfigError(unknown_key(kind, name, names(kind)) + ', or "package.module:Class"')
    return _checked(kind, name, found)


def _built_in(kind: str) -> set[str]:
    package, interface, _ = FOLDERS[kind]
    spec = importlib.util.find_spec(package)
    assert spec is not None
    assert spec.submodule_search_locations is not None
    folder = Path(next(iter(spec.submodule_search_locations)))
    return {p.stem for p in folder.glob("*.py") if not p.stem.startswith("_") and f"{package}.{p.stem}" != interface}


def _installed(kind: str) -> dict[str, EntryPoint]:
    group = "headway.drafters" if kind == "drafter" else "headway.policies"
    return {point.name: point for point in entry_points(group=group)}


def _import(kind: str, name: str, load: Callable[[], Any]) -> Any:
    try:
        return load()
    except Exception as error:   # whatever the module raises while it is imported
        absent = isinstance(error, ModuleNotFoundError) and error.name == name.partition(":")[0]
        hint = ". Is the folder of its file in PYTHONPATH?" if absent else ""
        raise ConfigError(f"cannot load {kind} {name!r}: {type(error).__name__}: {error}{hint}") from error


def _only_class(kind: str, name: str) -> type[Any]:
    module = importlib.import_module(f"{FOLDERS[kind][0]}.{name}")
    classes = [cls for _, cls in inspect.getmembers(module, inspect.isclass) if cls.__module__ == module.__name__]
    own = [cls for cls in classes if issubclass(cls, _base(kind))]
    if len(own) != 1:
        raise ConfigError(f"{module.__name__} must define exactly one {FOLDERS[kind][2]}, found {len(own)}")
    return own[0]


def _base(kind: str) -> type[Any]:
    _, module, name = FOLDERS[kind]
    base: type[Any] = getattr(importlib.import_module(module), name)
    return base


def _checked(kind: str, name: str, found: Any) -> type[Any]:
    base = _base(kind)
    if not inspect.isclass(found) or not issubclass(found, base):
        raise ConfigError(f"{kind} {name!r} is not a {base.__name__}: {found!r}")
    cls: type[Any] = found
    if inspect.isabstract(cls):
        raise ConfigError(f"{kind} {name!r} does not define {', '.join(sorted(cls.__abstractmethods__))}")
    options = getattr(cls, "Options", None)
    if options is not None and not (inspect.isclass(options) and dataclasses.is_dataclass(options)):
        raise ConfigError(f"{kind} {name!r}: Options must be a dataclass, got {options!r}")
    if not vars(cls).get("name"):
        cls.name = name
    return cls
