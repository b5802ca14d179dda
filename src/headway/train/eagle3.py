"""An EAGLE-3 head that can be trained: the network of drafters/core/eagle_network.py with gradients, and its training-time test.

Parameters carry the published names, so `state_dict` is what is exported. Embedding and targets are the target's and stay fixed. Of
the published variants this is the one with `fc_norm` and `norm_before_residual`: whatever enters is normed, so nothing drifts from
step to step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headway.models.config import ModelConfig
from headway.models.rope import inverse_frequencies


@dataclass(frozen=True)
class HeadShape:
    """What the head looks like. `layers`: the target's layers whose outputs it reads, by the convention of `Decoder.forward`."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    layers: tuple[int, ...]
    draft_vocab_size: int

    @classmethod
    def of(cls, target: ModelConfig, draft_vocab_size: int) -> HeadShape:
        """As large as one of the target's layers; reads a low, a middle and a high one, as EAGLE-3 does."""
        return cls(
            target.hidden_size, target.intermediate_size, target.num_heads, target.num_kv_heads, target.head_dim, target.rms_norm_eps,
            feature_layers(target), draft_vocab_size,
        )


def feature_layers(target: ModelConfig) -> tuple[int, ...]:
    """The target's layers whose outputs a head reads: a low, a middle and a high one."""
    n = target.num_layers
    return (1, n // 2 - 1, n - 4) if n >= 8 else tuple(sorted({0, n // 2, n - 1}))


class Norm(nn.RMSNorm):
    """In float32, also where matrix products are not."""

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.normalized_shape, self.weight, self.eps)


class Attention(nn.Module):
    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        q_size, kv_size = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        self.q_proj = nn.Linear(2 * shape.hidden_size, q_size, bias=False)
        self.k_proj = nn.Linear(2 * shape.hidden_size, kv_size, bias=False)
        self.v_proj = nn.Linear(2 * shape.hidden_size, kv_size, bias=False)
        self.o_proj = nn.Linear(q_size, shape.hidden_size, bias=False)


class Mlp(nn.Module):
    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = F.silu(self.gate_proj(x)) * self.up_proj(x)
        return self.down_proj(x)   # type: ignore[no-any-return]


class HeadLayer(nn.Module):
    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.shape = shape
        self.input_layernorm = Norm(shape.hidden_size, eps=shape.rms_norm_eps)
        self.hidden_norm = Norm(shape.hidden_size, eps=shape.rms_norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = Norm(shape.hidden_size, eps=shape.rms_norm_eps)
        self.mlp = Mlp(shape)

    def forward(
        self, embeds: Tensor, features: Tensor, cos: Tensor, sin: Tensor, mask: Tensor, before: list[tuple[Tensor, Tensor]]
    ) -> Tensor:
        """[batch, length, hidden] both -> the same.

        cos, sin  [batch, length, 1, head_dim], of this step's positions
        mask      additive [batch, 1, length, length]: what step 0 may see
        before    keys and values of the steps before, [batch, kv_heads, length, head_dim] each; this step's are appended. Row i sees step
                  0 up to i, and of each later step its own row alone: the drafts that would have led here
        """
        features = self.hidden_norm(features)
        x = torch.cat([self.input_layernorm(embeds), features], -1)
        attention, shape = self.self_attn, self.shape

        def heads(projection: nn.Module, count: int) -> Tensor:
            return projection(x).unflatten(-1, (count, shape.head_dim))   # type: ignore[no-any-return]

        q = _rotate(heads(attention.q_proj, shape.num_heads), cos, sin).transpose(1, 2)
        k = _rotate(heads(attention.k_proj, shape.num_kv_heads), cos, sin).transpose(1, 2)
        before.append((k, heads(attention.v_proj, shape.num_kv_heads).transpose(1, 2)))
        x = features + attention.o_proj(_attend(q, mask, before).transpose(1, 2).flatten(2))
        return x + self.mlp(self.post_attention_layernorm(x))   # type: ignore[no-any-return]


class Eagle3Head(nn.Module):
    """`target_ids` int64 [draft vocabulary]: the target's token for each draft token, rising."""

    target_ids: Tensor
    inv_freq: Tensor

    def __init__(self, shape: HeadShape, target: ModelConfig, target_ids: Tensor) -> None:
        super().__init__()
        self.shape = shape
        # Hidden states of different layers differ in size by orders of magnitude, and a few of their dimensions are huge.
        self.fc_norm = nn.ModuleList([Norm(target.hidden_size, eps=shape.rms_norm_eps) for _ in shape.layers])
        self.fc = nn.Linear(len(shape.layers) * target.hidden_size, shape.hidden_size, bias=False)
        self.layers = nn.ModuleList([HeadLayer(shape)])
        self.norm = Norm(shape.hidden_size, eps=shape.rms_norm_eps)
        self.lm_head = nn.Linear(shape.hidden_size, shape.draft_vocab_size, bias=False)
        self.register_buffer("target_ids", target_ids, persistent=False)
        inv_freq, self.rope_factor = inverse_frequencies(target.rope, shape.head_dim, target.max_position)
        self.register_buffer("inv_freq", inv_freq, persistent=False)

    def steps(self, token_ids: Tensor, hidden: Tensor, lengths: Tensor, embedding: Tensor, num_steps: int) -> Sequence[Tensor]:
        """The training-time test: what `lm_head` reads, [batch, length, hidden], at each draft step.

        token_ids  [batch, length + num_steps]: row i of step s reads token i + 1 + s; padded as you like
        hidden     [batch, length, layers * hidden]: the target's hidden states at each position
        lengths    [batch]: positions that count

        Step s, row i predicts token i + 2 + s from what is known at position i and the text's own tokens in between.
        """
        parts = hidden.to(self.fc.weight.dtype).chunk(len(self.fc_norm), -1)
        features = self.fc(torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], -1))
        length = hidden.shape[1]
        order = torch.arange(length, device=hidden.device)
        seen = (order[None, :] <= order[:, None]) & (order < lengths[:, None, None])
        seen |= torch.eye(length, dtype=torch.bool, device=hidden.device)
        mask = torch.zeros(seen.shape, device=hidden.device).masked_fill_(~seen, float("-inf"))[:, None]
        before: list[tuple[Tensor, Tensor]] = []
        out = []
        for step in range(num_steps):
            angles = (order + step)[:, None].float() * self.inv_freq
            angles = torch.cat([angles, angles], -1)[None, :, None]
            embeds = F.embedding(token_ids[:, 1 + step : 1 + step + length], embedding).to(features.dtype)
            cos, sin = angles.cos() * self.rope_factor, angles.sin() * self.rope_factor
            features = self.layers[0](embeds, features, cos, sin, mask, before)
            out.append(self.norm(features))
        return out


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return (x * cos + torch.cat([-second, first], -1) * sin).to(x.dtype)


def _attend(q: Tensor, mask: Tensor, steps: list[tuple[Tensor, Tensor]]) -> Tensor:
    """q [batch, heads, length, head_dim] -> the same. One softmax over the text of step 0 and one row of each later step."""
    shared = q.shape[1] // steps[0][0].shape[1]
    scale = q.shape[-1] ** -0.5
    keys = [k.repeat_interleave(shared, 1) for k, _ in steps]
    values = [v.repeat_interleave(shared, 1) for _, v in steps]
    if len(steps) == 1:
        return F.scaled_dot_product_attention(q, keys[0], values[0], attn_mask=mask.to(q.dtype))
    scores = (q @ keys[0].transpose(-1, -2)).float() * scale + mask
    own = [(q * k).sum(-1, keepdim=True).float() * scale for k in keys[1:]]
    weights = torch.softmax(torch.cat([scores, *own], -1), -1).to(q.dtype)
    length = q.shape[2]
    out = weights[..., :length] @ values[0]
    for step, v in enumerate(values[1:]):
        out = out + weights[..., length + step : length + step + 1] * v
    return out
