"""How a model's makers sample from it: what a request that says nothing about sampling gets, as in vLLM."""

from __future__ import annotations

from pathlib import Path

from headway.errors import InvalidRequestError, ModelError
from headway.models import hub
from headway.models.config import read_json
from headway.types import SamplingParams

FILE = "generation_config.json"
NAMES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def sampling_defaults(name: str, directory: Path) -> dict[str, float]:
    """SamplingParams' names -> values, from the directory's generation_config.json, else from what is known of a built-in `name`.

    Empty where the makers say nothing: then SamplingParams' own defaults hold. Raises ModelError for a value that cannot be.
    """
    path = directory / FILE
    raw = read_json(path) if path.exists() else {}
    given = {key: raw[key] for key in NAMES if raw.get(key) is not None}
    try:
        SamplingParams(**given)
    except (InvalidRequestError, TypeError) as error:
        raise ModelError(f"{path}: {error}") from error
    if not given and name in hub.BUILTIN:
        return dict(hub.BUILTIN[name].sampling)
    return given
