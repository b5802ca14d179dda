"""What the network looks like, in our names; read once from a Hugging Face directory."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headway.errors import ModelError, unknown_key
from headway.models import families
from headway.models.traits import Traits


@dataclass(frozen=True)
class ModelConfig:
    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    rms_norm_eps: float
    rope: Mapping[str, Any]
    tie_word_embeddings: bool
    eos_token_ids: frozenset[int]
    features: Traits = field(default_factory=Traits)
    generation: Mapping[str, Any] = field(default_factory=dict)     # generation_config.json as it is

    @property
    def windows(self) -> tuple[int | None, ...]:
        return self.features.windows or (None,) * self.num_layers

    @property
    def num_parameters(self) -> int:
        hidden, features = self.hidden_size, self.features
        q_size, kv_size = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        attention = (q_size + 2 * kv_size) * (hidden + features.qkv_bias) + hidden * (q_size + features.o_bias)
        mlp = 2 * self.intermediate_size * (hidden + features.mlp_bias) + hidden * (self.intermediate_size + features.mlp_bias)
        norms = 2 * hidden + 2 * self.head_dim * features.qk_norm
        tables = self.vocab_size * hidden * (1 if self.tie_word_embeddings else 2)
        return self.num_layers * (attention + mlp + norms) + tables + hidden

    @classmethod
    def from_directory(cls, directory: Path) -> ModelConfig:
        """Reads config.json and generation_config.json; ModelError when they are missing, broken or not supported."""
        raw = read_json(directory / "config.json")
        model_type = raw.get("model_type")
        if model_type not in families.names():
            raise ModelError(f"{directory}: " + unknown_key("model_type", str(model_type), families.names()))
        if raw.get("quantization_config"):
            method = raw["quantization_config"].get("quant_method", "unknown")
            raise ModelError(f"{directory}: {method} weights are not supported. Supported: float32, bfloat16, float16, and GGUF files")
        from transformers import AutoConfig

        try:
            hf = AutoConfig.from_pretrained(directory)
        except Exception as error:  # transformers validates with several libraries' exceptions
            raise ModelError(f"{directory / 'config.json'} is not a valid {model_type} configuration: {error}") from error
        if hf.hidden_act != "silu":
            raise ModelError(f"{directory}: hidden_act {hf.hidden_act!r} is not supported. Supported: silu")
        path = directory / "generation_config.json"
        generation = read_json(path) if path.exists() else {}
        eos = {*_as_ids(raw.get("eos_token_id")), *_as_ids(generation.get("eos_token_id"))}
        config = cls(
            model_type=model_type,
            vocab_size=hf.vocab_size,
            hidden_size=hf.hidden_size,
            intermediate_size=hf.intermediate_size,
            num_layers=hf.num_hidden_layers,
            num_heads=hf.num_attention_heads,
            num_kv_heads=hf.num_key_value_heads,
            head_dim=getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads,
            max_position=hf.max_position_embeddings,
            rms_norm_eps=hf.rms_norm_eps,
            rope=dict(hf.rope_parameters),
            tie_word_embeddings=hf.tie_word_embeddings,
            eos_token_ids=frozenset(eos),
            features=families.describe(hf),
            generation=generation,
        )
        if config.num_heads % config.num_kv_heads:
            raise ModelError(f"{directory}: {config.num_heads} heads cannot share {config.num_kv_heads} KV heads evenly")
        return config


def _as_ids(value: Any) -> list[int]:
    if value is None:
        return []
    return [int(v) for v in value] if isinstance(value, list) else [int(value)]


def read_json(path: Path, expected: str = "a model directory has a config.json, a tokenizer and *.safetensors") -> dict[str, Any]:
    """The object in a file; ModelError, with what was `expected` around a missing one."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path} does not exist; {expected}") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ModelError(f"{path} is not readable JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} must hold a JSON object")
    return value
