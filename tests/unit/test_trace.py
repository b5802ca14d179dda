"""Traces: what is written is what is read, and what cannot be read is named."""

from __future__ import annotations

import contextlib
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headway.config import EngineConfig, SpeculativeConfig
from headway.control.policy import BatchView, SequenceView
from headway.engine.engine import Engine
from headway.errors import ConfigError
from headway.sampling_params import SamplingParams
from headway.telemetry.trace import Trace, TraceWriter, read_trace
from headway.tune.replay import World
from headway.types import DrafterFeedback, Feedback, Forecast, LookupFeedback, Request, SequenceFeedback, ShadowFeedback
from tests.tiny import tiny_model_dir

HEADER = {"engine": "test", "max_k": 4, "drafters": ["suffix"]}
FEEDBACK = Feedback(
    step=3,
    sequences=(SequenceFeedback(7, "suffix", 4, 4, 3, 2, 100, (0.5, 0.25, 0.125)), SequenceFeedback(9, "none", 0, 0, 0, 0, 40)),
    num_prefill_tokens=11, num_tokens=16, num_context_tokens=151, draft_ms=0.25, verify_ms=10.5, step_ms=11.125, num_rows=3, num_waiting=6,
    policy_ms=0.125, reason="edge", forecast=Forecast(10.0, 3.5, 8.0), drafters=(DrafterFeedback("suffix", 2, 4, 0, 4, 0.25),),
    shadows=(ShadowFeedback(9, "ngram", 0, 3, 1, (0.5, 0.25, 0.125), 38),), lookups=(LookupFeedback(7, "ngram", 4, 2),),
)
VIEW = BatchView(
    step=3,
    sequences=tuple(SequenceView(i, 100, 5, True, max_k, True, 0, 0, 0) for i, max_k in ((7, 4), (9, 2), (11, 1))),
    num_waiting=6, num_free_blocks=1, token_budget=64, drafters=("suffix",), max_k=4,
)


def written(path: Path, *steps: Feedback, **options: Any) -> list[str]:
    writer = TraceWriter(path, HEADER, **options)
    for feedback in steps:
        writer.write(VIEW, feedback)
    writer.close()
    return path.read_text(encoding="utf-8").splitlines()


def damaged(path: Path, line: int, text: str) -> Path:
    lines = written(path, FEEDBACK, FEEDBACK)
    lines[line] = text
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def changed(**values: Any) -> str:
    record = {
        "step": 0, "at_ms": 1.0, "num_waiting": 0, "num_rows": 1, "num_prefill_tokens": 0, "num_tokens": 1, "num_context_tokens": 1,
        "draft_ms": 0, "verify_ms": 1, "step_ms": 1, "seq_id": [0], "num_context": [1], "max_k": [2], "drafter": ["suffix"],
        "k": [2], "num_proposed": [2], "num_drafts": [2], "num_accepted": [1], "confidence": [None],
    }
    return json.dumps(record | values)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    written(tmp_path / "t", FEEDBACK, replace(FEEDBACK, step=4))
    trace = read_trace(tmp_path / "t")
    assert trace.header == {"format": "headway-trace", "version": 1, **HEADER}
    assert (trace.max_k, trace.drafters) == (4, ("suffix",))
    first, second = trace.steps
    assert first.feedback == FEEDBACK
    assert first.max_k == (4, 2)
    assert second.feedback.step == 4
    assert 0.0 <= first.at_ms <= second.at_ms


def test_one_line_per_step_and_numpy_counts_are_numbers(tmp_path: Path) -> None:
    odd = replace(FEEDBACK.sequences[0], k=np.int64(4), num_drafts=np.int64(3))   # type: ignore[arg-type]
    lines = written(tmp_path / "t", replace(FEEDBACK, sequences=(odd,)))
    assert len(lines) == 2
    assert read_trace(tmp_path / "t").steps[0].feedback.sequences[0].k == 4


def test_numbers_that_are_none_do_not_stop_a_step(tmp_path: Path) -> None:
    lost = replace(FEEDBACK.sequences[0], confidence=(math.nan, 0.5))
    written(tmp_path / "t", replace(FEEDBACK, sequences=(lost,), step_ms=math.nan))
    read = read_trace(tmp_path / "t").steps[0].feedback
    confidence = read.sequences[0].confidence
    assert confidence is not None
    assert math.isnan(confidence[0])
    assert confidence[1] == 0.5
    assert read.step_ms == 0.0


def test_a_trace_ends_at_its_limit_with_a_whole_line(tmp_path: Path) -> None:
    lines = written(tmp_path / "t", *[FEEDBACK] * 50, max_bytes=2000)
    assert 2 < len(lines) < 20
    assert len(read_trace(tmp_path / "t").steps) == len(lines) - 1


def test_whole_lines_reach_the_file_while_the_engine_runs(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path / "t", HEADER)
    for _ in range(500):
        writer.write(VIEW, FEEDBACK)
    data = (tmp_path / "t").read_bytes()
    assert data.endswith(b"\n")
    assert len(data) > 1 << 16
    writer.close()
    assert len(read_trace(tmp_path / "t").steps) == 500


def test_a_full_disk_ends_the_trace_and_not_the_engine(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    writer = TraceWriter("/dev/full", HEADER)
    writer.write(VIEW, FEEDBACK)
    writer.close()
    assert "ends here" in caplog.text


def test_a_file_that_cannot_be_made(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot write the trace .*no/t"):
        TraceWriter(tmp_path / "no" / "t", HEADER)


@pytest.mark.parametrize(
    ("line", "text", "message"),
    [
        (0, '{"hello": 1}', "is not a trace: its first line"),
        (0, "once upon a time", "is not a trace: its first line"),
        (0, '{"format": "headway-trace", "version": 2}', "version 2; this Headway reads version 1"),
        (2, "{", "line 3: not JSON"),
        (2, "[1]", "line 3: a step must be a JSON object"),
        (1, changed(step=-1), "line 2: step must be a whole number >= 0, got -1"),
        (1, changed(step_ms="fast"), "line 2: step_ms must be a number of milliseconds"),
        (1, changed(k=3), "line 2: k must be a list"),
        (1, changed(k=[]), "line 2: the columns differ in length: .*k 0"),
        (1, changed(num_accepted=[3]), "line 2: needs num_accepted <= num_drafts"),
        (1, changed(drafter=[4]), "line 2: drafter must be a name, got 4"),
        (1, changed(forecast=[1.0]), "line 2: an entry of forecast must be"),
        (1, changed(shadows=[[1, "ngram"]]), "line 2: an entry of shadows must be"),
        (1, changed(shadows=[[1, "ngram", -1, 2, 0, None]]), "line 2: num_verified must be a whole number >= 0, got -1"),
        (1, changed(drafting=[["ngram", 1, "x", 0, 2, 0.1]]), "line 2: num_steps must be a whole number"),
        (1, changed(confidence=[["x"]]), "line 2: confidence must be numbers from 0 to 1"),
        (1, changed(confidence=5), "line 2: confidence must be a list"),
        (0, '{"format": "headway-trace", "version": 1, "max_k": "x"}', "line 1: max_k must be a whole number"),
        (0, '{"format": "headway-trace", "version": 1, "drafters": "suffix"}', "line 1: drafters must be a list"),
        (0, "[" * 5000, "is not a trace: its first line"),
        (1, "[" * 5000, "line 2: not JSON"),
    ],
)
def test_a_foreign_or_damaged_file_is_named(tmp_path: Path, line: int, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_trace(damaged(tmp_path / "t", line, text))


def test_lookups_are_read_by_their_older_name(tmp_path: Path) -> None:
    lines = written(tmp_path / "t", FEEDBACK)
    assert '"lookups"' in lines[1]
    (tmp_path / "t").write_text("\n".join(lines).replace('"lookups"', '"looks"') + "\n", encoding="utf-8")
    assert read_trace(tmp_path / "t").steps[0].feedback.lookups == FEEDBACK.lookups


def test_a_cut_last_line_says_what_is_left(tmp_path: Path) -> None:
    written(tmp_path / "t", FEEDBACK, FEEDBACK)
    data = (tmp_path / "t").read_bytes()
    (tmp_path / "t").write_bytes(data[:-40])
    with pytest.raises(ConfigError, match=r"line 3: the line is cut short.* Whole steps before it: 1"):
        read_trace(tmp_path / "t")


def test_a_trace_without_steps_and_a_missing_file(tmp_path: Path) -> None:
    written(tmp_path / "t")
    with pytest.raises(ConfigError, match="holds no step"):
        read_trace(tmp_path / "t")
    with pytest.raises(ConfigError, match=r"cannot read the trace .*nothing"):
        read_trace(tmp_path / "nothing")


def test_unknown_keys_are_kept_in_the_header_and_ignored_in_a_step(tmp_path: Path) -> None:
    trace = read_trace(damaged(tmp_path / "t", 1, changed(mood="edgy")))
    assert trace.steps[0].feedback.num_tokens == 1
    assert Trace({"drafters": []}, trace.steps).drafters == ("suffix",)


def test_the_engine_writes_every_step(tmp_path: Path) -> None:
    directory = tiny_model_dir(tmp_path)
    engine = Engine(EngineConfig(
        model=str(directory), dtype="float32", kv_cache_memory_bytes=1 << 22, trace=str(tmp_path / "t"),
        speculative=SpeculativeConfig.parse({"method": "ngram", "num_speculative_tokens": 3, "policy": "static"}),
    ))
    for i in range(2):
        engine.add(Request(f"r{i}", [5, 6, 7] * 5, SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)))
    num_tokens = 0
    while engine.has_work():
        num_tokens += sum(len(delta.token_ids) for delta in engine.step())
    assert engine.trace is not None
    engine.trace.close()
    trace = read_trace(tmp_path / "t")
    assert len(trace.steps) == engine.metrics.num_steps
    sequences = [seq for step in trace.steps for seq in step.feedback.sequences]
    assert num_tokens == 40
    assert 0 <= sum(seq.num_accepted + 1 for seq in sequences) - num_tokens <= 2 * 3   # a last draft may reach beyond the end
    assert sum(seq.num_drafts for seq in sequences) > 0
    assert trace.header["max_k"] == 3
    assert trace.header["drafters"] == ["ngram"]


WRONG = st.sampled_from([
    None, "x", -1, 1.5, 2**70, True, [], {}, [None], [[]], [[1]], [["x", 1]], [-1], [2**70], ["suffix"], [[-1, "a", -1, -1, -1, [2]]],
])  # fmt: skip


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), wrong=WRONG)
def test_any_value_of_a_trace_is_read_and_replayed_or_refused(tmp_path: Path, data: st.DataObject, wrong: Any) -> None:
    path = tmp_path / "t"
    lines = written(path, FEEDBACK, FEEDBACK)
    number = data.draw(st.integers(0, 2))
    document = json.loads(lines[number])
    document[data.draw(st.sampled_from(sorted(document)))] = wrong
    lines[number] = json.dumps(document)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    with contextlib.suppress(ConfigError):
        World(read_trace(path)).fixed()
