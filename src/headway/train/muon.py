"""Muon: momentum made orthogonal, for matrices between hidden states (Jordan et al. 2024).

torch.optim.Muon multiplies in bf16 whatever the device: on a CPU without instructions for it an update took six times as long as the
gradients of 2048 positions.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

# A quintic whose iteration sends all singular values into about [0.7, 1.2]; exactness would take more passes and teach no better.
_QUINTIC = 3.4445, -4.7750, 2.0315
_PASSES = 5
_RMS = 0.2   # of an update's elements at rate 1, as large as AdamW's: one rate for both (arXiv:2502.16982)


class Muon(torch.optim.Optimizer):
    """Nesterov momentum, orthogonal updates, decoupled weight decay. `dtype`: of the products that make an update orthogonal."""

    def __init__(
        self, params: Iterable[Tensor], lr: float, *, dtype: torch.dtype, momentum: float = 0.95, weight_decay: float = 0.01
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        self._dtype = dtype

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:   # type: ignore[override]
        for group in self.param_groups:
            rate, momentum = group["lr"], group["momentum"]
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                mean = state.setdefault("mean", torch.zeros_like(param))
                mean.lerp_(param.grad, 1.0 - momentum)
                update = orthogonal(param.grad.lerp(mean, momentum), self._dtype)
                param.mul_(1.0 - rate * group["weight_decay"])
                param.add_(update, alpha=-rate * _RMS * max(param.shape) ** 0.5)


def orthogonal(matrix: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """[m, n] -> [m, n] in `dtype`: the same singular vectors, singular values near 1; zeros stay zeros."""
    x = matrix.to(dtype)
    wide = x.shape[0] <= x.shape[1]
    x = x if wide else x.t()   # [short, long]: the products below are of the short side
    x = x / x.norm().clamp(min=1e-7)
    a, b, c = _QUINTIC
    for _ in range(_PASSES):
        gram = x @ x.t()
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return x if wide else x.t()   # type: ignore[no-any-return]
