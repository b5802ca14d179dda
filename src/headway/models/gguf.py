"""A GGUF file -> a Hugging Face directory: dequantised weights in bf16, config, tokenizer, chat template.

Done once per file; what comes out is an ordinary model that transformers and vLLM load too. File format and metadata
names: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headway.errors import ModelError
from headway.models.rope import llama3_factors

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}

TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

Progress = Callable[[int, int], None]
"""(tensors done, tensors in all)"""


def convert(path: Path, directory: Path, progress: Progress | None = None) -> None:
    """Writes the model in `path` to the existing empty `directory`. Raises ModelError when the file cannot be read or supported."""
    reader = open_gguf(path)
    meta = _contents(path, reader)
    arch = meta.get("general.architecture")
    if arch not in ARCHITECTURES:
        raise ModelError(f"{path}: GGUF architecture {arch!r} is not supported. Supported: {', '.join(sorted(ARCHITECTURES))}")
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    try:
        config = make_config(arch, meta, tensors)
        _write_json(directory / "config.json", config)
        eos = config["eos_token_id"]
        _write_json(
            directory / "generation_config.json",
            {key: value for key, value in {"bos_token_id": config["bos_token_id"], "eos_token_id": eos}.items() if value is not None},
        )
        _write_tokenizer(path, meta, config, directory)
    except KeyError as error:
        raise ModelError(f"{path}: the GGUF file lacks {error}") from error
    except ModelError as error:
        raise error if str(path) in str(error) else ModelError(f"{path}: {error}") from error
    except Exception as error:   # of numbers and strings that are others than they should be, and of the tokenizers library
        raise ModelError(f"{path}: its metadata cannot be used: {type(error).__name__}: {error}") from error
    _write_weights(path, config, tensors, directory, progress)


def open_gguf(path: Path) -> Any:
    """A `gguf.GGUFReader` whose tensors all lie inside the file; ModelError otherwise."""
    from gguf import GGUFReader

    try:
        return GGUFReader(path)
    except (ValueError, IndexError, KeyError, TypeError, AttributeError, OSError, OverflowError, MemoryError) as error:
        raise ModelError(f"{path} is not a readable GGUF file (truncated or corrupt?): {error}") from error


def _contents(path: Path, reader: Any) -> dict[str, Any]:
    found = {}
    for name, field in reader.fields.items():
        try:
            found[name] = field.contents()
        except (UnicodeDecodeError, ValueError, IndexError, KeyError, TypeError) as error:
            raise ModelError(f"{path}: {name} cannot be read: {error}") from error
    return found


def make_config(arch: str, meta: dict[str, Any], tensors: dict[str, Any]) -> dict[str, Any]:
    """config.json of the model in Hugging Face's names."""
    heads = int(meta[f"{arch}.attention.head_count"])
    hidden = int(meta[f"{arch}.embedding_length"])
    kv_heads = meta.get(f"{arch}.attention.head_count_kv", heads)
    if isinstance(kv_heads, list):
        raise ModelError("a GGUF file with a different number of KV heads per layer is not supported")
    config = {
        "architectures": [ARCHITECTURES[arch]],
        "model_type": arch,
        "torch_dtype": "bfloat16",
        "vocab_size": len(meta["tokenizer.ggml.tokens"]),
        "hidden_size": hidden,
        "intermediate_size": int(meta[f"{arch}.feed_forward_length"]),
        "num_hidden_layers": int(meta[f"{arch}.block_count"]),
        "num_attention_heads": heads,
        "num_key_value_heads": int(kv_heads),
        "head_dim": int(meta.get(f"{arch}.attention.key_length", hidden // heads)),
        "hidden_act": "silu",
        "max_position_embeddings": int(meta[f"{arch}.context_length"]),
        # Stored as float32: the shortest decimal that gives the same float32 is what the author wrote.
        "rms_norm_eps": float(str(np.float32(meta[f"{arch}.attention.layer_norm_rms_epsilon"]))),
        "rope_theta": float(meta.get(f"{arch}.rope.freq_base", 10000.0)),
        "rope_scaling": _rope_scaling(arch, meta, tensors),
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "bos_token_id": meta.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": meta.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": meta.get("tokenizer.ggml.padding_token_id"),
    }
    if arch == "llama":
        config["mlp_bias"] = "blk.0.ffn_up.bias" in tensors
    else:
        config["use_sliding_window"] = False
    return config


def _rope_scaling(arch: str, meta: dict[str, Any], tensors: dict[str, Any]) -> dict[str, Any] | None:
    """Metadata for linear and yarn; Llama 3.1's scaling is stored as the finished divisor of each frequency (`rope_freqs`)."""
    kind = meta.get(f"{arch}.rope.scaling.type", "none")
    factor = float(meta.get(f"{arch}.rope.scaling.factor", 1.0))
    if "rope_freqs.weight" in tensors:
        factors = torch.tensor(np.array(tensors["rope_freqs.weight"].data, dtype=np.float32)).view(-1)
        head_dim = int(meta.get(f"{arch}.attention.key_length", len(factors) * 2))
        inv_freq = float(meta[f"{arch}.rope.freq_base"]) ** -(torch.arange(0, head_dim, 2) / head_dim)
        scaling: dict[str, Any] = {
            "rope_type": "llama3", "factor": round(float(factors.max()), 4), "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
        if not torch.allclose(llama3_factors(inv_freq, scaling), factors, rtol=1e-3):
            raise ModelError("the GGUF file has rope frequency factors that are not Llama 3.1's; only those are supported")
        return scaling
    if kind in ("none", "") or (kind == "linear" and factor == 1.0):
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        original = int(meta[f"{arch}.rope.scaling.original_context_length"])
        return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    raise ModelError(f"GGUF rope scaling {kind!r} is not supported. Supported: none, linear, yarn, and Llama 3.1's")


def _write_weights(path: Path, config: dict[str, Any], tensors: dict[str, Any], directory: Path, progress: Progress | None) -> None:
    from safetensors.torch import save_file

    state: dict[str, torch.Tensor] = {}
    for done, (name, tensor) in enumerate(_hf_tensors(path, config, tensors)):
        state[name] = tensor
        if progress is not None:
            progress(done + 1, len(tensors))
    save_file(state, directory / "model.safetensors", metadata={"format": "pt"})


def _hf_tensors(path: Path, config: dict[str, Any], tensors: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    from gguf.quants import dequantize

    for name, tensor in tensors.items():
        if name == "rope_freqs.weight":
            continue
        try:
            weight = torch.from_numpy(np.array(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32))
            if config["model_type"] == "llama" and (".attn_q." in name or ".attn_k." in name):
                weight = unpermute(weight, config["num_attention_heads" if ".attn_q." in name else "num_key_value_heads"])
        except (ValueError, NotImplementedError, RuntimeError, ArithmeticError, IndexError, TypeError) as error:
            raise ModelError(f"{path}: tensor {name} cannot be dequantised: {error}") from error
        yield hf_name(path, name), weight.to(torch.bfloat16).contiguous()


def unpermute(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Llama's query and key rows in GGUF pair dimension 2i with 2i+1 (interleaved rope); Hugging Face pairs i with i + D/2.

    weight  [num_heads * D, ...]
    """
    rows = weight.shape[0]
    return weight.reshape(num_heads, rows // num_heads // 2, 2, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)


def hf_name(path: Path, name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`"""
    stem, _, kind = name.rpartition(".")
    if kind in ("weight", "bias"):
        if stem in TOP_NAMES:
            return f"{TOP_NAMES[stem]}.{kind}"
        parts = stem.split(".", 2)
        if len(parts) == 3 and parts[0] == "blk" and parts[2] in LAYER_NAMES:
            return f"model.layers.{parts[1]}.{LAYER_NAMES[parts[2]]}.{kind}"
    raise ModelError(f"{path}: tensor {name!r} belongs to no supported model family")


# ---- tokenizer ------------------------------------------------------------------------------------------------------

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPLITS = {
    "llama-bpe": _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _TAIL,
    "qwen2": _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _TAIL,
}
PRE_TOKENIZERS = ("smollm", "default", "gpt-2", *SPLITS)
CONTROL, USER_DEFINED, BYTE = 3, 4, 6   # GGUF token types


def _write_tokenizer(path: Path, meta: dict[str, Any], config: dict[str, Any], directory: Path) -> None:
    kind = meta["tokenizer.ggml.model"]
    if kind == "gpt2":
        tokenizer = _byte_level_bpe(path, meta)
    elif kind == "llama":
        tokenizer = _sentencepiece_bpe(meta)
    else:
        raise ModelError(f"{path}: tokenizer model {kind!r} is not supported. Supported: gpt2 (byte-level BPE), llama (SentencePiece BPE)")
    tokens, types = meta["tokenizer.ggml.tokens"], meta.get("tokenizer.ggml.token_type", [])
    from tokenizers import AddedToken

    for special in (True, False):
        wanted = CONTROL if special else USER_DEFINED
        added = [
            AddedToken(token, special=special, normalized=False) for token, token_type in zip(tokens, types, strict=False)
            if token_type == wanted
        ]
        (tokenizer.add_special_tokens if special else tokenizer.add_tokens)(added)
    add_bos = bool(meta.get("tokenizer.ggml.add_bos_token", kind == "llama"))
    bos = config["bos_token_id"]
    if add_bos and bos is not None:
        from tokenizers.processors import TemplateProcessing

        tokenizer.post_processor = TemplateProcessing(
            single=f"{tokens[bos]} $A", pair=f"{tokens[bos]} $A {tokens[bos]} $B", special_tokens=[(tokens[bos], bos)]
        )
    if tokenizer.get_vocab_size() != len(tokens):
        raise ModelError(f"{path}: the vocabulary has {len(tokens)} tokens, of which only {tokenizer.get_vocab_size()} are distinct")
    tokenizer.save(str(directory / "tokenizer.json"))
    ids = {"bos_token": bos, "eos_token": config["eos_token_id"], "pad_token": config["pad_token_id"],
           "unk_token": meta.get("tokenizer.ggml.unknown_token_id")}
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": config["max_position_embeddings"],
        "clean_up_tokenization_spaces": False,
        **{name: tokens[i] for name, i in ids.items() if i is not None},
    }
    if "tokenizer.chat_template" in meta:
        tokenizer_config["chat_template"] = meta["tokenizer.chat_template"]
    _write_json(directory / "tokenizer_config.json", tokenizer_config)


def _byte_level_bpe(path: Path, meta: dict[str, Any]) -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    pre = meta.get("tokenizer.ggml.pre", "default")
    if pre not in PRE_TOKENIZERS:
        raise ModelError(f"{path}: pre-tokenizer {pre!r} is not supported. Supported: {', '.join(PRE_TOKENIZERS)}")
    vocab = {token: index for index, token in enumerate(meta["tokenizer.ggml.tokens"])}
    merges = [tuple(merge.split(" ", 1)) for merge in meta["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab, merges))
    split = SPLITS.get(pre)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None)
    first = pre_tokenizers.Digits(individual_digits=True) if split is None else pre_tokenizers.Split(Regex(split), "isolated")
    tokenizer.pre_tokenizer = byte_level if pre in ("default", "gpt-2") else pre_tokenizers.Sequence([first, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    if pre == "qwen2":
        from tokenizers import normalizers

        tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def _sentencepiece_bpe(meta: dict[str, Any]) -> Any:
    """Llama 2's kind: spaces are `▁`, unknown characters fall back to bytes, and merges follow from the scores."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    tokens, scores = meta["tokenizer.ggml.tokens"], meta["tokenizer.ggml.scores"]
    vocab = {token: index for index, token in enumerate(tokens)}
    merges = []
    for token, index in vocab.items():
        pairs = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        known = [(a, b) for a, b in pairs if a in vocab and b in vocab]
        merges += [(-scores[index], vocab[a], vocab[b], a, b) for a, b in known]
    unk = meta.get("tokenizer.ggml.unknown_token_id", 0)
    tokenizer = Tokenizer(
        models.BPE(vocab, [(a, b) for *_, a, b in sorted(merges)], unk_token=tokens[unk], fuse_unk=True, byte_fallback=True)
    )
    prefix = meta.get("tokenizer.ggml.add_space_prefix", True)
    tokenizer.normalizer = normalizers.Sequence(
        [*([normalizers.Prepend("▁")] if prefix else []), normalizers.Replace(" ", "▁")]
    )
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    return tokenizer


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
