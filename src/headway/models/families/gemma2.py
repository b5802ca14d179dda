"""Gemma 2: norms before and behind attention and MLP, soft caps on scores and logits, a window on every other layer."""

from __future__ import annotations

from typing import Any

from headway.models.traits import Norms, Traits

NORMS = Norms("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")


def describe(hf: Any) -> Traits:
    return Traits(
        qkv_bias=hf.attention_bias,
        o_bias=hf.attention_bias,
        windows=tuple(hf.sliding_window if kind == "sliding_attention" else None for kind in hf.layer_types),
        norms=NORMS,
        norm_offset=1.0,
        attention_scale=hf.query_pre_attn_scalar**-0.5,
        attention_softcap=hf.attn_logit_softcapping or 0.0,
        logit_softcap=hf.final_logit_softcapping or 0.0,
        embedding_scale=hf.hidden_size**0.5,
    )
