"""Speculators with exactly the names, configuration and proportions of one published checkpoint of each kind, sizes divided by 64.

EAGLE     huggingface.co/yuhuili/EAGLE-llama2-chat-7B: config.json; `embed_tokens`, `fc` with its bias, one layer without input norm
          (names as vLLM's model_executor/models/llama_eagle.py loads them)
EAGLE-3   huggingface.co/yuhuili/EAGLE3-LLaMA3.1-Instruct-8B: config.json (as SpecForge's configs/llama3-8B-eagle3.json has it); `midlayer`,
          `d2t`, `t2d` (vLLM's llama_eagle3.py)
Medusa    huggingface.co/FasterDecoding/medusa-vicuna-7b-v1.3: its config.json says 2 heads, medusa_lm_head.pt holds 5
          (github.com/InternLM/lmdeploy/issues/1180)
MLP       huggingface.co/ibm-ai-platform/llama3-8b-accelerator: config.json; every stage's tensors under `speculator.`
          (vLLM's mlp_speculator.py)
MTP       huggingface.co/XiaomiMiMo/MiMo-7B-RL: `model.mtp_layers.0` inside the target's files (vLLM's mimo_mtp.py)
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from headway.config import EngineConfig, SpeculativeConfig
from headway.engine.engine import Engine
from headway.sampling_params import SamplingParams
from headway.types import Request
from tests.tiny import tiny_model_dir

VOCAB, HIDDEN = 320, 64
LLAMA = {
    "hidden_act": "silu", "hidden_size": HIDDEN, "initializer_range": 0.02, "model_type": "llama", "num_hidden_layers": 1,
    "tie_word_embeddings": False, "torch_dtype": "float16", "use_cache": True, "vocab_size": VOCAB,
}   # fmt: skip
EAGLE = {
    **LLAMA, "architectures": ["LlamaForCausalLM"], "bos_token_id": 1, "eos_token_id": 2, "intermediate_size": 172,
    "max_position_embeddings": 4096, "num_attention_heads": 4, "num_key_value_heads": 4, "pretraining_tp": 1, "rms_norm_eps": 1e-06,
    "rope_scaling": None, "transformers_version": "4.32.0.dev0",
}   # fmt: skip
EAGLE3 = {
    **LLAMA, "architectures": ["LlamaForCausalLMEagle3"], "bos_token_id": 128000, "eos_token_id": 128001, "intermediate_size": 224,
    "max_position_embeddings": 2048, "num_attention_heads": 4, "num_key_value_heads": 1, "pad_token_id": 0, "rms_norm_eps": 1e-05,
    "transformers_version": "4.28.1", "draft_vocab_size": 80,
}   # fmt: skip
MEDUSA = {"medusa_num_heads": 2, "medusa_num_layers": 1, "base_model_name_or_path": "lmsys/vicuna-7b-v1.3"}
MLP = {
    "architectures": ["MLPSpeculatorPreTrainedModel"], "emb_dim": HIDDEN, "inner_dim": 48, "model_type": "mlp_speculator",
    "n_candidates": 5, "n_predict": 4, "top_k_tokens_per_head": [4, 3, 2, 2], "torch_dtype": "float16",
    "transformers_version": "4.38.2", "vocab_size": VOCAB,
}   # fmt: skip


def layer(name: str, inner: int, kv_size: int, size_in: int = HIDDEN, bias: bool = False) -> dict[str, tuple[int, ...]]:
    shapes = {
        f"{name}.self_attn.q_proj.weight": (HIDDEN, size_in), f"{name}.self_attn.k_proj.weight": (kv_size, size_in),
        f"{name}.self_attn.v_proj.weight": (kv_size, size_in), f"{name}.self_attn.o_proj.weight": (HIDDEN, HIDDEN),
        f"{name}.mlp.gate_proj.weight": (inner, HIDDEN), f"{name}.mlp.up_proj.weight": (inner, HIDDEN),
        f"{name}.mlp.down_proj.weight": (HIDDEN, inner), f"{name}.post_attention_layernorm.weight": (HIDDEN,),
    }   # fmt: skip
    sizes = {"q_proj": HIDDEN, "k_proj": kv_size, "v_proj": kv_size}
    return {**shapes, **({f"{name}.self_attn.{part}.bias": (size,) for part, size in sizes.items()} if bias else {})}


def stages(num: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for i in range(num):
        shapes |= {
            f"speculator.emb.{i}.weight": (VOCAB, 48), f"speculator.head.{i}.weight": (VOCAB, 48), f"speculator.ln.{i}.weight": (48,),
            f"speculator.ln.{i}.bias": (48,), f"speculator.proj.{i}.weight": (48, 48 if i else HIDDEN),
        }   # fmt: skip
    return shapes


HEADS = {f"{i}.0.linear.{kind}": (HIDDEN, HIDDEN) if kind == "weight" else (HIDDEN,) for i in range(5) for kind in ("weight", "bias")}
PUBLISHED: dict[str, tuple[str, dict[str, Any], str, dict[str, tuple[int, ...]]]] = {
    "eagle-1": (
        "eagle", EAGLE, "pytorch_model.bin",
        {"embed_tokens.weight": (VOCAB, HIDDEN), "fc.weight": (HIDDEN, 2 * HIDDEN), "fc.bias": (HIDDEN,), **layer("layers.0", 172, HIDDEN)},
    ),
    "eagle-3": (
        "eagle", EAGLE3, "pytorch_model.bin",
        {
            "d2t": (80,), "t2d": (VOCAB,), "fc.weight": (HIDDEN, 3 * HIDDEN), "lm_head.weight": (80, HIDDEN), "norm.weight": (HIDDEN,),
            "midlayer.hidden_norm.weight": (HIDDEN,), "midlayer.input_layernorm.weight": (HIDDEN,),
            **layer("midlayer", 224, 16, size_in=2 * HIDDEN),
        },
    ),
    "medusa": ("medusa", MEDUSA, "medusa_lm_head.pt", {**HEADS, **{f"{i}.1.weight": (VOCAB, HIDDEN) for i in range(5)}}),
    "mlp": ("mlp_speculator", MLP, "model.safetensors", stages(4)),
}   # fmt: skip
MODULE = {
    **{f"model.mtp_layers.0.{name}.weight": (HIDDEN,) for name in (
        "token_layernorm", "hidden_layernorm", "final_layernorm", "input_layernorm",
    )},
    "model.mtp_layers.0.input_proj.weight": (HIDDEN, 2 * HIDDEN), **layer("model.mtp_layers.0", 96, 32, bias=True),
}   # fmt: skip


def tensors(shapes: dict[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    made = {}
    for name, shape in shapes.items():
        drawn = torch.randn(shape, generator=random)
        made[name] = (drawn / shape[-1] ** 0.5 if len(shape) == 2 else 1 + 0.1 * drawn).half()
    if "d2t" in made:
        ids = torch.randperm(VOCAB, generator=random)[:80].sort().values
        made["d2t"], made["t2d"] = ids - torch.arange(80), torch.isin(torch.arange(VOCAB), ids)
    return made


def drafted(target: Path, speculative: dict[str, Any]) -> tuple[list[int], list[int], int]:
    """(text without drafts, text with them, the longest draft)"""
    texts = []
    for config in (None, SpeculativeConfig.parse({**speculative, "policy": "static"})):
        engine = Engine(EngineConfig(model=str(target), dtype="float32", device="cpu", speculative=config, profile=False))
        engine.add(Request("r", [5, 6, 7] * 5, SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)))
        texts.append([token for _ in iter(engine.has_work, False) for delta in engine.step() for token in delta.token_ids])
    return texts[0], texts[1], max((num for _, num, *_ in engine.metrics.verified), default=0)


@pytest.mark.parametrize("kind", PUBLISHED)
def test_a_published_checkpoint_drafts(tmp_path: Path, kind: str) -> None:
    method, config, file, shapes = PUBLISHED[kind]
    target = tiny_model_dir(tmp_path, "llama", num_hidden_layers=8, tie_word_embeddings=False)
    directory = tmp_path / "speculator"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    made = tensors(shapes)
    save_file(made, directory / file) if file.endswith("safetensors") else torch.save(made, directory / file)
    longest = 5 if kind == "medusa" else 4
    plain, text, num = drafted(target, {"method": method, "model": str(directory), "num_speculative_tokens": longest})
    assert text == plain
    assert num == longest


def test_a_published_module_inside_its_target_drafts(tmp_path: Path) -> None:
    target = tiny_model_dir(tmp_path, "mimo", tie_word_embeddings=False, num_nextn_predict_layers=1)
    state = load_file(target / "model.safetensors")
    save_file({**state, **tensors(MODULE)}, target / "model.safetensors", metadata={"format": "pt"})
    plain, text, num = drafted(target, {"method": "mtp", "num_speculative_tokens": 3})
    assert text == plain
    assert num == 3
