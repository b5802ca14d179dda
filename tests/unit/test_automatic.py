"""What "auto" and the default mean for a model: what is shipped, what is published, and no network."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headway.cli.main import main
from headway.config import SpeculativeConfig
from headway.drafters.core import automatic
from headway.drafters.core.automatic import spell_out
from headway.errors import ConfigError, ModelError
from headway.models import hub

WELL_KNOWN, PUBLISHED = "Qwen/Qwen3-8B", "RedHatAI/Qwen3-8B-speculator.eagle3"


@pytest.fixture
def shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    directory = tmp_path / "speculators" / "smollm2-135m-eagle3"
    directory.mkdir(parents=True)
    (directory / "model.safetensors").touch()
    monkeypatch.setattr(automatic, "FOLDERS", (tmp_path / "nowhere", tmp_path / "speculators"))
    return str(directory)


@pytest.fixture
def nothing_shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(automatic, "FOLDERS", (tmp_path / "nowhere",))


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """A hub whose answers the test chooses; it notes what was downloaded."""
    state: dict[str, Any] = {"cached": None, "size": 1_500_000_000, "downloaded": [], "fails": False}

    def resolve(name: str, **options: Any) -> Path:
        state["downloaded"].append(name)
        if state["fails"]:
            raise ModelError("the disk is full")
        return tmp_path / "from-hub"

    monkeypatch.setattr(hub, "cached", lambda hub_id, weights: state["cached"])
    monkeypatch.setattr(hub, "download_size", lambda hub_id, weights: state["size"])
    monkeypatch.setattr(hub, "resolve", resolve)
    return state


def methods(value: Any, model: str) -> tuple[str, ...]:
    config = SpeculativeConfig.parse(spell_out(value, model)[0])
    assert config is not None
    return config.methods


def test_the_default_of_a_model_with_a_shipped_speculator(shipped: str) -> None:
    value, sources = spell_out("default", "smollm2-135m")
    config = SpeculativeConfig.parse(value)
    assert config is not None
    assert config.methods == ("eagle", "suffix")
    assert config.model_of("eagle") == shipped
    assert config.policy == "goodput"
    assert set(sources.values()) == {"shipped for smollm2-135m"}


def test_the_default_of_any_other_model_is_suffix(shipped: str, asked: dict[str, Any]) -> None:
    for model in ("./mine", WELL_KNOWN):
        assert spell_out("default", model) == ("default", {})
    assert methods("default", WELL_KNOWN) == ("suffix",)
    assert asked["downloaded"] == []


def test_without_the_speculator_the_default_is_suffix(nothing_shipped: None) -> None:
    assert methods("default", "smollm2-135m") == ("suffix",)
    assert methods("auto", "smollm2-135m") == ("suffix", "ngram")


@pytest.mark.parametrize("value", ["auto", {"method": "auto"}, ' {"method": "auto", "policy": "static"}'])
def test_auto_adds_what_was_made_for_the_model(shipped: str, value: Any) -> None:
    assert methods(value, "smollm2-135m") == ("eagle", "suffix", "ngram")
    assert methods(value, "./mine") == ("suffix", "ngram")


def test_other_configs_come_back_as_they_are() -> None:
    for value in (None, "off", "ngram", {"method": "suffix"}, "{broken", SpeculativeConfig.parse("ngram")):
        assert spell_out(value, "smollm2-135m") == (value, {})


def test_options_beside_auto_are_kept_and_checked(shipped: str) -> None:
    value, _ = spell_out({"method": "auto", "num_speculative_tokens": 3, "download": False}, "smollm2-135m")
    config = SpeculativeConfig.parse(value)
    assert config is not None
    assert config.num_speculative_tokens == 3
    for mistake in ({"model": "x"}, {"download": "no"}):
        with pytest.raises(ConfigError, match=r"cannot be given|true or false"):
            spell_out({"method": "auto", **mistake}, "smollm2-135m")


def test_a_published_speculator_is_announced_and_downloaded(asked: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    value, sources = spell_out("auto", WELL_KNOWN)
    assert value["method"][0]["name"] == "eagle"
    assert value["method"][0]["model"].endswith("from-hub")
    assert asked["downloaded"] == [PUBLISHED]
    assert sources["method"] == f"published for {WELL_KNOWN}"
    assert f"downloading {PUBLISHED} (1.50 GB)" in capsys.readouterr().err


def test_what_is_cached_is_not_downloaded(asked: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked["cached"] = tmp_path / "cached"
    assert spell_out("auto", WELL_KNOWN)[0]["method"][0]["model"].endswith("cached")
    assert asked["downloaded"] == []
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("value", "environment", "state", "said"),
    [
        ({"method": "auto", "download": False}, "1", {}, "downloading is off"),
        ("auto", "0", {}, "downloading is off"),
        ("auto", "1", {"size": None}, "does not answer"),
        ("auto", "1", {"fails": True}, "the disk is full"),
    ],
)
def test_without_it_auto_goes_on_with_one_line(
    value: Any, environment: str, state: dict[str, Any], said: str, asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    asked.update(state)
    monkeypatch.setenv("HEADWAY_DOWNLOAD", environment)
    with caplog.at_level(logging.INFO):
        assert methods(value, WELL_KNOWN) == ("suffix", "ngram")
    assert [said in record.getMessage() for record in caplog.records] == [True]


def test_the_size_of_a_download_counts_what_would_be_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    files = [("config.json", 10), ("model.safetensors", 700), ("pytorch_model.bin", 800), ("plot.png", 5000), ("README.md", 9)]
    info = SimpleNamespace(siblings=[SimpleNamespace(rfilename=name, size=size) for name, size in files])
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda self, hub_id, **options: info)
    assert hub.download_size("org/name") == 710
    assert hub.download_size("org/name", hub.SPECULATOR_WEIGHTS) == 1510


def test_config_says_where_it_came_from(shipped: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headway.cli.config._resolved", lambda config, settings: settings)
    assert main(["config", "--json"]) == 0
    settings = json.loads(capsys.readouterr().out)
    assert settings["speculative.method"] == {"value": ["eagle", "suffix"], "source": "shipped for smollm2-135m"}
    assert settings["speculative.eagle.model"] == {"value": shipped, "source": "shipped for smollm2-135m"}
    assert main(["config", "--json", "--spec-method", "auto", "--spec-policy", "static"]) == 0
    settings = json.loads(capsys.readouterr().out)
    assert settings["speculative.method"]["value"] == ["eagle", "suffix", "ngram"]
    assert settings["speculative.policy"] == {"value": "static", "source": "flag --spec-policy"}
