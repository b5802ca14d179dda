"""The same models on a CUDA device: logits equal the CPU's float32 ones."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from headway.models import attention, attention_cuda
from headway.models.attention import KVCache
from headway.models.loader import load_model
from tests.tiny import tiny_model_dir

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

TABLES = [[9, 4, 1, 30, 7, 22, 3, 8, 12, 2], [20, 21, 23, 24, 25], [13, 11, 10, 5], [6]]
PASSES = [
    [(TABLES[0], 0, 130), (TABLES[2], 0, 40)],
    [(TABLES[0], 130, 1), (TABLES[1], 0, 70), (TABLES[2], 40, 5), (TABLES[3], 0, 3)],
    [(TABLES[0], 131, 1), (TABLES[1], 70, 4), (TABLES[2], 45, 5)],
]


def logits(directory: Path, dtype: str, device: str) -> torch.Tensor:
    """Of every token of three passes over four sequences."""
    model = load_model(str(directory), dtype=dtype, device=device)
    cache = KVCache(model.config, 40, 16, model.dtype, model.device)
    random = torch.Generator().manual_seed(0)
    parts = []
    for rows in PASSES:
        ids = torch.randint(0, 320, (sum(length for *_, length in rows),), generator=random)
        positions = torch.cat([torch.arange(start, start + length) for _, start, length in rows])
        plan = cache.plan(rows)
        hidden, _ = model.forward(ids.to(model.device), positions.to(model.device), plan, cache)
        parts.append(model.logits(hidden).float().cpu())
    return torch.cat(parts)


@pytest.mark.parametrize(("model_type", "overrides"), [("llama", {}), ("mistral", {"sliding_window": 24}), ("qwen2", {}), ("qwen3", {})])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-3), ("float16", 0.05), ("bfloat16", 0.3)])
def test_logits_equal_the_cpu(tmp_path: Path, model_type: str, overrides: dict[str, int], dtype: str, tolerance: float) -> None:
    directory = tiny_model_dir(tmp_path, model_type, head_dim=64, **overrides)
    reference = logits(directory, "float32", "cpu")
    error = (logits(directory, dtype, "cuda") - reference).pow(2).mean().sqrt()
    assert error < tolerance


@pytest.mark.parametrize("window", [None, 24])
def test_a_paged_kernel_is_found(window: int | None) -> None:
    """Not required for a right answer, but its absence should be noticed: tiles are slower."""
    kernel = attention_cuda._kernel(torch.device("cuda:0"), torch.bfloat16, 9, 3, 64, 32, window, attention._attend_alone)
    assert kernel is not None, "neither torch.nn.attention.varlen nor FlashInfer reads pages correctly here"
