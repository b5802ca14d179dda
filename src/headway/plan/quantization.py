"""How many bits a stored weight takes: by a name, or by the `quantization_config` of a config.json."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

from headway.errors import ConfigError, unknown_key
from headway.json_object import JsonObject


class Stored(Protocol):
    """The part of `network.Part` that decides how it is stored."""

    @property
    def num_experts(self) -> int: ...
    @property
    def is_attention(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class Quantization:
    """bits: per weight, the scales' share included. compute: the type that products run in: the device's peak for it holds.
    experts_only, keeps_attention: what else stays as it was.

    Embeddings, output layers, norms and routers keep the network's own type.
    """

    name: str
    bits: float
    compute: str
    experts_only: bool = False
    keeps_attention: bool = False

    def bytes_per_value(self, part: Stored, otherwise: float) -> float:
        kept = not part.num_experts if self.experts_only else part.is_attention and self.keeps_attention
        return otherwise if kept else self.bits / 8


def _grouped(bits: int, group_size: int, zero_points: bool) -> float:
    """A 16-bit scale per group, and a zero point of the weights' own width."""
    return bits + (16 + (bits if zero_points else 0)) / group_size if group_size > 0 else float(bits)


NAMED = {
    "fp8": Quantization("fp8", 8.0, "fp8"),
    "int8": Quantization("int8", 8.0, "int8"),
    "awq": Quantization("awq", _grouped(4, 128, True), "bf16"),
    "gptq": Quantization("gptq", _grouped(4, 128, True), "bf16"),
    "mxfp4": Quantization("mxfp4", 4.0 + 8 / 32, "bf16"),
    "nvfp4": Quantization("nvfp4", 4.0 + 8 / 16, "fp4"),
    "bitsandbytes": Quantization("bitsandbytes", 4.0 + 32 / 64, "bf16"),
}
"""By the name that `--quantization` takes. Scales: 8 bits per 32 weights (OCP MX), per 16 (NVFP4), a float per 64 (bitsandbytes)."""


def named(name: str) -> Quantization | None:
    """Raises ConfigError for a name that is not known; "none": weights as they are."""
    if name == "none":
        return None
    if name not in NAMED:
        raise ConfigError(unknown_key("quantization", name, ["none", *NAMED]))
    return NAMED[name]


def of_config(raw: JsonObject) -> Quantization | None:
    """What config.json says of its checkpoint. Raises the object's error for a method that is not known."""
    if not raw.has("quantization_config"):
        return None
    config = raw.child("quantization_config")
    left_out = [*config.list_of(str, "modules_to_not_convert", []), *config.list_of(str, "ignore", [])]
    return replace(_stored(config), keeps_attention=any("self_attn" in name for name in left_out))


def _stored(config: JsonObject) -> Quantization:
    method = config.text("quant_method", "")
    bits, group = config.integer("bits", 4, least=1, most=16), config.integer("group_size", 128, least=-1)
    if method in ("awq", "gptq"):
        return Quantization(method, _grouped(bits, group, True), "bf16")
    if method == "bitsandbytes":
        return NAMED["bitsandbytes"] if config.flag("load_in_4bit", False) else Quantization(method, 8.0, "bf16")
    if method == "compressed-tensors":
        return _compressed_tensors(config)
    if method == "modelopt":
        return NAMED["nvfp4"] if "NVFP4" in config.text("quant_algo", "").upper() else NAMED["fp8"]
    if method == "mxfp4":   # of gpt-oss: attention keeps its type
        return Quantization("mxfp4", NAMED["mxfp4"].bits, "bf16", experts_only=True)
    if method in ("fp8", "fbgemm_fp8"):
        return NAMED["fp8"]
    known = ("awq", "gptq", "bitsandbytes", "compressed-tensors", "modelopt", "mxfp4", "fp8", "fbgemm_fp8")
    raise config.wrong("quant_method", f"one of {', '.join(known)}")


def _compressed_tensors(config: JsonObject) -> Quantization:
    groups = config.child("config_groups")
    if not groups.values:
        raise config.wrong("config_groups", "an object with at least one group")
    first = groups.child(next(iter(groups.values)))
    weights, inputs = first.child("weights"), first.child("input_activations")
    bits, kind = weights.integer("num_bits", 8, least=1, most=16), weights.text("type", "float")
    compute = {8: "int8" if kind == "int" else "fp8", 4: "fp4"}.get(bits, "bf16") if inputs.values else "bf16"
    return Quantization(f"compressed-tensors W{bits}", _grouped(bits, weights.integer("group_size", 0, least=-1), False), compute)
