"""Llama 2 and 3.x, TinyLlama, SmolLM2: the base of the others."""

from __future__ import annotations

from typing import Any

from headway.models.traits import Traits


def describe(hf: Any) -> Traits:
    return Traits(qkv_bias=hf.attention_bias, o_bias=hf.attention_bias, mlp_bias=hf.mlp_bias)
