"""Distances between the target's distribution and the drafter's, by name. All are 0 when they are equal.

What acceptance depends on, under exact rejection sampling, is the total variation: P(accept) = 1 - TV (Leviathan et al. 2023,
arXiv:2211.17192). Its gradient is weak far from the goal, so forward KL is the usual choice; arXiv:2310.08461 compares them.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

Loss = Callable[[Tensor, Tensor], Tensor]
"""(log p, log q), both [n, vocab] and normalised: the target's and the drafter's -> [n]"""


def forward_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """KL(p || q): q must cover what the target writes."""
    return F.kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1)


def reverse_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """KL(q || p): q must not write what the target would not."""
    return F.kl_div(log_p, log_q, reduction="none", log_target=True).sum(-1)


def jensen_shannon(log_p: Tensor, log_q: Tensor) -> Tensor:
    """The mean of both KL distances to the mixture (p + q) / 2; at most log 2."""
    log_m = torch.logaddexp(log_p, log_q) - math.log(2.0)
    return 0.5 * (forward_kl(log_p, log_m) + forward_kl(log_q, log_m))


def total_variation(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Half the sum of |p - q|: one minus the probability that a sampled draft is accepted."""
    return 0.5 * (log_p.exp() - log_q.exp()).abs().sum(-1)


LOSSES: dict[str, Loss] = {
    "forward_kl": forward_kl,
    "jensen_shannon": jensen_shannon,
    "reverse_kl": reverse_kl,
    "total_variation": total_variation,
}
