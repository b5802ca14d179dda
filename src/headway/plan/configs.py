"""A model's name -> its config.json. No weights are read or downloaded."""

from __future__ import annotations

import re
from pathlib import Path

from headway.errors import ModelError
from headway.json_object import JsonObject
from headway.models import hub


def find(name: str) -> JsonObject:
    """A directory, a config.json, a built-in model, or a hub id, of which this one file is taken. Raises ModelError."""
    path = Path(name).expanduser()
    if path.suffix == ".json" or path.is_dir():
        return JsonObject.read(path / "config.json" if path.is_dir() else path, ModelError)
    if name in hub.BUILTIN:
        return JsonObject.read(hub.resolve(name, progress=False) / "config.json", ModelError)
    if re.fullmatch(r"[\w.-]+/[\w.-]+", name) and not name.startswith(".") and not path.exists():
        return JsonObject.read(_from_hub(name), ModelError)
    raise ModelError(f"{name} is no model directory, no config.json and no hub id (org/name). Built in: {', '.join(hub.BUILTIN)}")


def short_name(name: str) -> str:
    """What a table calls it."""
    path = Path(name)
    if path.suffix == ".json":
        return path.parent.name if path.name == "config.json" and path.parent.name else path.stem
    return path.name or name


def _from_hub(name: str) -> Path:
    import huggingface_hub

    try:
        return Path(huggingface_hub.hf_hub_download(name, "config.json"))
    except Exception as error:  # network, permissions, a name that is not there: the hub client raises many kinds
        raise ModelError(f"cannot get the config.json of {name!r} ({type(error).__name__}): give a directory, or the file") from error
