"""Tiny random models in Hugging Face directories, made in milliseconds, for everybody's tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from headway.models.gguf import _sentencepiece_bpe

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MIN_VOCAB = 256 + len(SPECIAL)
PIECES = ["▁", *"abcdehilnorstwx", "th", "the", "▁the", "▁a", "é", "漢"]

BASE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FAMILY: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": False, "mlp_bias": False},
    "mistral": {"sliding_window": None},
    "qwen2": {"use_sliding_window": False},
    "qwen3": {"use_sliding_window": False, "attention_bias": False},
    "gemma2": {"hidden_act": "gelu_pytorch_tanh", "query_pre_attn_scalar": 24, "sliding_window": 20, "attn_logit_softcapping": 5.0},
    "gemma3_text": {
        "hidden_act": "gelu_pytorch_tanh", "query_pre_attn_scalar": 24, "sliding_window": 20, "rope_theta": 1e6,
        "rope_local_base_freq": 10000.0, "sliding_window_pattern": 2, "pad_token_id": 0,
    },
    "phi3": {"pad_token_id": 0},
    "olmo2": {"tie_word_embeddings": False},
    "granite": {
        "embedding_multiplier": 12.0, "residual_multiplier": 0.22, "attention_multiplier": 0.3, "logits_scaling": 2.0,
        "attention_bias": False, "mlp_bias": False,
    },
    "glm4": {"partial_rotary_factor": 0.5, "attention_bias": True, "pad_token_id": 0},
    "mimo": {"use_sliding_window": False},
    "qwen3_moe": {
        "use_sliding_window": False, "attention_bias": False, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32,
        "norm_topk_prob": True,
    },
    "mixtral": {"sliding_window": None, "num_local_experts": 4, "num_experts_per_tok": 2, "tie_word_embeddings": False},
    "gpt_oss": {
        "sliding_window": 20, "num_local_experts": 4, "num_experts_per_tok": 2, "attention_bias": True, "pad_token_id": 0,
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "truncate": False},
    },
    "glm4_moe": {
        "partial_rotary_factor": 0.5, "attention_bias": True, "use_qk_norm": True, "n_routed_experts": 8, "n_shared_experts": 1,
        "num_experts_per_tok": 3, "moe_intermediate_size": 32, "first_k_dense_replace": 1, "routed_scaling_factor": 2.5,
        "norm_topk_prob": True, "pad_token_id": 0, "num_nextn_predict_layers": 0,
    },
}
ARCHITECTURE = {
    "llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM",
    "gemma2": "Gemma2ForCausalLM", "gemma3_text": "Gemma3ForCausalLM", "phi3": "Phi3ForCausalLM", "olmo2": "Olmo2ForCausalLM",
    "granite": "GraniteForCausalLM", "glm4": "Glm4ForCausalLM", "mimo": "MiMoForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM",
    "mixtral": "MixtralForCausalLM", "gpt_oss": "GptOssForCausalLM", "glm4_moe": "Glm4MoeForCausalLM",
}
_GEMMA_NORMS = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
NORMS = {
    "gemma2": _GEMMA_NORMS, "gemma3_text": _GEMMA_NORMS, "olmo2": ("post_attention_layernorm", "post_feedforward_layernorm"),
    "glm4": ("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"),
}

# block, router, an expert's parts, keys of config.json for the number of experts and their inner size
_PARTS = ("gate_proj", "up_proj", "down_proj")
EXPERTS = {
    "qwen3_moe": ("mlp", "gate", _PARTS, "num_experts", "moe_intermediate_size"),
    "mixtral": ("block_sparse_moe", "gate", ("w1", "w3", "w2"), "num_local_experts", "intermediate_size"),
    "gpt_oss": ("mlp", "router", _PARTS, "num_local_experts", "intermediate_size"),
    "glm4_moe": ("mlp", "gate", _PARTS, "n_routed_experts", "moe_intermediate_size"),
}


def tiny_model_dir(
    tmp_path: Path, model_type: str = "llama", vocab_size: int = 320, seed: int = 0, *, dtype: torch.dtype = torch.float32,
    shards: int = 1, byte_fallback: bool = False, **overrides: Any,
) -> Path:
    """Writes config.json, generation_config.json, safetensors (in `shards` files) and a byte-level tokenizer to a new directory
    under `tmp_path`; returns it. Equal arguments give equal weights. `overrides` replace entries of config.json.

    Any text round-trips when vocab_size >= 259 (token 3 + b is byte b); a smaller vocabulary has no tokenizer, for tests that feed
    token ids. `byte_fallback`: a SentencePiece vocabulary instead, as Llama 2 has; token 3 + b is byte b there, too, and PIECES follow.
    """
    config = {**BASE, **FAMILY.get(model_type, {}), "model_type": model_type, "vocab_size": vocab_size, **overrides}
    config["architectures"] = [ARCHITECTURE.get(model_type, "Unknown")]
    number = sum(1 for _ in tmp_path.glob(f"{model_type}-*"))
    directory = tmp_path / f"{model_type}-{number}"
    directory.mkdir(parents=True)
    _write(directory / "config.json", config)
    _write(directory / "generation_config.json", {"eos_token_id": config["eos_token_id"], "bos_token_id": config["bos_token_id"]})
    _save(random_weights(config, seed, dtype), directory, shards)
    if vocab_size >= MIN_VOCAB:
        tokenizer = byte_fallback_tokenizer(vocab_size) if byte_fallback else byte_level_tokenizer(vocab_size)
        tokenizer.save(str(directory / "tokenizer.json"))
        _write(directory / "tokenizer_config.json", {
            "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": SPECIAL[1], "eos_token": SPECIAL[2], "pad_token": SPECIAL[0],
            "chat_template": CHAT_TEMPLATE, "model_max_length": config["max_position_embeddings"], "clean_up_tokenization_spaces": False,
        })
    return directory


def random_weights(config: dict[str, Any], seed: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Weights large enough that the next token depends on the context, and that attention is not uniform."""
    random = torch.Generator().manual_seed(seed)
    hidden, inner, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q_size, kv_size = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    kind = config["model_type"]
    qkv_bias = kind in ("qwen2", "mimo") or config.get("attention_bias", False)
    o_bias, mlp_bias = config.get("attention_bias", False) and not kind.startswith("glm4"), config.get("mlp_bias", False)
    state: dict[str, torch.Tensor] = {}

    def matrix(name: str, rows: int, columns: int, bias: bool = False, gain: float = 1.5) -> None:
        state[f"{name}.weight"] = torch.randn(rows, columns, generator=random) * gain / columns**0.5
        if bias:
            state[f"{name}.bias"] = torch.randn(rows, generator=random) * 0.2

    def norm(name: str, size: int) -> None:
        state[f"{name}.weight"] = (0.0 if kind.startswith("gemma") else 1.0) + 0.2 * torch.randn(size, generator=random)

    def experts(layer: str) -> None:
        block, router, parts, num_key, size_key = EXPERTS[kind]
        num, size = config[num_key], config[size_key]
        matrix(f"{layer}.{block}.{router}", num, hidden, kind == "gpt_oss", gain=3.0)
        if kind == "gpt_oss":   # one tensor for all experts, [experts, in, out]
            for name, size_in, size_out in (("gate_up_proj", hidden, 2 * size), ("down_proj", size, hidden)):
                stacked = torch.randn(num, size_in, size_out, generator=random) * 1.5 / size_in**0.5
                state[f"{layer}.{block}.experts.{name}"] = stacked
                state[f"{layer}.{block}.experts.{name}_bias"] = torch.randn(num, size_out, generator=random) * 0.2
            return
        if kind == "glm4_moe":
            state[f"{layer}.{block}.{router}.e_score_correction_bias"] = torch.randn(num, generator=random) * 0.3
        for name in [*(f"experts.{i}" for i in range(num)), *(["shared_experts"] if kind == "glm4_moe" else [])]:
            for part in parts:
                rows, columns = (hidden, size) if part == parts[2] else (size, hidden)
                matrix(f"{layer}.{block}.{name}.{part}", rows, columns)

    matrix("model.embed_tokens", config["vocab_size"], hidden, gain=2.0)
    for index in range(config["num_hidden_layers"]):
        layer = f"model.layers.{index}"
        for name in NORMS.get(kind, ("input_layernorm", "post_attention_layernorm")):
            norm(f"{layer}.{name}", hidden)
        parts = (("qkv_proj", q_size + 2 * kv_size),) if kind == "phi3" else (("q_proj", q_size), ("k_proj", kv_size), ("v_proj", kv_size))
        for name, size in parts:
            matrix(f"{layer}.self_attn.{name}", size, hidden, qkv_bias)
        matrix(f"{layer}.self_attn.o_proj", hidden, q_size, o_bias)
        if kind in ("qwen3", "qwen3_moe", "glm4_moe", "gemma3_text", "olmo2"):
            norm(f"{layer}.self_attn.q_norm", q_size if kind == "olmo2" else head_dim)
            norm(f"{layer}.self_attn.k_norm", kv_size if kind == "olmo2" else head_dim)
        if kind == "gpt_oss":
            state[f"{layer}.self_attn.sinks"] = torch.randn(config["num_attention_heads"], generator=random)
        if kind in EXPERTS and index >= config.get("first_k_dense_replace", 0) and index not in config.get("mlp_only_layers", []):
            experts(layer)
            continue
        for name in ("gate_up_proj",) if kind in ("phi3", "glm4") else ("gate_proj", "up_proj"):
            matrix(f"{layer}.mlp.{name}", inner * (2 if name == "gate_up_proj" else 1), hidden, mlp_bias)
        matrix(f"{layer}.mlp.down_proj", hidden, inner, mlp_bias)
    norm("model.norm", hidden)
    if not config["tie_word_embeddings"]:
        matrix("lm_head", config["vocab_size"], hidden, gain=2.0)
    return {name: tensor.to(dtype) for name, tensor in state.items()}


def _save(state: dict[str, torch.Tensor], directory: Path, shards: int) -> None:
    if shards == 1:
        save_file(state, directory / "model.safetensors", metadata={"format": "pt"})
        return
    where = {}
    for shard in range(shards):
        part = dict(list(state.items())[shard::shards])
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        save_file(part, directory / file, metadata={"format": "pt"})
        where.update(dict.fromkeys(part, file))
    total = sum(tensor.nbytes for tensor in state.values())
    _write(directory / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": where})


def byte_level_tokenizer(vocab_size: int) -> Tokenizer:
    """Byte-level BPE: three special tokens, the 256 bytes, then `<extra_i>` words that no text encodes to."""
    alphabet = byte_alphabet()
    vocab = {token: index for index, token in enumerate([*SPECIAL, *alphabet])}
    vocab |= {f"<extra_{i}>": MIN_VOCAB + i for i in range(vocab_size - MIN_VOCAB)}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    return tokenizer


def byte_fallback_tokenizer(vocab_size: int) -> Tokenizer:
    """SentencePiece's BPE: three special tokens, the 256 bytes, PIECES, then `<extra_i>` words that no text encodes to."""
    tokens = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES]
    tokens += [f"<extra_{i}>" for i in range(vocab_size - len(tokens))]
    scores = [0.0] * MIN_VOCAB + [float(len(piece)) for piece in tokens[MIN_VOCAB:]]
    tokenizer = _sentencepiece_bpe({
        "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.scores": scores, "tokenizer.ggml.unknown_token_id": 0,
    })
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    assert isinstance(tokenizer, Tokenizer)
    return tokenizer


def byte_alphabet() -> list[str]:
    """The printable character that byte-level BPE writes for each byte 0..255."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    shifted = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(shifted)) for byte in range(256)]


def _write(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2), encoding="utf-8")
