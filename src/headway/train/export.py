"""A trained head as a speculators-format directory, which vLLM loads too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from headway.models.decoder import Decoder
from headway.train.eagle3 import Eagle3Head

FORMAT_VERSION = "0.9.0"   # of the speculators package whose format this is


def draft_vocabulary(counts: torch.Tensor, size: int) -> torch.Tensor:
    """The `size` most frequent tokens, rising. Ties, and what the data lacks, by id: tokenizers number merges by frequency."""
    size = min(size, len(counts))
    return torch.sort(counts, descending=True, stable=True).indices[:size].sort().values


def write_speculator(
    directory: Path, head: Eagle3Head, target: Decoder, *, name: str, num_speculative_tokens: int, dtype: torch.dtype = torch.bfloat16
) -> None:
    """config.json and model.safetensors. The embedding is left out: loaders take the target's."""
    state = {key: tensor.detach().to("cpu", dtype).contiguous() for key, tensor in head.state_dict().items()}
    ids = head.target_ids.cpu()
    known = torch.zeros(target.config.vocab_size, dtype=torch.bool)
    known[ids] = True
    state["d2t"], state["t2d"] = ids - torch.arange(len(ids)), known
    directory.mkdir(parents=True, exist_ok=True)
    part = directory / "model.safetensors.part"
    save_file(state, part, metadata={"format": "pt"})
    part.replace(directory / "model.safetensors")
    config = speculator_config(head, target, name, num_speculative_tokens, str(dtype).removeprefix("torch."))
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def speculator_config(head: Eagle3Head, target: Decoder, name: str, num_speculative_tokens: int, dtype: str) -> dict[str, Any]:
    """config.json as the speculators package writes it. Layer ids count what has been computed: layer i's output is id i + 1."""
    shape, config = head.shape, target.config
    rope = {key: value for key, value in config.rope.items() if key != "partial_rotary_factor"}   # the head turns whole heads
    raw = json.loads((target.directory / "config.json").read_text(encoding="utf-8"))
    proposal = {"proposal_type": "greedy", "speculative_tokens": num_speculative_tokens, "verifier_accept_k": 1, "accept_tolerance": 0.0}
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": FORMAT_VERSION,
        "speculators_config": {
            "algorithm": "eagle3",
            "proposal_methods": [proposal],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": name, "architectures": raw.get("architectures") or []},
        },
        "transformer_layer_config": {
            "model_type": "llama", "vocab_size": config.vocab_size, "hidden_size": shape.hidden_size,
            "intermediate_size": shape.intermediate_size, "num_hidden_layers": 1, "num_attention_heads": shape.num_heads,
            "num_key_value_heads": shape.num_kv_heads, "head_dim": shape.head_dim, "hidden_act": "silu",
            "max_position_embeddings": config.max_position, "rms_norm_eps": shape.rms_norm_eps,
            "rope_parameters": {"rope_type": "default", **rope}, "attention_bias": False, "mlp_bias": False,
            "tie_word_embeddings": False,
        },
        "draft_vocab_size": shape.draft_vocab_size,
        "eagle_aux_hidden_state_layer_ids": [layer + 1 for layer in shape.layers],
        "norm_before_residual": True,
        "norm_before_fc": False,
        "fc_norm": True,
        "norm_output": False,
        "embed_requires_grad": False,
        "torch_dtype": dtype,
    }
