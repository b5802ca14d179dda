"""What the drafters that have a network need, made small: by drafter, the speculative config's keys that go with a tiny target."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from headway import plugins
from tests import heads


def noisy_copy(folder: Path, target: Path, noise: float, seed: int = 0) -> Path:
    """A model like `target` whose weights are off by `noise` of their size: it often says the same, and often not."""
    directory = folder / "noisy"
    shutil.copytree(target, directory)
    random = torch.Generator().manual_seed(seed)
    state = load_file(target / "model.safetensors")
    state = {name: w + noise * w.std() * torch.randn(w.shape, generator=random) for name, w in state.items()}
    save_file(state, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def _draft_model(folder: Path, target: Path) -> dict[str, Any]:
    return {"model": str(noisy_copy(folder, target, 0.05))}


MAKERS: dict[str, Callable[[Path, Path], dict[str, Any]]] = {
    "draft_model": _draft_model,
    "cascade": _draft_model,
    # Left to itself it would not draft for a model of random weights.
    "layer_skip": lambda folder, target: {"layer_skip_exit": 1},
    "eagle": lambda folder, target: {"model": str(heads.eagle3_dir(folder / "eagle3", target))},
    "medusa": lambda folder, target: {"model": str(heads.medusa_dir(folder / "medusa", target))},
    "mtp": lambda folder, target: {"model": str(heads.mtp_dir(folder / "mtp", target))},
    "mlp_speculator": lambda folder, target: {"model": str(heads.mlp_speculator_dir(folder / "mlp", target))},
}
"""drafter -> (new folder, the target's directory) -> keys of the speculative config"""


ONLY: dict[str, list[str]] = {"drafter": [], "policy": []}
"""What the conformance suite was told to test alone."""


def kinds() -> list[str]:
    """Every drafter by name, and "NAME tree" for those that have trees as an option."""
    names = ONLY["drafter"] or plugins.names("drafter")
    options = {name: getattr(plugins.load("drafter", name), "Options", None) for name in names}
    return names + [f"{name} tree" for name in names if options[name] and any(field.name == "topk" for field in fields(options[name]))]


def policies() -> list[str]:
    return ONLY["policy"] or plugins.names("policy")


def drafter_config(name: str, folder: Path, target: Path) -> dict[str, Any]:
    """{"method": name} and what else one of `kinds` needs to draft for the model in `target`. A drafter that needs a model has an entry
    above."""
    if name.endswith(" tree"):
        return {**drafter_config(name.removesuffix(" tree"), folder, target), "topk": 3, "num_draft_tokens": 9}
    if name in MAKERS:
        return {"method": name, **MAKERS[name](folder, target)}
    assert not plugins.load("drafter", name).needs_model, f"tests/drafter_models.py has no tiny network for the drafter {name!r}"
    return {"method": name}
