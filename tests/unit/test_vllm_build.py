"""The parts of a scheduler inside vLLM: what switches Headway off, what is refused, what is kept between starts. Needs no vLLM."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headway.control.costs import Work
from headway.errors import ConfigError
from headway.telemetry.learned_state import LEAST_STEPS, SAVE_BUSY_S, SAVE_IDLE_S
from headway.telemetry.trace import read_trace
from headway.vllm import compat
from headway.vllm.build import Parts, build, refuse_data_parallel
from headway.vllm.settings import Settings, learned_path
from tests.unit.test_vllm_adapter import Engine, Recorder, request


def scheduler(method: str | None = "ngram", data_parallel_size: int = 1, is_async: bool = False, **headway: Any) -> Any:
    config = SimpleNamespace(
        additional_config={"headway": headway}, speculative_config=SimpleNamespace(method=method) if method else None,
        num_speculative_tokens=4, cache_config=SimpleNamespace(block_size=16),
        model_config=SimpleNamespace(model="tiny", dtype="torch.float32", quantization=None),
        parallel_config=SimpleNamespace(data_parallel_size=data_parallel_size, tensor_parallel_size=1, pipeline_parallel_size=1),
        scheduler_config=SimpleNamespace(async_scheduling=is_async, max_num_batched_tokens=64),
    )  # fmt: skip
    engine: Any = Engine(Recorder())
    engine.vllm_config, engine.num_spec_tokens = config, 4 if method else 0
    return engine


def built(*args: Any, **kwargs: Any) -> Parts:
    return build(scheduler(*args, **{"costs": "off"} | kwargs), "0.32.0")


def test_at_work() -> None:
    parts = built()
    assert parts.adapter is not None
    assert (parts.counters.off, parts.counters.policy, parts.counters.drafter, parts.counters.max_k) == ("", "goodput", "ngram", 4)
    assert not parts.drafts_all


@pytest.mark.parametrize(("given", "reason"), [({"enabled": False}, "enabled"), ({"method": None}, "speculative-config")])
def test_off(given: dict[str, Any], reason: str, caplog: pytest.LogCaptureFixture) -> None:
    parts = built(**given)
    assert parts.adapter is None
    assert reason in parts.counters.off
    assert "Headway is off" in caplog.text


@pytest.mark.parametrize(("method", "is_async"), [("suffix", False), ("medusa", False), ("eagle3", True)])
def test_drafters_that_must_draft_all(method: str, is_async: bool) -> None:
    parts = built(method, is_async=is_async)
    assert parts.num_to_draft() == 4
    assert parts.drafts_all


def test_a_vllm_that_is_not_what_was_expected_does_without(caplog: pytest.LogCaptureFixture) -> None:
    engine = scheduler(costs="off")
    del engine.vllm_config.scheduler_config.async_scheduling
    parts = build(engine, "0.40.0")
    assert parts.adapter is None
    assert (parts.counters.off, parts.counters.num_errors) == ("vLLM 0.40.0 is not what was expected: AttributeError", 1)
    assert "async_scheduling" in caplog.text


def test_a_wrong_setting_ends_the_start() -> None:
    with pytest.raises(ConfigError, match="policy"):
        built(polcy="static")


@pytest.mark.parametrize("method", ["eagle", "eagle3", "mtp", "draft_model", "medusa"])
def test_data_parallel_ranks_must_not_disagree(method: str) -> None:
    with pytest.raises(ConfigError, match="hang"):
        built(method, data_parallel_size=2)
    refuse_data_parallel(method, 1)
    assert built("ngram", data_parallel_size=2).adapter is not None


def test_what_was_learned_is_kept_between_starts(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "costs.json"
    parts = built(costs=str(path))
    assert parts.learned is not None
    assert parts.learned.costs is not None
    parts.learned.costs.learn([(Work(4, 4 + n, 400), 10.0 + n) for n in range(8)])
    parts.close()
    assert not path.exists(), "nothing was observed: nothing to keep"
    parts.learned.costs._target.num_observed = LEAST_STEPS
    parts.keep(idle=True)
    assert not path.exists(), "not so soon"
    parts.close()
    again = built(costs=str(path))
    assert again.learned is not None
    assert again.learned.costs is not None
    assert float(again.learned.costs.predict(4, 8, 400)) == pytest.approx(float(parts.learned.costs.predict(4, 8, 400)), rel=0.05)
    saved = json.loads(path.read_text())
    for damaged in ("damaged", "[]", json.dumps(saved | {"costs": {}}), json.dumps(saved | {"learned": {"ngram": {"worth": "x"}}})):
        path.write_text(damaged)
        assert built(costs=str(path)).adapter is not None


@pytest.mark.parametrize(("idle", "wait_s"), [(True, SAVE_IDLE_S), (False, SAVE_BUSY_S)])
def test_it_is_saved_while_the_server_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, idle: bool, wait_s: float) -> None:
    now = [100.0]
    monkeypatch.setattr("headway.telemetry.learned_state.time", SimpleNamespace(monotonic=lambda: now[0]))
    path = tmp_path / "costs.json"
    parts = built(costs=str(path))
    assert parts.learned is not None
    assert parts.learned.costs is not None
    parts.learned.costs._target.num_observed = LEAST_STEPS
    now[0] += wait_s - 1.0
    parts.keep(idle=idle)
    assert not path.exists()
    now[0] += 1.0
    parts.keep(idle=idle)
    assert path.exists()


def test_a_file_per_model_and_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HEADWAY_HOME", str(tmp_path))
    engine, other = scheduler(), scheduler()
    other.vllm_config.model_config.model = "larger"
    paths = [learned_path(Settings(), one.vllm_config, "ngram") for one in (engine, scheduler(), other)]
    assert paths[0] == paths[1] != paths[2]
    assert paths[0] is not None
    assert paths[0].parent == tmp_path / "vllm"


def test_a_trace_is_written(tmp_path: Path) -> None:
    engine = scheduler(trace=str(tmp_path / "trace.jsonl"), costs="off")
    parts = build(engine, "0.32.0")
    assert parts.adapter is not None
    engine.adapter = parts.adapter
    engine.add(request("a", [1, 2, 3]))
    engine.step({"a": [7, 8]}, a=[6])
    engine.step({}, a=[7, 8, 9])
    parts.close()
    trace = read_trace(tmp_path / "trace.jsonl")
    assert (trace.max_k, trace.drafters) == (4, ("ngram",))
    assert [seq.num_accepted for step in trace.steps for seq in step.feedback.sequences] == [0, 2]


class Known:
    def schedule(self, throttle: bool = False) -> None: ...
    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> None: ...
    def _update_after_schedule(self, scheduler_output: Any) -> None: ...
    def update_draft_token_ids(self, draft_token_ids: Any) -> None: ...
    def make_stats(self, **kwargs: Any) -> None: ...
    def shutdown(self) -> None: ...


class Renamed(Known):
    make_stats = None   # type: ignore[assignment]

    def update_from_output(self, output: Any) -> None: ...   # type: ignore[override]


def test_another_vllm_is_looked_at_before_it_is_used() -> None:
    assert compat.is_tested("0.32.0")
    assert compat.is_tested("0.31.1+cpu")
    assert not compat.is_tested("0.33.0")
    assert not compat.is_tested("0.3.2")
    assert compat.problems("0.40.0", Known) == []
    found = compat.problems("0.40.0", Renamed)
    assert len(found) == 3
    assert "Renamed.make_stats" in found[-1]
