"""One file per Hugging Face `model_type`: what sets the family apart. File name = model_type.

Each file defines `describe(hf) -> Traits`, where `hf` is the transformers configuration.
"""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any

from headway.errors import ModelError, unknown_key
from headway.models.traits import Traits


def names() -> list[str]:
    return sorted(module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_"))


def describe(hf: Any) -> Traits:
    """The features of this configuration's family; ModelError when there is no such family."""
    if hf.model_type not in names():
        raise ModelError(unknown_key("model_type", hf.model_type, names()))
    traits: Traits = importlib.import_module(f"{__name__}.{hf.model_type}").describe(hf)
    return traits
