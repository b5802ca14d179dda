"""`headway vllm config` and `check` where vLLM is not installed: flags, the rules, exit codes."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from typing import Any

import pytest

from headway.cli.main import main
from headway.errors import ConfigError
from headway.vllm import check, server_flags
from headway.vllm.check import Facts, facts_from_flags, judge
from headway.vllm.settings import k_table

GOOD = Facts(version="0.32.0", scheduler=server_flags.SCHEDULER, method="ngram", max_k=4, async_scheduling=False)


def errors(facts: Facts) -> list[str]:
    return [f"{finding.what}: {finding.why}" for finding in judge(facts) if finding.level == check.ERROR]


def warnings(facts: Facts) -> list[str]:
    return [f"{finding.what}: {finding.why}" for finding in judge(facts) if finding.level == check.WARNING]


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    code = main(["vllm", *words])
    return code, capsys.readouterr().out


@pytest.mark.parametrize("method", server_flags.METHODS)
def test_the_flags_that_config_prints_pass_the_check(capsys: pytest.CaptureFixture[str], method: str) -> None:
    model = ["--draft-model", "some/model"] if server_flags.METHODS[method].needs_model else []
    code, text = run(capsys, "config", "org/model", "--method", method, *model)
    assert code == 0
    words = shlex.split(text.replace("\\\n", " "))
    assert words[:3] == ["vllm", "serve", "org/model"]
    code, text = run(capsys, "check", "--assume", "0.32.0", *words)
    assert code == 0, text
    assert "ERROR" not in text
    assert "warning" not in text


def test_one_flag_beside_a_speculative_config_is_enough() -> None:
    found = server_flags.serve_flags(method="ngram")
    assert found == {"--scheduler-cls": server_flags.SCHEDULER, "--speculative-config": {"method": "ngram", "num_speculative_tokens": 8}}


def test_config_carries_policy_and_trace(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("config", "M", "--max-k", "3", "--policy", "goodput:tpot_slo_ms=30", "--trace", "steps.jsonl", "--json")
    code, text = run(capsys, *words)
    assert code == 0
    found = json.loads(text)
    assert found["--additional-config"] == {"headway": {"policy": {"name": "goodput", "tpot_slo_ms": 30}, "trace": "steps.jsonl"}}
    assert found["--speculative-config"]["num_speculative_tokens"] == 3


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--method", "egle"), "Did you mean 'eagle'?"),
        (("--method", "eagle3"), "needs --draft-model"),
        (("--method", "ngram", "--draft-model", "x"), "takes no --draft-model"),
        (("--policy", "gudput"), "goodput"),
    ],
)
def test_config_refuses_what_cannot_work(capsys: pytest.CaptureFixture[str], words: tuple[str, ...], said: str) -> None:
    assert main(["vllm", "config", "M", *words]) == 2
    assert said in capsys.readouterr().err


def test_without_vllm_the_check_says_so_and_judges_the_flags_all_the_same(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check, "installed_version", lambda: None)
    words = ["M", "--scheduler-cls", server_flags.SCHEDULER, "-sc", '{"method": "eagle", "model": "e"}', "-dp", "4"]
    code, text = run(capsys, "check", *words)
    assert code == 2
    assert "vLLM is not installed here" in text
    assert "data parallel (4) with eagle" in text
    assert "num_speculative_tokens is missing" in text


def test_json_says_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    code, text = run(capsys, "check", "--json", "--assume=0.99", "M", "--async-scheduling", "-sc.method", "ngram")
    found = json.loads(text)
    assert code == 2
    assert found["works"] is False
    assert found["facts"]["version"] == "0.99"
    assert {finding["level"] for finding in found["findings"]} >= {"error", "warning", "note"}


def test_a_good_setup_has_no_errors_and_no_warnings() -> None:
    assert errors(GOOD) == []
    assert warnings(GOOD) == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"version": None}, "not installed"),
        ({"missing": ("vLLM 9 has no Scheduler.schedule",)}, "has no Scheduler.schedule"),
        ({"refusal": "unrecognized arguments: --x"}, "unrecognized arguments"),
        ({"scheduler": None}, "nothing of Headway"),
        ({"scheduler": "other.Scheduler"}, "other.Scheduler"),
        ({"method": None}, "no --speculative-config"),
        ({"max_k": None}, "num_speculative_tokens is missing"),
        ({"additional": {"headway": {"polizy": "x"}}}, "Did you mean 'policy'"),
        ({"additional": {"headway": {"trace": "/no/such/folder/x.jsonl"}}}, "folder does not exist"),
        ({"async_asked": True}, "--async-scheduling with ngram"),
        ({"method": "custom_class", "model": server_flags.PROPOSER, "v2_runner": True}, "model runner V2 has no custom_class"),
        ({"method": "ngram_gpu", "device": "cpu"}, "ngram_gpu needs a GPU"),
        ({"method": "mtp", "data_parallel": 2}, "hang in the drafter's collectives"),
        ({"pipeline_parallel": 2}, "no attribute 'drafter'\" (gpu_model_runner.py, initialize_kv_cache_tensors"),
        ({"method": "eagle3", "pipeline_parallel": 2, "async_scheduling": False}, "pipeline parallel (2) with eagle3"),
    ],
)
def test_what_cannot_work_is_an_error(changes: dict[str, Any], said: str) -> None:
    found = errors(replace(GOOD, **changes))
    assert len(found) == 1
    assert said in found[0]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"version": "0.33.1"}, "not tested"),
        ({"additional": {"headway": {"enabled": False}}}, "switched off"),
        ({"method": "eagle3", "async_scheduling": True, "table": [[1, 8, 4], [9, 64, 0]]}, "[[1, 1, 4], [2, 2, 3]"),
        ({"method": "eagle3", "table": k_table(4), "cudagraphs": "FULL_DECODE_ONLY"}, "run eagerly"),
        ({"rejection": "synthetic"}, "not the model's"),
        ({"pipeline_parallel": 2, "v2_runner": True}, "not tested"),
        ({"max_num_seqs": 256, "kv_tokens": 2048}, "50%"),
        ({"environment": {"VLLM_PLUGINS": "other"}}, "VLLM_PLUGINS"),
        ({"scheduler": None, "method": "custom_class", "model": server_flags.PROPOSER}, "without its scheduler"),
    ],
)
def test_what_loses_something_is_a_warning(changes: dict[str, Any], said: str) -> None:
    facts = replace(GOOD, **changes)
    assert errors(facts) == []
    assert len(found := warnings(facts)) == 1
    assert said in found[0]


def test_data_parallel_is_fine_without_collectives() -> None:
    assert errors(replace(GOOD, data_parallel=8)) == []


def test_flags_are_read_in_each_of_vllms_spellings() -> None:
    spec = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 5}
    by_json = ["M", "--speculative-config", json.dumps(spec), "--tensor_parallel_size=2", "--enforce-eager", "--no-async-scheduling"]
    dotted = ["-sc.method", "ngram", "M", "-sc.num_speculative_tokens=4", "--speculative-config.prompt_lookup_max", "5", "-tp", "2",
              "--enforce-eager", "--host", "x", "--no-async-scheduling"]
    expected = {"speculative_config": spec, "tensor_parallel_size": 2, "enforce_eager": True, "async_scheduling": False}
    assert server_flags.read_flags(by_json) == expected
    assert server_flags.read_flags(dotted) == expected


@pytest.mark.parametrize(
    "words", [["-sc", "{"], ["-sc", "[]"], ["--additional-config"], ["-tp", "two"]], ids=["json", "not an object", "no value", "number"]
)
def test_a_value_that_is_none_is_an_error(words: list[str]) -> None:
    with pytest.raises(ConfigError):
        server_flags.read_flags(words)


def test_flags_alone_decide_what_they_can() -> None:
    given = {"speculative_config": {"method": "suffix"}, "compilation_config": {"cudagraph_mode": "full"}, "async_scheduling": True}
    facts = facts_from_flags(given, "0.32", {"VLLM_USE_V2_MODEL_RUNNER": "0"})
    assert (facts.async_scheduling, facts.async_asked, facts.v2_runner, facts.cudagraphs) == (False, True, False, "FULL")
