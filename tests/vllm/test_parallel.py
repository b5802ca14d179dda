"""What fails in vLLM itself, so that `headway vllm check` refuses it: when one of these fails, the rule can go."""

from __future__ import annotations

import subprocess
import sys

import pytest
from conftest import NGRAM

PROGRAM = """
from vllm import LLM

if __name__ == "__main__":
    small = dict(dtype="float32", max_model_len=256, max_num_seqs=2, enforce_eager=True)
    LLM({model!r}, pipeline_parallel_size=2, speculative_config={spec}, **small)
    print("it starts")
"""


@pytest.mark.heavy
def test_pipeline_parallel_with_drafts_ends_at_start(model_directory: str) -> None:
    """gpu_model_runner.py makes the drafter on the last stage only."""
    program = PROGRAM.format(model=model_directory, spec=NGRAM)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=420)
    assert "it starts" not in done.stdout
    assert "has no attribute 'drafter'" in done.stdout + done.stderr
