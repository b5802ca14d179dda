"""Qwen3 with mixtures of experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from headway.models.traits import ExpertTraits, Traits


def describe(hf: Any) -> Traits:
    layers = tuple(
        i not in hf.mlp_only_layers and (i + 1) % hf.decoder_sparse_step == 0 for i in range(hf.num_hidden_layers)
    )
    base = Traits(qkv_bias=hf.attention_bias, o_bias=hf.attention_bias, qk_norm=True, windows=(hf.sliding_window,) * hf.num_hidden_layers)
    experts = ExpertTraits(hf.num_experts, hf.num_experts_per_tok, hf.moe_intermediate_size, layers, normalised=hf.norm_topk_prob)
    return replace(base, experts=experts)
