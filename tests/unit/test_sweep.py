"""The sweep without a model: what is run, in which order, what a file continues, and what the figures say."""

from __future__ import annotations

import dataclasses
import json
import xml.etree.ElementTree as ET
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headway.bench import flow, sweep, sweep_report, sweep_run, throughput
from headway.bench.load import LoadOptions
from headway.bench.records import Record, Run
from headway.bench.svg import Line, heat_map, line_chart
from headway.bench.sweep import SweepOptions
from headway.bench.sweep_analysis import Analysis
from headway.bench.sweep_run import Results, Series, Sweep
from headway.config import EngineConfig
from headway.engine import memory
from headway.engine.engine import Engine
from headway.engine.memory import kv_bytes_each, plan_memory
from headway.engine.metrics import EngineMetrics
from headway.errors import ConfigError
from headway.spec_decode_metrics import SpecDecodeMetrics
from headway.types import OutputDelta
from tests.tiny import tiny_model_dir

TINY = SweepOptions(workloads="chat", concurrencies="1,4", configurations="off,suffix-k2,batch_table", rounds=2, output_len=4)


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


class Machine:
    """Engines that write one token of each request a step; a step takes so many seconds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds: float = 1.0) -> None:
        self.now, self.seconds = 0.0, seconds
        self.ran: list[tuple[str, int, list[int]]] = []   # (configuration, requests in flight then, prompt), as they were added
        for module in (sweep_run, flow, throughput):
            monkeypatch.setattr(module.time, "perf_counter", lambda: self.now)

    def engines(self, names: Iterable[str]) -> Any:
        return {name: Fake(name, self) for name in names}


class Fake:
    tokenizer = Letters()

    def __init__(self, name: str, machine: Machine) -> None:
        self.name, self._machine = name, machine
        self._left: dict[str, int] = {}
        self.metrics = EngineMetrics()
        self.scheduler = SimpleNamespace(running=[])

    def add(self, request: Any) -> None:
        self._machine.ran.append((self.name, len(self._left), request.prompt_token_ids))
        self._left[request.request_id] = request.params.max_tokens
        self.scheduler.running.append(SimpleNamespace(request=request))

    def abort(self, request_id: str) -> None:
        self._drop(request_id)

    def _drop(self, request_id: str) -> None:
        del self._left[request_id]
        self.scheduler.running = [seq for seq in self.scheduler.running if seq.request.request_id != request_id]

    def step(self) -> list[OutputDelta]:
        self._machine.now += self._machine.seconds
        self.metrics.step_ms += 1e3 * self._machine.seconds
        self.metrics.num_generation_tokens += len(self._left)
        self.metrics.num_sampling_rows += len(self._left)
        self.metrics.num_step_tokens += len(self._left)
        deltas = []
        for request_id in list(self._left):
            self._left[request_id] -= 1
            done = self._left[request_id] == 0
            deltas.append(OutputDelta(request_id, 0, [7], [False], "", finish_reason="length" if done else None))
            if done:
                self._drop(request_id)
        return deltas


def results(path: Path, options: SweepOptions, **config: Any) -> Results:
    return Results(path, sweep.head(options, config, model="m"))


def swept(path: Path, options: SweepOptions, machine: Machine, began: float | None = None) -> Results:
    found, began = results(path, options), machine.now if began is None else began
    Sweep(machine.engines(sweep.configurations(options)), options, found, lambda count, what: None, began).run()
    return found


# -- what is swept ------------------------------------------------------------------------------------------------


def test_cells_are_workloads_at_spread_concurrencies_and_patterns() -> None:
    options = SweepOptions(workloads="chat,mixed", concurrencies="1,2,4", patterns="drift,ramp,poisson", pattern_concurrency=4)
    cells = {cell.name: cell for cell in sweep.cells(options)}
    assert list(cells) == [
        "chat@1", "mixed@1", "chat@4", "mixed@4", "chat@2", "mixed@2", "drift@4", "mixed@ramp-4", "mixed@poisson-4",
    ]
    assert [cells[name].load.num_prompts for name in ("chat@1", "chat@4", "drift@4", "mixed@ramp-4")] == [4, 6, 16, 12]
    assert [cells[name].num_needed(3) for name in ("chat@4", "mixed@ramp-4", "mixed@poisson-4")] == [3 * 6 + 2 + 8, 3 * 12, 4 * 6]
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
    assert [cell.load.num_prompts for cell in sweep.cells(SweepOptions(workloads="chat@8,drift@8", num_prompts=10))] == [10, 20]


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


def test_engines_take_turns_with_the_same_prompts_and_stay_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)
    found = swept(tmp_path / "s.json", TINY, machine)
    by_name = {name: [prompt for who, _, prompt in machine.ran if who == name] for name in sweep.configurations(TINY)}
    assert by_name["off"] == by_name["suffix-k2"] == by_name["batch_table"]
    handed_out = [tuple(prompt) for prompt in by_name["off"]]
    assert len(handed_out) == len(set(handed_out))
    assert [run["configuration"] for run in found.runs if run["cell"] == "chat@1"] == [
        "off", "suffix-k2", "batch_table", "suffix-k2", "batch_table", "off",
    ]
    assert ["series" in run for run in found.runs if run["cell"] == "chat@1"] == [False] * 3 + [True] * 3
    assert {run["output_tokens_per_s"] for run in found.runs if run["cell"] == "chat@4"} == {4.0}
    assert {run["output_tokens_per_s"] for run in found.runs if run["cell"] == "chat@1"} == {1.0}
    assert all(run["equal_outputs"][0] == run["equal_outputs"][1] > 0 for run in found.runs if run["configuration"] != "off")


def test_workloads_that_share_prompts_never_hand_one_out_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)
    options = SweepOptions(workloads="code-edit@2,chat@2,mixed@3,drift@2", configurations="off", rounds=1, output_len=4)
    swept(tmp_path / "s.json", options, machine)
    handed_out = [tuple(prompt) for _, _, prompt in machine.ran]
    assert len(handed_out) == len(set(handed_out))
    is_edit = ["Repeat" in "".join(map(chr, prompt)) for _, _, prompt in machine.ran[-10:]]
    assert is_edit[:8] == [True] * 4 + [False] * 4


def test_a_sweep_that_was_cut_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)
    swept(tmp_path / "s.json", TINY, machine)
    document = json.loads((tmp_path / "s.json").read_text())
    document["runs"] = document["runs"][:3]
    (tmp_path / "s.json").write_text(json.dumps(document))
    whole, machine.ran = machine.ran, []
    assert len(swept(tmp_path / "s.json", TINY, machine).runs) == 12
    assert machine.ran[0][2] == [prompt for name, _, prompt in whole if name == "off"][4]   # the first round had four
    machine.ran = []
    found = swept(tmp_path / "s.json", SweepOptions(**{**vars(TINY), "workloads": "mixed", "concurrencies": "2"}), machine)
    assert {name for name, _, _ in machine.ran} == {"off", "suffix-k2", "batch_table"}
    assert Analysis(found.document).cells == ["chat@1", "chat@4", "mixed@2"]
    assert len(found.runs) == 18


def test_a_file_of_another_sweep_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "s.json"
    results(path, TINY, dtype="bfloat16").save()
    results(path, SweepOptions(**{**vars(TINY), "rounds": 3, "time_budget": 1.0}), dtype="bfloat16")
    with pytest.raises(ConfigError, match="begun with output_len = 4, now it is 32"):
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


def test_drift_says_how_long_each_switch_took(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = SweepOptions(workloads="drift@2", configurations="suffix-k2,bandit", rounds=2, num_prompts=8, output_len=12)
    found = swept(tmp_path / "s.json", options, Machine(monkeypatch))
    told = [item for run in found.runs if run["configuration"] == "bandit" for item in run["recoveries"]]
    assert told == [   # the last phase is not over
        {"to": kind, "phase": phase, "steps": 0, "seconds": 0.0} for phase, kind in ((1, "chat"), (2, "code-edit"), (3, "chat"))
    ]


def test_series_has_slices_of_equally_many_steps() -> None:
    metrics = SimpleNamespace(num_sampling_rows=0, num_verified_drafts=0, step_ms=0.0)
    series = Series(SimpleNamespace(metrics=metrics))   # type: ignore[arg-type]
    for step in range(1000):
        metrics.num_sampling_rows += 2
        metrics.step_ms += 4.0
        metrics.num_verified_drafts += 6 if step >= 500 else 0
        series.observe()
    found = series.to_json()
    assert len(found["k"]) == sweep_run.SERIES_LEN
    assert (found["k"][0], found["k"][-1]) == (0.0, 3.0)
    assert found["t_s"][-1] == 4.0
    assert set(found["batch"]) == {2.0}
    assert Series(SimpleNamespace(metrics=metrics)).to_json()["k"] == []   # type: ignore[arg-type]


# -- what it says -------------------------------------------------------------------------------------------------


def document(speeds: dict[tuple[str, str], list[float]], **more: Any) -> dict[str, Any]:
    """(cell, configuration) -> tokens/s in each round; as many tokens in all of them."""
    runs = [
        {"cell": cell, "configuration": name, "round": number, **run_of(speed).summary(),
         "num_output_tokens": 1320, "duration_s": 1320 / speed,
         "series": {"t_s": [0.5, 1.0], "k": [0.0, 2.0], "batch": [1.0, 1.0]}, "equal_outputs": [2, 2]}
        for (cell, name), values in speeds.items() for number, speed in enumerate(values)
    ]
    return {
        "benchmark": "sweep", "model": "<m>", "command": "headway bench sweep", "configurations": dict.fromkeys(name for _, name in speeds),
        "cells": dict.fromkeys(cell for cell, _ in speeds), "runs": runs, "left_out": [], **more,
    }


SPEEDS = {
    ("chat@1", "off"): [10.0, 12.0, 11.0], ("chat@1", "suffix-k4"): [20.0, 24.0, 22.0], ("chat@1", "policy"): [22.0, 26.4, 33.0],
    ("chat@8", "off"): [40.0, 40.0, 40.0], ("chat@8", "suffix-k4"): [30.0, 30.0, 30.0], ("chat@8", "policy"): [30.0, 40.0, 40.0],
}


def test_a_ratio_is_that_of_tokens_and_seconds_of_all_rounds() -> None:
    analysis = Analysis(document(SPEEDS))
    assert analysis.best_static("chat@1") == "suffix-k4"
    assert analysis.best_static("chat@8") == "off"
    found = analysis.summary()["policy"]
    assert found["against_off"] == {"worst": 0.9, "worst_cell": "chat@8", "mean": pytest.approx((26.4 * 181 / 1980 + 0.9) / 2)}
    assert found["against_best_static"] == {"worst": 0.9, "worst_cell": "chat@8", "mean": pytest.approx((13.2 * 181 / 1980 + 0.9) / 2)}
    [loss] = analysis.losses()
    assert (loss["cell"], loss["best_static"], loss["ratio"]) == ("chat@8", "off", 0.9)
    assert loss["spread"] == pytest.approx((0.75, 1.0))
    assert (loss["output_tokens_per_s"], loss["best_output_tokens_per_s"]) == (36.0, 40.0)
    assert analysis.to_json()["against_off"]["chat@8"]["policy"] == {"ratio": pytest.approx(0.9), "spread": pytest.approx((0.75, 1.0))}
    assert analysis.equal_outputs() == 1.0


def test_rounds_count_by_what_was_measured_in_them() -> None:
    """One engine reads the prompts of both rounds in the first, the other in the second: ratios within rounds say nothing."""
    tokens_and_seconds = {"off": [(100, 10.0), (100, 30.0)], "x-k1": [(300, 30.0), (30, 18.0)], "p": [(90, 30.0), (130, 10.0)]}
    made = document({("chat@8", name): [1.0, 1.0] for name in tokens_and_seconds})
    for run in made["runs"]:
        run["num_output_tokens"], run["duration_s"] = tokens_and_seconds[run["configuration"]][run["round"]]
    analysis = Analysis(made)
    assert analysis.against("off")["p", "chat@8"] == pytest.approx((220 / 40) / (200 / 40))
    assert analysis.spread("chat@8", "p", "off") == pytest.approx((0.3, 3.9))
    # Behind or level in every round and ahead in all: it wrote most while the machine was fast. The spread does not hide that.
    assert analysis.against("off")["x-k1", "chat@8"] == pytest.approx((330 / 48) / (200 / 40))
    assert analysis.spread("chat@8", "x-k1", "off") == pytest.approx((0.5, 1.0))
    assert analysis.best_static("chat@8") == "x-k1"
    assert analysis.against(None)["p", "chat@8"] == pytest.approx((220 / 40) / (330 / 48))


def test_a_static_k_chosen_beforehand_gains_nothing_from_noise() -> None:
    """Both are as good; hindsight takes whichever was lucky in more of the rounds."""
    speeds = {("chat@1", "x-k1"): [10.0, 14.0, 12.0], ("chat@1", "x-k2"): [14.0, 10.0, 11.9], ("chat@1", "p"): [12.0] * 3}
    made = document(speeds | {("chat@8", name): [1.0] for name in ("x-k1", "x-k2", "p")})
    for run in made["runs"]:
        run["num_output_tokens"], run["duration_s"] = run["num_output_tokens"] / run["duration_s"], 1.0   # as long in all of them
    analysis = Analysis(made)
    assert analysis.best_static("chat@1") == "x-k1"
    assert analysis.against(None)["p", "chat@1"] == 1.0
    # The others say x-k1, x-k2, x-k1... each wrong where it counts.
    assert analysis.against_chosen() == {
        ("x-k1", "chat@1"): pytest.approx(36 / 32), ("x-k2", "chat@1"): pytest.approx(35.9 / 32), ("p", "chat@1"): pytest.approx(36 / 32),
    }  # fmt: skip
    assert analysis.summary()["p"]["against_chosen_static"]["worst"] == pytest.approx(1.125)


def test_a_machine_that_changes_its_speed_changes_no_ratio() -> None:
    bases = {"off": 10.0, "x-k1": 11.0, "p": 13.2}
    speeds = {("chat@1", name): [base * pace for pace in (1.0, 3.0, 0.5, 1.4)] for name, base in bases.items()}
    analysis = Analysis(document(speeds))
    assert analysis.best_static("chat@1") == "x-k1"
    assert analysis.against(None)["p", "chat@1"] == pytest.approx(1.2)
    assert analysis.spread("chat@1", "p", "off") == pytest.approx((1.32, 1.32))


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
    assert analysis.tokens_per_s("chat@1", "off") == pytest.approx(2 / (1 / 12.0 + 1 / 11.0))


def test_the_report_is_one_file_with_every_cell_and_loss() -> None:
    page = sweep_report.html(document(SPEEDS, left_out=[{"cell": "chat@64", "num_rounds": 3, "needs_s": 9.0}]))
    assert "&lt;m&gt;" in page
    assert "chat@64 (3 rounds)" in page
    assert "0.750 to 1.000" in page
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


def test_loads_that_end_are_a_whole_run_each_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)
    monkeypatch.setattr(throughput.time, "sleep", lambda seconds: setattr(machine, "now", machine.now + seconds))
    options = SweepOptions(
        workloads="", patterns="poisson,ramp", pattern_workload="chat", configurations="suffix-k2,off", rounds=2, output_len=4,
        pattern_concurrency=4,
    )
    found = swept(tmp_path / "s.json", options, machine)
    assert [name for name, _, _ in machine.ran[:18]] == ["off"] * 6 + ["suffix-k2"] * 6 + ["off"] * 6   # the rate, then a round
    assert machine.ran[0][2] not in [prompt for _, _, prompt in machine.ran[6:]]
    assert [prompt for _, _, prompt in machine.ran[6:12]] == [prompt for _, _, prompt in machine.ran[12:18]]
    assert list(found.document["calibration"]) == ["chat@poisson-4"]
    assert [run["num_requests"] for run in found.runs] == [6] * 4 + [12] * 4
    assert all(run["equal_outputs"] == [run["num_requests"]] * 2 for run in found.runs if run["configuration"] == "suffix-k2")


# -- engines ------------------------------------------------------------------------------------------------------


def test_engines_share_one_model_and_write_the_same(tmp_path: Path) -> None:
    directory = str(tiny_model_dir(tmp_path, "llama"))
    config = EngineConfig(model=directory, dtype="float32", max_num_seqs=4, profile=False, block_size=16, kv_cache_memory_bytes=1 << 22)
    found = sweep_run.engines(config, {"off": None, "ngram-k2": {"method": "ngram", "num_speculative_tokens": 2, "policy": "static"}})
    plain, drafting = found.values()
    assert plain.model is drafting.model
    assert plain.runner.cache is not drafting.runner.cache
    load = LoadOptions(output_len=64, concurrency=2)   # long enough for so small a model to repeat itself
    prompts = [[5, 6, 7, 5, 6, 7, 5, 6], [9, 9, 9, 9, 9]]
    flows = [flow.Flow(engine, load, [*prompts, [1, 2, 3], [4, 4, 4]]) for engine in (plain, drafting)]
    runs = [each.turn(1) for each in flows for _ in range(2)]
    assert flows[0].outputs == flows[1].outputs
    assert runs[2].speculation.num_draft_tokens > 0
    for each in flows:
        each.stop()
        each.engine.check()
        assert not each.engine.has_work()


def test_time_stands_still_between_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)
    [engine] = machine.engines(["off"]).values()
    load = LoadOptions(output_len=10, concurrency=2)
    paused = flow.Flow(engine, load, [[index] for index in range(6)])
    paused.turn(2)
    machine.now += 1000.0
    run = paused.turn(2)
    assert run.summary()["output_tokens_per_s"] == 2.0
    assert run.summary()["tpot_ms"]["p99"] == 1000.0
    with pytest.raises(ValueError, match="no prompt is left"):
        paused.turn(3)


def test_a_slow_spell_hits_all_who_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two equal engines; the machine is four times slower for 40 seconds of 200."""
    machine = Machine(monkeypatch, seconds=0.25)
    load = LoadOptions(output_len=20, concurrency=2)
    flows = {name: flow.Flow(engine, load, [[index] for index in range(20)]) for name, engine in machine.engines(["a", "b"]).items()}

    def weather() -> None:
        machine.seconds = 1.0 if 20.0 < machine.now < 60.0 else 0.25

    runs = flow.in_slices({name: each.slices(16, weather) for name, each in flows.items()})
    a, b = (run.summary()["output_tokens_per_s"] for run in runs.values())
    assert a < 0.8 * 2 / 0.25   # it was hit
    assert 0.95 < a / b < 1.05


def test_engines_divide_what_memory_there_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineConfig(model=str(tiny_model_dir(tmp_path, "llama")), max_num_seqs=4)
    model = Engine(config).model
    alone = plan_memory(config, model).kv_cache_bytes
    assert kv_bytes_each(config, model, 2) == alone
    monkeypatch.setattr(memory, "available_cpu_bytes", lambda: 2 * alone)
    assert kv_bytes_each(config, model, 4) == alone // 4
    assert kv_bytes_each(dataclasses.replace(config, kv_cache_memory_bytes=12345678), model, 4) == 12345678
