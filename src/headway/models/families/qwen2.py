"""Qwen2 and 2.5: biases on queries, keys and values; a sliding window on the layers that say so."""

from __future__ import annotations

from typing import Any

from headway.models.traits import Traits


def describe(hf: Any) -> Traits:
    windows = tuple(hf.sliding_window if kind == "sliding_attention" else None for kind in hf.layer_types)
    return Traits(qkv_bias=True, windows=windows)
