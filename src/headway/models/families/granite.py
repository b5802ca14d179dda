"""Granite 3: Llama with four multipliers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from headway.models.families import llama
from headway.models.traits import Traits


def describe(hf: Any) -> Traits:
    return replace(
        llama.describe(hf),
        attention_scale=hf.attention_multiplier,
        embedding_scale=hf.embedding_multiplier,
        residual_scale=hf.residual_multiplier,
        logit_scale=1.0 / hf.logits_scaling,
    )
