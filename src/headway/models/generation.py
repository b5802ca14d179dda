"""How a model's makers sample from it: what a request that says nothing about sampling gets, as in vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headway.errors import InvalidRequestError, ModelError
from headway.models import hub
from headway.sampling_params import SamplingParams

NAMES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def sampling_defaults(name: str, generation: Mapping[str, Any]) -> dict[str, float]:
    """SamplingParams' names -> values, from the model's generation_config.json, else from what is known of a built-in `name`.

    Empty where the makers say nothing: then SamplingParams' own defaults hold. Raises ModelError for a value that cannot be.
    """
    given = {key: generation[key] for key in NAMES if generation.get(key) is not None}
    try:
        SamplingParams(**given)
    except (InvalidRequestError, TypeError, ValueError, OverflowError) as error:
        raise ModelError(f"generation_config.json of {name}: {error}") from error
    if not given and name in hub.BUILTIN:
        return dict(hub.BUILTIN[name].sampling)
    return given
