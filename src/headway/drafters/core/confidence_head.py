"""An acceptance head: how likely is the token that a draft network is about to draw to be accepted?

A few residual blocks x + silu(W x + b) and a linear layer to two classes, refused and accepted, on the hidden state from which the network
predicts the token. That state is a function of the prefix alone, so the estimate may decide whether the token is drafted or
verified even when drafts are sampled.

Source: SpecDec++ (Huang et al. 2024, arXiv 2405.19715). Its own heads read the state one token later, after the drafted token has been
read, and so may only decide about the position behind it; here the head is to be trained on the state before. Tensor names
are those of its release: `model.N.linear.{weight,bias}` of block N, then `model.N.{weight,bias}` of the last layer.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from headway.errors import ModelError

REFUSED, ACCEPTED = 0, 1


class ConfidenceHead:
    """Raises ModelError when the file does not hold a head for hidden states of this size."""

    def __init__(self, path: Path, hidden_size: int, device: torch.device) -> None:
        self.path = path
        tensors = _read(path)
        num_blocks = sum(name.endswith(".linear.weight") for name in tensors)

        def take(name: str, *shape: int) -> Tensor:
            if name not in tensors:
                raise ModelError(f"{path}: the confidence head lacks {name}; it has {', '.join(sorted(tensors)) or 'nothing'}")
            if tuple(tensors[name].shape) != shape:
                raise ModelError(f"{path}: {name} has shape {tuple(tensors[name].shape)}, the draft network's hidden states need {shape}")
            # A few thousand numbers per row: float32 costs nothing and keeps 1 - p.
            return tensors[name].to(device=device, dtype=torch.float32)

        self.blocks = [
            (take(f"model.{i}.linear.weight", hidden_size, hidden_size), take(f"model.{i}.linear.bias", hidden_size))
            for i in range(num_blocks)
        ]
        self.last = take(f"model.{num_blocks}.weight", 2, hidden_size), take(f"model.{num_blocks}.bias", 2)

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for pair in (*self.blocks, self.last) for tensor in pair)

    def __call__(self, hidden: Tensor) -> Tensor:
        """[n, hidden] -> P(accepted) [n], f32"""
        x = hidden.float()
        for weight, bias in self.blocks:
            x = x + F.silu(F.linear(x, weight, bias))
        return torch.softmax(F.linear(x, *self.last), -1)[:, ACCEPTED]


def _read(path: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except FileNotFoundError:
        raise ModelError(f"the confidence head {path} does not exist") from None
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path} is not a readable safetensors file (truncated or corrupt?): {error}") from error
