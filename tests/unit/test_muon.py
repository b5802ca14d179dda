"""Updates made orthogonal, beside torch's own optimizer."""

from __future__ import annotations

import pytest
import torch

from headway.train.muon import Muon, orthogonal


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(64, 96), (96, 64), (50, 50)])
def test_steps_as_torchs_does(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """Torch's multiplies in bf16, so the two differ by what that rounds: 1 in 256 of an update, five products deep."""
    random = torch.Generator().manual_seed(1)
    begin = torch.randn(shape, generator=random)
    own, other = torch.nn.Parameter(begin.clone()), torch.nn.Parameter(begin.clone())
    optimizers = [
        Muon([own], 1e-2, dtype=dtype), torch.optim.Muon([other], lr=1e-2, weight_decay=0.01, adjust_lr_fn="match_rms_adamw")
    ]
    for _ in range(5):
        gradient = torch.randn(shape, generator=random)
        for parameter, optimizer in zip((own, other), optimizers, strict=True):
            parameter.grad = gradient.clone()
            optimizer.step()
    moved = (own - begin).abs().max()
    assert moved > 0.01
    assert (own - other).abs().max() < 0.05 * moved


@pytest.mark.parametrize("shape", [(30, 80), (80, 30)])
def test_singular_vectors_stay_and_values_come_near_one(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(2))
    made = orthogonal(matrix)
    values = torch.linalg.svdvals(made)
    assert float(values.min()) > 0.6
    assert float(values.max()) < 1.3
    u, _, v = torch.linalg.svd(matrix, full_matrices=False)
    inside = u.t() @ made @ v.t()
    assert (inside - torch.diag(inside.diagonal())).abs().max() < 1e-3


def test_a_gradient_of_nothing_moves_nothing() -> None:
    parameter = torch.nn.Parameter(torch.ones(4, 6))
    optimizer = Muon([parameter], 1e-2, dtype=torch.float32, weight_decay=0.0)
    optimizer.step()   # no gradient at all
    parameter.grad = torch.zeros(4, 6)
    optimizer.step()
    assert torch.equal(parameter, torch.ones(4, 6))
