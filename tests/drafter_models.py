"""What the drafters that have a network need, made small: by drafter, the speculative config's keys that go with a tiny target."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from headway import plugins
from tests import heads

MAKERS: dict[str, Callable[[Path, Path], dict[str, Any]]] = {
    "eagle": lambda folder, target: {"model": str(heads.eagle3_dir(folder / "eagle3", target))},
    "medusa": lambda folder, target: {"model": str(heads.medusa_dir(folder / "medusa", target))},
    "mlp_speculator": lambda folder, target: {"model": str(heads.mlp_speculator_dir(folder / "mlp", target))},
}
"""drafter -> (new folder, the target's directory) -> keys of the speculative config"""


def drafter_config(name: str, folder: Path, target: Path) -> dict[str, Any]:
    """{"method": name} and what else it needs to draft for the model in `target`. A drafter that needs a model has an entry above."""
    if name in MAKERS:
        return {"method": name, **MAKERS[name](folder, target)}
    assert not plugins.load("drafter", name).needs_model, f"tests/drafter_models.py has no tiny network for the drafter {name!r}"
    return {"method": name}
