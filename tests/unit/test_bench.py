"""Benchmarks without an engine: workloads, the ruler, the report, the provenance."""

from __future__ import annotations

import hashlib
import json
import mmap
from pathlib import Path
from typing import Any

import pytest

from headway.bench import environment, report, workloads
from headway.bench.arrivals import Arrivals
from headway.bench.load import LoadOptions
from headway.bench.records import Record, Run, TimeShares, hash_outputs, percentiles
from headway.bench.workloads import Prompt
from headway.errors import ConfigError
from headway.spec_decode_metrics import SpecDecodeMetrics


class Bytes:
    """A tokenizer whose tokens are bytes; a chat is its contents."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def apply_chat_template(self, messages: Any) -> list[int]:
        return [*self.encode("".join(message["content"] for message in messages)), 0]


# -- workloads ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", workloads.NAMES)
def test_prompts_are_a_function_of_name_number_and_seed(name: str) -> None:
    first = workloads.load(name, 9, seed=1, vocab_size=100)
    assert first == workloads.load(name, 9, seed=1, vocab_size=100)
    assert first[:4] == workloads.load(name, 4, seed=1, vocab_size=100)
    assert first != workloads.load(name, 9, seed=2, vocab_size=100)


@pytest.mark.parametrize(
    ("name", "number"),
    [("code-edit", 200), ("summarize", 150), ("chat", 640), ("reasoning", 400), ("mixed", 200), ("drift", 200), ("random", 50)],
)
def test_no_prompt_occurs_twice(name: str, number: int) -> None:
    prompts = [tuple(prompt.encode(Bytes())) for prompt in workloads.load(name, number, seed=0, vocab_size=100)]
    assert len(set(prompts)) == number


def content(prompt: Prompt) -> str:
    assert prompt.messages is not None
    [message] = prompt.messages
    assert message["role"] == "user"
    return str(message["content"])


def test_code_edit_asks_for_one_change_of_a_whole_function() -> None:
    import ast

    for prompt in workloads.load("code-edit", 20, seed=0):
        task, _, code = content(prompt).partition("\n\n```python\n")
        assert task.startswith("Repeat the following Python function with one change: ")
        [function] = ast.parse(code.removesuffix("\n```")).body
        assert isinstance(function, ast.FunctionDef)
        # Three to four characters a token: about 600 tokens.
        assert workloads.CODE_CHARS[0] <= len(code) <= workloads.CODE_CHARS[1] + 4


def test_summarize_is_prose_of_the_right_size() -> None:
    for prompt in workloads.load("summarize", 50, seed=0):
        assert workloads.PROSE_CHARS // 2 <= len(content(prompt)) <= workloads.PROSE_CHARS + 60


def test_chat_uses_every_request_once_before_it_varies_them() -> None:
    items = json.loads(Path(workloads.__file__).with_name("chat_prompts.json").read_text())
    assert len(items) == 80
    assert len({item["kind"] for item in items}) >= 8
    asked = [content(prompt) for prompt in workloads.load("chat", 160, seed=3)]
    assert sorted(asked[:80]) == sorted(item["prompt"] for item in items)
    assert not set(asked[:80]) & set(asked[80:])


def test_mixed_takes_turns() -> None:
    kinds = [content(prompt)[:6] for prompt in workloads.load("mixed", 6, seed=0)]
    assert kinds[0] == kinds[3] == "Repeat"
    assert kinds[1] == kinds[4] == "Summar"


def test_drift_takes_turns_in_blocks() -> None:
    kinds = [content(prompt).startswith("Repeat the following") for prompt in workloads.load("drift:2", 8, seed=0)]
    assert kinds == [True, True, False, False] * 2
    assert workloads.load("drift", 40, seed=0) == workloads.load(f"drift:{workloads.DRIFT_LEN}", 40, seed=0)
    with pytest.raises(ConfigError, match="drift:N needs"):
        workloads.load("drift:0", 1, seed=0)


def test_random_ids_are_in_the_vocabulary() -> None:
    for prompt in workloads.load("random", 3, seed=0, vocab_size=7):
        assert prompt.token_ids is not None
        assert len(prompt.token_ids) == workloads.RANDOM_LEN
        assert set(prompt.token_ids) == set(range(7))


def test_random_needs_a_vocabulary() -> None:
    with pytest.raises(ConfigError, match="tokenizer"):
        workloads.load("random", 1, seed=0)


def test_unknown_workload_names_the_accepted_ones() -> None:
    with pytest.raises(ConfigError, match=r"Did you mean 'code-edit'\?.*jsonl:PATH"):
        workloads.load("code-edt", 1, seed=0)


def test_jsonl(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    messages = [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]
    file.write_text(json.dumps({"prompt": "text"}) + "\n\n" + json.dumps({"messages": messages}) + "\n")
    text, chat = workloads.load(f"jsonl:{file}", 2, seed=5)
    assert text.encode(Bytes()) == list(b"text")
    assert chat.encode(Bytes()) == [*b"ab", 0]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: not JSON"),
        ("[]", "line 2: a line is"),
        ("{}", "line 2: a line is"),
        ('{"prompt": "a", "messages": []}', "line 2: a line is"),
        ('{"prompt": ""}', "line 2: prompt must be"),
        ('{"messages": []}', "line 2: a line is"),
        ('{"messages": [{"content": "x"}]}', "line 2: a line is"),
    ],
)
def test_jsonl_errors_name_the_line(tmp_path: Path, line: str, message: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "fine"}\n' + line + "\n")
    with pytest.raises(ConfigError, match=message):
        workloads.load(f"jsonl:{file}", 1, seed=0)


def test_jsonl_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match="cannot read the workload /no/such/file"):
        workloads.load("jsonl:/no/such/file", 1, seed=0)


def test_too_few_prompts(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "one"}\n')
    with pytest.raises(ConfigError, match="has 1 different prompts, 2 were asked for"):
        workloads.load(f"jsonl:{file}", 2, seed=0)


@pytest.mark.parametrize("name", workloads.NAMES)
def test_warmup_prompts_are_others(name: str) -> None:
    prompts, warmup = workloads.load_with_warmup(name, 10, 3, seed=0, vocab_size=50)
    assert prompts == workloads.load(name, 10, seed=0, vocab_size=50)
    assert len(warmup) == 3
    assert not [prompt for prompt in warmup if prompt in prompts]


def test_warmup_of_a_file_that_is_used_up_is_chat(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "one"}\n{"prompt": "two"}\n')
    assert workloads.load_with_warmup(f"jsonl:{file}", 1, 1, seed=0)[1] == [Prompt(text="two")]
    assert workloads.load_with_warmup(f"jsonl:{file}", 2, 2, seed=0)[1] == workloads.load("chat", 2, seed=0)


# -- the ruler ----------------------------------------------------------------------------------------------------


def test_percentiles() -> None:
    assert percentiles([]) is None
    assert percentiles([5.0]) == {"p50": 5.0, "p99": 5.0, "mean": 5.0}
    assert percentiles([float(value) for value in range(101)]) == {"p50": 50.0, "p99": 99.0, "mean": 50.0}
    assert percentiles([4.0, 1.0]) == pytest.approx({"p50": 2.5, "p99": 3.97, "mean": 2.5})


def example_run(**changes: Any) -> Run:
    """Two requests: 5 tokens in 1 s, the first after 200 ms; 1 token after 500 ms, sent half a second later."""
    first = Record(num_prompt_tokens=10, sent=100.0, first=100.2, last=101.0, num_output_tokens=5, output=[1, 2, 3, 4, 5])
    second = Record(num_prompt_tokens=20, sent=100.5, first=101.0, last=101.0, num_output_tokens=1, output=[6])
    stats = SpecDecodeMetrics(num_spec_steps=2, num_draft_tokens=4, num_accepted_tokens=3, num_accepted_per_pos=[2, 1])
    return Run(**{"records": (first, second), "speculation": stats, "shares": TimeShares(0.1, 0.7, 0.2), "mean_k": 1.5, **changes})


def test_summary() -> None:
    summary = example_run().summary()
    assert summary["duration_s"] == pytest.approx(1.0)
    assert summary["output_tokens_per_s"] == pytest.approx(6.0)
    assert summary["num_prompt_tokens"] == 30
    assert summary["ttft_ms"]["p50"] == pytest.approx(350.0)
    assert summary["tpot_ms"]["p50"] == pytest.approx(200.0)   # one token alone has no time per further token
    assert summary["e2el_ms"]["p50"] == pytest.approx(750.0)
    assert summary["mean_acceptance_length"] == pytest.approx(2.5)
    assert summary["draft_acceptance_rate"] == pytest.approx(0.75)
    assert summary["acceptance_by_position"] == [1.0, 0.5]
    assert summary["time_shares"] == {"draft": 0.1, "verify": 0.7, "overhead": 0.2}
    assert summary["output_hash"] == hash_outputs([[1, 2, 3, 4, 5], [6]])
    assert summary["output_hash_of"] == "token ids"
    assert summary["invalid"] is False
    json.dumps(summary)


def test_summary_without_speculation_has_no_rates() -> None:
    summary = example_run(speculation=SpecDecodeMetrics(), shares=None, mean_k=None).summary()
    assert summary["mean_acceptance_length"] is None
    assert summary["draft_acceptance_rate"] is None
    assert summary["acceptance_by_position"] == []
    assert summary["time_shares"] is None


def test_one_failed_request_makes_the_run_invalid() -> None:
    failed = Record(num_prompt_tokens=0, sent=100.0, error="status 500: boom", output="")
    summary = example_run(records=(*example_run().records, failed)).summary()
    assert summary["invalid"] is True
    assert summary["errors"] == ["status 500: boom"]
    assert summary["ttft_ms"]["p50"] == pytest.approx(350.0)


def test_output_hash() -> None:
    assert hash_outputs([[1, 2], [3]]) == hash_outputs([[1, 2], [3]])
    different = ([[1, 2], [3]], [[1], [2, 3]], [[12], [3]], [[3], [1, 2]], [[1, 2, 3]], [[1, 2], [3], []])
    assert len(set(map(hash_outputs, different))) == len(different)
    assert hash_outputs(["a"]) == hashlib.sha256((1).to_bytes(8, "little") + b"a").hexdigest()


@pytest.mark.parametrize("name", ["num_prompts", "output_len", "concurrency"])
def test_load_options_are_checked(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} must be >= 1, got 0"):
        LoadOptions(**{name: 0})
    with pytest.raises(ConfigError, match="temperature"):
        LoadOptions(temperature=float("nan"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"request_rate": 0.0}, "request_rate must be a finite number > 0"),
        ({"request_rate": float("inf")}, "request_rate must be a finite number > 0"),
        ({"arrivals": "poisson"}, "poisson arrivals need a request_rate"),
        ({"arrivals": "ramp", "request_rate": 1.0}, "request_rate is for poisson arrivals, not for ramp"),
        ({"arrivals": "rolout"}, "Did you mean 'rollout'"),
    ],
)
def test_arrivals_are_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LoadOptions(**options)


# -- arrivals -----------------------------------------------------------------------------------------------------


def started(arrivals: Arrivals, num_prompts: int) -> list[int]:
    """How many are in flight after each start, when every request ends as soon as another one has to wait for it."""
    in_flight, found = 0, []
    for index in range(num_prompts):
        while arrivals.wait(index, in_flight, 0.0) > 0.0:
            in_flight -= 1
        in_flight += 1
        found.append(in_flight)
    return found


def test_a_closed_loop_holds_its_concurrency() -> None:
    assert started(Arrivals(LoadOptions(concurrency=3), 6), 6) == [1, 2, 3, 3, 3, 3]


def test_a_ramp_climbs_and_falls() -> None:
    counts = started(Arrivals(LoadOptions(concurrency=8, arrivals="ramp"), 40), 40)
    assert counts[0] == counts[-1] == 1
    assert max(counts) == counts[20] == 8
    assert counts[:20] == sorted(counts[:20])


def test_a_rollout_starts_everything_and_has_a_long_tail() -> None:
    arrivals = Arrivals(LoadOptions(concurrency=2, arrivals="rollout", output_len=10), 16)
    assert started(arrivals, 16)[-1] == 16
    assert [arrivals.output_len(index) for index in range(16)] == ([10] * 7 + [40]) * 2
    assert Arrivals(LoadOptions(arrivals="rollout", output_len=10), 3).output_len(2) == 40


def test_lengths_spread_around_their_mean_for_every_part_of_a_run() -> None:
    load = LoadOptions(output_len=96, output_range_ratio=0.5)
    lengths = [Arrivals(load, 64).output_len(index) for index in range(64)]
    assert min(lengths) in range(48, 52)
    assert max(lengths) in range(140, 145)
    for start in range(0, 64, 8):
        assert sum(lengths[start : start + 8]) / 8 == pytest.approx(96, rel=0.15)
    assert str(load).endswith("48 to 144 tokens each")


def test_poisson_gaps_have_the_rate_and_the_seed() -> None:
    arrivals = Arrivals(LoadOptions(request_rate=4.0, seed=1), 4000)
    due = [arrivals.due(index) or 0.0 for index in range(4000)]
    assert due[0] == 0.0
    assert due == sorted(due)
    assert due[-1] == pytest.approx(1000.0, rel=0.1)   # 6 standard deviations
    assert arrivals.wait(10, 10**6, due[10] - 0.5) == pytest.approx(0.5)
    assert arrivals.wait(10, 10**6, due[10]) == 0.0
    assert Arrivals(LoadOptions(request_rate=4.0, seed=2), 4000).due(5) != due[5]


# -- comparing ----------------------------------------------------------------------------------------------------


def run_of(seconds: float, output: list[int]) -> Run:
    record = Record(1, sent=10.0, first=10.1, last=10.0 + seconds, num_output_tokens=12, output=output)
    return Run((record,), SpecDecodeMetrics(), None, None)


def test_compare_is_the_ratio_of_medians_with_the_spread_of_neighbours() -> None:
    runs_a = [run_of(seconds, [1]) for seconds in (4.0, 6.0, 2.0)]      # 3, 2, 6 tokens/s
    runs_b = [run_of(seconds, [1]) for seconds in (2.0, 6.0, 1.0)]      # 6, 2, 12
    result = report.compare(runs_a, runs_b)
    assert result["ratio"] == pytest.approx(2.0)
    assert result["ratios"] == pytest.approx([2.0, 1.0, 2.0])
    assert (result["ratio_min"], result["ratio_max"]) == pytest.approx((1.0, 2.0))
    assert result["median_output_tokens_per_s"] == pytest.approx({"a": 3.0, "b": 6.0})
    assert result["outputs_equal"] is True
    assert result["invalid"] is False


def test_compare_tells_when_outputs_differ() -> None:
    result = report.compare([run_of(1.0, [1]), run_of(1.0, [2])], [run_of(1.0, [1]), run_of(1.0, [3])])
    assert result["outputs_equal"] is False
    assert result["equal_outputs_share"] == 0.5


# -- the report ---------------------------------------------------------------------------------------------------


def test_the_last_line_is_the_document(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = example_run()
    file = tmp_path / "result.json"
    report.print_table("title", {"": run})
    code = report.finish(report.document("throughput", "headway bench throughput", **run.summary()), report.check_output(str(file)))
    assert code == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("title")
    document = json.loads(lines[-1])
    assert document == json.loads(file.read_text())
    assert document["command"] == "headway bench throughput"
    assert {"commit", "versions", "hardware", "output_hash", "output_tokens_per_s", "tpot_ms", "ttft_ms", "mean_k"} <= document.keys()


def test_an_invalid_run_exits_with_1_and_still_prints_the_document(capsys: pytest.CaptureFixture[str]) -> None:
    run = example_run(records=(Record(0, 1.0, error="status 500", output=""),))
    assert report.finish(report.document("serve", "x", **run.summary()), None) == 1
    captured = capsys.readouterr()
    assert json.loads(captured.out.splitlines()[-1])["invalid"] is True
    assert "invalid run: status 500" in captured.err


def test_the_table_has_a_column_per_run_and_no_holes(capsys: pytest.CaptureFixture[str]) -> None:
    report.print_table("two", {"left": example_run(), "right": example_run(shares=None, mean_k=None, speculation=SpecDecodeMetrics())})
    text = capsys.readouterr().out
    assert "left" in text
    assert "right" in text
    assert all(label in text for label, _ in report.ROWS)


def test_output_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is a directory"):
        report.check_output(str(tmp_path))
    with pytest.raises(ConfigError, match="there is no directory"):
        report.check_output(str(tmp_path / "no" / "file"))
    assert report.check_output(None) is None


# -- provenance ---------------------------------------------------------------------------------------------------


def test_commit_says_whether_the_tree_is_dirty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import subprocess

    def git(*words: str) -> None:
        subprocess.run(["git", "-C", str(tmp_path), "-c", "user.name=n", "-c", "user.email=e", *words], check=True, capture_output=True)

    file = tmp_path / "__init__.py"
    monkeypatch.setattr(environment, "__file__", str(tmp_path / "environment.py"))
    git("init")
    assert environment.commit() is None   # a checkout, but of something else
    file.write_text("")
    git("add", ".")
    git("commit", "-m", "one")
    found = environment.commit()
    assert found is not None
    assert len(found["sha"]) == 40
    assert found["dirty"] is False
    file.write_text("x = 1\n")
    assert environment.commit() == {"sha": found["sha"], "dirty": True}


def test_environment_is_json_and_names_the_machine() -> None:
    found = json.loads(json.dumps(environment.describe()))
    assert found["versions"].keys() >= {"headway", "python", "torch", "numpy"}
    assert found["hardware"]["cores"] >= 1
    assert found["hardware"]["memory_bytes"] > 2**28
    assert isinstance(found["hardware"]["cpu"], str)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
def test_the_age_of_the_process() -> None:
    first, second = environment.seconds_since_start(), environment.seconds_since_start()
    assert first is not None
    assert second is not None
    assert 0 < first <= second


def test_peak_memory_grows_with_what_is_held() -> None:
    environment.forget_peak_memory()
    before = environment.peak_memory_bytes()
    with mmap.mmap(-1, 64 << 20) as block:   # pages of its own: a bytearray may reuse memory that is already held
        block.write(b"x" * len(block))
        grown = environment.peak_memory_bytes()
    assert before > 1 << 20
    assert grown - before > 32 << 20


def test_options_have_help() -> None:
    import dataclasses

    assert all(field.metadata["help"] for field in dataclasses.fields(LoadOptions))
