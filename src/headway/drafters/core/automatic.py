"""What to draft with when nobody says: `"method": "auto"`, and the default.

    auto      suffix and ngram, and a speculator made for the model where there is one: shipped with Headway, in the hub's cache, or
              published (`PUBLISHED`) and downloaded now; that is announced with its size, `"download": false` or HEADWAY_DOWNLOAD=0 refuses
    default   suffix; for a model that a speculator is shipped for, that one and suffix

Both need to know the model, so they are spelled out before a SpeculativeConfig is made of them.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headway.errors import ConfigError, ModelError
from headway.models import hub

AUTO, DEFAULT = "auto", "default"
ALWAYS = ("suffix", "ngram")

SHIPPED = {"smollm2-135m": ("eagle", "smollm2-135m-eagle3")}
"""Model -> (drafter, directory in speculators/)."""

# In the package, or beside the sources of a checkout.
FOLDERS = tuple(Path(__file__).parents[up] / "speculators" for up in (2, 4))

PUBLISHED = {
    "Qwen/Qwen3-8B": ("eagle", "RedHatAI/Qwen3-8B-speculator.eagle3"),
    "Qwen/Qwen3-32B": ("eagle", "RedHatAI/Qwen3-32B-speculator.eagle3"),
    "deepseek-ai/DeepSeek-R1-Distill-Llama-8B": ("eagle", "yuhuili/EAGLE3-DeepSeek-R1-Distill-LLaMA-8B"),
    "meta-llama/Llama-3.1-8B-Instruct": ("eagle", "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B"),
    "meta-llama/Llama-3.3-70B-Instruct": ("eagle", "yuhuili/EAGLE3-LLaMA3.3-Instruct-70B"),
    "meta-llama/Meta-Llama-3-8B-Instruct": ("eagle", "yuhuili/EAGLE-LLaMA3-Instruct-8B"),
}
"""Model -> (drafter, its network), both by their hub ids."""

logger = logging.getLogger("headway.speculators")

Given = dict[str, Any]


def spell_out(value: Any, model: str) -> tuple[Any, dict[str, str]]:
    """What a user gave as speculative config, with "auto" and "default" replaced by drafters; other values come back as they are.

    The mapping says where what was filled in came from, by key. Raises ConfigError for an "auto" that cannot be one.
    """
    given = _mapping(value)
    if given is None or given.get("method") not in (AUTO, DEFAULT):
        return value, {}
    automatic, download = given["method"] == AUTO, given.pop("download", True)
    if not isinstance(download, bool):
        raise ConfigError(f"download must be true or false, got {download!r}")
    if given.get("model") is not None:
        raise ConfigError('method "auto" finds the draft network itself, so "model" cannot be given; name the drafter instead')
    found = shipped(model)
    source = f"shipped for {model}"
    if found is None and automatic:
        found = published(model, download and os.environ.get("HEADWAY_DOWNLOAD", "1") != "0")
        source = f"published for {model}"
    plain = ALWAYS if automatic else ALWAYS[:1]
    if found is None:
        if automatic:
            return {**given, "method": list(plain)}, {"method": "method auto"}
        return value, {}
    drafter, directory = found
    return {**given, "method": [{"name": drafter, "model": directory}, *plain]}, {"method": source, "model": source}


def shipped(model: str) -> tuple[str, str] | None:
    """(drafter, directory) of the speculator that comes with Headway for this model."""
    drafter, name = SHIPPED.get(model, (None, ""))
    for folder in FOLDERS:
        if drafter is not None and (folder / name / "model.safetensors").exists():
            return drafter, str(folder / name)
    return None


def published(model: str, download: bool) -> tuple[str, str] | None:
    """(drafter, directory) of the published speculator of a well-known model: from the hub's cache, or downloaded. Where that cannot be,
    one line in the log."""
    if model not in PUBLISHED:
        return None
    drafter, hub_id = PUBLISHED[model]
    local = hub.cached(hub_id, hub.SPECULATOR_WEIGHTS)
    if local is not None:
        return drafter, str(local)
    if not download:
        logger.warning("%s would draft for %s, but is not in the hub's cache and downloading is off", hub_id, model)
        return None
    size = hub.download_size(hub_id, hub.SPECULATOR_WEIGHTS)
    if size is None:
        logger.warning("%s would draft for %s, but is not in the hub's cache and the hub does not answer", hub_id, model)
        return None
    print(f"downloading {hub_id} ({size / 1e9:.2f} GB) to draft for {model}; HEADWAY_DOWNLOAD=0 goes without", file=sys.stderr)
    try:
        return drafter, str(hub.resolve(hub_id, weights=hub.SPECULATOR_WEIGHTS))
    except ModelError as error:
        logger.warning("going on without a draft network: %s", error)
        return None


def _mapping(value: Any) -> Given | None:
    """A copy of the config as a mapping; None: it is none, or not for us to judge."""
    if isinstance(value, str):
        text = value.strip()
        if not text.startswith("{"):
            return {"method": text}
        try:
            value = json.loads(text)
        except json.JSONDecodeError:
            return None
    return dict(value) if isinstance(value, Mapping) else None
