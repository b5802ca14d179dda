"""`headway vllm check` with vLLM's own parser and configuration behind it."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
from conftest import SCHEDULER

from headway.vllm import server_flags

SPEC = {"method": "ngram", "num_speculative_tokens": 4}


def run(*words: str) -> tuple[int, dict[str, Any]]:
    done = subprocess.run([sys.executable, "-m", "headway.cli.main", "vllm", "check", "--json", *words], capture_output=True, timeout=300)
    assert done.returncode in (0, 2), done.stderr.decode()
    found: dict[str, Any] = json.loads(done.stdout)
    return done.returncode, found


def test_vllm_resolves_the_flags(model_directory: str) -> None:
    code, found = run(model_directory, "--scheduler-cls", SCHEDULER, "-sc", json.dumps(SPEC), "--dtype", "bfloat16", "--max-num-seqs", "8")
    facts = found["facts"]
    assert code == 0, found
    assert (facts["device"], facts["async_scheduling"], facts["max_num_seqs"], facts["max_k"]) == ("cpu", False, 8, 4)
    # 30 layers of 3 heads of 64, keys and values, two bytes each, in the gibibyte that the tests allow
    assert facts["kv_tokens"] == 2**30 // (30 * 3 * 64 * 2 * 2)
    assert facts["missing"] == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--no-such-flag"], "no-such-flag"),
        (["-sc", json.dumps({"method": "no-such-method", "num_speculative_tokens": 4})], "method"),
        (["--async-scheduling", "-sc", json.dumps(SPEC)], "async"),
    ],
)
def test_what_vllm_refuses_is_told_in_its_words(model_directory: str, words: list[str], said: str) -> None:
    code, found = run(model_directory, "--scheduler-cls", SCHEDULER, *words)
    assert code == 2
    refusals = [finding["why"] for finding in found["findings"] if finding["what"] == "vLLM refuses these flags"]
    assert refusals
    assert said in refusals[0]


@pytest.mark.parametrize("method", ["headway", "ngram"])
def test_what_config_prints_works_here(model_directory: str, method: str) -> None:
    given = server_flags.serve_flags(method=method)
    words = [word for name, value in given.items() for word in (name, value if isinstance(value, str) else json.dumps(value))]
    code, found = run(model_directory, "--dtype", "bfloat16", *words)
    assert code == 0, found


def test_vllm_loads_the_short_cut_as_often_as_it_likes() -> None:
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    from headway.vllm.runner import register

    register()
    once = WorkerWrapperBase.initialize_from_config
    register()
    assert WorkerWrapperBase.initialize_from_config is once
    assert not hasattr(once.__wrapped__, "by_headway")
