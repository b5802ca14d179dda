"""Rotary position embedding: inverse frequencies of each `rope_type` (arXiv:2104.09864; yarn: arXiv:2309.00071)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from headway.errors import ModelError

ROPE_TYPES = ("default", "linear", "llama3", "longrope", "yarn")


def inverse_frequencies(rope: Mapping[str, Any], head_dim: int, max_position: int, longest: int | None = None) -> tuple[Tensor, float]:
    """(inverse frequencies, float32 [head_dim / 2]; factor on cos and sin) of a Hugging Face `rope_parameters` mapping.

    longest  context that is served, by default `max_position`: `longrope` has other frequencies beyond its original one
    """
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
    if kind == "longrope":
        return _longrope(inv_freq, rope, max_position, longest or max_position)
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


def _longrope(inv_freq: Tensor, rope: Mapping[str, Any], max_position: int, longest: int) -> tuple[Tensor, float]:
    """arXiv:2402.13753. One set of frequencies for all contexts up to `longest`: keys in the cache cannot be turned again."""
    original = int(rope["original_max_position_embeddings"])
    factors = torch.tensor(rope["long_factor" if longest > original else "short_factor"], dtype=torch.float32)
    if factors.shape != inv_freq.shape:
        raise ModelError(f"longrope has {len(factors)} factors for {len(inv_freq)} frequencies")
    factor = float(rope.get("factor") or max_position / original)
    attention = rope.get("attention_factor")
    if attention is None:
        attention = 1.0 if factor <= 1.0 else math.sqrt(1 + math.log(factor) / math.log(original))
    return inv_freq / factors, float(attention)


def rotated_order(head_dim: int, num_rotated: int, interleaved: bool) -> list[int] | None:
    """Where dimensions of a head are taken from, so that pair i is (i, i + head_dim / 2) and the pairs that turn come first; None: as
    they are. Scores do not depend on the order of dimensions, so queries and keys are put in this one when a model is loaded.

    num_rotated  dimensions that turn: the head's first ones
    interleaved  pair i was (2i, 2i + 1), else (i, i + num_rotated / 2)
    """
    if num_rotated == head_dim and not interleaved:
        return None
    half, rest = num_rotated // 2, list(range(num_rotated, head_dim))
    first = list(range(0, num_rotated, 2)) if interleaved else list(range(half))
    second = [i + (1 if interleaved else half) for i in first]
    return [*first, *rest[: len(rest) // 2], *second, *rest[len(rest) // 2 :]]


def in_rotated_order(weight: Tensor, order: list[int] | None, head_dim: int, num_heads: int) -> Tensor:
    """weight [rows, ...] with the rows of its first heads (all there are, but at most `num_heads`) in this order each."""
    if order is None:
        return weight
    num_heads = min(len(weight) // head_dim, num_heads)
    rows = [head * head_dim + i for head in range(num_heads) for i in order]
    return weight[[*rows, *range(len(rows), len(weight))]]


def num_rotated(rope: Mapping[str, Any], head_dim: int) -> int:
    """How many dimensions of a head turn, an even number. Raises ModelError."""
    number = int(head_dim * float(rope.get("partial_rotary_factor") or 1.0))
    if number % 2 or head_dim % 2 or not 0 < number <= head_dim:
        raise ModelError(f"partial_rotary_factor {rope.get('partial_rotary_factor')!r} turns {number} of {head_dim} dimensions of a head")
    return number


class RopeShape(Protocol):
    """What is read of a `ModelConfig`."""

    @property
    def rope(self) -> Mapping[str, Any]: ...
    @property
    def local_rope(self) -> Mapping[str, Any] | None: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def max_position(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Rope:
    """The rotations of a network's layers, of which most have one.

    inv_freq  float32 [rotations * head_dim / 2], one rotation after the other; 0: the pair is not turned
    factor    on cos and sin of pairs that are turned
    """

    inv_freq: Tensor
    factor: float
    rotations: int = 1

    @classmethod
    def of(cls, shape: RopeShape, device: torch.device, longest: int | None = None) -> Rope:
        """Of a network of these dimensions that serves contexts up to `longest`, by default what its configuration says. Raises ModelError
        for a rope type that is not supported."""
        found = []
        for rope in (shape.rope, *([] if shape.local_rope is None else [shape.local_rope])):
            turned = num_rotated(rope, shape.head_dim)
            inv_freq, factor = inverse_frequencies(rope, turned, shape.max_position, longest)
            found.append((torch.cat([inv_freq, torch.zeros((shape.head_dim - turned) // 2)]), factor))
        if len({factor for _, factor in found}) > 1:
            raise ModelError("rotations of different attention factors in one network are not supported")
        return cls(torch.cat([inv_freq for inv_freq, _ in found]).to(device), found[0][1], len(found))

    def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions [n] -> (cos, sin), each float32 [n, rotations * head_dim / 2]. Angles are float32, as in training."""
        angles = positions.to(torch.float32)[:, None] * self.inv_freq
        cos, sin = angles.cos(), angles.sin()
        if self.factor == 1.0:
            return cos, sin
        factors = torch.where(self.inv_freq == 0, 1.0, self.factor)
        return cos * factors, sin * factors


def rotation(positions: Tensor, rope: Rope, dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
    """By rotation (cos, signed sin), each [n, 1, head_dim]; the sine's first half is negated, so that

        rotated = x * cos + roll(x, head_dim / 2) * signed_sin
    """
    tables = zip(*(table[:, None].chunk(rope.rotations, -1) for table in rope.angles(positions)), strict=True)
    return [(torch.cat([cos, cos], dim=-1).to(dtype), torch.cat([-sin, sin], dim=-1).to(dtype)) for cos, sin in tables]


def rotate_(x: Tensor, cos: Tensor, signed_sin: Tensor) -> Tensor:
    """Rotates x [n, heads, head_dim] in place."""
    rolled = torch.roll(x, x.shape[-1] // 2, -1)
    return x.mul_(cos).addcmul_(rolled, signed_sin)
