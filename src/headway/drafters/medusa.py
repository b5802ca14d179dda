"""Medusa: one small head per draft position, all on the same hidden state (arXiv:2401.10774).

Names read, `medusa_lm_head.pt` or safetensors: those of the Medusa repository, `H.L.linear.weight` (residual block L of head H) and
`H.N.weight` (its output layer behind N blocks); and those of converted checkpoints, `blocks.H.layers.L.weight`, `lm_heads.H.weight`,
`lm_head.weight` where all heads share one, `token_map` for a reduced vocabulary.

How many heads there are is what the weights say: the configurations of published ones say 2 where there are five
(github.com/InternLM/lmdeploy/issues/1180 lists the names).
"""

from __future__ import annotations

import logging
import re
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

logger = logging.getLogger("headway.medusa")

HEAD = re.compile(r"(?:blocks\.)?(\d+)\.")


class Medusa(HiddenHeads):
    """`model` names the directory of the heads. Draft tokens do not depend on one another, given the prefix: a tree (`topk` > 1) combines
    the likeliest tokens of each head, the most probable combinations first."""

    def read(self, directory: Path, target: ModelConfig) -> MedusaFile:
        return MedusaFile(directory, target)


class MedusaNetwork:
    reads_tokens = False

    def __init__(self, blocks: list[list[Linear]], outputs: list[Linear], target_ids: Tensor | None) -> None:
        self.blocks, self.outputs, self.target_ids = blocks, outputs, target_ids
        self.num_heads = len(blocks)

    def begin(self, hidden: Tensor) -> Tensor:
        return hidden

    def step(self, index: int, state: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        x = state
        for block in self.blocks[index]:
            x = x + F.silu(block(x))
        return self.outputs[index](x), state


class MedusaFile:
    """Raises ModelError naming what is missing, misshapen, or made for another target."""

    def __init__(self, directory: Path, target: ModelConfig) -> None:
        self.checkpoint = Checkpoint(directory, prefixes=("medusa_heads.", "medusa_head."))
        self.checkpoint.check_type(None, "medusa reads heads of the Medusa repository, also converted ones")
        config, count = self.checkpoint.config, self.checkpoint.number
        for key, own in (("hidden_size", target.hidden_size), ("vocab_size", target.vocab_size)):
            if config.get(key, own) != own:
                raise ModelError(f"{directory}: made for a target of {key} {config[key]}, the target's is {own}")
        self.num_heads = there = max((int(found[1]) for name in self.checkpoint.names if (found := HEAD.match(name))), default=-1) + 1
        if there == 0:
            raise ModelError(f"{directory} has no Medusa heads: no tensor is named 0.0.linear.weight or blocks.0.layers.0.weight")
        named = count("num_heads", default=count("medusa_num_heads", default=there))
        if named > there:
            raise ModelError(f"{directory}: config.json names {named} heads, the weights have {there}")
        if named < there:
            logger.warning("%s: config.json names %d heads, the weights have %d: all are used", directory, named, there)
        layers = config.get("medusa_num_layers", config.get("num_hidden_layers"))
        self.num_layers = 1 if layers is None else int(layers)

    def load(self, target: Decoder) -> MedusaNetwork:
        checkpoint, hidden = self.checkpoint, target.config.hidden_size
        converted = any(name.startswith("blocks.") for name in checkpoint.names)

        def take(name: str, *shape: int) -> Tensor:
            return checkpoint.take(name, shape).to(target.device, target.dtype)

        def block(head: int, layer: int) -> Linear:
            name = f"blocks.{head}.layers.{layer}" if converted else f"{head}.{layer}.linear"
            bias = take(f"{name}.bias", hidden) if f"{name}.bias" in checkpoint else None
            return Linear(take(f"{name}.weight", hidden, hidden), bias)

        blocks = [[block(head, layer) for layer in range(self.num_layers)] for head in range(self.num_heads)]
        vocab, ids = target.config.vocab_size, None
        if "token_map" in checkpoint:
            ids = checkpoint.take("token_map", checkpoint.shape("token_map"), "int").to(torch.int64)
            if len(set(ids.tolist())) != len(ids) or int(ids.min()) < 0 or int(ids.max()) >= vocab:
                raise ModelError(f"{checkpoint.directory}: token_map does not name distinct tokens of the target's vocabulary of {vocab}")

        def output(name: str) -> Linear:
            rows = checkpoint.shape(name)[0] if ids is not None else vocab
            weight = take(name, rows, hidden)
            return Linear(weight if ids is None or rows == len(ids) else weight[ids.to(weight.device)])

        if "lm_head.weight" in checkpoint:
            outputs = [output("lm_head.weight")] * self.num_heads
        else:
            names = [f"lm_heads.{head}.weight" if converted else f"{head}.{self.num_layers}.weight" for head in range(self.num_heads)]
            outputs = [output(name) for name in names]
        checkpoint.finish()
        return MedusaNetwork(blocks, outputs, None if ids is None else ids.to(target.device))
