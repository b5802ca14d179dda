"""A Hugging Face directory -> a Decoder: reads safetensors (sharded too), fuses QKV and gate-up, packs for the device."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headway import native
from headway.errors import ModelError, unknown_key
from headway.json_object import JsonObject
from headway.models import hub
from headway.models.config import ModelConfig
from headway.models.decoder import Decoder
from headway.models.layers import GatedLinear, Layer, Linear, RMSNorm

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load_model(
    name: str, *, dtype: str = "auto", device: str = "auto", quantization: str | None = None, progress: bool = True
) -> Decoder:
    """`name`: a built-in name, a local Hugging Face directory, a GGUF file, or a hub id. Raises ModelError.

    quantization  "int8": the weights of all matrix products, the output layer's included, as 8-bit integers
    """
    directory = hub.resolve(name, progress=progress)
    config = ModelConfig.from_directory(directory)
    where = pick_device(device)
    with torch.inference_mode(), Weights(directory) as weights:
        return _build(config, weights, pick_dtype(dtype, where), where, directory, quantization == "int8")


def pick_device(device: str) -> torch.device:
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        where = torch.device(device)
    except RuntimeError as error:
        raise ModelError(f"unknown device {device!r}. Accepted: cpu, cuda, cuda:N, auto") from error
    if where.type not in ("cpu", "cuda"):
        raise ModelError(f"device {device!r} is not supported. Accepted: cpu, cuda, cuda:N, auto")
    if where.type == "cuda" and (not torch.cuda.is_available() or (where.index or 0) >= torch.cuda.device_count()):
        raise ModelError(f"device {device!r} is not there: this torch sees {torch.cuda.device_count()} CUDA devices")
    return where


def pick_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """auto: what is fastest on the device."""
    if dtype != "auto":
        if dtype not in DTYPES:
            raise ModelError(unknown_key("dtype", dtype, [*DTYPES, "auto"]))
        return DTYPES[dtype]
    if device.type == "cuda":
        return torch.bfloat16 if multiplies_bf16(device) else torch.float16
    library = native.library()
    return torch.bfloat16 if multiplies_bf16(device) or (library is not None and library.linear_panel) else torch.float32


def multiplies_bf16(device: torch.device) -> bool:
    """Whether PyTorch's own products of bf16 are quicker than those of float32."""
    return torch.cuda.get_device_capability(device)[0] >= 8 if device.type == "cuda" else _cpu_has_bf16()


def _cpu_has_bf16() -> bool:
    """Dot products of bf16 in hardware (AVX512-BF16 or AMX)."""
    capabilities = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    if capabilities:
        return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16") or capabilities.get("bf16"))
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


class Weights:
    """The tensors of a directory by name, read when asked for. `take` is once per tensor: what is left over is an error."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.files: dict[str, Any] = {}
        self.where: dict[str, str] = {}

    def __enter__(self) -> Weights:
        for path in self._paths():
            if not path.exists():
                raise ModelError(f"{self.directory}: the weight file {path.name} is missing")
            from safetensors import SafetensorError, safe_open

            try:
                file: Any = safe_open(path, framework="pt")
            except (SafetensorError, OSError) as error:
                raise ModelError(f"{path} is not a readable safetensors file (truncated or corrupt?): {error}") from error
            self.files[path.name] = file
            self.where.update(dict.fromkeys(file.keys(), path.name))
        return self

    def __exit__(self, *_: object) -> None:
        self.files.clear()

    def _paths(self) -> Iterator[Path]:
        index = self.directory / "model.safetensors.index.json"
        if index.exists():
            document = JsonObject.read(index, ModelError)
            if not document.has("weight_map"):
                raise ModelError(f"{index} is not a valid index: it has no weight_map")
            files = document.child("weight_map")
            yield from (self.directory / name for name in sorted({files.text(tensor) for tensor in files.values}))
        elif (single := self.directory / "model.safetensors").exists():
            yield single
        else:
            raise ModelError(f"{self.directory} has no model.safetensors[.index.json]. Supported: safetensors, GGUF files")

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        if name not in self.where:
            raise ModelError(f"{self.directory}: the weights lack {name}")
        tensor: Tensor = self.files[self.where[name]].get_tensor(name)
        if tuple(tensor.shape) != shape:
            raise ModelError(f"{self.directory}: {name} has shape {tuple(tensor.shape)}, the configuration says {shape}")
        if not tensor.is_floating_point():
            raise ModelError(f"{self.directory}: {name} is {tensor.dtype}; supported: float32, bfloat16, float16")
        return tensor


def _build(
    config: ModelConfig, weights: Weights, dtype: torch.dtype, device: torch.device, directory: Path, int8: bool
) -> Decoder:
    hidden, inner, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
    q_size, kv_size = config.num_heads * head_dim, config.num_kv_heads * head_dim
    features = config.features
    num_bytes = 0

    def take(name: str, *shape: int) -> Tensor:
        nonlocal num_bytes
        tensor = weights.take(name, shape).to(device=device, dtype=dtype)
        num_bytes += tensor.nbytes
        return tensor

    def norm(name: str, size: int) -> RMSNorm:
        return RMSNorm(take(f"{name}.weight", size), config.rms_norm_eps)

    def stacked(prefix: str, parts: dict[str, int], size_in: int, bias: bool) -> tuple[Tensor, Tensor | None]:
        weight = torch.cat([take(f"{prefix}.{part}.weight", size, size_in) for part, size in parts.items()])
        return weight, torch.cat([take(f"{prefix}.{part}.bias", size) for part, size in parts.items()]) if bias else None

    layers = []
    for index in range(config.num_layers):
        name = f"model.layers.{index}"
        attention = f"{name}.self_attn"
        layers.append(Layer(
            input_norm=norm(f"{name}.input_layernorm", hidden),
            qkv=Linear(*stacked(attention, {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size}, hidden, features.qkv_bias), int8),
            q_norm=norm(f"{attention}.q_norm", head_dim) if features.qk_norm else None,
            k_norm=norm(f"{attention}.k_norm", head_dim) if features.qk_norm else None,
            o=Linear(*stacked(attention, {"o_proj": hidden}, q_size, features.o_bias), int8),
            post_norm=norm(f"{name}.post_attention_layernorm", hidden),
            gate_up=GatedLinear(*stacked(f"{name}.mlp", {"gate_proj": inner, "up_proj": inner}, hidden, features.mlp_bias), int8),
            down=Linear(*stacked(f"{name}.mlp", {"down_proj": hidden}, inner, features.mlp_bias), int8),
            window=config.windows[index],
        ))
    embedding = take("model.embed_tokens.weight", config.vocab_size, hidden)
    lm_head = Linear(embedding if config.tie_word_embeddings else take("lm_head.weight", config.vocab_size, hidden), int8=int8)
    final_norm = norm("model.norm", hidden)
    if int8:   # the table that is looked up stays as it was, so a tied output layer is a copy
        num_bytes -= sum(_saved(part) for layer in layers for part in (layer.qkv, layer.o, layer.gate_up, layer.down))
        num_bytes -= _saved(lm_head) - (embedding.nbytes if config.tie_word_embeddings else 0)
    return Decoder(config, embedding, layers, final_norm, lm_head, directory, num_bytes)


def _saved(product: Linear | GatedLinear) -> int:
    """Bytes by which an int8 weight and its scales are less than a bf16 one."""
    packed = product.packed
    assert packed is not None
    assert packed.scales is not None
    return packed.weight.nbytes - packed.scales.nbytes
