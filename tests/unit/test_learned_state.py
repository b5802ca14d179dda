"""What one run leaves to the next is whole and plausible, or ignored."""

from __future__ import annotations

import copy
import json
import logging
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headway.control.costs import CostModel, Work
from headway.control.policies.static import Static
from headway.telemetry import learned_state
from headway.telemetry.learned_state import LearnedState

LEARNED = {"suffix": {"max_k": 4, "gain": 0.5, "depth": 2, "table": [[1.0, 2.0], [3.0, 4.0]]}}
SAMPLES = ((1, 1, 32), (4, 8, 400), (16, 80, 8192), (64, 320, 1 << 16))


class Learns(Static):
    def learned(self) -> dict[str, Any]:
        return LEARNED


def costs() -> CostModel:
    model = CostModel()
    model.learn([(Work(n, n + k, 100 * n), 10.0 + n + 0.5 * k) for n in (1, 4, 16) for k in (0, 1, 4)])
    return model


@pytest.fixture(scope="module")
def valid(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("state") / "state.json"
    state = LearnedState(path)
    state.follow("goodput", Learns(), costs())
    state.release()
    state.measured(costs())
    return path.read_text()


def test_it_is_read_as_it_was_written(tmp_path: Path, valid: str) -> None:
    (tmp_path / "state.json").write_text(valid)
    state = LearnedState(tmp_path / "state.json")
    assert state.costs is not None
    assert [float(state.costs.predict(*at)) for at in SAMPLES] == pytest.approx([float(costs().predict(*at)) for at in SAMPLES], rel=0.01)
    assert state.learned("goodput") == LEARNED
    assert state.learned("another") is None


def test_files_of_earlier_versions_are_read(tmp_path: Path) -> None:
    """The engine's had the costs alone and policies beside them, vLLM's one policy without a name."""
    engine, plugin = tmp_path / "engine.json", tmp_path / "vllm.json"
    engine.write_text(json.dumps(costs().to_json()))
    (tmp_path / "engine-policies.json").write_text(json.dumps({"goodput": LEARNED}))
    plugin.write_text(json.dumps({"costs": costs().to_json(), "learned": LEARNED}))
    assert LearnedState(engine).learned("goodput") == LearnedState(plugin).learned("ngram") == LEARNED
    assert LearnedState(engine).costs is not None
    assert LearnedState(plugin).costs is not None


def sound(path: Path) -> bool:
    """Whether a state was read. Whatever was, predicts finite times."""
    state = LearnedState(path)
    if state.costs is None:
        assert state.learned("goodput") is None
        return False
    assert all(math.isfinite(ms) and ms >= 0.0 for ms in (float(state.costs.predict(*at)) for at in SAMPLES))
    return True


FUZZ = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@FUZZ
@given(data=st.data())
def test_torn_and_flipped_files_are_ignored(tmp_path: Path, valid: str, data: st.DataObject) -> None:
    raw = bytearray(valid.encode())
    if data.draw(st.booleans()):
        del raw[data.draw(st.integers(0, len(raw) - 1)) :]
    else:
        raw[data.draw(st.integers(0, len(raw) - 1))] ^= data.draw(st.integers(1, 255))
    path = tmp_path / "state.json"
    path.write_bytes(raw)
    read = sound(path)
    assert not read or json.loads(raw) == json.loads(valid)   # a changed space says the same


WRONG = st.sampled_from([math.nan, math.inf, -math.inf, 1e308, -1.0, 0, "x", None, [], {}, True, 2**70, [[[1.0]]]])


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [path] if path else []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return found + [place for key, each in items for place in places(each, (*path, key))]


@FUZZ
@given(data=st.data(), wrong=WRONG)
def test_wrong_values_without_a_checksum_are_ignored_or_harmless(tmp_path: Path, valid: str, data: st.DataObject, wrong: Any) -> None:
    document = json.loads(valid)
    del document["checksum"]
    document["learned"] = copy.deepcopy(LEARNED)
    *way, last = data.draw(st.sampled_from(places(document)))
    holder: Any = document
    for key in way:
        holder = holder[key]
    holder[last] = wrong
    path = tmp_path / "state.json"
    path.write_text(json.dumps(document))
    sound(path)


@pytest.mark.parametrize("text", ["", "[]", "{}", "[" * 5000, '{"costs": ' * 3000, "\xff", '{"checksum": 1}'])
def test_no_state_is_one_line_in_the_log(tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "state.json"
    path.write_text(text, encoding="latin-1")
    with caplog.at_level(logging.WARNING, logger="headway.learned"):
        assert not sound(path)
    assert len(caplog.records) == 1
    assert str(path) in caplog.text


def test_it_is_written_when_enough_was_learned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learned_state, "LEAST_STEPS", 10)
    path, known = tmp_path / "deep" / "state.json", costs()
    state = LearnedState(path)
    state.follow("goodput", Learns(), known)
    state.save()
    assert not path.exists()
    known._target.num_observed = 10
    state.save()
    assert LearnedState(path).learned("goodput") == LEARNED
    assert [each.name for each in path.parent.iterdir()] == [path.name]
