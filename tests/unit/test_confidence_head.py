"""An acceptance head: the file, the numbers, and what they decide."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file

from headway.config import EngineConfig, SpeculativeConfig
from headway.control.policies.static import Static
from headway.control.policy import AdaptivePolicy
from headway.drafters.core.confidence_head import ConfidenceHead
from headway.engine.engine import Engine
from headway.errors import ModelError
from headway.sampling_params import SamplingParams
from headway.types import Request
from tests.drafter_models import noisy_copy
from tests.heads import eagle3_dir
from tests.tiny import tiny_model_dir

HIDDEN = 64


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.nn.functional.silu(self.linear(x))


def reference(num_blocks: int, seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(*(Block() for _ in range(num_blocks)), torch.nn.Linear(HIDDEN, 2))


def save(head: torch.nn.Module, path: Path) -> Path:
    save_file({f"model.{name}": tensor.detach().clone() for name, tensor in head.state_dict().items()}, path)
    return path


@pytest.mark.parametrize("num_blocks", [0, 3])
def test_it_computes_what_its_layers_say(num_blocks: int, tmp_path: Path) -> None:
    module = reference(num_blocks)
    head = ConfidenceHead(save(module, tmp_path / "head.safetensors"), HIDDEN, torch.device("cpu"))
    x = torch.randn(7, HIDDEN)
    torch.testing.assert_close(head(x), torch.softmax(module(x), -1)[:, 1].detach())
    assert head(x.bfloat16()).dtype == torch.float32
    assert head.num_bytes == sum(4 * p.numel() for p in module.parameters())


def test_wrong_files_are_named(tmp_path: Path) -> None:
    path = tmp_path / "head.safetensors"
    with pytest.raises(ModelError, match="does not exist"):
        ConfidenceHead(path, HIDDEN, torch.device("cpu"))
    save(reference(1), path)
    with pytest.raises(ModelError, match=r"model\.0\.linear\.weight has shape \(64, 64\), the draft .* need \(32, 32\)"):
        ConfidenceHead(path, 32, torch.device("cpu"))
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(ModelError, match="truncated"):
        ConfidenceHead(path, HIDDEN, torch.device("cpu"))
    save_file({"weight": torch.zeros(2)}, path)
    with pytest.raises(ModelError, match=r"lacks model\.0\.weight; it has weight"):
        ConfidenceHead(path, HIDDEN, torch.device("cpu"))


class Rule(Static, AdaptivePolicy):
    """Drafts on while the estimate is above a third."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []

    def stops_early(self, drafter: str) -> bool:
        return True

    def continue_drafting(self, seq_ids: Sequence[int], position: int, confidence: NDArray[np.float64]) -> NDArray[np.bool_]:
        self.seen += confidence.tolist()
        return confidence > 1 / 3


@pytest.mark.parametrize("method", ["draft_model", "eagle"])
def test_a_drafter_with_a_head_tells_the_policy_the_head_s_estimate(method: str, tmp_path: Path) -> None:
    target = tiny_model_dir(tmp_path, "llama", seed=3)
    draft = noisy_copy(tmp_path, target, 0.05) if method == "draft_model" else eagle3_dir(tmp_path / "eagle3", target)
    path = save(reference(2), tmp_path / "head.safetensors")
    speculative = SpeculativeConfig.parse({
        "method": method, "model": str(draft), "num_speculative_tokens": 5, "confidence_head": str(path),
        **({"draft_sample_method": "probabilistic"} if method == "draft_model" else {}),
    })  # fmt: skip
    engine = Engine(EngineConfig(model=str(target), dtype="float32", device="cpu", max_model_len=128, speculative=speculative))
    rule = Rule()
    engine.drive(rule)
    for i in range(4):
        params = SamplingParams(temperature=float(i % 2), seed=i, max_tokens=20, ignore_eos=True)
        engine.add(Request(f"r{i}", list(range(5 + i, 30 + i)), params))
    while engine.has_work():
        engine.step()
        engine.check()
    (drafter,) = engine.drafters.values()
    spread = np.array(rule.seen)
    assert len(spread) > 50
    assert spread.std() > 0.05
    assert 0.0 <= spread.min() < 0.3 < 0.7 < spread.max() <= 1.0
    lengths = engine.metrics.speculation()[method].num_drafts_per_pos
    assert len(lengths) > 1
    assert lengths[-1] < lengths[0], "some drafts stopped early"
    assert not drafter.deterministic
