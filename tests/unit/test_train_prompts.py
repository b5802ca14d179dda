"""What a model is asked when it writes texts to learn from."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import headway
from headway.config import EngineConfig
from headway.engine.engine import Engine
from headway.errors import ConfigError
from headway.train.prompts import UserTurns
from tests.tiny import tiny_model_dir


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    directory = tiny_model_dir(tmp_path_factory.mktemp("target"), "llama")
    return Engine(EngineConfig(model=str(directory), dtype="float32", device="cpu", max_num_seqs=4))


def test_turns_are_requests_openings_or_the_models_own(engine: Engine) -> None:
    turns = UserTurns(engine, 3)
    begun = [turns.begin(index) for index in range(300)]
    assert begun == [UserTurns(engine, 3).begin(index) for index in range(300)]
    assert all(token_ids[: len(turns.opened)] == turns.opened for token_ids, _ in begun)
    assert 140 < sum(complete for _, complete in begun) < 220
    assert 10 < sum(token_ids == turns.opened for token_ids, _ in begun) < 60
    assert len({tuple(token_ids) for token_ids, _ in begun}) > 200
    texts = [engine.tokenizer.decode(token_ids[len(turns.opened) :]) for token_ids, _ in begun]
    assert not any(mark in text for text in texts for mark in ("{}", "{n}", "{m}", "{name}", "{place}"))


def test_what_is_set_aside_answers_other_requests(engine: Engine) -> None:
    learned, aside = UserTurns(engine, 3).asks, UserTurns(engine, 3, aside=True).asks
    assert learned
    assert aside
    assert not {*learned} & {*aside}


def test_no_request_to_learn_from_is_one_of_the_benchmarks() -> None:
    """Whoever measures a speculator on a workload should not have taught it the answers: no eight words in a row are in both."""
    def read(name: str) -> Any:
        return json.loads((Path(headway.__file__).parent / name).read_text(encoding="utf-8"))

    asks = read("train/asks.json")["asks"]
    prompts = [*(item["prompt"] for item in read("bench/chat_prompts.json")), *read("bench/reasoning_prompts.json")]

    def runs(texts: list[str]) -> set[tuple[str, ...]]:
        words = [re.findall(r"\w+", text.lower()) for text in texts]
        return {tuple(found[i : i + 8]) for found in words for i in range(len(found) - 7)}

    assert len(runs(prompts)) > 500
    assert not runs(asks) & runs(prompts)


def test_a_turn_of_nothing_is_no_prompt(engine: Engine) -> None:
    turns = UserTurns(engine, 3)
    assert turns.end(turns.opened) == []
    words = engine.tokenizer.encode("Tell me about the moon", add_special_tokens=False)
    assert engine.tokenizer.decode(turns.end(turns.opened + words)) == engine.tokenizer.decode(
        engine.tokenizer.apply_chat_template([{"role": "user", "content": "Tell me about the moon"}])
    )


def test_a_model_without_a_template_needs_data(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.tokenizer._hf, "chat_template", None)
    with pytest.raises(ConfigError, match="--data"):
        UserTurns(engine, 0)
