"""Mistral: Llama with a sliding window on every layer (none since v0.2)."""

from __future__ import annotations

from typing import Any

from headway.models.traits import Traits


def describe(hf: Any) -> Traits:
    return Traits(windows=(hf.sliding_window,) * hf.num_hidden_layers)
