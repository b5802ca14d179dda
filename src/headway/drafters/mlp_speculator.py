"""MLP speculators: a small recurrent chain from the target's last hidden state and the tokens drafted so far (arXiv:2404.19124).

Names read: IBM's, `emb.I`, `proj.I`, `ln.I`, `head.I` (with or without the prefix `speculator.`); tied weights are taken from the
first stage where the others are left out.
"""

from __future__ import annotations

import math
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from headway.drafters.core.checkpoint import Checkpoint
from headway.drafters.core.hidden_heads import HiddenHeads
from headway.errors import ModelError
from headway.models.config import ModelConfig
from headway.models.decoder import Decoder
from headway.models.layers import Linear


class MLPSpeculator(HiddenHeads):
    """`model` names the directory of the speculator."""

    def read(self, directory: Path, target: ModelConfig) -> MLPSpeculatorFile:
        return MLPSpeculatorFile(directory, target)


class MLPSpeculatorNetwork:
    target_ids: Tensor | None = None
    reads_tokens = True

    def __init__(
        self, embeddings: list[Tensor], projections: list[Linear], norms: list[tuple[Tensor, Tensor]], outputs: list[Linear],
        scale_input: bool,
    ) -> None:
        self.embeddings, self.projections, self.norms, self.outputs = embeddings, projections, norms, outputs
        self.scale_input = scale_input
        self.num_heads = len(outputs)
        inner = embeddings[0].shape[1]
        state_weight = 0.5 ** (0.5 / self.num_heads)
        self.token_weight = math.sqrt((1 - state_weight**2) * (inner / 2)) / state_weight

    def begin(self, hidden: Tensor) -> Tensor:
        return _rms(hidden) / math.sqrt(2) if self.scale_input else hidden

    def step(self, index: int, state: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        weight, bias = self.norms[index]
        mixed = torch.add(self.projections[index](state), F.embedding(tokens, self.embeddings[index]), alpha=self.token_weight)
        state = F.gelu(_rms(mixed) * weight + bias)
        return self.outputs[index](state), state


def _rms(x: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], eps=1e-6)


class MLPSpeculatorFile:
    """Raises ModelError naming what is missing, misshapen, or made for another target."""

    def __init__(self, directory: Path, target: ModelConfig) -> None:
        self.checkpoint = Checkpoint(directory, prefixes=("speculator.",))
        self.checkpoint.check_type(None, "mlp_speculator reads IBM's")
        count = self.checkpoint.number
        hidden, vocab = count("emb_dim"), count("vocab_size")
        if hidden != target.hidden_size:
            raise ModelError(f"{directory}: made for a target of hidden size {hidden}, the target's is {target.hidden_size}")
        if vocab != target.vocab_size:
            raise ModelError(f"{directory}: made for a vocabulary of {vocab} tokens, the target's has {target.vocab_size}")
        self.num_heads = count("n_predict")
        self.inner = int(self.checkpoint.config.get("inner_dim") or hidden)
        self.tied = bool(self.checkpoint.config.get("tie_weights", False))

    def load(self, target: Decoder) -> MLPSpeculatorNetwork:
        checkpoint, inner, vocab = self.checkpoint, self.inner, target.config.vocab_size
        taken: dict[str, Tensor] = {}

        def take(part: str, index: int, first: int, *shape: int) -> Tensor:
            """Stage `index`, or stage `first` when its weights are tied and left out."""
            kind, _, leaf = part.partition(".")
            name = f"{kind}.{index}.{leaf}"
            if name not in checkpoint and self.tied:
                name = f"{kind}.{first}.{leaf}"
            if name not in taken:
                taken[name] = checkpoint.take(name, shape).to(target.device, target.dtype)
            return taken[name]

        stages = range(self.num_heads)
        sizes = [target.config.hidden_size, *([inner] * (self.num_heads - 1))]
        network = MLPSpeculatorNetwork(
            [take("emb.weight", i, 0, vocab, inner) for i in stages],
            [Linear(take("proj.weight", i, min(i, 1), inner, sizes[i])) for i in stages],
            [(take("ln.weight", i, 0, inner), take("ln.bias", i, 0, inner)) for i in stages],
            [Linear(take("head.weight", i, 0, vocab, inner)) for i in stages],
            bool(checkpoint.config.get("scale_input", False)),
        )
        checkpoint.finish()
        return network
