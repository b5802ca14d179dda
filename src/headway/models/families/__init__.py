"""One file per Hugging Face `model_type`: what sets the family apart. File name = model_type.

Each file defines `describe(hf) -> Traits`, where `hf` is the transformers configuration. `READ_AS` names the model_type whose
configuration class reads it, for families that transformers does not know.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headway.errors import ModelError, unknown_key
from headway.models.traits import Traits

UNSERVED = {
    "deepseek_v2": "latent attention",
    "deepseek_v3": "latent attention",
    "qwen3_next": "linear attention, whose running state would have to be taken back for every rejected draft",
}
"""model_type -> what it has that nothing here runs."""


def names() -> list[str]:
    return sorted(module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_"))


def read_config(model_type: str, directory: Path, values: Mapping[str, Any]) -> Any:
    """The transformers configuration of the language model in `directory`, whose config.json holds `values`."""
    from transformers import AutoConfig

    read_as = getattr(_module(model_type), "READ_AS", None)
    if read_as is None:
        return AutoConfig.from_pretrained(directory).get_text_config()
    return AutoConfig.for_model(read_as, **{key: value for key, value in values.items() if key not in ("model_type", "auto_map")})


def describe(model_type: str, hf: Any) -> Traits:
    """The features of this configuration's family; ModelError when there is no such family."""
    traits: Traits = _module(model_type).describe(hf)
    return traits


def _module(model_type: str) -> Any:
    if model_type not in names():
        raise ModelError(unknown_key("model_type", model_type, names()))
    return importlib.import_module(f"{__name__}.{model_type}")
