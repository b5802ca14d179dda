"""What a sweep with a time budget measures and leaves out, on a clock of its own."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headway.bench.sweep import SweepOptions, cells
from headway.bench.sweep_budget import READ, Planned, TimeBudget
from headway.bench.workloads import Prompts
from tests.unit.test_sweep import TINY, Machine, swept

EQUAL = dataclasses.replace(TINY, output_range_ratio=0.0)   # one at a time, three engines: a lead-in takes 12 s, a round of four 48 s


@pytest.fixture(autouse=True)
def _prompts_are_equally_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine reads in no time, so length must not count."""
    prompt = SimpleNamespace(encode=lambda tokenizer: [1, 2, 3])
    monkeypatch.setattr(Prompts, "take", lambda self, workload, count: [prompt] * count)


def measured(document: dict[str, Any]) -> dict[str, int]:
    """Cell -> rounds."""
    return {cell: len({run["round"] for run in document["runs"] if run["cell"] == cell}) for cell in document["cells"]}


def planned(workload: str, **more: Any) -> Planned:
    [cell] = cells(SweepOptions(workloads=workload, **more))
    return Planned(cell, [[0] * 100] * 9, [0])


def test_a_budget_is_shared_by_the_cells_and_what_does_not_fit_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)
    options = dataclasses.replace(EQUAL, workloads="chat@1,mixed@1", rounds=3, time_budget=2.1)
    # A lead-in and a round in the 63 s of either cell.
    found = swept(tmp_path / "s.json", options, machine)
    assert [(run["cell"], run["configuration"], run["round"]) for run in found.runs] == [
        (cell, name, 0) for cell in ("chat@1", "mixed@1") for name in ("off", "suffix-k2", "batch_table")
    ]
    assert [(item["cell"], item["num_rounds"]) for item in found.document["left_out"]] == [("chat@1", 2), ("mixed@1", 2)]
    assert found.document["left_out"][0]["needs_s"] == 96.0


def test_a_cell_whose_lead_in_and_round_would_not_end_in_time_is_not_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)
    options = dataclasses.replace(EQUAL, workloads="chat@1,mixed@1,reasoning@1", rounds=1, time_budget=2.9)
    found = swept(tmp_path / "s.json", options, machine)
    assert measured(found.document) == {"chat@1": 1, "mixed@1": 1, "reasoning@1": 0}
    assert found.document["left_out"] == [{"cell": "reasoning@1", "num_rounds": 1, "needs_s": 60.0}]
    assert machine.now == 120.0


def test_loading_is_in_the_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = dataclasses.replace(EQUAL, workloads="chat@1", rounds=9, time_budget=5.0)
    machine = Machine(monkeypatch)
    assert measured(swept(tmp_path / "s.json", options, machine).document) == {"chat@1": 6}   # 12 + 6 x 48 = 300
    machine = Machine(monkeypatch)
    machine.now = 100.0
    assert measured(swept(tmp_path / "t.json", options, machine, began=0.0).document) == {"chat@1": 3}
    assert machine.now <= 300.0


def test_a_sweep_that_goes_on_knows_what_its_cells_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)
    options = dataclasses.replace(EQUAL, workloads="chat@1", rounds=2, time_budget=1.0)
    assert measured(swept(tmp_path / "s.json", options, machine).document) == {"chat@1": 1}
    before = machine.now
    found = swept(tmp_path / "s.json", dataclasses.replace(options, time_budget=0.9), machine)
    assert machine.now == before
    assert found.document["left_out"] == [{"cell": "chat@1", "num_rounds": 1, "needs_s": 60.0}]
    assert measured(swept(tmp_path / "s.json", options, machine).document) == {"chat@1": 2}


def test_time_for_the_first_rounds_of_dear_cells_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)
    budget = TimeBudget(10.0, 0.0, {})
    cheap, dear = planned("chat@1", output_len=10), planned("chat@1", output_len=1000)
    assert budget.forecast(dear) == (0.0, 0.0)   # nothing is known yet: it is tried
    machine.now = 60.0
    budget.learn(cheap, 2, 50.0)   # five seconds a request with its lead-in: 9 of them, 10 s of a first round to come
    assert budget.has_time_for_more(269.0, 60.0, [cheap])   # half of what is left
    assert not budget.has_time_for_more(271.0, 60.0, [cheap])
    budget = TimeBudget(10.0, 0.0, {"mixed@1": {"concurrency": 1, "s_per_work": 480.0 / 5 / dear.request_work}})
    assert sum(budget.forecast(dear)) == pytest.approx(480.0)
    assert budget.has_time_for_more(59.0, 60.0, [dear])
    assert not budget.has_time_for_more(61.0, 60.0, [dear])
    assert budget.has_time_for_first(dear)
    machine.now = 121.0
    assert not budget.has_time_for_first(dear)
    assert budget.has_time_for_more(470.0, 60.0, [dear])   # which keeps nothing from others then


def test_a_forecast_is_that_of_the_nearest_concurrency_by_tokens() -> None:
    paces = {name: {"concurrency": int(name.split("@")[1]), "s_per_work": pace} for name, pace in
             (("chat@1", 1.0), ("chat@16", 2.0), ("mixed@16", 3.0), ("chat@64", 9.0))}   # fmt: skip
    budget = TimeBudget(None, 0.0, paces)
    each = planned("code-edit@25", output_len=50)
    assert each.request_work == 50 / 5 + READ * 100
    assert budget.forecast(each) == pytest.approx((25 * 3.0 * each.request_work, (4 + 12) * 3.0 * each.request_work))
    assert budget.forecast(planned("chat@16"))[0] == pytest.approx(16 * 2.0 * planned("chat@16").request_work)   # its own
    assert budget.has_time_for_first(each)
    assert budget.has_time_for_more(1e9, 0.0, [each])
    [ramp] = cells(SweepOptions(workloads="", patterns="ramp"))
    assert ramp.lead_in_work == 0
    [poisson] = cells(SweepOptions(workloads="", patterns="poisson"))
    assert poisson.lead_in_work == poisson.load.num_prompts
