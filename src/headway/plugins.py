"""Name -> class. A drafter or policy is one file; the file's name is its name in every config.

Looked up in this order: a file in the built-in folder, an entry point (groups `headway.drafters`, `headway.policies`),
"package.module:Class". Files that start with an underscore and the interface files themselves are not listed.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, cast

from headway.errors import ConfigError, unknown_key

FOLDERS = {
    "drafter": ("headway.drafters", "drafter", "Drafter"),
    "policy": ("headway.control.policies", "policy", "Policy"),
}


def names(kind: str) -> list[str]:
    """Built-in and installed names of a kind ("drafter" or "policy"), sorted."""
    package, interface, _ = FOLDERS[kind]
    spec = importlib.util.find_spec(package)
    assert spec is not None
    assert spec.submodule_search_locations is not None
    folder = Path(next(iter(spec.submodule_search_locations)))
    found = {p.stem for p in folder.glob("*.py") if not p.stem.startswith("_") and p.stem != interface}
    return sorted(found | set(_installed(kind)))


def load(kind: str, name: str) -> type[Any]:
    """The class called `name`. Raises ConfigError naming what is accepted."""
    package, _, base_name = FOLDERS[kind]
    if ":" in name:
        module_name, _, class_name = name.partition(":")
        try:
            cls = getattr(importlib.import_module(module_name), class_name)
        except (ImportError, AttributeError) as error:
            raise ConfigError(f"cannot load {kind} {name!r}: {error}") from error
        return _checked(kind, name, cls)
    if name in _installed(kind):
        return _checked(kind, name, _installed(kind)[name].load())
    if name not in names(kind):
        raise ConfigError(unknown_key(kind, name, names(kind)) + ', or "package.module:Class"')
    module = importlib.import_module(f"{package}.{name}")
    own = [
        cls for _, cls in inspect.getmembers(module, inspect.isclass)
        if cls.__module__ == module.__name__ and base_name in (base.__name__ for base in cls.__mro__[1:])
    ]
    if len(own) != 1:
        raise ConfigError(f"{module.__name__} must define exactly one {base_name}, found {len(own)}")
    return _checked(kind, name, own[0])


def _installed(kind: str) -> dict[str, Any]:
    group = "headway.drafters" if kind == "drafter" else "headway.policies"
    return {point.name: point for point in entry_points(group=group)}


def _checked(kind: str, name: str, cls: Any) -> type[Any]:
    base_name = FOLDERS[kind][2]
    if not inspect.isclass(cls) or base_name not in (base.__name__ for base in cls.__mro__):
        raise ConfigError(f"{kind} {name!r} is not a {base_name}: {cls!r}")
    if not getattr(cls, "name", ""):
        setattr(cls, "name", name)  # noqa: B010 (a class attribute unknown to `type`)
    return cast("type[Any]", cls)
