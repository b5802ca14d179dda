"""The sweep without a model: what is run, in which order, what a file continues, and what the figures say."""

from __future__ import annotations

import dataclasses
import json
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headway.bench import sweep, sweep_report, sweep_run, throughput
from headway.bench.records import LoadOptions, Record, Run
from headway.bench.svg import Line, heat_map, line_chart
from headway.bench.sweep import SweepOptions
from headway.bench.sweep_analysis import Analysis
from headway.bench.sweep_run import Results, Series, Sweep
from headway.config import EngineConfig
from headway.engine import memory
from headway.engine.engine import Engine
from headway.engine.memory import kv_bytes_each, plan_memory
from headway.errors import ConfigError
from headway.types import SpecDecodeMetrics
from tests.tiny import tiny_model_dir

TINY = SweepOptions(workloads="chat", concurrencies="1,4", configurations="off,suffix-k2,batch_table", rounds=2, warmup=1)


class Letters:
    """A tokenizer of letters: a prompt's ids say which prompt it is."""

    vocab_size = 100

    def encode(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]

    def apply_chat_template(self, messages: Any) -> list[int]:
        return self.encode(messages[0]["content"])


def run_of(tokens_per_s: float, output: Sequence[int] = (1,)) -> Run:
    record = Record(1, sent=10.0, first=10.5, last=11.0, num_output_tokens=int(tokens_per_s), output=list(output))
    return Run((record,), SpecDecodeMetrics(), None, 0.0, {"num_steps": 1, "num_preemptions": 0})


class Clock:
    """Every run takes so many seconds; `ran` has (configuration, load, prompts)."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds: float, steps: dict[str, Any] | None = None) -> None:
        self.now, self.seconds, self.steps = 0.0, seconds, steps
        self.ran: list[tuple[str, LoadOptions, list[list[int]]]] = []
        self.num_warmed = 0
        monkeypatch.setattr(sweep_run.time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(sweep_run.throughput, "run", self.warm_up)
        monkeypatch.setattr(Sweep, "_measure", lambda _, *given: self.run(*given))

    def warm_up(self, engine: Any, prompts: Any, load: LoadOptions, label: str) -> None:
        self.num_warmed += len(prompts)

    def run(self, name: str, load: LoadOptions, prompts: list[list[int]]) -> tuple[Run, dict[str, Any]]:
        self.now += self.seconds
        self.ran.append((name, load, prompts))
        series = {"t_s": [0.5], "k": [1.0], "batch": [1.0]}
        return run_of(10.0), {"series": series} | ({"steps": self.steps} if self.steps else {})


def results(path: Path, options: SweepOptions, **config: Any) -> Results:
    return Results(path, sweep.head(options, config, model="m"))


def swept(path: Path, options: SweepOptions) -> Results:
    found = results(path, options)
    engines: Any = {name: SimpleNamespace(tokenizer=Letters()) for name in sweep.configurations(options)}
    Sweep(engines, options, found, lambda count, what: None).run()
    return found


# -- what is swept ------------------------------------------------------------------------------------------------


def test_cells_are_workloads_at_spread_concurrencies_and_patterns() -> None:
    options = SweepOptions(workloads="chat,mixed", concurrencies="1,2,4", patterns="drift,ramp,poisson", pattern_concurrency=4)
    cells = {cell.name: cell for cell in sweep.cells(options)}
    assert list(cells) == [
        "chat@1", "mixed@1", "chat@4", "mixed@4", "chat@2", "mixed@2", "drift@4", "mixed@ramp-4", "mixed@poisson-4",
    ]
    assert [cells[name].load.num_prompts for name in ("chat@1", "chat@4", "drift@4")] == [2, 6, 24]
    assert cells["drift@4"].load.workload == "drift:8"
    assert cells["mixed@ramp-4"].load.arrivals == "ramp"
    assert [name for name, cell in cells.items() if cell.needs_rate] == ["mixed@poisson-4"]


def test_a_workload_may_name_its_own_load() -> None:
    workloads = "chat@2,mixed,chat@8,drift@3,jsonl:a@b"
    cells = sweep.cells(SweepOptions(workloads=workloads, concurrencies="1", patterns="drift", pattern_concurrency=3))
    assert [(cell.name, cell.load.concurrency) for cell in cells] == [
        ("mixed@1", 1), ("jsonl:a@b@1", 1), ("chat@2", 2), ("chat@8", 8), ("drift@3", 3),
    ]
    assert cells[-1].load.workload == "drift:6"
    assert [cell.load.num_prompts for cell in sweep.cells(SweepOptions(workloads="chat@8,drift@8", num_prompts=10))] == [10, 30]


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
    names = ("off", "suffix-k2", "eagle+suffix-k4", "batch_table", "eagle+suffix", "x:Y-k2")
    assert [sweep.is_static(name) for name in names] == [True, True, True, False, False, False]


def test_drafters_side_by_side_and_their_networks() -> None:
    options = SweepOptions(configurations="eagle-k4,suffix,eagle+suffix,bandit", speculators="eagle=heads/one", static_k="2,6")
    eagle = {"name": "eagle", "model": "heads/one"}
    assert sweep.configurations(options) == {
        "eagle-k4": {"method": [eagle], "num_speculative_tokens": 4, "policy": "static"},
        "suffix": {"method": "suffix", "num_speculative_tokens": 6},
        "eagle+suffix": {"method": [eagle, "suffix"], "num_speculative_tokens": 6},
        "bandit": {"method": ["suffix", "ngram"], "num_speculative_tokens": 6, "policy": "bandit"},
    }


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"configurations": "off,sufix-k2"}, "Did you mean"),
        ({"configurations": "goodputt"}, "unknown configuration 'goodputt'"),
        ({"configurations": "suffix+ngrm"}, "unknown configuration 'suffix\\+ngrm'"),
        ({"configurations": "suffix-k0"}, "unknown configuration 'suffix-k0'"),
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


def test_a_round_is_the_same_prompts_for_all_and_who_begins_rotates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, 1.0)
    found = swept(tmp_path / "s.json", TINY)
    assert [(name, load.concurrency) for name, load, _ in clock.ran[:6]] == [
        ("off", 1), ("suffix-k2", 1), ("batch_table", 1), ("suffix-k2", 1), ("batch_table", 1), ("off", 1),
    ]
    for start in range(0, 12, 3):
        assert all(prompts == clock.ran[start][2] for _, _, prompts in clock.ran[start : start + 3])
    handed_out = [tuple(prompt) for _, _, prompts in clock.ran[::3] for prompt in prompts]
    assert len(handed_out) == len(set(handed_out)) == 2 * (2 + 6)
    assert clock.num_warmed == 3   # one request for each engine, once
    assert [run["round"] for run in found.runs if run["cell"] == "chat@1"] == [0] * 3 + [1] * 3
    assert ["series" in run for run in found.runs if run["cell"] == "chat@1"] == [False] * 3 + [True] * 3


def test_workloads_that_share_prompts_never_hand_one_out_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, 1.0)
    options = SweepOptions(workloads="code-edit@2,chat@2,mixed@3,drift@2", configurations="off", rounds=2)
    swept(tmp_path / "s.json", options)
    handed_out = [tuple(prompt) for _, _, prompts in clock.ran for prompt in prompts]
    assert len(handed_out) == len(set(handed_out)) == 2 * (3 + 3 + 4 + 12)
    rounds = [prompts for _, load, prompts in clock.ran if load.workload == "drift:4"]
    is_edit = [["Repeat" in "".join(map(chr, prompt)) for prompt in prompts] for prompts in rounds]
    assert is_edit == [[True] * 4 + [False] * 4 + [True] * 4, [False] * 4 + [True] * 4 + [False] * 4]


def test_a_sweep_that_was_cut_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, 1.0)
    swept(tmp_path / "s.json", TINY)
    whole = list(clock.ran)
    document = json.loads((tmp_path / "s.json").read_text())
    document["runs"] = document["runs"][:3]
    (tmp_path / "s.json").write_text(json.dumps(document))
    clock.ran.clear()
    assert len(swept(tmp_path / "s.json", TINY).runs) == 12
    assert clock.ran == whole[3:]
    clock.ran.clear()
    more = SweepOptions(**{**vars(TINY), "workloads": "mixed", "concurrencies": "2"})
    found = swept(tmp_path / "s.json", more)
    assert {load.workload for _, load, _ in clock.ran} == {"mixed"}
    assert Analysis(found.document).cells == ["chat@1", "chat@4", "mixed@2"]


def test_a_file_of_another_sweep_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "s.json"
    results(path, TINY, dtype="bfloat16").save()
    results(path, SweepOptions(**{**vars(TINY), "rounds": 3, "time_budget": 1.0}), dtype="bfloat16")
    with pytest.raises(ConfigError, match="begun with output_len = 64, now it is 32"):
        results(path, SweepOptions(**{**vars(TINY), "output_len": 32}), dtype="bfloat16")
    with pytest.raises(ConfigError, match='begun with dtype = "bfloat16", now it is "float32"'):
        results(path, TINY, dtype="float32")
    for other in ("[]", '{"benchmark": "sweep", "options": {"repeats": 2}}'):
        path.write_text(other)
        with pytest.raises(ConfigError, match="is not a sweep in rounds"):
            results(path, TINY)
    path.write_text("{")
    with pytest.raises(ConfigError, match="cannot continue"):
        results(path, TINY)


def test_a_budget_is_shared_by_the_cells_and_what_does_not_fit_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, 10.0)
    # 30 s a round: one for the first cell, whose share is 35 s; 40 s are left for the second.
    found = swept(tmp_path / "s.json", SweepOptions(**{**vars(TINY), "rounds": 3, "time_budget": 70.0 / 60.0}))
    assert [load.concurrency for _, load, _ in clock.ran] == [1] * 3 + [4] * 3
    assert found.document["left_out"] == [
        {"cell": "chat@1", "num_rounds": 2, "needs_s": 60.0}, {"cell": "chat@4", "num_rounds": 2, "needs_s": 60.0},
    ]


def test_drift_says_how_long_each_switch_took(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Clock(monkeypatch, 1.0, {"phase": [0] * 20 + [1] * 20 + [2] * 20, "ms": [1.0] * 60, "tokens": [2] * 60})
    options = SweepOptions(workloads="drift@2", configurations="suffix-k2,bandit", rounds=2)
    found = swept(tmp_path / "s.json", options)
    assert [run["recoveries"] for run in found.runs if run["configuration"] == "bandit"] == [
        [{"to": "chat", "phase": 1, "steps": 0, "seconds": 0.0}, {"to": "code-edit", "phase": 2, "steps": 0, "seconds": 0.0}],
        [{"to": "code-edit", "phase": 1, "steps": 0, "seconds": 0.0}, {"to": "chat", "phase": 2, "steps": 0, "seconds": 0.0}],
    ]
    assert "steps" not in found.runs[0]


def test_series_has_slices_of_equally_many_steps() -> None:
    metrics = SimpleNamespace(num_sampling_rows=0, num_verified_drafts=0)
    series = Series(SimpleNamespace(metrics=metrics))   # type: ignore[arg-type]
    for step in range(1000):
        metrics.num_sampling_rows += 2
        metrics.num_verified_drafts += 6 if step >= 500 else 0
        series.observe()
    found = series.to_json()
    assert len(found["k"]) == sweep_run.SERIES_LEN
    assert (found["k"][0], found["k"][-1]) == (0.0, 3.0)
    assert set(found["batch"]) == {2.0}
    assert Series(SimpleNamespace(metrics=metrics)).to_json()["k"] == []   # type: ignore[arg-type]


# -- what it says -------------------------------------------------------------------------------------------------


def document(speeds: dict[tuple[str, str], list[float]], **more: Any) -> dict[str, Any]:
    """(cell, configuration) -> tokens/s in each round."""
    runs = [
        {"cell": cell, "configuration": name, "round": number, **run_of(speed).summary(), "output_tokens_per_s": speed,
         "series": {"t_s": [0.5, 1.0], "k": [0.0, 2.0], "batch": [1.0, 1.0]}}
        for (cell, name), values in speeds.items() for number, speed in enumerate(values)
    ]
    return {
        "benchmark": "sweep", "model": "<m>", "command": "headway bench sweep", "configurations": dict.fromkeys(name for _, name in speeds),
        "cells": dict.fromkeys(cell for cell, _ in speeds), "runs": runs, "left_out": [], **more,
    }


SPEEDS = {
    ("chat@1", "off"): [10.0, 12.0, 11.0], ("chat@1", "suffix-k4"): [20.0, 24.0, 22.0], ("chat@1", "policy"): [22.0, 26.4, 33.0],
    ("chat@8", "off"): [40.0, 40.0, 40.0], ("chat@8", "suffix-k4"): [30.0, 30.0, 30.0], ("chat@8", "policy"): [36.0, 38.0, 34.0],
}


def test_a_ratio_is_the_median_of_ratios_within_rounds() -> None:
    analysis = Analysis(document(SPEEDS))
    assert analysis.best_static("chat@1") == "suffix-k4"
    assert analysis.best_static("chat@8") == "off"
    found = analysis.summary()["policy"]
    assert found["against_off"] == {"worst": 0.9, "worst_cell": "chat@8", "mean": pytest.approx((2.2 + 0.9) / 2)}
    assert found["against_best_static"] == {"worst": 0.9, "worst_cell": "chat@8", "mean": pytest.approx((1.1 + 0.9) / 2)}
    [loss] = analysis.losses()
    assert (loss["cell"], loss["best_static"], loss["ratio"]) == ("chat@8", "off", 0.9)
    assert loss["quartiles"] == pytest.approx([0.875, 0.925])
    assert analysis.to_json()["against_off"]["chat@1"]["policy"]["median"] == pytest.approx(2.2)
    assert analysis.equal_outputs() == 1.0


def test_a_machine_that_changes_its_speed_changes_no_ratio() -> None:
    bases = {"off": 10.0, "x-k1": 11.0, "p": 13.2}
    speeds = {("chat@1", name): [base * pace for pace in (1.0, 3.0, 0.5, 1.4)] for name, base in bases.items()}
    analysis = Analysis(document(speeds))
    assert analysis.best_static("chat@1") == "x-k1"
    assert analysis.against(None)["p", "chat@1"] == pytest.approx(1.2)
    assert analysis.quartiles("chat@1", "p", "off") == pytest.approx((1.32, 1.32))


def test_policies_are_compared_with_each_other() -> None:
    speeds = {("chat@1", "p"): [10.0, 20.0], ("chat@1", "q"): [5.0, 10.0], ("chat@8", "p"): [10.0, 10.0], ("chat@8", "q"): [10.0, 10.0]}
    summary = Analysis(document(speeds)).summary()
    assert (summary["p"]["mean_against"], summary["q"]["mean_against"]) == ({"q": 1.5}, {"p": 0.75})


def test_a_round_counts_only_when_it_is_whole_and_valid() -> None:
    whole = document(SPEEDS)
    whole["runs"] = [run for run in whole["runs"] if (run["cell"], run["configuration"], run["round"]) != ("chat@8", "off", 1)]
    whole["runs"][0]["invalid"] = True
    analysis = Analysis(whole)
    assert {cell: len(rounds) for cell, rounds in analysis.rounds.items()} == {"chat@1": 2, "chat@8": 2}
    assert analysis.median("chat@1", "off") == 11.5


def test_the_report_is_one_file_with_every_cell_and_loss() -> None:
    page = sweep_report.html(document(SPEEDS, left_out=[{"cell": "chat@64", "num_rounds": 3, "needs_s": 9.0}]))
    assert "&lt;m&gt;" in page
    assert "chat@64 (3 rounds)" in page
    assert "0.875 to 0.925" in page
    assert "chat@8, 3 rounds" in page
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
    clock = Clock(monkeypatch, 1.0)
    options = SweepOptions(workloads="", patterns="poisson", pattern_workload="chat", configurations="suffix-k2,off", rounds=1)
    found = swept(tmp_path / "s.json", options)
    assert [(name, load.arrivals) for name, load, _ in clock.ran] == [("off", "closed"), ("suffix-k2", "poisson"), ("off", "poisson")]
    assert clock.ran[0][2] != clock.ran[1][2] == clock.ran[2][2]
    assert clock.ran[1][1].request_rate == found.document["calibration"]["chat@poisson-16"] == 1.0


# -- engines ------------------------------------------------------------------------------------------------------


def test_engines_share_one_model_and_write_the_same(tmp_path: Path) -> None:
    directory = str(tiny_model_dir(tmp_path, "llama"))
    config = EngineConfig(model=directory, max_num_seqs=4, profile=False, block_size=16, kv_cache_memory_bytes=1 << 22)
    found = sweep_run.engines(config, {"off": None, "ngram-k2": {"method": "ngram", "num_speculative_tokens": 2, "policy": "static"}})
    plain, drafting = found.values()
    assert plain.model is drafting.model
    assert plain.runner.cache is not drafting.runner.cache
    load = LoadOptions(output_len=12, concurrency=2)
    prompts = [[5, 6, 7, 5, 6, 7, 5, 6], [9, 9, 9, 9, 9]]
    runs = [throughput.run(engine, prompts, load) for engine in (plain, drafting, plain)]
    assert len({run.output_hash for run in runs}) == 1
    assert runs[1].speculation.num_draft_tokens > 0


def test_engines_divide_what_memory_there_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineConfig(model=str(tiny_model_dir(tmp_path, "llama")), max_num_seqs=4)
    model = Engine(config).model
    alone = plan_memory(config, model).kv_cache_bytes
    assert kv_bytes_each(config, model, 2) == alone
    monkeypatch.setattr(memory, "_available_cpu_bytes", lambda: 2 * alone)
    assert kv_bytes_each(config, model, 4) == alone // 4
    assert kv_bytes_each(dataclasses.replace(config, kv_cache_memory_bytes=12345678), model, 4) == 12345678
