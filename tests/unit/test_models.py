"""Logits of every family equal transformers' on tiny random configurations, and on the real SmolLM2."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from headway.errors import ModelError
from headway.models import hub
from headway.models.attention import KVCache
from headway.models.decoder import Decoder
from headway.models.loader import load_model
from tests.tiny import tiny_model_dir

BLOCK = 16


def our_logits(model: Decoder, token_ids: list[int]) -> torch.Tensor:
    num_blocks = -(-len(token_ids) // BLOCK)
    cache = KVCache(model.config, num_blocks, BLOCK, model.dtype, model.device)
    plan = cache.plan([(list(range(num_blocks)), 0, len(token_ids))])
    hidden, _ = model.forward(torch.tensor(token_ids), torch.arange(len(token_ids)), plan, cache)
    return model.logits(hidden)


def reference_logits(directory: Path, token_ids: list[int]) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    config = reference_config(directory)
    model = AutoModelForCausalLM.from_pretrained(directory, config=config, dtype=torch.float32, attn_implementation="eager")
    with torch.inference_mode():
        return model(torch.tensor([token_ids])).logits[0]


def reference_config(directory: Path) -> Any:
    """None: as it is. MiMo's network is Qwen2's, and transformers does not know its name."""
    from transformers import Qwen2Config

    values = json.loads((directory / "config.json").read_text())
    return Qwen2Config(**{**values, "model_type": "qwen2"}) if values["model_type"] == "mimo" else None


def random_ids(count: int, vocab_size: int, seed: int = 0) -> list[int]:
    return torch.randint(0, vocab_size, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}


def longrope(num_frequencies: int) -> dict[str, Any]:
    factors = {name: [1.0 + step * i for i in range(num_frequencies)] for name, step in (("short_factor", 0.05), ("long_factor", 0.5))}
    return {"type": "longrope", **factors}


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
    "gemma2": ("gemma2", {}),
    "gemma2-no-caps": ("gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": None}),
    "gemma3": ("gemma3_text", {}),
    "gemma3-linear": ("gemma3_text", {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}),
    "phi3": ("phi3", {}),
    "phi3-window": ("phi3", {"sliding_window": 24, "tie_word_embeddings": False}),
    "phi3-longrope": ("phi3", {"rope_scaling": longrope(8), "original_max_position_embeddings": 64}),
    "phi3-longrope-of-part-of-a-head": (
        "phi3", {"rope_scaling": longrope(6), "original_max_position_embeddings": 64, "partial_rotary_factor": 0.75},
    ),
    "olmo2": ("olmo2", {}),
    "granite": ("granite", {}),
    "granite-biases": ("granite", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False}),
    "glm4": ("glm4", {}),
    "glm4-no-biases": ("glm4", {"attention_bias": False, "partial_rotary_factor": 1.0, "tie_word_embeddings": False}),
    "mimo": ("mimo", {}),
    "qwen3-moe": ("qwen3_moe", {}),
    "qwen3-moe-some-layers": ("qwen3_moe", {"mlp_only_layers": [0], "norm_topk_prob": False}),
    "mixtral": ("mixtral", {}),
    "gpt-oss": ("gpt_oss", {}),
    "glm4-moe": ("glm4_moe", {}),
    "glm4-moe-groups": ("glm4_moe", {"n_group": 4, "topk_group": 2, "use_qk_norm": False, "norm_topk_prob": False}),
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
    assert torch.equal(ours.argmax(-1), reference.argmax(-1))


def test_equal_weights_in_shards(tmp_path: Path) -> None:
    one, three = (load_model(str(tiny_model_dir(tmp_path, shards=shards)), dtype="float32", device="cpu") for shards in (1, 3))
    token_ids = random_ids(20, 320)
    assert torch.equal(our_logits(one, token_ids), our_logits(three, token_ids))


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16])
def test_weights_are_converted_to_the_asked_dtype(tmp_path: Path, stored: torch.dtype) -> None:
    directory = tiny_model_dir(tmp_path, dtype=stored)
    model = load_model(str(directory), dtype="float32", device="cpu")
    token_ids = random_ids(20, 320)
    assert (our_logits(model, token_ids) - reference_logits(directory, token_ids)).abs().max() < 1e-4


def test_auto_dtype_and_what_a_decoder_says_of_itself(tmp_path: Path) -> None:
    directory = tiny_model_dir(tmp_path)
    model = load_model(str(directory))
    assert model.dtype in (torch.float32, torch.bfloat16, torch.float16)
    assert model.directory == directory
    assert model.config.eos_token_ids == {2}
    stored = sum(tensor.numel() for tensor in load_file(directory / "model.safetensors").values())
    assert model.weight_bytes == stored * model.dtype.itemsize


def test_end_tokens_of_both_configurations_count(tmp_path: Path) -> None:
    directory = tiny_model_dir(tmp_path, eos_token_id=7)
    (directory / "generation_config.json").write_text('{"eos_token_id": [2, 9]}')
    assert load_model(str(directory)).config.eos_token_ids == {2, 7, 9}


def change_config(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize(("changes", "message"), [
    ({"model_type": "gpt_neox"}, "unknown model_type 'gpt_neox'.* Accepted: .*llama, mimo, mistral"),
    ({"model_type": "qwen3_mo"}, "Did you mean 'qwen3_moe'"),
    ({"model_type": "qwen3_next"}, "qwen3_next is not supported: it has linear attention, whose running state .*Supported: gemma2"),
    ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported. Supported: silu"),
    ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope type 'dynamic' is not supported. Supported: default, linear"),
    ({"num_key_value_heads": 3}, "4 heads cannot share 3 KV heads"),
    ({"hidden_size": 128}, "has shape .*, the configuration says"),
    ({"num_hidden_layers": 3}, "the weights lack model.layers.2"),
    ({"tie_word_embeddings": False}, "the weights lack lm_head.weight"),
    ({"vocab_size": "many"}, "vocab_size must be a whole number"),
])
def test_configurations_that_are_not_supported(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    directory = tiny_model_dir(tmp_path)
    change_config(directory, **changes)
    with pytest.raises(ModelError, match=message):
        load_model(str(directory), device="cpu")


def test_broken_files(tmp_path: Path) -> None:
    directory = tiny_model_dir(tmp_path)
    weights = directory / "model.safetensors"
    whole = weights.read_bytes()
    for broken in (whole[:-100], whole[:20], b"\xff" * 100):
        weights.write_bytes(broken)
        with pytest.raises(ModelError, match="not a readable safetensors file"):
            load_model(str(directory), device="cpu")
    weights.unlink()
    with pytest.raises(ModelError, match=r"has no model\.safetensors"):
        load_model(str(directory), device="cpu")
    (directory / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config\.json is not readable JSON"):
        load_model(str(directory), device="cpu")


def test_a_missing_shard_and_a_broken_index(tmp_path: Path) -> None:
    directory = tiny_model_dir(tmp_path, shards=2)
    (directory / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ModelError, match=r"model-00002-of-00002\.safetensors is missing"):
        load_model(str(directory), device="cpu")
    (directory / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ModelError, match="not a valid index"):
        load_model(str(directory), device="cpu")


@pytest.mark.parametrize(("options", "message"), [
    ({"dtype": "int4"}, "unknown dtype 'int4'. .*Accepted: auto, bfloat16"),
    ({"device": "tpu"}, "unknown device 'tpu'. Accepted: cpu, cuda"),
    ({"device": "meta"}, "'meta' is not supported. Accepted: cpu, cuda"),
    ({"device": "cuda:99"}, "'cuda:99' is not there"),
])
def test_devices_and_dtypes_that_are_not_there(tmp_path: Path, options: dict[str, str], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        load_model(str(tiny_model_dir(tmp_path)), **options)


PROMPT = "def add(a, b):\n    \"\"\"Return a + b, for 12 numbers or 345.\"\"\"\n    return a + b\n\n\nWhat is the capital of France? " * 4


def assert_real_model_equals_the_reference(name: str, tolerance: float) -> None:
    from transformers import AutoTokenizer

    directory = hub.resolve(name, progress=False)
    token_ids = AutoTokenizer.from_pretrained(directory).encode(PROMPT)
    reference = reference_logits(directory, token_ids)
    ours = our_logits(load_model(name, dtype="float32", device="cpu"), token_ids)
    error = (ours - reference).abs().max().item()
    print(f"{name}: {len(token_ids)} tokens, logits up to {reference.abs().max():.1f}, largest difference {error:.2e}")
    assert error < tolerance
    assert torch.equal(ours.argmax(-1), reference.argmax(-1))


def test_the_real_smollm2() -> None:
    assert_real_model_equals_the_reference("smollm2-135m", 2e-4)


def test_the_tokenizer_of_the_real_smollm2() -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(hub.resolve("smollm2-135m", progress=False))
    for text in (PROMPT, "  two  spaces\n\n\ttab", "naïve café 日本語 🙂", "1234567890", "<|im_start|>user\nhi<|im_end|>"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("x = 1234")) == ["x", "Ġ=", "Ġ", "1", "2", "3", "4"]
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True)
    assert chat.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert chat.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.eos_token == "<|im_end|>"


@pytest.mark.skipif("HEADWAY_TEST_QWEN_GGUF" not in os.environ, reason="HEADWAY_TEST_QWEN_GGUF names no Qwen2.5-Coder GGUF file")
def test_the_real_qwen_coder() -> None:
    assert_real_model_equals_the_reference(os.environ["HEADWAY_TEST_QWEN_GGUF"], 2e-4)
