"""Rotary position embedding: inverse frequencies of each `rope_type` (arXiv:2104.09864; yarn: arXiv:2309.00071)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from headway.errors import ModelError

ROPE_TYPES = ("default", "linear", "llama3", "yarn")


def inverse_frequencies(rope: Mapping[str, Any], head_dim: int, max_position: int) -> tuple[Tensor, float]:
    """(inverse frequencies, float32 [head_dim / 2]; factor on cos and sin) of a Hugging Face `rope_parameters` mapping."""
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind not in ROPE_TYPES:
        raise ModelError(f"rope type {kind!r} is not supported. Supported: {', '.join(ROPE_TYPES)}")
    theta = float(rope["rope_theta"])
    inv_freq = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    if kind == "linear":
        return inv_freq / float(rope["factor"]), 1.0
    if kind == "llama3":
        return inv_freq / llama3_factors(inv_freq, rope), 1.0
    if kind == "yarn":
        return _yarn(inv_freq, rope, theta, head_dim, max_position)
    return inv_freq, 1.0


def llama3_factors(inv_freq: Tensor, rope: Mapping[str, Any]) -> Tensor:
    """What Llama 3.1 divides each frequency by: 1 for short wavelengths, `factor` for long ones, a smooth step between."""
    wavelength = 2 * math.pi / inv_freq
    low, high = float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
    smooth = (float(rope["original_max_position_embeddings"]) / wavelength - low) / (high - low)
    smooth = smooth.clamp(0.0, 1.0)
    return 1.0 / ((1.0 - smooth) / float(rope["factor"]) + smooth)


def _yarn(
    inv_freq: Tensor, rope: Mapping[str, Any], theta: float, head_dim: int, max_position: int
) -> tuple[Tensor, float]:
    original = float(rope.get("original_max_position_embeddings") or max_position)
    factor = float(rope.get("factor") or max_position / original)

    def scale(times: float, mscale: float = 1.0) -> float:
        return 1.0 if times <= 1.0 else 0.1 * mscale * math.log(times) + 1.0

    attention = rope.get("attention_factor")
    if attention is None:
        mscale, all_dim = rope.get("mscale"), rope.get("mscale_all_dim")
        attention = scale(factor, mscale) / scale(factor, all_dim) if mscale and all_dim else scale(factor)

    def dimension(rotations: float) -> float:
        return head_dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension(float(rope.get("beta_fast") or 32)), dimension(float(rope.get("beta_slow") or 1))
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / max(high - low, 0.001)).clamp(0.0, 1.0)
    return inv_freq / factor * ramp + inv_freq * (1.0 - ramp), float(attention)


class RopeShape(Protocol):
    """What is read of a `ModelConfig`."""

    @property
    def rope(self) -> Mapping[str, Any]: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def max_position(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Rope:
    """inv_freq float32 [head_dim / 2]; factor on cos and sin."""

    inv_freq: Tensor
    factor: float

    @classmethod
    def of(cls, shape: RopeShape, device: torch.device) -> Rope:
        """Of a network of these dimensions. Raises ModelError for a rope type that is not supported."""
        inv_freq, factor = inverse_frequencies(shape.rope, shape.head_dim, shape.max_position)
        return cls(inv_freq.to(device), factor)

    def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions [n] -> (cos, sin), each float32 [n, head_dim / 2]. Angles are float32, as in training."""
        angles = positions.to(torch.float32)[:, None] * self.inv_freq
        cos, sin = angles.cos(), angles.sin()
        return (cos, sin) if self.factor == 1.0 else (cos * self.factor, sin * self.factor)


def rotation(positions: Tensor, rope: Rope, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(cos, signed sin), each [n, 1, head_dim]; the sine's first half is negated, so that

        rotated = x * cos + roll(x, head_dim / 2) * signed_sin
    """
    cos, sin = (table[:, None] for table in rope.angles(positions))
    return torch.cat([cos, cos], dim=-1).to(dtype), torch.cat([-sin, sin], dim=-1).to(dtype)


def rotate_(x: Tensor, cos: Tensor, signed_sin: Tensor) -> Tensor:
    """Rotates x [n, heads, head_dim] in place."""
    rolled = torch.roll(x, x.shape[-1] // 2, -1)
    return x.mul_(cos).addcmul_(rolled, signed_sin)
