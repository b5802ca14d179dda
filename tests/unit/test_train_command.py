"""`headway train` from nothing to a directory that drafts, interrupted and resumed, on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headway.cli.main import main
from headway.config import EngineConfig, SpeculativeConfig
from headway.engine.engine import Engine
from headway.errors import ConfigError
from headway.sampling_params import SamplingParams
from headway.train import run as train_run
from headway.train import texts
from headway.train.options import TrainOptions
from headway.train.run_record import open_record
from headway.train.screen import Screen
from headway.train.trainer import Trainer
from headway.types import Request
from tests.interrupt import interrupted_after
from tests.tiny import tiny_model_dir


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_dir(tmp_path_factory.mktemp("target"), "llama", seed=3, num_hidden_layers=3)


def options(target: Path, out: Path, **changes: object) -> TrainOptions:
    small = {
        "num_tokens": 300, "num_steps": 8, "max_tokens": 16, "ttt_steps": 3, "batch_tokens": 128, "draft_vocab_size": 128,
        "dtype": "float32", "device": "cpu",
    }
    return TrainOptions(**{"target": str(target), "out": str(out), **small, **changes})   # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def few_texts_aside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(texts, "NUM_HELD_OUT", 3)


def test_from_nothing_to_a_directory_that_drafts(target: Path, tmp_path: Path) -> None:
    out = tmp_path / "spec"
    live = train_run.train(options(target, out), "headway train eagle3 ...", Screen(quiet=True))
    assert {path.name for path in out.iterdir()} == {"README.md", "config.json", "model.safetensors", "run"}
    assert live.num_tokens > 0
    assert len(live.stats.num_drafts_per_pos) == 4
    card = (out / "README.md").read_text()
    assert "headway train eagle3 ..." in card
    assert f"{live.stats.mean_acceptance_length:.2f}" in card
    steps = [json.loads(line) for line in (out / "run" / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in steps] == list(range(1, 9))
    assert steps[-1]["acceptance"] is not None
    speculative = SpeculativeConfig.parse({"method": "eagle", "model": str(out), "num_speculative_tokens": 3, "policy": "static"})
    engine = Engine(EngineConfig(model=str(target), dtype="float32", device="cpu", speculative=speculative))
    engine.add(Request("r", [5, 6, 7], SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)))
    while engine.has_work():
        engine.step()
    assert sum(engine.metrics.verified.values()) > 0


def test_interrupted_and_resumed_is_uninterrupted(target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train_run.train(options(target, tmp_path / "whole"), "", Screen(quiet=True))
    with interrupted_after(monkeypatch, Trainer, 4):
        train_run.train(options(target, tmp_path / "parts"), "", Screen(quiet=True))
    assert not (tmp_path / "parts" / "model.safetensors").exists()
    texts = (tmp_path / "parts" / "run" / "texts.jsonl").read_bytes()
    train_run.train(options(target, tmp_path / "parts", minutes=500.0), "", Screen(quiet=True))   # more time changes no text
    assert (tmp_path / "parts" / "run" / "texts.jsonl").read_bytes() == texts
    for name in ("model.safetensors", "run/texts.jsonl", "run/held_out.jsonl"):
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "parts" / name).read_bytes(), name


def test_a_run_resumes_with_the_same_options_only(target: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    open_record(tmp_path / "run", options(target, tmp_path)).set("seconds", 1.0)
    open_record(tmp_path / "run", options(target, tmp_path, minutes=1.0))
    with pytest.raises(ConfigError, match=r"started with seed=0, now it is 1"):
        open_record(tmp_path / "run", options(target, tmp_path, seed=1))


def test_the_time_is_planned(target: Path, tmp_path: Path) -> None:
    """Three seconds for everything: fewer steps than would be taken without a limit, and texts within their share."""
    chosen = options(target, tmp_path, minutes=0.05, num_steps=None, num_tokens=None)
    train_run.train(chosen, "", Screen(quiet=True))
    plan = json.loads((tmp_path / "run" / "plan.json").read_text())
    assert 1 <= plan["num_steps"] < 10_000
    assert (tmp_path / "model.safetensors").exists()


def test_the_users_texts_are_learned(target: Path, tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    answered = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello hello hello"}]}
    data.write_text("\n".join(json.dumps(line) for line in [{"prompt": "once upon"}, {"prompt": "a time"}, answered]))
    train_run.train(options(target, tmp_path / "out", data=str(data), num_steps=2), "", Screen(quiet=True))
    texts = (tmp_path / "out" / "run" / "texts.jsonl").read_text().splitlines()
    assert len(texts) == 2   # one of the prompts is held out


def test_the_command_line(target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "eagle9", "--out", str(tmp_path)]) == 2
    assert "unknown training method 'eagle9'. Did you mean 'eagle3'?" in capsys.readouterr().err
    assert main(["train", "eagle3"]) == 2
    assert "--out DIR" in capsys.readouterr().err
    assert main(["train", "eagle3", "--target", str(target), "--out", str(tmp_path / "o"), "--data", str(tmp_path / "none")]) == 2
    assert "cannot read --data" in capsys.readouterr().err
