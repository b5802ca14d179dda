"""Every command on a real (tiny) model, and the benchmarks against a real server."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from headway.cli.main import main
from headway.engine.outputs import TextOutput
from headway.llm import LLM
from headway.sampling_params import SamplingParams
from tests.integration.conftest import LiveServer, live_server
from tests.tiny import tiny_model_dir

FAST = ["--dtype", "float32", "--kv-cache-memory-bytes", "8M"]
# Prompts of the workload chat and these answers fit the tiny model's context of 512.
LOAD = ["--workload", "chat", "--output-len", "80", "--num-prompts", "5", "--warmup", "1"]
# Drafts whatever it costs: the default policy decides by the time steps take.
DRAFTING = ["--spec-method", "ngram", "--spec-tokens", "3", "--spec-policy", "static"]
SPECULATION = [["--spec", "off"], ["--spec", "default"], DRAFTING]


@pytest.fixture
def headway(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[str, str]]:
    """Runs a command in this process and returns what it wrote to stdout and stderr."""

    def run(*words: str, code: int = 0) -> tuple[str, str]:
        capsys.readouterr()
        assert main([*words]) == code
        captured = capsys.readouterr()
        return captured.out, captured.err

    return run


Headway = Callable[..., tuple[str, str]]


def document(out: str) -> dict[str, Any]:
    return dict(json.loads(out.splitlines()[-1]))


# -- model and configuration --------------------------------------------------------------------------------------


def test_pull_prints_the_directory_last(headway: Headway, tiny_dir: Path) -> None:
    out, _ = headway("pull", str(tiny_dir))
    assert Path(out.splitlines()[-1]) == tiny_dir


def test_config_resolves_what_model_and_machine_decide(headway: Headway, tiny_dir: Path) -> None:
    out, _ = headway("config", str(tiny_dir), "--json", "--dtype", "float32", "--port", "0")
    settings = json.loads(out)
    assert settings["model"] == {"value": str(tiny_dir), "source": "flag MODEL"}
    assert settings["dtype"] == {"value": "float32", "source": "flag --dtype"}
    assert settings["max_model_len"] == {"value": 512, "source": "model"}
    assert settings["kv_cache_memory_bytes"]["source"] == "machine"
    assert settings["kv_cache_memory_bytes"]["value"] > 0
    assert settings["device"]["source"] == settings["num_threads"]["source"] == "machine"
    assert settings["block_size"] == {"value": 64, "source": "default"}
    assert settings["speculative.method"] == {"value": "suffix", "source": "default"}
    assert settings["server.port"] == {"value": 0, "source": "flag --port"}


def test_config_resolves_a_context_that_the_pool_limits(headway: Headway, tiny_dir: Path) -> None:
    out, _ = headway("config", str(tiny_dir), "--json", "--dtype", "float32", "--kv-cache-memory-bytes", "64K")
    settings = json.loads(out)
    assert settings["max_model_len"]["value"] < 512
    assert settings["max_model_len"]["source"] == "machine"


def test_config_as_text_never_shows_the_key(headway: Headway, tiny_dir: Path) -> None:
    out, _ = headway("config", str(tiny_dir), "--api-key", "secret")
    assert "secret" not in out
    assert re.search(r"^server.api_key +\"\(given\)\" +flag --api-key$", out, re.MULTILINE)


# -- generate and chat --------------------------------------------------------------------------------------------


def test_generate_writes_the_same_with_and_without_speculation(headway: Headway, tiny_dir: Path) -> None:
    words = ("generate", str(tiny_dir), *FAST, "-p", "one two one two one", "--max-tokens", "40", "--ignore-eos")
    outputs = [headway(*words, *speculation) for speculation in SPECULATION]
    assert len({out for out, _ in outputs}) == 1
    assert outputs[0][0].startswith("one two one two one")
    assert "40 tokens in" in outputs[0][1]
    assert "nothing drafted" in outputs[0][1]
    assert "drafts accepted" in outputs[2][1]


def test_generate_writes_the_prompt_once(headway: Headway, tiny_dir: Path) -> None:
    prompt = "The secret is 42 \ufffd"
    out, _ = headway("generate", str(tiny_dir), *FAST, "-p", prompt, "--max-tokens", "5", "--ignore-eos")
    llm = LLM(str(tiny_dir), dtype="float32", kv_cache_memory_bytes=8 << 20)
    [answer] = llm.generate(prompt, SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True))
    assert out == llm.get_tokenizer().decode(answer.prompt_token_ids + answer.outputs[0].token_ids) + "\n"


def test_generate_says_when_it_cannot_go_on(headway: Headway, tiny_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("injected")

    monkeypatch.setattr(TextOutput, "flush", fails)
    with pytest.raises(SystemExit, match="could not be written"):
        headway("generate", str(tiny_dir), *FAST, "-p", "x", "--max-tokens", "5", "--ignore-eos")


def test_generate_keeps_to_a_schema(headway: Headway, tiny_dir: Path, tmp_path: Path) -> None:
    file = tmp_path / "schema.json"
    file.write_text('{"enum": ["red", "blue"]}', encoding="utf-8")
    words = ("generate", str(tiny_dir), *FAST, "--chat", "-p", "colour?", "--json-schema")
    assert headway(*words, str(file))[0] in ('"red"\n', '"blue"\n')
    file.write_text('{"uniqueItems": true}', encoding="utf-8")
    assert "uniqueItems" in headway(*words, str(file), code=2)[1]
    assert "No such file" in headway(*words, str(tmp_path / "none"), code=2)[1]


def test_generate_reads_standard_input_and_chats(headway: Headway, tiny_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello"))
    out, _ = headway("generate", str(tiny_dir), *FAST, "--chat", "--max-tokens", "5")
    assert not out.startswith("hello")


def test_generate_without_a_prompt(headway: Headway, tiny_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(" \n"))
    _, err = headway("generate", str(tiny_dir), code=2)
    assert "no prompt" in err


def test_generate_with_a_prompt_that_does_not_fit(headway: Headway, tiny_dir: Path) -> None:
    _, err = headway("generate", str(tiny_dir), *FAST, "-p", "x" * 600, code=2)
    assert "600 tokens" in err


def test_show_drafts_marks_what_was_drafted(headway: Headway, tiny_dir: Path) -> None:
    words = ("generate", str(tiny_dir), *FAST, *DRAFTING, "-p", "abcabcabc", "--max-tokens", "60", "--ignore-eos")
    plain, _ = headway(*words)
    marked, err = headway(*words, "--show-drafts")
    assert "[+drafted and accepted]" in err
    accepted, drafted = map(int, re.search(r"(\d+) of (\d+) drafts accepted", err).groups())  # type: ignore[union-attr]
    assert 0 < accepted < drafted
    assert "[+" in marked
    assert "[-" in marked
    assert "\x1b" not in marked
    assert plain.startswith("abcabcabc")


def test_chat_keeps_the_conversation_until_it_is_reset(headway: Headway, tiny_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = "hello\n\nhello\n/reset\nhello\n/exit\nnever\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    out, err = headway("chat", str(tiny_dir), *FAST, "--max-tokens", "8", "--temperature", "0", "--ignore-eos", "--system", "be brief")
    assert err.count("8 tokens in") == 3
    first, second, third = _answers(tiny_dir)
    assert out == f"{first}\n{second}\n{third}\n"
    assert first == third


def _answers(directory: Path) -> tuple[str, str, str]:
    """What the engine says to the same conversation: once, after its own answer, and once more from the start."""
    from headway import LLM, SamplingParams

    llm = LLM(str(directory), dtype="float32", kv_cache_memory_bytes=8 << 20, speculative_config=None)
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    opening = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]

    def ask(messages: list[dict[str, str]]) -> str:
        return llm.chat(messages, params)[0].outputs[0].text

    first = ask(opening)
    second = ask([*opening, {"role": "assistant", "content": first}, {"role": "user", "content": "hello"}])
    return first, second, ask(opening)


def test_a_question_that_does_not_fit_does_not_end_the_chat(headway: Headway, tiny_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("x" * 600 + "\nhello\n"))
    _, err = headway("chat", str(tiny_dir), *FAST, "--max-tokens", "4", "--ignore-eos")
    assert "/reset starts over" in err
    assert "4 tokens in" in err


# -- benchmarks in process ----------------------------------------------------------------------------------------


def test_throughput_writes_the_same_tokens_however_they_are_computed(headway: Headway, tiny_dir: Path) -> None:
    hashes = set()
    for speculation in SPECULATION:
        for concurrency in ("1", "4"):
            out, _ = headway("bench", "throughput", str(tiny_dir), *FAST, *LOAD, "--concurrency", concurrency, *speculation)
            result = document(out)
            assert result["num_output_tokens"] == 5 * 80
            assert result["invalid"] is False
            plain = "off" in speculation and concurrency == "1"   # what the ceiling is said for
            assert (result["ceiling_share"] is not None) == ("of the ceiling of" in out) == plain
            assert not plain or result["ceiling_share"] > 0
            hashes.add(result["output_hash"])
    assert len(hashes) == 1


def test_throughput_document(headway: Headway, tiny_dir: Path, tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    speculation = tuple(DRAFTING)
    words = ("bench", "throughput", str(tiny_dir), *FAST, *LOAD, *speculation, "--seed", "3", "--output", str(file))
    out, _ = headway(*words)
    result = document(out)
    assert result == json.loads(file.read_text())
    assert result["benchmark"] == "throughput"
    assert result["command"].startswith("headway bench throughput ")
    assert result["load"]["seed"] == 3
    assert result["config"]["seed"] == 3
    assert result["config"]["speculative.method"] == "ngram"
    assert (result["dtype"], result["device"]) == ("float32", "cpu")
    assert result["ttft_ms"]["p50"] > 0
    assert result["tpot_ms"]["p99"] >= result["tpot_ms"]["p50"] > 0
    assert sum(result["time_shares"].values()) == pytest.approx(1.0)
    assert result["num_draft_tokens"] >= result["num_accepted_tokens"] > 0
    assert result["mean_acceptance_length"] > 1.0
    assert result["mean_k"] > 0.0
    roofline = result["roofline"]
    assert result["ready_s"] > 0
    assert 0 < result["kv_cache_bytes"] <= 8 << 20
    assert result["peak_memory_bytes"] > result["kv_cache_bytes"] + roofline["weight_bytes"]
    assert roofline["weight_bytes"] == roofline["bytes_per_token"] > 0   # tied: the output layer reads the whole table
    assert roofline["kv_bytes_per_token"] == 2 * 2 * 2 * 16 * 4         # keys and values, layers, KV heads, head_dim, float32
    assert roofline["ceiling_empty_context"] > roofline["ceiling_context_1024"] > 0
    assert out.index("memory bandwidth") < out.index("output tokens/s")


def test_throughput_with_a_prompt_that_does_not_fit(headway: Headway, tiny_dir: Path) -> None:
    _, err = headway("bench", "throughput", str(tiny_dir), *FAST, "--workload", "code-edit", "--num-prompts", "2", "--warmup", "0", code=2)
    assert "prompt 0 of the workload cannot be served" in err


def test_compare_two_configurations(headway: Headway, tiny_dir: Path) -> None:
    out, _ = headway("bench", "compare", str(tiny_dir), *FAST, *LOAD, "--repeats", "2", "--a", "--spec off", "--b", "--spec-method ngram")
    result = document(out)
    assert result["benchmark"] == "compare"
    assert result["outputs_equal"] is True
    assert len(result["ratios"]) == 2
    assert result["ratio_min"] <= result["ratio_max"]
    assert result["ratio"] > 0
    assert (result["a"]["flags"], result["b"]["flags"]) == ("--spec off", "--spec-method ngram")
    assert result["a"]["config"]["speculative"] is None
    assert result["b"]["config"]["speculative.method"] == "ngram"
    first, second = (run["output_hash"] for run in result["a"]["runs"])
    assert first != second   # every repeat has prompts of its own


def test_flags_of_an_arm_win_over_the_common_ones(headway: Headway, tiny_dir: Path) -> None:
    common = ("--spec-method", "ngram", "--max-num-seqs", "8")
    out, _ = headway(
        "bench", "compare", str(tiny_dir), *FAST, *LOAD, *common, "--repeats", "1", "--a", "--spec off", "--b", "--max-num-seqs 4"
    )
    result = document(out)
    assert result["a"]["config"]["speculative"] is None
    assert result["b"]["config"]["speculative.method"] == "ngram"
    assert (result["a"]["config"]["max_num_seqs"], result["b"]["config"]["max_num_seqs"]) == (8, 4)


def test_a_sweep_is_measured_continued_and_reported(headway: Headway, tiny_dir: Path, tmp_path: Path) -> None:
    words = (
        "bench", "sweep", str(tiny_dir), *FAST, "--workloads", "chat@1,chat@2", "--patterns", "rollout", "--num-prompts", "2",
        "--pattern-workload", "chat", "--pattern-concurrency", "2", "--configurations", "off,suffix-k2,batch_table",
        "--output-len", "16", "--output-range-ratio", "0", "--output", str(tmp_path / "s.json"),
    )
    out, err = headway(*words, "--rounds", "1")
    result = document(out)
    assert set(result["analysis"]["num_rounds"].values()) == {1}
    assert result["analysis"]["equal_outputs_share"] == 1.0   # fp32: speculation changes nothing
    assert result["invalid"] is False
    assert "9/9" in err
    out, err = headway(*words, "--rounds", "2")
    assert "9 are in" in err
    assert set(document(out)["analysis"]["num_rounds"].values()) == {2}
    saved = json.loads((tmp_path / "s.json").read_text())
    assert len(saved["runs"]) == 18
    assert {(run["cell"], run["configuration"], run["round"]) for run in saved["runs"]} == set(product(
        saved["cells"], ("off", "suffix-k2", "batch_table"), (0, 1)
    ))  # fmt: skip
    assert all(run["num_output_tokens"] > 0 for run in saved["runs"])
    assert {run["num_output_tokens"] for run in saved["runs"] if "rollout" in run["cell"]} == {16 + 64}
    page = (tmp_path / "s.html").read_text()
    (tmp_path / "s.html").unlink()
    headway("bench", "sweep", "--output", str(tmp_path / "s.json"), "--report-only")
    assert (tmp_path / "s.html").read_text() == page


def test_an_interrupted_sweep_has_a_report_and_can_go_on(
    headway: Headway, tiny_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*args: Any) -> None:
        raise KeyboardInterrupt

    words = (
        "bench", "sweep", str(tiny_dir), *FAST, "--workloads", "chat@1", "--configurations", "off,suffix-k2", "--num-prompts", "2",
        "--output-len", "8", "--rounds", "1", "--output", str(tmp_path / "s.json"),
    )
    with monkeypatch.context() as patched:
        patched.setattr("headway.bench.sweep_run.Sweep._round", interrupt)
        _, err = headway(*words, code=130)
    assert "interrupted: the same command continues" in err
    assert "No cell has a valid run" in (tmp_path / "s.html").read_text()
    out, _ = headway(*words)
    assert document(out)["analysis"]["num_rounds"] == {"chat@1": 1}


# -- benchmarks against a server ----------------------------------------------------------------------------------


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_bench_serve(headway: Headway, server: LiveServer, tiny_dir: Path, endpoint: str) -> None:
    words = ("bench", "serve", "--base-url", server.url, "--endpoint", endpoint, "--tokenizer", str(tiny_dir), *LOAD)
    out, _ = headway(*words, "--concurrency", "3")
    result = document(out)
    assert result["model"] == "tiny"
    assert result["num_output_tokens"] == 5 * 80
    assert result["invalid"] is False
    assert result["metrics_scraped"] is True
    assert result["num_draft_tokens"] >= result["num_accepted_tokens"] > 0
    assert sum(result["time_shares"].values()) == pytest.approx(1.0)
    assert result["mean_k"] > 0
    assert result["client_cpu_share"] > 0


def test_bench_serve_open_loop_writes_what_the_closed_loop_writes(headway: Headway, server: LiveServer) -> None:
    words = ("bench", "serve", "--base-url", server.url, "--endpoint", "chat", *LOAD)
    closed, opened = document(headway(*words)[0]), document(headway(*words, "--request-rate", "200")[0])
    assert closed["output_hash"] == opened["output_hash"]
    assert opened["load"]["request_rate"] == 200.0


def test_bench_serve_with_a_request_that_fails(headway: Headway, server: LiveServer, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "short"}\n' + json.dumps({"prompt": "x" * 600}) + "\n")
    words = ("bench", "serve", "--base-url", server.url, "--workload", f"jsonl:{file}", "--num-prompts", "2", "--warmup", "0")
    out, err = headway(*words, code=1)
    assert document(out)["invalid"] is True
    assert "status 400" in err


def test_bench_serve_without_a_server(headway: Headway) -> None:
    _, err = headway("bench", "serve", "--base-url", "http://127.0.0.1:9", *LOAD, code=2)
    assert "the server does not answer" in err


def test_bench_serve_without_a_tokenizer_says_what_to_do(headway: Headway, server: LiveServer) -> None:
    _, err = headway("bench", "serve", "--base-url", server.url, *LOAD, code=2)
    assert "--tokenizer" in err
    assert "--endpoint chat" in err


def test_compare_two_servers(headway: Headway, server: LiveServer, tiny_dir: Path) -> None:
    with live_server(tiny_dir, speculative=None) as other:
        words = ("--base-url-a", other.url, "--base-url-b", server.url, "--endpoint", "chat", "--repeats", "2")
        result = document(headway("bench", "compare", *words, *LOAD)[0])
    assert result["outputs_equal"] is True
    assert result["a"]["base_url"] == other.url
    assert result["a"]["runs"][0]["num_draft_tokens"] == 0
    assert result["b"]["runs"][0]["num_draft_tokens"] > 0


# -- as a process -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def long_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A context long enough that nobody is done before the signal comes."""
    return tiny_model_dir(tmp_path_factory.mktemp("long"), vocab_size=300, max_position_embeddings=8192)


def start(directory: Path, *words: str, stdout: Any = subprocess.PIPE) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "headway.cli.main", "generate", str(directory), *FAST, "--ignore-eos", "--max-tokens", "8000", *words]
    return subprocess.Popen(command, stdout=stdout, stderr=subprocess.PIPE, text=True)


def test_ctrl_c_ends_with_130_and_no_traceback(long_dir: Path) -> None:
    process = start(long_dir, "-p", "hello")
    assert process.stdout is not None
    process.stdout.read(7)   # past the prompt: it is writing
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert "interrupted" in err


def test_a_reader_that_goes_away_is_no_error(long_dir: Path) -> None:
    read, write = os.pipe()
    process = start(long_dir, "-p", "hello", stdout=write)
    os.close(write)
    os.read(read, 7)
    os.close(read)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 141, err
    assert "Traceback" not in err
    assert "Exception ignored" not in err


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_full_disk_is_one_line(long_dir: Path) -> None:
    with open("/dev/full", "wb") as full:
        process = start(long_dir, "-p", "hello", stdout=full.fileno())
        _, err = process.communicate(timeout=60)
    assert process.returncode == 1, err
    assert "Traceback" not in err
    assert "Exception ignored" not in err
    said = [line for line in err.splitlines() if "error" in line]
    assert said == ["headway generate: error: cannot write the output: No space left on device"]
