"""What the network looks like, in our names; read once from a Hugging Face directory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from headway.errors import ModelError, unknown_key
from headway.json_object import JsonObject
from headway.models import families
from headway.models.quantized import Scheme
from headway.models.rope import Rope
from headway.models.traits import Traits
from headway.native.ops import GATES


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
    activation: str = "silu"                                        # of the MLP's gate
    local_rope: Mapping[str, Any] | None = None                     # of layers with a window, where it is another
    generation: Mapping[str, Any] = field(default_factory=dict)     # generation_config.json as it is
    scheme: Scheme | None = None                                    # how its weights are quantised; None: they are not

    @property
    def windows(self) -> tuple[int | None, ...]:
        return self.features.windows or (None,) * self.num_layers

    @property
    def num_parameters(self) -> int:
        hidden, features = self.hidden_size, self.features
        q_size, kv_size = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        attention = (q_size + 2 * kv_size) * (hidden + features.qkv_bias) + hidden * (q_size + features.o_bias)
        mlp = 2 * self.intermediate_size * (hidden + features.mlp_bias) + hidden * (self.intermediate_size + features.mlp_bias)
        norms = sum(name is not None for name in features.norms) * hidden + 2 * self.head_dim * features.qk_norm
        norms += (q_size + kv_size) * features.qk_norm_wide + self.num_heads * features.sinks
        sparse = sum(features.experts.layers) if features.experts else 0
        mlps = (self.num_layers - sparse) * mlp + (sparse * features.experts.num_parameters(hidden) if features.experts else 0)
        tables = self.vocab_size * hidden * (1 if self.tie_word_embeddings else 2)
        return self.num_layers * (attention + norms) + mlps + tables + hidden

    @property
    def num_idle_parameters(self) -> int:
        """Of experts that one token does not go through."""
        experts = self.features.experts
        if experts is None:
            return 0
        return sum(experts.layers) * (experts.num - experts.per_token) * 3 * experts.inner_size * self.hidden_size

    @classmethod
    def from_directory(cls, directory: Path) -> ModelConfig:
        """Reads config.json and generation_config.json; ModelError when they are missing, broken or not supported."""
        path = directory / "config.json"
        raw = JsonObject.read(path, ModelError, EXPECTED)
        model_type = raw.text("model_type", "")
        if model_type in families.UNSERVED:
            accepted = ", ".join(families.names())
            raise ModelError(f"{directory}: {model_type} is not supported: it has {families.UNSERVED[model_type]}. Supported: {accepted}")
        if model_type not in families.names():
            raise ModelError(f"{directory}: " + unknown_key("model_type", model_type, families.names()))
        whole, raw = raw, raw.child("text_config") if raw.has("text_config") else raw
        try:
            scheme = Scheme.of(whole)
            _check_types(raw)
            hf = families.read_config(model_type, directory, raw.values)
            config = replace(cls._of(model_type, hf, raw, _read_generation(directory)), scheme=scheme)
            Rope.of(config, torch.device("cpu"))
        except ModelError as error:
            raise error if str(directory) in str(error) else ModelError(f"{path}: {error}") from error
        except Exception as error:  # transformers validates with several libraries' exceptions
            raise ModelError(f"{path} is not a valid {model_type} configuration: {' '.join(str(error).split())}") from error
        if config.activation not in GATES:
            raise ModelError(f"{directory}: hidden_act {config.activation!r} is not supported. Supported: {', '.join(GATES)}")
        if config.num_heads % config.num_kv_heads:
            raise ModelError(f"{directory}: {config.num_heads} heads cannot share {config.num_kv_heads} KV heads evenly")
        return config

    @classmethod
    def _of(cls, model_type: str, hf: Any, raw: JsonObject, generation: JsonObject) -> ModelConfig:
        ropes = dict(hf.rope_parameters)
        return cls(
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
            rope=ropes.get("full_attention", ropes),
            local_rope=ropes.get("sliding_attention"),
            tie_word_embeddings=hf.tie_word_embeddings,
            eos_token_ids=frozenset({*_token_ids(raw, "eos_token_id"), *_token_ids(generation, "eos_token_id")}),
            features=families.describe(model_type, hf),
            activation="gpt_oss" if model_type == "gpt_oss" else getattr(hf, "hidden_activation", None) or hf.hidden_act,
            generation=generation.values,
        )


EXPECTED = "a model directory has a config.json, a tokenizer and *.safetensors"
SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "max_position_embeddings",
)  # fmt: skip


def _check_types(raw: JsonObject) -> None:
    """Of what every family has. A key that is left out has the family's default; null is none for a number that must be there."""
    for key in SIZES:
        raw.integer(key, 1, least=1, most=1 << 31)
    for key in ("rms_norm_eps", "rope_theta"):
        if key in raw.values:
            raw.number(key, least=0.0)
    _token_ids(raw, "eos_token_id")
    raw.flag("tie_word_embeddings", False)
    raw.text("hidden_act", "")
    for key in ("rope_scaling", "rope_parameters"):
        raw.child(key)


def _read_generation(directory: Path) -> JsonObject:
    path = directory / "generation_config.json"
    return JsonObject.read(path, ModelError) if path.exists() else JsonObject({}, str(path), ModelError)


def _token_ids(raw: JsonObject, key: str) -> list[int]:
    """One id, a list of them, or none."""
    if isinstance(raw.values.get(key), list):
        return raw.list_of(int, key)
    return [raw.integer(key)] if raw.has(key) else []


def read_json(path: Path, expected: str = EXPECTED) -> dict[str, Any]:
    """The object in a file; ModelError, with what was `expected` around a missing one."""
    return dict(JsonObject.read(path, ModelError, expected).values)
