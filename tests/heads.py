"""Tiny drafting heads with the key names and shapes that are published, for a tiny target (tests/tiny.py)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

Tensors = dict[str, torch.Tensor]


class Maker:
    """Random tensors by name; equal seeds give equal weights."""

    def __init__(self, seed: int, dtype: torch.dtype = torch.float32) -> None:
        self.random = torch.Generator().manual_seed(seed)
        self.dtype = dtype
        self.tensors: Tensors = {}

    def matrix(self, name: str, rows: int, columns: int, bias: bool = False, gain: float = 1.5) -> None:
        self.tensors[f"{name}.weight"] = (torch.randn(rows, columns, generator=self.random) * gain / columns**0.5).to(self.dtype)
        if bias:
            self.tensors[f"{name}.bias"] = (torch.randn(rows, generator=self.random) * 0.2).to(self.dtype)

    def norm(self, name: str, size: int) -> None:
        self.tensors[f"{name}.weight"] = (1.0 + 0.2 * torch.randn(size, generator=self.random)).to(self.dtype)

    def layer(self, name: str, config: dict[str, Any], *, size_in: int | None = None, input_norm: bool = True) -> None:
        hidden, inner, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
        q_size, kv_size = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
        if input_norm:
            self.norm(f"{name}.input_layernorm", hidden)
        bias = config["model_type"] == "qwen2"
        for part, size in (("q_proj", q_size), ("k_proj", kv_size), ("v_proj", kv_size)):
            self.matrix(f"{name}.self_attn.{part}", size, size_in or hidden, bias)
        self.matrix(f"{name}.self_attn.o_proj", hidden, q_size)
        if config["model_type"] == "qwen3":
            self.norm(f"{name}.self_attn.q_norm", head_dim)
            self.norm(f"{name}.self_attn.k_norm", head_dim)
        self.norm(f"{name}.post_attention_layernorm", hidden)
        self.matrix(f"{name}.mlp.gate_proj", inner, hidden)
        self.matrix(f"{name}.mlp.up_proj", inner, hidden)
        self.matrix(f"{name}.mlp.down_proj", hidden, inner)


def target_config(target: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((target / "config.json").read_text(encoding="utf-8"))
    return config


def layer_config(target: Path, model_type: str = "llama", num_layers: int = 1, inner_size: int = 80) -> dict[str, Any]:
    """The draft network's own decoder layers: smaller heads than the target's."""
    config = target_config(target)
    return {
        "model_type": model_type, "vocab_size": config["vocab_size"], "hidden_size": config["hidden_size"],
        "intermediate_size": inner_size, "num_hidden_layers": num_layers,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "hidden_act": "silu", "max_position_embeddings": config["max_position_embeddings"], "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, "attention_bias": False, "mlp_bias": False,
        "tie_word_embeddings": False,
    }


def draft_vocabulary(vocab: int, size: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(d2t, t2d) of a random subset, in rising order as it is published."""
    ids = torch.randperm(vocab, generator=torch.Generator().manual_seed(seed))[:size].sort().values
    known = torch.zeros(vocab, dtype=torch.bool)
    known[ids] = True
    return ids - torch.arange(size), known


def eagle3_dir(
    directory: Path, target: Path, *, layout: str = "speculators", seed: int = 0, draft_vocab: int | None = 200, num_layers: int = 1,
    model_type: str = "llama", layer_ids: tuple[int, ...] = (1, 2), inner_size: int = 80, **flags: Any,
) -> Path:
    """`layout`: speculators, or eagle (the EAGLE repository's). `draft_vocab` None: the target's own vocabulary."""
    hidden, vocab = target_config(target)["hidden_size"], target_config(target)["vocab_size"]
    inner = layer_config(target, model_type, num_layers, inner_size)
    make = Maker(seed)
    make.matrix("fc", hidden, len(layer_ids) * hidden)
    for index in range(num_layers):
        name = "midlayer" if layout == "eagle" and index == 0 else f"layers.{index}"
        make.layer(name, inner, size_in=2 * hidden if index == 0 else None)
        if index == 0:
            make.norm(f"{name}.hidden_norm", hidden)
    make.norm("norm", hidden)
    make.matrix("lm_head", draft_vocab or vocab, hidden, gain=3.0)
    if draft_vocab is not None:
        make.tensors["d2t"], make.tensors["t2d"] = draft_vocabulary(vocab, draft_vocab, seed)
    if flags.get("fc_norm"):
        for index in range(len(layer_ids)):
            make.norm(f"fc_norm.{index}", hidden)
    if flags.get("norm_before_fc"):
        make.norm("input_norm", len(layer_ids) * hidden)
    shared = {"draft_vocab_size": draft_vocab or vocab, "eagle_aux_hidden_state_layer_ids": list(layer_ids)}
    if layout == "eagle":
        config = {**inner, **shared, "architectures": ["LlamaForCausalLMEagle3"]}
    else:
        top = speculators_config("eagle3", target)
        config = {**top, "transformer_layer_config": inner, "norm_before_residual": False, **shared, **flags}
    return write(directory, config, make.tensors, "pytorch_model.bin" if layout == "eagle" else "model.safetensors")


def eagle1_dir(
    directory: Path, target: Path, *, seed: int = 0, bias: bool = True, file: str = "pytorch_model.bin", inner_size: int = 80
) -> Path:
    config = layer_config(target, inner_size=inner_size)
    make = Maker(seed)
    make.matrix("fc", config["hidden_size"], 2 * config["hidden_size"], bias)
    make.layer("layers.0", config, input_norm=False)
    return write(directory, {**config, "architectures": ["LlamaForCausalLM"]}, make.tensors, file)


def speculators_config(algorithm: str, target: Path, num_tokens: int = 4) -> dict[str, Any]:
    return {
        "architectures": ["Eagle3Speculator" if algorithm == "eagle3" else "MTPDraftModel"],
        "speculators_model_type": algorithm,
        "speculators_version": "0.9.0",
        "speculators_config": {
            "algorithm": algorithm,
            "proposal_methods": [
                {"proposal_type": "greedy", "speculative_tokens": num_tokens, "verifier_accept_k": 1, "accept_tolerance": 0.0}
            ],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": str(target), "architectures": target_config(target)["architectures"]},
        },
    }


def write(directory: Path, config: dict[str, Any], tensors: Tensors, file: str) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    if file.endswith(".safetensors"):
        save_file(tensors, directory / file, metadata={"format": "pt"})
    else:
        torch.save(tensors, directory / file)
    return directory


def medusa_dir(
    directory: Path, target: Path, *, layout: str = "repository", num_heads: int = 3, num_layers: int = 1, seed: int = 0,
    file: str = "medusa_lm_head.pt", draft_vocab: int | None = None,
) -> Path:
    """`layout`: repository (FasterDecoding/Medusa), or converted (the names vLLM reads)."""
    hidden, vocab = target_config(target)["hidden_size"], target_config(target)["vocab_size"]
    make = Maker(seed)
    for head in range(num_heads):
        for layer in range(num_layers):
            make.matrix(f"{head}.{layer}.linear" if layout == "repository" else f"blocks.{head}.layers.{layer}", hidden, hidden, bias=True)
        make.matrix(f"{head}.{num_layers}" if layout == "repository" else f"lm_heads.{head}", draft_vocab or vocab, hidden, gain=3.0)
    if layout == "repository":
        config: dict[str, Any] = {"medusa_num_heads": num_heads, "medusa_num_layers": num_layers, "base_model_name_or_path": str(target)}
        return write(directory, config, make.tensors, file)
    config = {
        "model_type": "medusa", "architectures": ["MedusaModel"], "hidden_size": hidden, "vocab_size": vocab, "num_heads": num_heads,
        "num_hidden_layers": num_layers, "truncated_vocab_size": draft_vocab or vocab, "medusa_fc_bias": True,
    }
    if draft_vocab is not None:
        make.tensors["token_map"] = torch.randperm(vocab, generator=torch.Generator().manual_seed(seed))[:draft_vocab]
    return write(directory, config, make.tensors, "model.safetensors")


def mlp_speculator_dir(
    directory: Path, target: Path, *, num_heads: int = 3, inner: int = 48, tied: bool = False, scale_input: bool = True, seed: int = 0,
    prefix: str = "speculator.", file: str = "model.safetensors",
) -> Path:
    hidden, vocab = target_config(target)["hidden_size"], target_config(target)["vocab_size"]
    make = Maker(seed)
    for head in range(num_heads):
        if head == 0 or not tied:
            make.matrix(f"{prefix}emb.{head}", vocab, inner, gain=2.0)
            make.norm(f"{prefix}ln.{head}", inner)
            make.tensors[f"{prefix}ln.{head}.bias"] = torch.randn(inner, generator=make.random) * 0.2
            make.matrix(f"{prefix}head.{head}", vocab, inner, gain=3.0)
        if head <= 1 or not tied:
            make.matrix(f"{prefix}proj.{head}", inner, hidden if head == 0 else inner)
    config = {
        "architectures": ["MLPSpeculatorPreTrainedModel"], "model_type": "mlp_speculator", "emb_dim": hidden, "inner_dim": inner,
        "n_predict": num_heads, "n_candidates": 5, "top_k_tokens_per_head": [4, 3, 2][:num_heads], "vocab_size": vocab,
        "tie_weights": tied, "scale_input": scale_input,
    }
    return write(directory, config, make.tensors, file)


def mtp_dir(
    directory: Path, target: Path, *, layout: str = "speculators", model_type: str = "qwen3", seed: int = 0, inner_size: int = 80,
    num_modules: int = 1,
) -> Path:
    """`layout`: speculators, qwen, mimo or deepseek."""
    inner, hidden = layer_config(target, model_type, inner_size=inner_size), target_config(target)["hidden_size"]
    first = target_config(target)["num_hidden_layers"] if layout == "deepseek" else 0
    named = ("input_proj", "token_layernorm", "hidden_layernorm", "final_layernorm")
    project, token, state, final = {
        "qwen": ("fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"),
        "deepseek": ("eh_proj", "enorm", "hnorm", "shared_head.norm"),
    }.get(layout, named)
    root = {"speculators": "mtp_layers.{}", "qwen": "mtp", "mimo": "model.mtp_layers.{}", "deepseek": "model.layers.{}"}[layout]
    make = Maker(seed)
    for index in range(first, first + num_modules):
        own = root.format(index)
        if index == first or layout != "qwen":
            make.matrix(f"{own}.{project}", hidden, 2 * hidden)
            for norm in (token, state, final):
                make.norm(f"{own}.{norm}", hidden)
        make.layer(f"{own}.layers.{index}" if layout == "qwen" else own, inner)
        if layout == "deepseek":
            make.matrix(f"{own}.shared_head.head", inner["vocab_size"], hidden, gain=3.0)
    config = {**inner, "num_nextn_predict_layers": num_modules}
    if layout == "speculators":
        config = {**speculators_config("mtp", target), "transformer_layer_config": inner, "num_nextn_predict_layers": num_modules}
    return write(directory, config, make.tensors, "model.safetensors")
