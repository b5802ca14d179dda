"""`headway plan` as users run it: words, JSON, files that servers read, and one sentence for what cannot be."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from headway.cli.main import main
from headway.config import SpeculativeConfig
from tests.fixed_documents import commands, outputs
from tests.tiny import tiny_model_dir

ROOT = Path(__file__).parents[2]
GUIDE = ROOT / "docs" / "planning.md"
TARGET, DRAFT = (str(ROOT / "examples" / "models" / name) for name in ("llama-3.1-70b.json", "llama-3.2-1b.json"))


def plan(*words: str) -> int:
    return main(["plan", *words])


def answer(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert plan(*words, "--json") == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)   # Infinity and NaN are no JSON
    return found


def test_words_come_first_and_then_the_tables(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(TARGET, "--draft", DRAFT, "--gpu", "H100", "--tp", "4", "--draft-tp", "1", "--concurrency", "32") == 0
    words, _, tables = capsys.readouterr().out.partition("\n\n")
    assert 3 <= len(words.splitlines()) <= 8
    assert words.startswith("llama-3.1-70b fits on 4 x H100 (tp 4, pp 1): ")
    for part in ("on device 0", "devices 1 to 3 keep", "with draft_model", "assumed", "max-num-seqs 32", "expect 25% of error"):
        assert part in words, part
    assert "target's weights" in tables
    assert "pays from acceptance" in tables


def test_the_document_says_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(capsys, TARGET, "--draft", DRAFT, "--gpu", "H100", "--tp", "4", "--draft-tp", "1", "--acceptance", "0.7")
    [candidate] = found["candidates"]
    assert candidate["acceptance"]["by_position"] == [0.7]
    assert found["plain"]["num_tokens"] > candidate["capacity"]["num_tokens"] > 0
    assert len(candidate["capacity"]["devices"]) == 2
    best = next(row for row in candidate["rows"] if row["k"] == candidate["k"])
    assert best["throughput"] == max(row["throughput"] for row in candidate["rows"])
    assert set(candidate["throughput_by_load"]) == {"1", "2", "4", "8", "16"}


def test_the_least_tensor_parallelism_that_holds_the_load_is_taken(capsys: pytest.CaptureFixture[str]) -> None:
    def tp(*words: str) -> int:
        return int(answer(capsys, TARGET, "--method", "ngram", *words)["deployment"]["tp"])

    assert tp("--gpu", "H100") == 4
    assert tp("--gpu", "H100", "--concurrency", "1", "--input-len", "8") == 2
    assert tp("--gpu", "B200") == 1


def test_several_drafters_are_compared_and_unknown_acceptance_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(capsys, TARGET, "--draft", DRAFT, "--method", "ngram", "--method", "draft_model", "--gpu", "H200", "--tp", "2")
    kinds = {candidate["method"]: candidate for candidate in found["candidates"]}
    assert set(kinds) == {"draft_model", "ngram"}
    assert kinds["ngram"]["throughput_by_load"] == {}
    assert kinds["ngram"]["rows"][1]["throughput"] is None
    assert plan(TARGET, "--method", "ngram", "--gpu", "H200", "--tp", "2") == 0
    assert "measure it" in capsys.readouterr().out


def test_a_smaller_load_is_answered_where_not_all_fit(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(TARGET, "--gpu", "H200", "--tp", "2", "--concurrency", "200", "--input-len", "4000", "--method", "eagle3") == 0
    out = capsys.readouterr().out
    assert "too little for 200 in flight" in out
    assert "requests would wait" in out
    assert "is assumed (--draft names one)" in out


def test_this_machine_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = tiny_model_dir(tmp_path, "llama")
    found = answer(capsys, str(directory), "--gpu", "this-machine", "--method", "ngram", "--input-len", "32", "--output-len", "32")
    device = found["deployment"]["device"]
    assert device["bandwidth"] > 1e8
    assert device["flops"]["bf16"] > 1e8
    assert device["memory_bytes"] > 1 << 28


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--gpu", "H101"], "unknown device 'H101'. Did you mean 'H100'? Accepted: A100-40, A100-80, B200"),
        (["--tp", "1"], "on 1 x H100: for one request of 1,152 tokens device 0 needs 134.3 GiB of the 71.2 GiB that may be used, 63.2 GiB"),
        (["--tp", "1"], "it fits with --tp 2 or with --quantization fp8"),
        (["--tp", "4", "--draft", DRAFT, "--draft-tp", "3"], "--draft-tp 3 must divide --tp 4"),
        (["--tp", "3"], "--tp 3 does not divide the 64 attention heads of llama-3.1-70b; possible: 1, 2, 4"),
        (["--draft", "nowhere/at/all"], "nowhere/at/all is no model directory"),
        (["--method", "eagel"], "unknown method 'eagel'. Did you mean 'eagle'"),
        (["--method", "draft_model"], "draft_model needs a network: --draft names it"),
        (["--method", "ngram", "--draft", DRAFT, "--method", "eagle3", "--method", "mtp"], "with --draft give one method"),
        (["--method", "mtp"], "has no layers for multi-token prediction"),
        (["--quantization", "fp7"], "unknown quantization 'fp7'. Did you mean 'fp8'"),
        (["--acceptance", "70"], "acceptance must be numbers from 0 to 1"),
        (["--acceptance", "often"], "acceptance must be numbers from 0 to 1"),
        (["--concurrency", "0"], "concurrency must be >= 1"),
        (["--input-len", "200000"], "are longer than the 131072 that llama-3.1-70b attends to"),
        (["--max-model-len", "100"], "max_model_len 100 is less than input_len + output_len"),
        (["--gpu-memory-utilization", "1.5"], "gpu_memory_utilization must be above 0 and at most 1"),
        (["--trace", "missing.jsonl"], "missing.jsonl"),
        (["--gpu", "this-machine", "--tp", "2"], "this-machine is one device"),
        (["--method", "ngram", "--emit-dir", "out"], "give --acceptance or --trace"),
        (["--method", "eagle3", "--emit-dir", "out"], "the files name the eagle3 network: give it by --draft"),
    ],
)
def test_what_cannot_be_is_one_sentence(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert plan(TARGET, *words) == 2
    said = capsys.readouterr()
    assert message in said.err
    assert said.err.startswith("headway plan: error: ")
    assert said.err.count("\n") == 1
    assert said.out == ""
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "key", ["model_type", "hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "intermediate_size"]
)
def test_a_model_without_a_key_is_refused(key: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values = json.loads(Path(TARGET).read_text())
    del values[key]
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert plan(str(tmp_path)) == 2
    assert key in capsys.readouterr().err


# -- files ------------------------------------------------------------------------------------------------------------------


def emitted(folder: Path, *words: str) -> dict[str, str]:
    assert plan(TARGET, "--gpu", "H100", *words, "--emit-dir", str(folder)) == 0
    return {path.name: path.read_text() for path in folder.iterdir()}


def test_files_for_a_draft_model(tmp_path: Path) -> None:
    found = emitted(tmp_path / "out", "--tp", "4", "--draft", DRAFT, "--concurrency", "64", "--kv-dtype", "fp8", "--acceptance", "0.65")
    assert set(found) == {
        "headway.json", "vllm.json", "vllm.yaml", "sglang.txt", "trtllm-lower.yaml", "trtllm-upper.yaml", "trtllm-1.4.yaml", "llamacpp.txt"
    }
    vllm = yaml.safe_load(found["vllm.yaml"])
    assert vllm["tensor-parallel-size"] == 4
    assert vllm["kv-cache-dtype"] == "fp8"
    assert vllm["speculative-config"]["model"] == DRAFT
    assert SpeculativeConfig.parse(json.loads(found["headway.json"])["speculative_config"]) is not None
    newest = yaml.safe_load(found["trtllm-1.4.yaml"])
    assert newest["tensor_parallel_size"] == 4
    assert newest["kv_cache_config"] == {"dtype": "fp8"}
    speculative = newest["speculative_config"]
    assert speculative["speculative_model"] == DRAFT
    assert 0.0 < speculative["acceptance_rate_threshold"] < 1.0
    assert speculative["draft_len_schedule"][min(speculative["draft_len_schedule"])] == speculative["max_draft_len"]
    flags = shlex.split(found["sglang.txt"])
    assert flags[flags.index("--speculative-algorithm") + 1] == "STANDALONE"
    assert flags[flags.index("--max-running-requests") + 1] == "64"
    assert "--spec-draft-n-max" in found["llamacpp.txt"]


def test_vllm_gets_no_file_for_a_draft_that_it_would_refuse(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = emitted(tmp_path / "out", "--tp", "4", "--draft-tp", "1", "--draft", DRAFT)
    assert "vllm.json" not in found
    assert "not written: vllm.json: vLLM runs a draft_model on as many devices as the target, 4" in capsys.readouterr().out


# -- the guide --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("command", "expected"), list(zip(commands(GUIDE), outputs(GUIDE), strict=True)))
def test_the_guide_shows_what_the_command_prints(
    command: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """From the root of the repository; lines of a document are shorter, so only the order of the words counts."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.setenv("COLUMNS", "110")
    assert main(shlex.split(command)[1:]) == 0
    printed = capsys.readouterr().out.split()
    shown = [part.split() for part in expected.split("...\n")]
    for part in shown:
        assert any(printed[i : i + len(part)] == part for i in range(len(printed))), " ".join(part)
