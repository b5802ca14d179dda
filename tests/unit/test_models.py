"""Logits of every family equal transformers' on tiny random configurations, and on the real SmolLM2."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from headway.models.attention import KVCache, make_plan
from headway.models.decoder import Decoder
from headway.models.loader import load_model
from tests.tiny import tiny_model_dir

BLOCK = 16


def our_logits(model: Decoder, token_ids: list[int]) -> torch.Tensor:
    num_blocks = -(-len(token_ids) // BLOCK)
    cache = KVCache(model.config, num_blocks, BLOCK, model.dtype, model.device)
    plan = make_plan([(list(range(num_blocks)), 0, len(token_ids))], BLOCK, model.device)
    hidden, _ = model.forward(torch.tensor(token_ids), torch.arange(len(token_ids)), plan, cache)
    return model.logits(hidden)


def reference_logits(directory: Path, token_ids: list[int]) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    with torch.inference_mode():
        return model(torch.tensor([token_ids])).logits[0]


def random_ids(count: int, vocab_size: int, seed: int = 0) -> list[int]:
    return torch.randint(0, vocab_size, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-untied": ("llama", {"tie_word_embeddings": False}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-mha": ("llama", {"num_key_value_heads": 4}),
    "llama-mqa": ("llama", {"num_key_value_heads": 1}),
    "llama-linear": ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
    "llama-llama3": ("llama", {"rope_scaling": LLAMA3}),
    "llama-yarn": ("llama", {"rope_scaling": YARN}),
    "llama-rope-parameters": ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}),
    "llama-wide-heads": ("llama", {"head_dim": 32}),
    "mistral": ("mistral", {}),
    "mistral-window": ("mistral", {"sliding_window": 24}),
    "qwen2": ("qwen2", {}),
    "qwen2-window-on-upper-layers": ("qwen2", {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}),
    "qwen3": ("qwen3", {}),
    "qwen3-untied": ("qwen3", {"tie_word_embeddings": False, "attention_bias": True}),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_the_reference(tmp_path: Path, variant: str) -> None:
    model_type, overrides = VARIANTS[variant]
    directory = tiny_model_dir(tmp_path, model_type, **overrides)
    token_ids = random_ids(150, 320)
    reference = reference_logits(directory, token_ids)
    ours = our_logits(load_model(str(directory), dtype="float32", device="cpu"), token_ids)
    assert reference.std() > 0.5
    assert (ours - reference).abs().max() < 1e-4
