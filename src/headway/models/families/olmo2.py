"""OLMo 2: norms behind attention and MLP, none before; queries and keys normed over all heads together."""

from __future__ import annotations

from typing import Any

from headway.models.traits import Norms, Traits


def describe(hf: Any) -> Traits:
    return Traits(
        qkv_bias=hf.attention_bias,
        o_bias=hf.attention_bias,
        qk_norm_wide=True,
        norms=Norms(None, "post_attention_layernorm", None, "post_feedforward_layernorm"),
    )
