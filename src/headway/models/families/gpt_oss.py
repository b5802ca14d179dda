"""gpt-oss: a mixture of experts with biases in every layer, sinks in attention, a window on every other layer."""

from __future__ import annotations

from typing import Any

from headway.errors import ModelError
from headway.models.traits import ExpertTraits, Traits


def describe(hf: Any) -> Traits:
    if (hf.swiglu_alpha, hf.swiglu_limit) != (1.702, 7.0):
        raise ModelError(f"swiglu_alpha {hf.swiglu_alpha} and swiglu_limit {hf.swiglu_limit} are not supported. Supported: 1.702 and 7")
    return Traits(
        qkv_bias=hf.attention_bias,
        o_bias=hf.attention_bias,
        windows=tuple(hf.sliding_window if kind == "sliding_attention" else None for kind in hf.layer_types),
        sinks=True,
        experts=ExpertTraits(
            hf.num_local_experts, hf.num_experts_per_tok, hf.intermediate_size, (True,) * hf.num_hidden_layers,
            router="router", stacked=True,
        ),
    )   # fmt: skip
