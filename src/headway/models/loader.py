"""A Hugging Face directory -> a Decoder: reads safetensors (sharded too), fuses QKV and gate-up, packs for the device."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from headway import native
from headway.errors import ModelError, unknown_key
from headway.models import hub
from headway.models.config import ModelConfig
from headway.models.decoder import Decoder
from headway.models.experts import Experts
from headway.models.layers import MLP, GatedLinear, Layer, Linear, RMSNorm, Scores
from headway.models.lora import LoraAdapter
from headway.models.rope import in_rotated_order, num_rotated, rotated_order
from headway.models.traits import ExpertTraits
from headway.models.weights import Weights

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load_model(
    name: str, *, dtype: str = "auto", device: str = "auto", quantization: str | None = None, max_model_len: int | None = None,
    lora: str | None = None, progress: bool = True,
) -> Decoder:
    """`name`: a built-in name, a local Hugging Face directory, a GGUF file, or a hub id. Raises ModelError.

    quantization   "int8": the weights of all matrix products, the output layer's included, as 8-bit integers
    max_model_len  the longest context that is served, where it is less than the model's
    lora           the directory of an adapter, which is merged into the weights
    """
    directory = hub.resolve(name, progress=progress)
    config = ModelConfig.from_directory(directory)
    where = pick_device(device)
    adapter = None if lora is None else LoraAdapter(Path(lora).expanduser())
    with Weights(directory, config.scheme, adapter) as weights:
        model = make_decoder(config, weights, pick_dtype(dtype, where), where, directory, quantization == "int8", max_model_len)
        weights.check()
    return model


class TensorSource(Protocol):
    """What is asked of `Weights`."""

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor: ...


@torch.inference_mode()
def make_decoder(
    config: ModelConfig, weights: TensorSource, dtype: torch.dtype, device: torch.device, directory: Path, int8: bool = False,
    max_model_len: int | None = None,
) -> Decoder:
    """`directory`: where its tokenizer is. Raises ModelError for a weight that is missing or misshapen."""
    return _Builder(config, weights, dtype, device, int8).decoder(directory, max_model_len)


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


class _Builder:
    """Makes a Decoder of a directory's weights."""

    def __init__(self, config: ModelConfig, weights: TensorSource, dtype: torch.dtype, device: torch.device, int8: bool) -> None:
        self.config, self.weights, self.dtype, self.device, self.int8 = config, weights, dtype, device, int8
        self.q_size, self.kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.order = rotated_order(config.head_dim, num_rotated(config.rope, config.head_dim), config.features.interleaved_rotation)
        self.num_bytes = 0

    def decoder(self, directory: Path, longest: int | None) -> Decoder:
        config, hidden, int8 = self.config, self.config.hidden_size, self.int8
        layers = [self._layer(index) for index in range(config.num_layers)]
        embedding = self._take("model.embed_tokens.weight", config.vocab_size, hidden)
        lm_head = Linear(embedding if config.tie_word_embeddings else self._take("lm_head.weight", config.vocab_size, hidden), int8=int8)
        final_norm = self._norm("model.norm", hidden)
        if int8:   # the table that is looked up stays as it was, so a tied output layer is a copy
            self.num_bytes -= sum(_saved(part) for layer in layers for part in (layer.qkv, layer.o))
            self.num_bytes -= _saved(lm_head) - (embedding.nbytes if config.tie_word_embeddings else 0)
        return Decoder(config, embedding, layers, final_norm, lm_head, directory, self.num_bytes, longest)

    def _layer(self, index: int) -> Layer:
        config, hidden, features = self.config, self.config.hidden_size, self.config.features
        name = f"model.layers.{index}"
        attention, norms, window = f"{name}.self_attn", features.norms, config.windows[index]
        parts = {"qkv_proj": self.q_size + 2 * self.kv_size} if features.fused_qkv else {
            "q_proj": self.q_size, "k_proj": self.kv_size, "v_proj": self.kv_size,
        }   # fmt: skip
        weight, bias = self._stacked(attention, parts, hidden, features.qkv_bias)

        def norm(norm_name: str | None) -> RMSNorm | None:
            return None if norm_name is None else self._norm(f"{name}.{norm_name}", hidden)

        def head_norm(part: str, wanted: bool, size: int) -> RMSNorm | None:
            return self._norm(f"{attention}.{part}", size, of_heads=True) if wanted else None

        q_wide, k_wide = (head_norm(*each) for each in (
            ("q_norm", features.qk_norm_wide, self.q_size), ("k_norm", features.qk_norm_wide, self.kv_size),
        ))   # fmt: skip
        return Layer(
            input_norm=norm(norms.attention_in),
            qkv=Linear(self._in_order(weight), None if bias is None else self._in_order(bias), self.int8),
            q_norm=head_norm("q_norm", features.qk_norm, config.head_dim),
            k_norm=head_norm("k_norm", features.qk_norm, config.head_dim),
            o=Linear(*self._stacked(attention, {"o_proj": hidden}, self.q_size, features.o_bias), self.int8),
            post_norm=norm(norms.mlp_in),
            mlp=(
                self._experts(name, features.experts) if features.experts is not None and features.experts.layers[index]
                else self._mlp(f"{name}.mlp", config.intermediate_size)
            ),
            scores=Scores(
                window, features.attention_scale, features.attention_softcap,
                self._take(f"{attention}.sinks", config.num_heads).float() if features.sinks else None,
            ),
            rotation=0 if window is None or config.local_rope is None else 1,
            wide_norms=None if q_wide is None or k_wide is None else (q_wide, k_wide),
            attention_out_norm=norm(norms.attention_out),
            mlp_out_norm=norm(norms.mlp_out),
        )

    def _mlp(self, name: str, inner: int, parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")) -> MLP:
        hidden, bias = self.config.hidden_size, self.config.features.mlp_bias
        gate, up, down = parts
        sizes = {"gate_up_proj": 2 * inner} if self.config.features.fused_gate_up else {gate: inner, up: inner}
        return self._made_mlp(self._stacked(name, sizes, hidden, bias), self._stacked(name, {down: hidden}, inner, bias))

    def _made_mlp(self, gate_up: tuple[Tensor, Tensor | None], down: tuple[Tensor, Tensor | None]) -> MLP:
        mlp = MLP(GatedLinear(*gate_up, self.int8, self.config.activation), Linear(*down, self.int8))
        self.num_bytes -= (_saved(mlp.gate_up) + _saved(mlp.down)) if self.int8 else 0
        return mlp

    def _experts(self, layer: str, traits: ExpertTraits) -> Experts:
        block, hidden = f"{layer}.{traits.block}", self.config.hidden_size
        router, experts = f"{block}.{traits.router}", f"{block}.experts"
        return Experts(
            traits, self._take(f"{router}.weight", traits.num, hidden),
            self._take(f"{router}.bias", traits.num) if traits.stacked else None,
            self._unstacked(experts, traits) if traits.stacked else [
                self._mlp(f"{experts}.{number}", traits.inner_size, traits.parts) for number in range(traits.num)
            ],
            self._mlp(f"{block}.shared_experts", traits.shared_size) if traits.shared_size else None,
            None if traits.choice_bias is None else self._take(f"{block}.{traits.choice_bias}", traits.num),
        )   # fmt: skip

    def _unstacked(self, name: str, traits: ExpertTraits) -> list[MLP]:
        """Tensors [experts, in, out] with gates and ups in turn, as gpt-oss has them."""
        num, inner, hidden = traits.num, traits.inner_size, self.config.hidden_size
        gate_up, down = self._take(f"{name}.gate_up_proj", num, hidden, 2 * inner), self._take(f"{name}.down_proj", num, inner, hidden)
        biases = self._take(f"{name}.gate_up_proj_bias", num, 2 * inner), self._take(f"{name}.down_proj_bias", num, hidden)
        order = [*range(0, 2 * inner, 2), *range(1, 2 * inner, 2)]
        return [
            self._made_mlp((gate_up[i].T[order], biases[0][i][order]), (down[i].T.contiguous(), biases[1][i])) for i in range(num)
        ]

    def _take(self, name: str, *shape: int) -> Tensor:
        tensor = self.weights.take(name, shape).to(device=self.device, dtype=self.dtype)
        self.num_bytes += tensor.nbytes
        return tensor

    def _norm(self, name: str, size: int, of_heads: bool = False) -> RMSNorm:
        """Of the residual stream, which the decoder keeps divided by `residual_scale`, or of heads."""
        weight, features = self._take(f"{name}.weight", size), self.config.features
        if of_heads:
            return RMSNorm(self._in_order(weight), self.config.rms_norm_eps, features.norm_offset)
        return RMSNorm(weight, self.config.rms_norm_eps / features.residual_scale**2, features.norm_offset)

    def _stacked(self, prefix: str, parts: dict[str, int], size_in: int, bias: bool) -> tuple[Tensor, Tensor | None]:
        weight = torch.cat([self._take(f"{prefix}.{part}.weight", size, size_in) for part, size in parts.items()])
        return weight, torch.cat([self._take(f"{prefix}.{part}.bias", size) for part, size in parts.items()]) if bias else None

    def _in_order(self, weight: Tensor) -> Tensor:
        """Rows of queries and keys, of which there may be values behind, in the order that the rotation works in."""
        return in_rotated_order(weight, self.order, self.config.head_dim, self.config.num_heads + self.config.num_kv_heads)


def _saved(product: Linear | GatedLinear) -> int:
    """Bytes by which an int8 weight and its scales are less than a bf16 one."""
    packed = product.packed
    assert packed is not None
    assert packed.scales is not None
    return packed.weight.nbytes - packed.scales.nbytes
