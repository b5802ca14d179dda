"""Configurations of published models, as far as shapes go, with the counts that their makers publish."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).parents[1] / "examples" / "models"


@dataclass(frozen=True)
class Published:
    """num_parameters, num_active: of the model card; within: how far its rounding reaches. kv_bytes_per_token: 16 bits per value."""

    name: str
    config: dict[str, Any]
    num_parameters: float
    num_active: float
    within: float
    kv_bytes_per_token: int
    source: str


def _llama(hidden: int, inner: int, layers: int, heads: int, kv_heads: int = 8, **more: Any) -> dict[str, Any]:
    return {
        "model_type": "llama", "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "vocab_size": 128256, "max_position_embeddings": 131072, "torch_dtype": "bfloat16", **more,
    }  # fmt: skip


LLAMA_8B = _llama(4096, 14336, 32, 32)
LLAMA_70B = json.loads((EXAMPLES / "llama-3.1-70b.json").read_text())
LLAMA_405B = _llama(16384, 53248, 126, 128)
LLAMA_1B = json.loads((EXAMPLES / "llama-3.2-1b.json").read_text())
QWEN3_30B = {
    "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48, "num_attention_heads": 32,
    "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936, "num_experts": 128, "num_experts_per_tok": 8,
    "moe_intermediate_size": 768, "max_position_embeddings": 40960, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip
MIXTRAL = {
    "model_type": "mixtral", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 32000, "num_local_experts": 8, "num_experts_per_tok": 2, "max_position_embeddings": 32768,
    "torch_dtype": "bfloat16",
}  # fmt: skip
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18432, "num_hidden_layers": 61, "num_attention_heads": 128,
    "num_key_value_heads": 128, "vocab_size": 129280, "moe_intermediate_size": 2048, "n_routed_experts": 256, "n_shared_experts": 1,
    "num_experts_per_tok": 8, "first_k_dense_replace": 3, "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "v_head_dim": 128, "num_nextn_predict_layers": 1, "max_position_embeddings": 163840,
    "torch_dtype": "bfloat16", "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}  # fmt: skip

PUBLISHED = [
    Published("Llama-3.1-8B", LLAMA_8B, 8_030_261_248, 7.5e9, 0.0, 131072, "https://huggingface.co/meta-llama/Llama-3.1-8B"),
    Published("Llama-3.1-70B", LLAMA_70B, 70_553_706_496, 69.5e9, 0.0, 327680, "https://huggingface.co/meta-llama/Llama-3.1-70B"),
    Published("Llama-3.2-1B", LLAMA_1B, 1_235_814_400, 1.236e9, 0.0, 32768, "https://huggingface.co/meta-llama/Llama-3.2-1B"),
    Published("Qwen3-30B-A3B", QWEN3_30B, 30.5e9, 3.03e9, 0.002, 98304, "https://huggingface.co/Qwen/Qwen3-30B-A3B"),
    Published("Mixtral-8x7B", MIXTRAL, 46.7e9, 12.8e9, 0.001, 131072, "https://huggingface.co/mistralai/Mixtral-8x7B-v0.1"),
    Published("DeepSeek-V3", DEEPSEEK_V3, 671e9, 37e9, 0.001, 70272, "https://arxiv.org/abs/2412.19437"),
]
