"""The sweep without a model: what is run, in which order, what a file continues, and what the figures say."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headway.bench import sweep, sweep_report
from headway.bench.records import LoadOptions, Record, Run
from headway.bench.svg import Line, heat_map, line_chart
from headway.bench.sweep import Results, Series, Sweep, SweepOptions
from headway.bench.sweep_analysis import Analysis
from headway.errors import ConfigError
from headway.types import SpecDecodeMetrics

TINY = SweepOptions(workloads="chat", concurrencies="1,4", configurations="off,suffix-k2,batch_table", repeats=2)


def run_of(tokens_per_s: float, output: Sequence[int] = (1,)) -> Run:
    record = Record(1, sent=10.0, first=10.5, last=11.0, num_output_tokens=int(tokens_per_s), output=list(output))
    return Run((record,), SpecDecodeMetrics(), None, 0.0, {"num_steps": 1, "num_preemptions": 0})


class Clock:
    """Every run takes the seconds its configuration is worth."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
        self.now, self.seconds = 0.0, seconds
        self.ran: list[tuple[str, str, int]] = []
        monkeypatch.setattr(sweep.time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(Sweep, "_run", self.run)

    def run(self, cell: sweep.Cell, name: str, repeat: int) -> dict[str, Any]:
        self.now += self.seconds
        self.ran.append((cell.name, name, repeat))
        return {**run_of(10.0).summary(), "series": {"t_s": [], "k": [], "batch": []}}


def results(path: Path, options: SweepOptions, **config: Any) -> Results:
    return Results(path, sweep.head(options, config, model="m"))


def swept(path: Path, options: SweepOptions) -> Results:
    found = results(path, options)
    Sweep(SimpleNamespace(), options, found, lambda count, what: None).run()   # type: ignore[arg-type]
    return found


# -- what is swept ------------------------------------------------------------------------------------------------


def test_cells_are_workloads_at_spread_concurrencies_and_patterns() -> None:
    options = SweepOptions(workloads="chat,mixed", concurrencies="1,2,4", patterns="drift,ramp,poisson", pattern_concurrency=4)
    cells = {cell.name: cell for cell in sweep.cells(options)}
    assert list(cells) == [
        "chat@1", "mixed@1", "chat@4", "mixed@4", "chat@2", "mixed@2", "drift@4", "mixed@ramp-4", "mixed@poisson-4",
    ]
    assert [cells[name].load.num_prompts for name in ("chat@1", "chat@4", "drift@4")] == [4, 8, 24]
    assert cells["drift@4"].load.workload == "drift:8"
    assert cells["mixed@ramp-4"].load.arrivals == "ramp"
    assert [name for name, cell in cells.items() if cell.needs_rate] == ["mixed@poisson-4"]


def test_spread_begins_with_the_ends() -> None:
    assert sweep._spread([1, 2, 3, 4, 5]) == [1, 5, 3, 2, 4]
    assert sorted(sweep._spread(list(range(9)))) == list(range(9))
    assert sweep._spread([3]) == [3]


def test_default_configurations() -> None:
    found = sweep.configurations(SweepOptions(drafters="suffix,ngram", static_k="2,4"))
    assert list(found)[:6] == ["off", "suffix-k2", "suffix-k4", "ngram-k2", "ngram-k4", "batch_table"]
    assert found["off"] is None
    assert found["ngram-k4"] == {"method": "ngram", "num_speculative_tokens": 4, "policy": "static"}
    assert found["batch_table"]["num_speculative_tokens_per_batch_size"][0] == [1, 4, 4]   # type: ignore[index]
    assert not set(sweep.FIXED_POLICIES) - {"batch_table"} & set(found)
    assert [sweep.is_static(name) for name in ("off", "suffix-k2", "batch_table", "x:Y")] == [True, True, False, False]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"configurations": "off,sufix-k2"}, "Did you mean"),
        ({"configurations": "goodputt"}, "unknown configuration 'goodputt'"),
        ({"batch_table": "[[2,4,1]]", "configurations": "batch_table"}, "must start at batch size 1"),
        ({"batch_table": "[[", "configurations": "batch_table"}, "batch_table is not JSON"),
        ({"concurrencies": "1,x"}, "concurrencies must be whole numbers"),
        ({"static_k": "0"}, "static_k must be whole numbers"),
        ({"patterns": "rollot"}, "Did you mean 'rollout'"),
        ({"workloads": "", "patterns": ""}, "nothing to sweep"),
        ({"output_len": 0}, "output_len must be >= 1"),
        ({"time_budget": 0.0}, "time_budget must be"),
    ],
)
def test_options_that_cannot_work(options: dict[str, Any], message: str) -> None:
    def check() -> None:
        made = SweepOptions(**options)
        sweep.cells(made)
        sweep.configurations(made)

    with pytest.raises(ConfigError, match=message):
        check()


# -- order, budget, resuming --------------------------------------------------------------------------------------


def test_the_second_repeat_runs_in_the_opposite_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, 1.0)
    found = swept(tmp_path / "s.json", TINY)
    there = [name for cell, name, repeat in clock.ran if (cell, repeat) == ("chat@1", 0)]
    back = [name for cell, name, repeat in clock.ran if (cell, repeat) == ("chat@1", 1)]
    assert there == ["off", "suffix-k2", "batch_table"]
    assert back == there[::-1]
    assert len(found.runs) == 12
    assert all(run["wall_s"] == 1.0 for run in found.runs)


def test_a_sweep_that_was_cut_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, 1.0)
    swept(tmp_path / "s.json", TINY)
    document = json.loads((tmp_path / "s.json").read_text())
    document["runs"] = document["runs"][:5]
    (tmp_path / "s.json").write_text(json.dumps(document))
    clock.ran.clear()
    assert len(swept(tmp_path / "s.json", TINY).runs) == 12
    assert len(clock.ran) == 7
    assert clock.ran[0] == ("chat@4", "batch_table", 0)


def test_a_file_of_another_sweep_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "s.json"
    results(path, TINY, dtype="bfloat16").save()
    results(path, SweepOptions(**{**vars(TINY), "repeats": 3, "time_budget": 1.0}), dtype="bfloat16")
    with pytest.raises(ConfigError, match="begun with output_len = 64, now it is 32"):
        results(path, SweepOptions(**{**vars(TINY), "output_len": 32}), dtype="bfloat16")
    with pytest.raises(ConfigError, match='begun with dtype = "bfloat16", now it is "float32"'):
        results(path, TINY, dtype="float32")
    path.write_text("[]")
    with pytest.raises(ConfigError, match="is not a sweep"):
        results(path, TINY)
    path.write_text("{")
    with pytest.raises(ConfigError, match="cannot continue"):
        results(path, TINY)


def test_a_block_that_would_not_end_in_time_is_left_out_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, 10.0)
    found = swept(tmp_path / "s.json", SweepOptions(**{**vars(TINY), "time_budget": 65.0 / 60.0}))
    assert len(clock.ran) == 6
    assert [(item["cell"], item["repeat"]) for item in found.document["left_out"]] == [("chat@1", 1), ("chat@4", 1)]
    assert found.document["left_out"][0]["needs_s"] == 30.0


def test_an_unknown_block_is_given_up_after_its_first_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, 10.0)
    found = swept(tmp_path / "s.json", SweepOptions(**{**vars(TINY), "time_budget": 25.0 / 60.0}))
    assert [name for _, name, _ in clock.ran] == ["off", "off"]
    assert [(item["cell"], item["num_runs"]) for item in found.document["left_out"]] == [
        ("chat@1", 2), ("chat@4", 2), ("chat@1", 3), ("chat@4", 3),
    ]


def test_series_has_slices_of_equally_many_steps() -> None:
    metrics = SimpleNamespace(num_sampling_rows=0, num_verified_drafts=0)
    series = Series(SimpleNamespace(metrics=metrics))   # type: ignore[arg-type]
    for step in range(1000):
        metrics.num_sampling_rows += 2
        metrics.num_verified_drafts += 6 if step >= 500 else 0
        series.observe()
    found = series.to_json()
    assert len(found["k"]) == sweep.SERIES_LEN
    assert (found["k"][0], found["k"][-1]) == (0.0, 3.0)
    assert set(found["batch"]) == {2.0}
    assert Series(SimpleNamespace(metrics=metrics)).to_json()["k"] == []   # type: ignore[arg-type]


# -- what it says -------------------------------------------------------------------------------------------------


def document(speeds: dict[tuple[str, str], list[float]], **more: Any) -> dict[str, Any]:
    """(cell, configuration) -> tokens/s of each repeat."""
    runs = [
        {"cell": cell, "configuration": name, "repeat": repeat, **run_of(speed).summary(), "output_tokens_per_s": speed,
         "series": {"t_s": [0.5, 1.0], "k": [0.0, 2.0], "batch": [1.0, 1.0]}}
        for (cell, name), values in speeds.items() for repeat, speed in enumerate(values)
    ]
    return {
        "benchmark": "sweep", "model": "<m>", "command": "headway bench sweep", "configurations": dict.fromkeys(name for _, name in speeds),
        "cells": dict.fromkeys(cell for cell, _ in speeds), "runs": runs, "left_out": [], **more,
    }


SPEEDS = {
    ("chat@1", "off"): [10.0, 12.0, 11.0], ("chat@1", "suffix-k4"): [20.0, 24.0, 22.0], ("chat@1", "policy"): [22.0, 26.4, 33.0],
    ("chat@8", "off"): [40.0, 40.0, 40.0], ("chat@8", "suffix-k4"): [30.0, 30.0, 30.0], ("chat@8", "policy"): [36.0, 38.0, 34.0],
}


def test_ratios_are_of_medians_on_the_same_prompts() -> None:
    analysis = Analysis(document(SPEEDS))
    assert analysis.best_static("chat@1") == "suffix-k4"
    assert analysis.best_static("chat@8") == "off"
    found = analysis.summary()["policy"]
    assert found["against_off"] == {"worst": 0.9, "worst_cell": "chat@8", "mean": pytest.approx((2.4 + 0.9) / 2)}
    assert found["against_best_static"] == {"worst": 0.9, "worst_cell": "chat@8", "mean": pytest.approx((1.2 + 0.9) / 2)}
    [loss] = analysis.losses()
    assert (loss["cell"], loss["best_static"], loss["ratio"]) == ("chat@8", "off", 0.9)
    assert (loss["ratio_min"], loss["ratio_max"]) == pytest.approx((0.85, 0.95))
    assert analysis.equal_outputs() == 1.0


def test_a_block_counts_only_when_it_is_whole_and_valid() -> None:
    whole = document(SPEEDS)
    whole["runs"] = [run for run in whole["runs"] if (run["cell"], run["configuration"], run["repeat"]) != ("chat@8", "off", 1)]
    whole["runs"][0]["invalid"] = True
    analysis = Analysis(whole)
    assert {cell: len(repeats) for cell, repeats in analysis.repeats.items()} == {"chat@1": 2, "chat@8": 2}
    assert analysis.median("chat@1", "off") == 11.5


def test_the_report_is_one_file_with_every_cell_and_loss() -> None:
    page = sweep_report.html(document(SPEEDS, left_out=[{"cell": "chat@64", "repeat": 0, "num_runs": 3, "needs_s": 9.0}]))
    assert "&lt;m&gt;" in page
    assert "chat@64 (repeat 1)" in page
    assert "0.850 to 0.950" in page
    assert "src=" not in page
    assert "href=" not in page
    for start in (i for i in range(len(page)) if page.startswith("<svg", i)):
        ET.fromstring(page[start : page.index("</svg>", start) + 6])
    assert page.count("<svg") == 2 + 2 + 2   # heat maps, curves of one workload, k over time of two cells


def test_a_sweep_without_a_whole_block_has_a_report_too() -> None:
    empty = document(SPEEDS)
    empty["runs"] = []
    assert "No cell has a valid run" in sweep_report.html(empty)
    assert Analysis(empty).to_json()["summary"]["policy"]["against_off"] is None


# -- charts -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "points", [[], [(1.0, 0.0)], [(1.0, 5.0), (64.0, 1234.5)], [(0.0, 1e-6), (0.5, 2e-6)], [(2.0, 3.0), (2.0, 3.0)]],
)
@pytest.mark.parametrize("log_x", [False, True])
def test_any_points_make_a_chart(points: list[tuple[float, float]], log_x: bool) -> None:
    root = ET.fromstring(line_chart("a < b", "x", "y", [Line("one", points, "#123456", strong=True)], log_x=log_x))
    texts = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"a < b", "x", "y", "one"} <= set(texts)
    assert "nan" not in ET.tostring(root).decode()


def test_a_curve_rises_to_the_right_and_up() -> None:
    root = ET.fromstring(line_chart("", "", "", [Line("l", [(1, 10), (4, 20), (16, 40)], "#123456")], log_x=True))
    curve = next(iter(root.iter("{http://www.w3.org/2000/svg}polyline"))).attrib["points"]
    (x0, y0), (x1, y1), (x2, y2) = (tuple(map(float, place.split(","))) for place in curve.split())
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.2)   # equal factors are equal distances
    assert y0 > y1 > y2


def test_a_heat_map_colours_gains_and_losses_and_leaves_holes() -> None:
    root = ET.fromstring(heat_map("t", ["p", "q"], ["c", "d"], {("p", "c"): 1.0, ("p", "d"): 0.5, ("q", "c"): 3.0}))
    fills = [rect.attrib["fill"] for rect in root.iter("{http://www.w3.org/2000/svg}rect")]
    assert fills == ["#ffffff", "#ee6677", "#6699dd"]


def test_poisson_is_calibrated_once_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = SweepOptions(workloads="", patterns="poisson", pattern_workload="chat", configurations="off,suffix-k2", repeats=1)
    loads: list[LoadOptions] = []

    def measure(self: Sweep, load: LoadOptions, configuration: Any, repeat: int) -> tuple[Run, Any]:
        loads.append(load)
        return run_of(10.0), {}

    monkeypatch.setattr(Sweep, "_measure", measure)
    found = swept(tmp_path / "s.json", options)
    assert [load.arrivals for load in loads] == ["closed", "poisson", "poisson"]
    assert loads[1].request_rate == found.document["calibration"]["chat@poisson-16"] == 1.0
