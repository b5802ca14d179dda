"""A mixture of experts in place of a layer's MLP."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from headway import native
from headway.models.layers import MLP, Linear
from headway.models.traits import ExpertTraits
from headway.native import ops

ROUTER_ROWS = 64
"""The router's outputs are padded to a multiple of it, which the compiled product takes."""


class Experts:
    """x [n, hidden] -> the sum of what each token's chosen experts make of it, weighed, and of the shared expert [n, hidden].

    By the compiled kernels in one call where the experts' products are packed (native/experts.c): each token then has the same bits
    whichever tokens share the pass. Else by PyTorch, expert by expert.
    """

    def __init__(
        self, traits: ExpertTraits, router: Tensor, router_bias: Tensor | None, experts: Sequence[MLP], shared: MLP | None,
        choice_bias: Tensor | None,
    ) -> None:
        """router [number of experts, hidden], router_bias and choice_bias [number of experts]"""
        padding = -traits.num % ROUTER_ROWS
        self.router = Linear(F.pad(router, (0, 0, 0, padding)), None if router_bias is None else F.pad(router_bias, (0, padding)))
        self.traits, self.experts, self.shared = traits, experts, shared
        self.choice_bias = None if choice_bias is None else choice_bias.float()
        self.packed = self._pack()

    def _pack(self) -> ops.PackedExperts | None:
        library, traits = native.library(), self.traits
        gate_ups, downs = ([part for part in parts if part is not None] for parts in zip(
            *((expert.gate_up.packed, expert.down.packed) for expert in self.experts), strict=True
        ))   # fmt: skip
        if library is None or self.router.packed is None or len(gate_ups) < traits.num or len(downs) < traits.num:
            return None
        return ops.PackedExperts(
            library, gate_ups, downs, per_token=traits.per_token, sigmoid=traits.sigmoid, normalised=traits.normalised, scale=traits.scale,
            choice_bias=self.choice_bias, num_groups=traits.num_groups, groups_kept=traits.groups_kept,
        )

    def __call__(self, x: Tensor) -> Tensor:
        logits = self.router(x)[:, : self.traits.num]
        y = self._one_by_one(x, logits) if self.packed is None else self.packed(x, logits)
        return y if self.shared is None else self.shared.add_to(y, x)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """residual + self(x)"""
        logits = self.router(x)[:, : self.traits.num]
        y = self._one_by_one(x, logits).add_(residual) if self.packed is None else self.packed(x, logits, residual)
        return y if self.shared is None else self.shared.add_to(y, x)

    def _one_by_one(self, x: Tensor, logits: Tensor) -> Tensor:
        weights, chosen = self._choose(logits.float())
        total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for number in torch.unique(chosen).tolist():
            rows, places = torch.where(chosen == number)
            total.index_add_(0, rows, self.experts[number](x[rows]).float() * weights[rows, places, None])
        return total.to(x.dtype)

    def _choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """[n, number of experts] -> (weights, numbers) of the chosen experts, [n, per_token] both; as experts.c does."""
        traits = self.traits
        scores = logits.sigmoid() if traits.sigmoid else logits.softmax(-1)
        choice = scores if self.choice_bias is None else scores + self.choice_bias
        if traits.num_groups > 1:
            groups = choice.view(len(choice), traits.num_groups, -1)
            best = groups.topk(min(2, groups.shape[-1]), -1).values.sum(-1)
            kept = torch.zeros_like(best).scatter_(1, best.topk(traits.groups_kept, -1).indices, 1.0)
            choice = groups.masked_fill(kept[..., None] == 0, float("-inf")).flatten(1)
        chosen = choice.topk(traits.per_token, -1).indices
        weights = scores.gather(1, chosen)
        if traits.normalised:
            weights = weights / weights.sum(-1, keepdim=True)
        return weights * traits.scale, chosen
