"""Texts -> padded batches of about equal work, in an order that is a function of the seed and the epoch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from headway.train.hidden_states import Example

MICRO_TOKENS = 1024
"""Padded positions of one forward and backward pass: bounds memory; gradients of several add up to one step."""


@dataclass(frozen=True)
class Batch:
    """token_ids [batch, length + num_steps + 1], hidden [batch, length, layers * hidden], last [batch, length, hidden],
    log_normalizer [batch, length], lengths [batch], num_prompt [batch]"""

    token_ids: Tensor
    hidden: Tensor
    last: Tensor
    log_normalizer: Tensor
    lengths: Tensor
    num_prompt: Tensor

    def learned(self) -> Tensor:
        """bool [batch, length]: positions whose next token the target wrote, so whose distribution is learned."""
        order = torch.arange(self.hidden.shape[1], device=self.hidden.device)
        return (order >= self.num_prompt[:, None] - 1) & (order < self.lengths[:, None] - 1)


def collate(examples: Sequence[Example], num_steps: int) -> Batch:
    length = max(len(e.token_ids) for e in examples)
    first = examples[0]

    def padded(parts: Sequence[Tensor], extra: int = 0) -> Tensor:
        out = torch.zeros(len(parts), length + extra, *parts[0].shape[1:], dtype=parts[0].dtype, device=parts[0].device)
        for row, part in enumerate(parts):
            out[row, : len(part)] = part
        return out

    device = first.token_ids.device
    return Batch(
        padded([e.token_ids for e in examples], num_steps + 1), padded([e.hidden for e in examples]), padded([e.last for e in examples]),
        padded([e.log_normalizer for e in examples]), torch.tensor([len(e.token_ids) for e in examples], device=device),
        torch.tensor([e.num_prompt for e in examples], device=device),
    )


def epoch_order(lengths: Sequence[int], batch_tokens: int, seed: int, epoch: int) -> list[list[list[int]]]:
    """Steps, each a list of micro-batches of text indices. Every text once; texts of similar length share a micro-batch."""
    random = np.random.default_rng([seed, epoch])
    shuffled = random.permutation(len(lengths)).tolist()
    by_length = sorted(range(len(lengths)), key=lambda i: (lengths[shuffled[i]] // 32, i))
    micro: list[list[int]] = []
    longest = 0
    for i in (shuffled[i] for i in by_length):
        longest = max(longest, lengths[i]) if micro else lengths[i]
        if micro and longest * (len(micro[-1]) + 1) <= MICRO_TOKENS:
            micro[-1].append(i)
        else:
            micro.append([i])
            longest = lengths[i]
    steps: list[list[list[int]]] = []
    total = 0
    for index in random.permutation(len(micro)).tolist():
        if not steps or total >= batch_tokens:
            steps.append([])
            total = 0
        steps[-1].append(micro[index])
        total += sum(lengths[i] for i in micro[index])
    if len(steps) > 1 and total < batch_tokens // 2:   # a small last step would be a noisy one
        steps[-2] += steps.pop()
    return steps
