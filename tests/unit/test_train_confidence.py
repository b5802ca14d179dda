"""An acceptance head trained on tiny models: labels, loss, resumption, and the file that drafters read."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from headway.config import EngineConfig, SpeculativeConfig
from headway.drafters.core.confidence_head import ConfidenceHead
from headway.engine.engine import Engine
from headway.errors import ConfigError
from headway.sampling_params import SamplingParams
from headway.train import confidence
from headway.train.confidence import HeadTrainer, TrainingError, drafter_of, train
from headway.train.options import TrainOptions
from headway.train.screen import Screen
from headway.types import Draft, Request, Verdict
from tests.drafter_models import noisy_copy
from tests.heads import eagle3_dir, medusa_dir, mtp_dir
from tests.interrupt import interrupted_after
from tests.tiny import tiny_model_dir

HIDDEN = 64


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_dir(tmp_path_factory.mktemp("target"), "llama", seed=3)


@pytest.fixture(scope="module")
def noisy(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return noisy_copy(tmp_path_factory.mktemp("noisy"), target, noise=0.05)


def options(target: Path, out: Path, drafter: Path, **changes: Any) -> TrainOptions:
    small = {"num_tokens": 400, "num_steps": 30, "max_tokens": 24, "batch_tokens": 64, "dtype": "float32", "device": "cpu", "num_blocks": 2}
    return TrainOptions(**{"target": str(target), "out": str(out), "drafter": str(drafter), **small, **changes})


@pytest.mark.parametrize("kind", ["draft_model", "eagle"])
def test_from_nothing_to_a_head_that_drafters_read(target: Path, noisy: Path, tmp_path: Path, kind: str) -> None:
    drafter = noisy if kind == "draft_model" else eagle3_dir(tmp_path / "eagle", target, norm_before_residual=True)
    found = train(options(target, tmp_path / "head", drafter), "headway train confidence_head ...", Screen(quiet=True))
    file = tmp_path / "head" / "confidence_head.safetensors"
    head = ConfidenceHead(file, HIDDEN, torch.device("cpu"))
    assert len(head.blocks) == 2
    assert 0.0 <= found["auc"] <= 1.0
    card = (tmp_path / "head" / "README.md").read_text()
    assert "headway train confidence_head ..." in card
    use = json.loads(card.partition("--speculative-config '")[2].partition("'")[0])
    assert use["method"] == kind
    engine = Engine(EngineConfig(model=str(target), dtype="float32", device="cpu", speculative=SpeculativeConfig.parse(use)))
    engine.add(Request("r", [5, 6, 7], SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)))
    while engine.has_work():
        engine.step()
    assert engine.metrics.speculation()[kind].num_draft_tokens > 0


def test_the_states_are_those_before_each_drafted_token(target: Path, noisy: Path, tmp_path: Path) -> None:
    """A draft model that is the target is never refused; a noisy one sometimes is, and its labels say so."""
    train(options(target, tmp_path / "own", target, num_steps=1), "", Screen(quiet=True))
    own = load_file(tmp_path / "own" / "run" / "positions.safetensors")
    assert own["states"].shape == (len(own["labels"]), HIDDEN)
    torch.testing.assert_close(own["labels"], torch.ones(len(own["labels"])), atol=1e-3, rtol=0)
    assert (own["weights"] == 1.0).all()
    train(options(target, tmp_path / "noisy", noisy, num_steps=1), "", Screen(quiet=True))
    other = load_file(tmp_path / "noisy" / "run" / "positions.safetensors")
    assert 0.05 < float(other["labels"].mean()) < 0.95
    assert set(other["weights"].unique().tolist()) == {torch.tensor(0.15).item(), 1.0}


def test_labels_are_the_probability_of_acceptance() -> None:
    logits = torch.tensor([[2.0, 0.0, 0.0], [0.0, 1.0, 0.0]])
    p, q = torch.softmax(logits, -1), torch.tensor([[0.2, 0.3, 0.5], [0.6, 0.2, 0.2]])
    assert confidence._labels(logits, Draft([0, 2]), 0.0).tolist() == [1.0, 0.0]
    torch.testing.assert_close(confidence._labels(logits, Draft([0, 2]), 1.0), torch.stack([p[0, 0], p[1, 2]]))
    torch.testing.assert_close(confidence._labels(logits, Draft([0, 2], q), 1.0), torch.minimum(p, q).sum(-1))


def test_each_label_finds_its_state() -> None:
    witness = confidence._Witness()
    told = [witness(torch.full((2, 4), float(position))) for position in range(3)]   # two drafts, position by position
    drafts = [Draft([0, 0, 0], confidence=[float(t[0]) for t in told]), None, Draft([0, 1], confidence=[float(t[1]) for t in told[:2]])]
    rows: list[Any] = [SimpleNamespace(seq=SimpleNamespace(params=SamplingParams(temperature=0.0)))] * 3
    logits = torch.zeros(4 + 1 + 3, 2)
    logits[:, 0] = 1.0
    verdicts = [Verdict([0, 0, 0, 0], 3), Verdict([0], 0), Verdict([0, 0], 1)]
    witness.judge(logits, rows, drafts, verdicts)
    found = witness.positions(0.5)
    assert found["states"][:, 0].tolist() == [0.0, 1.0, 2.0, 0.0, 1.0]
    assert found["labels"].tolist() == [1.0, 1.0, 1.0, 1.0, 0.0]
    assert found["weights"].tolist() == [1.0] * 5


def separable(num: int = 4000) -> dict[str, torch.Tensor]:
    """Accepted where the first number of the state is positive."""
    states = torch.randn(num, HIDDEN, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    return {"states": states, "labels": (states[:, 0] > 0).float(), "weights": torch.ones(num)}


def test_the_loss_falls_and_rejections_weigh_more(tmp_path: Path) -> None:
    fast = {"learning_rate": 1e-2, "batch_tokens": 256}
    trainer = HeadTrainer(separable(), options(tmp_path, tmp_path, tmp_path, **fast), tmp_path)
    losses = [trainer.train_step(150) for _ in range(150)]
    after = trainer.evaluate()
    assert sum(losses[-5:]) < 0.5 * sum(losses[:5])
    assert after["loss"] < 0.6 * after["constant"]
    assert after["auc"] > 0.95
    unsure = {**separable(), "labels": torch.full((4000,), 0.5)}
    for weight, expected in ((1.0, 0.5), (6.0, 1 / 7)):
        trainer = HeadTrainer(unsure, options(tmp_path, tmp_path, tmp_path, reject_weight=weight, num_blocks=0, **fast), tmp_path)
        for _ in range(400):
            trainer.train_step(400)
        said = torch.softmax(trainer.head(unsure["states"].float()), -1)[:, 1].mean()
        assert float(said.detach()) == pytest.approx(expected, abs=0.05)


def test_interrupted_and_resumed_is_uninterrupted(
    target: Path, noisy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(options(target, tmp_path / "whole", noisy), "", Screen(quiet=True))
    with interrupted_after(monkeypatch, HeadTrainer, 7):
        train(options(target, tmp_path / "parts", noisy), "", Screen(quiet=True))
    assert not (tmp_path / "parts" / confidence.FILE).exists()
    train(options(target, tmp_path / "parts", noisy), "", Screen(quiet=True))
    assert (tmp_path / "parts" / confidence.FILE).read_bytes() == (tmp_path / "whole" / confidence.FILE).read_bytes()
    with pytest.raises(ConfigError, match=r"was started with reject_weight=6\.0"):
        train(options(target, tmp_path / "parts", noisy, reject_weight=2.0), "", Screen(quiet=True))


def test_a_loss_that_is_not_a_number_stops(tmp_path: Path) -> None:
    trainer = HeadTrainer({**separable(), "labels": torch.full((4000,), float("nan"))}, options(tmp_path, tmp_path, tmp_path), tmp_path)
    with pytest.raises(TrainingError, match="not a number at step 1"):
        trainer.train_step(10)


def test_what_can_have_a_head(target: Path, tmp_path: Path) -> None:
    assert drafter_of(str(target)) == "draft_model"
    assert drafter_of(str(eagle3_dir(tmp_path / "a", target))) == "eagle"
    assert drafter_of(str(eagle3_dir(tmp_path / "b", target, layout="eagle"))) == "eagle"
    assert drafter_of(str(mtp_dir(tmp_path / "c", target))) == "mtp"
    with pytest.raises(ConfigError, match="without a state to judge"):
        drafter_of(str(medusa_dir(tmp_path / "d", target, layout="converted")))
    with pytest.raises(ConfigError, match="--drafter"):
        drafter_of(None)
