"""GLM-4 (0414): norms before and behind attention and MLP, half of each head turned, in pairs that lie side by side."""

from __future__ import annotations

from typing import Any

from headway.models.traits import Norms, Traits


def describe(hf: Any) -> Traits:
    return Traits(
        qkv_bias=hf.attention_bias,
        norms=Norms("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"),
        interleaved_rotation=True,
        fused_gate_up=True,
    )
