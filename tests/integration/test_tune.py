"""From predictions to schedules, and every engine's own rules for what it is given."""

from __future__ import annotations

import json
import shlex
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
import yaml

from headway.cli.main import main
from headway.config import EngineConfig, SpeculativeConfig
from headway.control.policy import BatchView, SequenceView
from headway.engine.engine import Engine
from headway.sampling_params import SamplingParams
from headway.telemetry.trace import TraceWriter
from headway.tune import emit
from headway.tune.files import File, Serving
from headway.tune.plan import Plan, Point, plan
from headway.tune.source import Source, of_headway, of_vllm
from headway.types import Feedback, Request, SequenceFeedback
from tests.heads import eagle1_dir, eagle3_dir, medusa_dir

OPTIONS = {"prompt_lookup_max": 5, "prompt_lookup_min": 1}
ALL_FILES = {"headway.json", "vllm.json", "sglang.txt", "trtllm-lower.yaml", "trtllm-upper.yaml", "llamacpp.txt", "plan.svg"}
NETWORK = of_vllm("eagle3", {"model": "org/eagle3"})


def falling() -> Plan:
    """Long drafts pay alone, short ones among a few, none among many."""
    return plan("ngram", [
        Point(1, {0: 50.0, 2: 90.0, 4: 120.0, 8: 120.5}),
        Point(4, {0: 150.0, 2: 240.0, 4: 245.0, 8: 200.0}),
        Point(16, {0: 300.0, 2: 330.0, 4: 280.0, 8: 200.0}),
        Point(64, {0: 500.0, 2: 480.0, 4: 300.0, 8: 200.0}),
    ], 64)


def never() -> Plan:
    return plan("ngram", [Point(1, {0: 50.0, 2: 40.0}), Point(8, {0: 200.0, 2: 100.0})], 32)


def rising() -> Plan:
    return plan("ngram", [Point(1, {0: 50.0, 2: 90.0, 4: 80.0}), Point(16, {0: 300.0, 2: 310.0, 4: 400.0})], 16)


def always() -> Plan:
    return plan("suffix", [Point(1, {0: 50.0, 4: 90.0}), Point(16, {0: 100.0, 4: 200.0})], 16)


# -- the plan -----------------------------------------------------------------------------------------------------


def test_the_schedule_changes_at_geometric_middles_and_joins_equal_neighbours() -> None:
    assert [(part.first, part.last, part.k) for part in falling().ranges] == [(1, 8, 4), (9, 32, 2), (33, 64, 0)]
    assert [(part.first, part.last, part.k) for part in always().ranges] == [(1, 16, 4)]


def test_the_shorter_draft_wins_a_tie() -> None:
    first = falling().points[0]
    assert first.k == 4
    assert first.candidates == [4, 8]
    assert "2.40x plain decoding; 8 would gain 0.4% more" in first.reason
    assert "behind plain decoding" in falling().points[-1].reason


def test_loads_next_to_each_other_leave_no_empty_range() -> None:
    found = plan("ngram", [Point(1, {0: 1.0, 1: 2.0}), Point(2, {0: 2.0, 1: 1.0}), Point(3, {0: 1.0, 1: 2.0})], 2)
    covered = [size for part in found.ranges for size in range(part.first, part.last + 1)]
    assert covered == list(range(1, 4))


# -- the formats --------------------------------------------------------------------------------------------------


def files(made: Plan, source: Source | None = None) -> dict[str, File]:
    found, _ = emit.emit(made, source or of_headway(made.drafter, OPTIONS))
    return {file.name: file for file in found}


def k_of(config: dict[str, Any], batch_size: int) -> int:
    """What our own policy makes of vLLM's words."""
    parsed = SpeculativeConfig.parse(config)
    assert parsed is not None
    view = BatchView(
        0, tuple(SequenceView(i, 100, 5, True, 99, True, 0, 0, 0) for i in range(batch_size)), 0, 100, 512, ("ngram",),
        parsed.num_speculative_tokens,
    )
    return max((choice.k for choice in parsed.build_policy().plan(view).values()), default=0)


def test_vllm_s_table_is_what_our_own_parser_accepts() -> None:
    config = json.loads(files(falling())["vllm.json"].text)
    assert config == {
        "method": "ngram", "num_speculative_tokens": 4, **OPTIONS,
        "num_speculative_tokens_per_batch_size": [[1, 8, 4], [9, 32, 2], [33, 64, 0]],
    }
    assert [k_of(config, size) for size in (1, 8, 9, 32, 33, 64)] == [4, 4, 2, 2, 0, 0]


def test_one_length_needs_no_table_and_suffix_may_have_none() -> None:
    assert "num_speculative_tokens_per_batch_size" not in json.loads(files(always())["vllm.json"].text)
    suffix = Plan("suffix", falling().points, falling().ranges)
    file = files(suffix)["vllm.json"]
    assert "num_speculative_tokens_per_batch_size" not in json.loads(file.text)
    assert any("cannot vary k with suffix" in note for note in file.notes)


@pytest.mark.parametrize("made", [falling(), never(), rising(), always()], ids=["falling", "never", "rising", "always"])
def test_sglang_s_slots(made: Plan) -> None:
    """Keys are batch sizes in digits, values non-empty lists of step counts >= 0 (adaptive_spec_params.py)."""
    found = files(made, NETWORK)
    words = shlex.split(found["sglang.txt"].text)
    if len(made.ranges) == 1:
        assert "sglang.json" not in found
        return
    assert words[-1] == "sglang.json"
    document = json.loads(found["sglang.json"].text)
    assert "1" in document
    for key, entry in document.items():
        assert key.isdigit()
        assert entry["candidate_steps"]
        assert all(isinstance(step, int) and step >= 0 for step in entry["candidate_steps"])
    for part in made.ranges:
        assert part.k in document[str(part.first)]["candidate_steps"]


@pytest.mark.parametrize("made", [falling(), rising()], ids=["falling", "rising"])
def test_tensorrt_llm_s_two_meanings_of_a_key(made: Plan) -> None:
    """Lower bounds: 1 is a key and has max_draft_len. Upper bounds: the smallest key has. No length is above it (llm_args.py)."""
    for kind, first in (("lower", 1), ("upper", made.ranges[0].last)):
        config = yaml.safe_load(files(made)[f"trtllm-{kind}.yaml"].text)["speculative_config"]
        schedule = config["draft_len_schedule"]
        assert min(schedule) == first
        assert schedule[first] == config["max_draft_len"] >= 1
        assert all(isinstance(key, int) and key >= 1 and 0 <= k <= config["max_draft_len"] for key, k in schedule.items())
    lower = yaml.safe_load(files(falling())["trtllm-lower.yaml"].text)["speculative_config"]["draft_len_schedule"]
    upper = yaml.safe_load(files(falling())["trtllm-upper.yaml"].text)["speculative_config"]["draft_len_schedule"]
    assert (lower, upper) == ({1: 4, 9: 2, 33: 0}, {8: 4, 32: 2, 64: 0})


@pytest.mark.parametrize(
    ("method", "options", "algorithm"),
    [("eagle3", {"model": "org/d"}, "EAGLE3"), ("eagle", {"model": "org/d"}, "EAGLE"), ("deepseek_mtp", {}, "EAGLE"),
     ("draft_model", {"model": "org/d"}, "STANDALONE"), ("ngram", {}, "NGRAM")],
)  # fmt: skip
def test_sglang_s_flags(method: str, options: dict[str, str], algorithm: str) -> None:
    """Names, and num_draft_tokens = num_steps + 1 where topk is 1 (server_args.py)."""
    words = shlex.split(files(falling(), of_vllm(method, options))["sglang.txt"].text)
    flags = dict(zip(words[::2], words[1::2], strict=False))
    assert flags["--speculative-algorithm"] == algorithm
    assert flags["--speculative-num-draft-tokens"] == "5"
    assert flags.get("--speculative-draft-model-path") == options.get("model")
    if algorithm != "NGRAM":
        assert (flags["--speculative-num-steps"], flags["--speculative-eagle-topk"]) == ("4", "1")


# Fields of TensorRT-LLM's DecodingBaseConfig and its children, and of LlmArgs, that are written; unknown ones are errors there.
TRTLLM_FIELDS = {
    "decoding_type", "max_draft_len", "speculative_model", "max_matching_ngram_size", "draft_len_schedule", "acceptance_rate_window_size",
    "acceptance_rate_threshold",
}  # fmt: skip
TRTLLM_NEEDS_MODEL = {"Eagle3": True, "Draft_Target": True, "MTP": False, "NGram": False}
SERVING = Serving("org/model", 4, 1, 4, 32, 4096, "fp8", 0.9, None, 0.4)


@pytest.mark.parametrize(
    ("method", "options", "releases"),
    [("eagle3", {"model": "org/d"}, {"upper", "1.4"}), ("mtp", {}, {"upper", "1.4"}),
     ("draft_model", {"model": "org/d"}, {"lower", "upper", "1.4"}), ("ngram", {}, {"lower", "upper", "1.4"})],
)  # fmt: skip
def test_tensorrt_llm_s_drafters(method: str, options: dict[str, str], releases: set[str]) -> None:
    found = {file.name: file for file in emit.emit(falling(), of_vllm(method, options), SERVING)[0] if file.name.startswith("trtllm")}
    assert set(found) == {f"trtllm-{release}.yaml" for release in releases}
    for name, file in found.items():
        document = yaml.safe_load(file.text)
        config = document.pop("speculative_config")
        assert document == {"tensor_parallel_size": 4, "pipeline_parallel_size": 1, "max_batch_size": 32, "max_seq_len": 4096,
                            "kv_cache_config": {"dtype": "fp8"}}
        assert config.keys() <= TRTLLM_FIELDS
        assert ("speculative_model" in config) == TRTLLM_NEEDS_MODEL[config["decoding_type"]]
        assert ("acceptance_rate_threshold" in config) == (name == "trtllm-1.4.yaml")
        assert config["draft_len_schedule"][min(config["draft_len_schedule"])] == config["max_draft_len"]


@pytest.mark.parametrize("method", ["suffix", "medusa"])
def test_what_other_servers_have_no_drafter_for_is_left_out(method: str) -> None:
    options = {"model": "org/heads"} if method == "medusa" else {}
    written, left_out = emit.emit(Plan(method, falling().points, falling().ranges), of_headway(method, options))
    assert {file.name for file in written} == {"headway.json", "vllm.json"}
    assert {reason.partition(":")[0] for reason in left_out} == {"sglang.txt", "trtllm-*.yaml", "llamacpp.txt"}


def test_a_length_that_rises_is_cut_for_tensorrt_llm_and_said_so() -> None:
    file = files(rising())["trtllm-lower.yaml"]
    assert yaml.safe_load(file.text)["speculative_config"]["draft_len_schedule"] == {1: 2, 5: 2}
    assert any("cut" in note for note in file.notes)


def test_llama_cpp_s_flags() -> None:
    assert shlex.split(files(falling())["llamacpp.txt"].text) == [
        "--spec-type", "ngram-simple", "--spec-ngram-simple-size-n", "5", "--spec-ngram-simple-size-m", "4",
    ]
    assert shlex.split(files(never())["llamacpp.txt"].text) == ["--spec-type", "none"]


def test_speculation_that_never_pays_is_off_everywhere() -> None:
    made = files(never())
    assert json.loads(made["headway.json"].text) == {"speculative_config": "off"}
    assert json.loads(made["vllm.json"].text) is None
    assert yaml.safe_load(made["trtllm-upper.yaml"].text) == {}
    assert made["sglang.txt"].text == "\n"


# -- the command --------------------------------------------------------------------------------------------------


def test_the_command_measures_and_writes_files_that_load(tiny_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    engine = ["--dtype", "float32", "--kv-cache-memory-bytes", "8M"]
    load = ["--workload", "chat", "--concurrencies", "1,2", "--num-prompts", "3", "--output-len", "48", "--max-k", "4"]
    assert main(["tune", str(tiny_dir), *engine, *load, "--output", str(tmp_path / "t")]) == 0
    out = capsys.readouterr().out
    assert "in flight" in out
    assert "batch size 1 to" in out
    names = {path.name for path in (tmp_path / "t").iterdir()}
    assert names == ALL_FILES
    ET.fromstring((tmp_path / "t" / "plan.svg").read_text())
    assert main(["config", str(tiny_dir), *engine, "--config", str(tmp_path / "t" / "headway.json"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["model"]["value"] == str(tiny_dir)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--concurrencies", "1,many"], "concurrencies must be whole numbers"),
        (["--max-k", "0"], "max_k must be >= 1"),
        (["--drafter", "ngran"], "Did you mean 'ngram'"),
        (["--concurrencies", "128"], "need --max-num-seqs 128"),
    ],
)
def test_what_cannot_be_tuned_is_named(words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", "m", *words, "--output", str(tmp_path / "t")]) == 2
    assert message in capsys.readouterr().err


# -- from recorded traffic ----------------------------------------------------------------------------------------


def write_trace(path: Path, drafter: str, accepted: int = 4, **header: Any) -> str:
    """Four sequences at a time write 41 tokens each, `accepted` of 4 drafts right in every step of 10 ms and 0.1 ms per token."""
    writer = TraceWriter(path, {"max_k": 8, "drafters": [drafter], "max_num_seqs": 16, **header})
    for wave in range(6):
        ids = range(4 * wave, 4 * wave + 4)
        for step in range(1 + 40 // (accepted + 1)):
            k = 4 if step else 0
            context = 100 + (1 + (step - 1) * (accepted + 1) if step else 0)
            rows = tuple(SequenceFeedback(seq_id, drafter if k else "none", k, k, k, min(k, accepted), context) for seq_id in ids)
            tokens = 4 + 4 * k
            views = tuple(SequenceView(seq_id, context, step, step > 0, 8, True, 0, 0, 0) for seq_id in ids)
            took = 10.0 + 0.1 * tokens
            feedback = Feedback(step, rows, 0 if step else 400, tokens, 4 * context, 0.0, took, took, 4)
            writer.write(BatchView(step, views, 0, 100, 512, (drafter,), 8), feedback)
    writer.close()
    return str(path)


@pytest.mark.parametrize(("accepted", "expected"), [(4, "k = 8"), (0, "k = 0")])
def test_recorded_traffic_is_enough(accepted: int, expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    traces = [word for name in "12" for word in ("--trace", write_trace(tmp_path / name, "ngram", accepted))]
    assert main(["tune", *traces, "--concurrencies", "1,8", "--output", str(tmp_path / "t")]) == 0
    assert f"batch size 1 to 16: {expected}" in capsys.readouterr().out
    assert (tmp_path / "t" / "trtllm-upper.yaml").exists()


VLLM = {"engine": "vllm with headway 0.1.0"}
OURS = {"engine": "headway 0.1.0"}


def tune(folder: Path, traces: list[str], *words: str) -> int:
    given = [word for trace in traces for word in ("--trace", trace)]
    return main(["tune", *given, "--concurrencies", "4", *words, "--output", str(folder)])


def written(folder: Path) -> dict[str, Any]:
    """The JSON files of a folder that configure a drafter."""
    return {path.name: json.loads(path.read_text()) for path in folder.iterdir() if path.name in ("headway.json", "vllm.json")}


def test_traffic_of_our_proposer_inside_vllm_is_written_for_vllm(tmp_path: Path) -> None:
    assert tune(tmp_path / "t", [write_trace(tmp_path / "1.jsonl", "custom_class", **VLLM)]) == 0
    assert written(tmp_path / "t") == {
        "vllm.json": {"method": "custom_class", "num_speculative_tokens": 8, "model": "headway.vllm.Proposer"}
    }
    assert {path.name for path in (tmp_path / "t").iterdir()} == {"vllm.json", "plan.svg"}


OTHERS: dict[str, set[str]] = {
    "eagle": {"sglang.txt"},
    "eagle3": {"sglang.txt", "trtllm-upper.yaml", "llamacpp.txt"},
    "draft_model": {"sglang.txt", "trtllm-lower.yaml", "trtllm-upper.yaml", "llamacpp.txt"},
    "medusa": set(),
}


@pytest.mark.parametrize("method", ["eagle", "eagle3", "draft_model", "medusa"])
def test_traffic_of_vllm_s_trained_drafters(method: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The network is in the recording, or is given; without one nothing is written. No file is of another algorithm."""
    bare = write_trace(tmp_path / "bare.jsonl", method, **VLLM)
    assert tune(tmp_path / "refused", [bare]) == 2
    assert f"'{method}' drafts with a network, and nothing says which: --draft-model names it" in capsys.readouterr().err
    assert not (tmp_path / "refused").exists()
    named = write_trace(tmp_path / "named.jsonl", method, **VLLM, drafter_options={method: {"model": "org/draft"}})
    for folder, words in ((tmp_path / "a", [named]), (tmp_path / "b", [bare])):
        assert tune(folder, words, *(["--draft-model", "org/draft"] if words == [bare] else [])) == 0
        made = written(folder)
        assert made["vllm.json"] == {"method": method, "num_speculative_tokens": 8, "model": "org/draft"}
        ours = SpeculativeConfig.parse(made["headway.json"]["speculative_config"])
        assert ours is not None
        assert (ours.method, ours.model) == ({"eagle3": "eagle"}.get(method, method), "org/draft")
        names = {path.name for path in folder.iterdir()} - {"headway.json", "vllm.json", "plan.svg"}
        assert names == OTHERS[method]


def test_the_options_of_the_recording_are_kept(tmp_path: Path) -> None:
    options = {"ngram": {"prompt_lookup_max": 4, "prompt_lookup_min": 2}}
    for name, engine in (("1", OURS), ("2", VLLM)):
        assert tune(tmp_path / name, [write_trace(tmp_path / f"{name}.jsonl", "ngram", **engine, drafter_options=options)]) == 0
        expected = {"method": "ngram", "num_speculative_tokens": 8, **options["ngram"]}
        assert written(tmp_path / name) == {"vllm.json": expected, "headway.json": {"speculative_config": expected}}
        assert {path.name for path in (tmp_path / name).iterdir()} == ALL_FILES


def test_our_own_recording_of_an_eagle_head(tiny_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """vLLM's method is that of the checkpoint; options that only Headway has stay with Headway."""
    for method, head in (("eagle3", eagle3_dir(tmp_path / "h3", tiny_dir)), ("eagle", eagle1_dir(tmp_path / "h1", tiny_dir))):
        options = {"eagle": {"model": str(head), "topk": 1, "draft_sample_method": "probabilistic"}}
        trace = write_trace(tmp_path / f"{method}.jsonl", "eagle", **OURS, drafter_options=options)
        assert tune(tmp_path / method, [trace]) == 0
        common = {"num_speculative_tokens": 8, "model": str(head), "draft_sample_method": "probabilistic"}
        made = written(tmp_path / method)
        assert made == {"vllm.json": {"method": method, **common},
                        "headway.json": {"speculative_config": {"method": "eagle", "topk": 1, **common}}}
    trees = write_trace(tmp_path / "trees.jsonl", "eagle", **OURS, drafter_options={"eagle": {"model": "org/eagle3", "topk": 4}})
    assert tune(tmp_path / "trees", [trees]) == 0
    assert set(written(tmp_path / "trees")) == {"headway.json"}
    assert "not written: vllm.json: the recording is of trees" in capsys.readouterr().out


def test_vllm_varies_no_k_with_medusa(tiny_dir: Path) -> None:
    made = Plan("medusa", falling().points, falling().ranges)
    file = files(made, of_vllm("medusa", {"model": "org/medusa"}))["vllm.json"]
    assert json.loads(file.text) == {"method": "medusa", "num_speculative_tokens": 4, "model": "org/medusa"}
    assert any("cannot vary k with Medusa heads" in note for note in file.notes)


@pytest.mark.parametrize(
    ("traces", "words", "message"),
    [
        ([("dspark9", VLLM)], [], "'dspark9', which neither Headway nor vLLM drafts with"),
        ([("extract_hidden_states", VLLM)], [], "which neither Headway nor vLLM drafts with"),
        ([("cascade", OURS)], [], "'cascade' drafts with a network, and nothing says which"),
        ([("ngram", OURS)], ["--draft-model", "org/draft"], "--draft-model was given, but 'ngram' has no draft network"),
        ([("eagle", {**OURS, "drafter_options": 3})], [], "drafter_options must be an object"),
        ([("eagle", {**OURS, "drafter_options": {"eagle": {"model": name}}}) for name in ("a", "b")], [], "different draft networks, a, b"),
    ],
)
def test_traces_that_give_no_config_are_refused(
    traces: list[tuple[str, dict[str, Any]]], words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [write_trace(tmp_path / str(i), drafter, **header) for i, (drafter, header) in enumerate(traces)]
    assert tune(tmp_path / "t", paths, *words) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "t").exists()


def test_what_only_headway_has_is_written_for_headway(tmp_path: Path) -> None:
    assert tune(tmp_path / "t", [write_trace(tmp_path / "1.jsonl", "layer_skip", **OURS)]) == 0
    assert written(tmp_path / "t") == {"headway.json": {"speculative_config": {"method": "layer_skip", "num_speculative_tokens": 8}}}


def test_the_engine_records_what_tune_needs(tiny_dir: Path, tmp_path: Path) -> None:
    head = medusa_dir(tmp_path / "heads", tiny_dir)
    recorded = tmp_path / "steps.jsonl"
    speculative = SpeculativeConfig.parse({"method": "medusa", "model": str(head), "num_speculative_tokens": 3, "policy": "static"})
    engine = Engine(EngineConfig(
        model=str(tiny_dir), dtype="float32", device="cpu", kv_cache_memory_bytes=1 << 23, profile=False, trace=str(recorded),
        speculative=speculative,
    ))   # fmt: skip
    engine.add(Request("r", [5, 6, 7], SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)))
    while engine.has_work():
        engine.step()
    assert engine.trace is not None
    engine.trace.close()
    assert tune(tmp_path / "t", [str(recorded)]) == 0
    made = written(tmp_path / "t")
    assert made["vllm.json"] is None or made["vllm.json"]["model"] == str(head)
    header = json.loads(recorded.read_text().splitlines()[0])
    assert header["drafter_options"] == {"medusa": {"model": str(head), "topk": 1, "draft_sample_method": "probabilistic"}}


def test_traces_of_different_drafters_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    traces = ["--trace", write_trace(tmp_path / "1.jsonl", "ngram", 4), "--trace", write_trace(tmp_path / "2.jsonl", "suffix", 4)]
    assert main(["tune", *traces, "--output", str(tmp_path / "t")]) == 2
    assert "[['ngram'], ['suffix']]" in capsys.readouterr().err
