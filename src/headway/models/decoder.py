"""The façade of every target network: token rows in, hidden states out.

    hidden, _ = model.forward(token_ids, positions, plan, cache)      # every row of the pass
    logits = model.logits(hidden[rows that sample])
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from headway.models.attention import KVCache
from headway.models.attention_native import NativePlan
from headway.models.attention_plan import AttentionPlan
from headway.models.config import ModelConfig
from headway.models.layers import Layer, Linear, RMSNorm, softcapped
from headway.models.rope import Rope
from headway.models.stack_native import NativeStack

__all__ = ["Decoder", "ModelConfig"]


class Decoder:
    """A decoder of one of the families, for inference only. Made by `loader.load_model`."""

    def __init__(
        self, config: ModelConfig, embedding: Tensor, layers: list[Layer], norm: RMSNorm, lm_head: Linear, directory: Path,
        weight_bytes: int, longest: int | None = None,
    ) -> None:
        """`longest`: context that is served, where it is less than the model's."""
        self.config = config
        self.embedding = embedding
        self.layers = layers
        self.norm = norm
        self.lm_head = lm_head
        self.directory = directory
        self.weight_bytes = weight_bytes
        self.int8 = lm_head.packed is not None and lm_head.packed.scales is not None
        self.dtype = embedding.dtype
        self.device = embedding.device
        self.rope = Rope.of(config, self.device, longest)
        self.stack = NativeStack.make(layers, config.head_dim) if self.device.type == "cpu" else None
        # The residual stream is kept as it would be, divided by residual_scale: norms undo it, and nothing else has to be multiplied.
        features = config.features
        scale = features.embedding_scale / features.residual_scale
        self._embedding_scale = None if scale == 1.0 else torch.tensor(scale).to(embedding)

    @torch.inference_mode()
    def forward(
        self, token_ids: Tensor, positions: Tensor, plan: AttentionPlan, cache: KVCache, hidden_layers: Sequence[int] = (),
        num_layers: int | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """One pass over all rows of a step; K/V of the rows is written to `cache`.

        token_ids, positions  int64 [num_tokens], in the order of the plan's rows
        hidden_layers         whose outputs to return as well: 0 is the first layer's, -1 the hidden states after the final norm
        num_layers            how many of the first layers to run before the final norm; None: all
        returns               (hidden states after the final norm [num_tokens, hidden], one tensor of that shape per asked-for layer)
        """
        if plan.order is not None:
            token_ids, positions = token_ids[plan.order], positions[plan.order]
        plan.begin(positions, self.rope, self.dtype)
        x = F.embedding(token_ids, self.embedding)  # [num_tokens, hidden]
        if self._embedding_scale is not None:
            x = x * self._embedding_scale
        wanted = sorted({index for index in hidden_layers if index >= 0})
        x, outputs = self._run(x, max([num_layers or len(self.layers), *(index + 1 for index in wanted)]), plan, cache, wanted)
        residual_scale = self.config.features.residual_scale
        kept = {index: output if residual_scale == 1.0 else output * residual_scale for index, output in zip(wanted, outputs, strict=True)}
        kept[-1] = x = self.norm(x)
        if plan.inverse is not None:
            x, kept = x[plan.inverse], {index: tensor[plan.inverse] for index, tensor in kept.items()}
        return x, tuple(kept[index] for index in hidden_layers)

    def _run(
        self, x: Tensor, num_layers: int, plan: AttentionPlan, cache: KVCache, wanted: Sequence[int]
    ) -> tuple[Tensor, list[Tensor]]:
        """(output of the first layers of x [num_tokens, hidden], those of the layers in `wanted`, which are in order)."""
        if self.stack is not None and isinstance(plan, NativePlan):
            return self.stack.run(x, num_layers, plan, cache, wanted)
        kept = []
        for index, (layer, pages) in enumerate(zip(self.layers[:num_layers], cache.layers[:num_layers], strict=True)):
            qkv = layer.project(x).view(len(x), -1, self.config.head_dim)  # [num_tokens, heads + 2 * kv_heads, head_dim]
            plan.write(qkv, layer, pages)
            x = layer.add_attended(x, plan.attend(qkv, layer, pages))
            if index in wanted:
                kept.append(x)
        return x, kept

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """[n, hidden] -> [n, vocab], in the model's dtype."""
        features, logits = self.config.features, self.lm_head(hidden)
        if features.logit_scale != 1.0:
            logits *= features.logit_scale
        return softcapped(logits, features.logit_softcap) if features.logit_softcap else logits
