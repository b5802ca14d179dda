"""Mixtral: Mistral with a mixture of experts in every layer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from headway.models.families import mistral
from headway.models.traits import ExpertTraits, Traits


def describe(hf: Any) -> Traits:
    experts = ExpertTraits(
        hf.num_local_experts, hf.num_experts_per_tok, hf.intermediate_size, (True,) * hf.num_hidden_layers,
        block="block_sparse_moe", parts=("w1", "w3", "w2"),
    )   # fmt: skip
    return replace(mistral.describe(hf), experts=experts)
