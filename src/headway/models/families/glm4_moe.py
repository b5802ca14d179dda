"""GLM-4.5: a few dense layers, then mixtures of experts beside a shared one; half of each head turned."""

from __future__ import annotations

from typing import Any

from headway.models.traits import ExpertTraits, Traits


def describe(hf: Any) -> Traits:
    return Traits(
        qkv_bias=hf.attention_bias,
        qk_norm=hf.use_qk_norm,
        experts=ExpertTraits(
            hf.n_routed_experts, hf.num_experts_per_tok, hf.moe_intermediate_size,
            tuple(i >= hf.first_k_dense_replace for i in range(hf.num_hidden_layers)),
            shared_size=hf.moe_intermediate_size * hf.n_shared_experts, sigmoid=True, normalised=hf.norm_topk_prob,
            scale=hf.routed_scaling_factor, choice_bias="gate.e_score_correction_bias", num_groups=hf.n_group, groups_kept=hf.topk_group,
        ),
    )   # fmt: skip
