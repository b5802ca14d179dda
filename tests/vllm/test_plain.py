"""Headway is installed beside vLLM and not asked for: nothing changes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest
from conftest import NGRAM, Server, flags_of


@pytest.fixture(scope="module")
def server(serve: Callable[..., Server]) -> Server:
    return serve(*flags_of(NGRAM, scheduler=False))


def test_no_metric_of_ours_appears(server: Server) -> None:
    server.complete()
    seen = server.metrics()
    assert seen.total("vllm:generation_tokens_total")
    assert not [name for name in seen.samples if name.startswith("headway:")]
    assert "Traceback" not in server.log.read_text(errors="replace")


def test_top_shows_what_there_is(server: Server) -> None:
    server.complete()
    words = [sys.executable, "-m", "headway.cli.main", "top", server.url, "--once", "--interval", "0.2"]
    shown = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert shown.returncode == 0, shown.stderr
    assert "requests" in shown.stdout
    assert "exact while k is constant" in shown.stdout, shown.stdout
    assert "goodput" not in shown.stdout
