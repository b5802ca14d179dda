"""The profile of the real engine: measured once, kept, checked on the next start, done without where nobody asks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headway.config import EngineConfig, SpeculativeConfig
from headway.control.costs import CostModel, Work
from headway.control.policies.goodput import Goodput
from headway.control.policies.static import Static
from headway.control.policy import Setup
from headway.engine import profile
from headway.engine.engine import Engine
from headway.sampling_params import SamplingParams
from headway.telemetry import learned_state
from headway.types import Request
from tests.tiny import tiny_model_dir


class Asks(Static):
    """A policy that wants a cost model and shows what it got."""

    needs_costs = True

    def start(self, setup: Setup) -> None:
        self.setup = setup


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_dir(tmp_path_factory.mktemp("tiny"), "llama", seed=3)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HEADWAY_HOME", str(tmp_path))
    monkeypatch.setattr(profile, "BUDGET_S", 0.2)
    return tmp_path


def build(model_dir: Path, policy: str = "tests.unit.test_profile:Asks", **options: object) -> Engine:
    speculative = SpeculativeConfig.parse({"method": ["suffix", "ngram"], "num_speculative_tokens": 4, "policy": policy})
    shape = {"dtype": "float32", "device": "cpu", "max_model_len": 256, **options}
    return Engine(EngineConfig(str(model_dir), speculative=speculative, **shape))   # type: ignore[arg-type]


def costs_of(engine: Engine) -> CostModel:
    setup: Setup = engine.policy.setup   # type: ignore[attr-defined]
    return setup.costs


def kept(home: Path) -> list[Path]:
    return sorted((home / "profiles").glob("*.json")) if (home / "profiles").exists() else []


@pytest.mark.parametrize(("size", "drafts"), [(1, 8), (4, 16), (16, 128)])
def test_every_row_of_a_measured_pass_is_another_token(model_dir: Path, size: int, drafts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of the same token go to the same experts of a mixture: a verification would look as cheap as a plain step."""
    engine = build(model_dir)
    forward, fed = engine.runner.forward, []

    def noted(rows: Any, proposals: Any) -> Any:
        for row, draft in zip(rows, proposals, strict=True):
            fed.extend([row.seq.token_ids[-1], *(draft.tokens if draft else ())])
        return forward(rows, proposals)

    monkeypatch.setattr(engine.runner, "forward", noted)
    assert profile._pass(engine, size, drafts, 32) is not None
    assert len(fed) == size + drafts
    assert len(set(fed)) > 0.9 * len(fed)


def test_measured_and_kept(model_dir: Path, home: Path) -> None:
    engine = build(model_dir)
    engine.check()
    assert engine.scheduler.pool.num_free == engine.scheduler.pool.num_blocks
    predicted = costs_of(engine).predict(4, [4, 8, 20], 400)
    assert 0.0 < predicted[0] <= predicted[1] <= predicted[2]
    [file] = kept(home)
    assert float(CostModel.from_json(json.loads(file.read_text())["costs"]).predict(4, 8, 400)) == pytest.approx(predicted[1], rel=0.05)


def test_the_policy_learns_who_drafts(model_dir: Path) -> None:
    setup: Setup = build(model_dir).policy.setup   # type: ignore[union-attr]
    assert [(view.name, view.deterministic) for view in setup.drafters] == [("suffix", True), ("ngram", True)]
    assert setup.max_k == 4


def test_nobody_asks_nobody_measures(model_dir: Path, home: Path) -> None:
    build(model_dir, "static")
    assert costs_of(build(model_dir, profile=False)).to_json()["target"]["cells"] == []
    assert kept(home) == []


def test_a_profile_that_holds_is_used_again(model_dir: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build(model_dir)
    [file] = kept(home)
    written = file.stat().st_mtime_ns
    monkeypatch.setattr(profile, "_factor", lambda kept, measured: 1.0)
    build(model_dir)
    assert file.stat().st_mtime_ns == written
    monkeypatch.setattr(profile, "_factor", lambda kept, measured: None)
    build(model_dir)
    assert file.stat().st_mtime_ns > written


def test_what_holds() -> None:
    costs = CostModel()
    shapes = [Work(b, b * t, b * 100) for b in (1, 4, 16) for t in (1, 2, 5)]
    costs.learn((work, 5.0 + 0.5 * work.num_tokens) for work in shapes)

    def measured(scale: float, bent: float = 1.0) -> list[tuple[Work, float]]:
        checked = (shapes[0], shapes[5], shapes[7])
        return [(work, scale * (5.0 + 0.5 * work.num_tokens) * (bent if work.num_tokens > 10 else 1.0)) for work in checked]

    assert profile._factor(costs, measured(1.0)) == pytest.approx(1.0, rel=0.05)
    assert profile._factor(costs, measured(3.0)) == pytest.approx(3.0, rel=0.05)   # the whole machine is slower
    assert not profile._factor(costs, measured(1.0, 2.0))   # large passes are: another kernel


def test_the_first_pass_of_all_is_not_counted(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights that were never read come from the disk, and there may be time for one pass only."""
    engine = build(model_dir, "static")
    times = iter([1e6, 5.0])
    monkeypatch.setattr(profile, "_pass", lambda engine, size, drafts, context: (Work(size, size + drafts, context), next(times)))
    assert [ms for _, ms in profile._measure(engine, profile.CHECKED[:1], 0.0)] == [5.0]


def test_a_broken_file_is_measured_anew(model_dir: Path, home: Path) -> None:
    build(model_dir)
    [file] = kept(home)
    for text in ("", "{", "[]", '{"format": 99}'):
        file.write_text(text, encoding="utf-8")
        build(model_dir)
        assert json.loads(file.read_text())["costs"]["target"]["cells"]


def test_a_folder_that_cannot_be_written_is_no_obstacle(model_dir: Path, home: Path) -> None:
    (home / "profiles").write_text("a file where the folder should be", encoding="utf-8")
    assert costs_of(build(model_dir)).to_json()["target"]["cells"]


def test_a_pool_that_is_too_small_for_large_passes(model_dir: Path) -> None:
    engine = build(model_dir, kv_cache_memory_bytes=1 << 20)
    assert costs_of(engine).to_json()["target"]["cells"]
    engine.check()


# -- what one run leaves to the next ----------------------------------------------------------------------------------


PROMPT = list(range(5, 25)) * 3


def generate(engine: Engine, num_requests: int = 4, max_tokens: int = 40) -> None:
    for number in range(num_requests):
        engine.add(Request(f"r{number}", PROMPT, SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)))
    while engine.has_work():
        engine.step()


def test_what_was_learned_outlives_a_change_of_configuration(model_dir: Path) -> None:
    engine = build(model_dir, "goodput")
    generate(engine)
    first = engine.policy
    assert isinstance(first, Goodput)
    costs, learned = first._costs, first.learned()
    assert learned
    assert costs.num_observed > 20
    engine.speculate(None)
    engine.speculate(engine.config.speculative)
    second = engine.policy
    assert isinstance(second, Goodput)
    assert second is not first
    assert second._costs is costs
    for drafter in second._drafters:
        if drafter.name in learned:
            assert drafter.gain.pool == learned[drafter.name]["gain"]
            assert drafter._first_asks < 32
    engine.speculate(SpeculativeConfig.parse({"method": "ngram", "policy": "goodput"}))   # another choice of drafters: nothing of theirs
    assert engine.policy._drafters[0]._first_asks == 32   # type: ignore[union-attr]


def test_what_was_learned_is_saved_and_read(model_dir: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learned_state, "LEAST_STEPS", 10)
    monkeypatch.setattr(learned_state, "SAVE_IDLE_S", 0.0)
    monkeypatch.setattr(profile, "_factor", lambda kept, measured: 1.0)
    engine = build(model_dir, "goodput")
    [file] = kept(home)
    measured = file.stat().st_mtime_ns
    generate(engine)
    assert kept(home) == [file]
    assert file.stat().st_mtime_ns > measured
    learned = engine.policy.learned()   # type: ignore[union-attr]
    again = build(model_dir, "goodput").policy
    assert isinstance(again, Goodput)
    assert again._costs.num_observed > 10
    assert {d.name: d.gain.pool for d in again._drafters if d.name in learned} == {name: learned[name]["gain"] for name in learned}


@pytest.mark.parametrize("state", [{}, {"suffix": {"max_k": 4, "worth": "x"}}, {"suffix": {"max_k": 4, "gain": 1e9, "depth": -1}}])
def test_what_cannot_be_read_is_forgotten(model_dir: Path, home: Path, state: dict[str, Any]) -> None:
    build(model_dir)
    [file] = kept(home)
    document = json.loads(file.read_text())["costs"]   # as an earlier version wrote it: policies are in a file beside it
    file.write_text(json.dumps(document), encoding="utf-8")
    policies = {"goodput [('suffix', None), ('ngram', None)]": state}
    file.with_name(f"{file.stem}-policies.json").write_text(json.dumps(policies), encoding="utf-8")
    policy = build(model_dir, "goodput").policy
    assert isinstance(policy, Goodput)
    assert all(drafter._first_asks == 32 for drafter in policy._drafters)


def test_a_folder_that_cannot_be_written_loses_what_was_learned(model_dir: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learned_state, "LEAST_STEPS", 10)
    monkeypatch.setattr(learned_state, "SAVE_IDLE_S", 0.0)
    (home / "profiles").write_text("a file where the folder should be", encoding="utf-8")
    engine = build(model_dir, "goodput")
    generate(engine)
    engine.check()


def test_without_a_profile_every_run_starts_cold(model_dir: Path, home: Path) -> None:
    engine = build(model_dir, "goodput", profile=False)
    generate(engine)
    engine.speculate(engine.config.speculative)
    assert engine.policy._costs.num_observed == 0   # type: ignore[union-attr]
    assert kept(home) == []
