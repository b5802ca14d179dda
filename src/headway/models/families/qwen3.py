"""Qwen3 (dense): RMS norm on each query and key head, before the rotation."""

from __future__ import annotations

from typing import Any

from headway.models.traits import Traits


def describe(hf: Any) -> Traits:
    windows = tuple(hf.sliding_window if kind == "sliding_attention" else None for kind in hf.layer_types)
    return Traits(qkv_bias=hf.attention_bias, o_bias=hf.attention_bias, qk_norm=True, windows=windows)
