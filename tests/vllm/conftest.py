"""Tests against real vLLM, on a CPU: `make test-vllm`. Without vLLM nothing here is collected."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from headway.bench.scrape import Scrape
from headway.models import hub

collect_ignore_glob = ["*"] if importlib.util.find_spec("vllm") is None else []

MODEL = "smollm2-135m"
SCHEDULER = "headway.vllm.Scheduler"
NGRAM = {"method": "ngram", "num_speculative_tokens": 8, "prompt_lookup_max": 5, "prompt_lookup_min": 2}
START_S = 420.0
# Nothing asks for more than a gibibyte of K/V cache, and threads are not bound: tests share the machine with others.
ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1"}
REPEATING = "red green blue yellow red green blue yellow red green blue"
if not collect_ignore_glob:
    os.environ.update(ENVIRONMENT)


@pytest.fixture(scope="session")
def model_directory() -> str:
    return str(hub.resolve(MODEL))


@dataclass
class Server:
    """A running `vllm serve`."""

    url: str
    process: subprocess.Popen[bytes]
    log: Path
    client: httpx.Client = field(init=False)

    def __post_init__(self) -> None:
        self.client = httpx.Client(base_url=self.url, timeout=120.0)

    def complete(self, prompt: str = REPEATING, **body: Any) -> dict[str, Any]:
        """One greedy completion; raises for an HTTP error."""
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 24, "temperature": 0.0} | body
        reply = self.client.post("/v1/completions", json=body)
        assert reply.status_code == 200, reply.text
        found: dict[str, Any] = reply.json()
        return found

    def metrics(self) -> Scrape:
        return Scrape.parse(self.client.get("/metrics").text)

    def settled(self) -> Scrape:
        """The metrics once nothing runs: the last numbers of a step arrive just after its text."""
        last = self.metrics()
        for _ in range(40):
            time.sleep(0.25)
            now = self.metrics()
            if now.total("vllm:num_requests_running") == 0 and now.total("headway:steps_total") == last.total("headway:steps_total"):
                return now
            last = now
        raise AssertionError(f"the server does not come to rest:\n{self.tail()}")

    def tail(self, num_lines: int = 60) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-num_lines:])

    def stop(self) -> None:
        """Its own process group only, politely first: workers must not outlive it."""
        self.client.close()
        for sign, seconds in ((signal.SIGINT, 30.0), (signal.SIGTERM, 10.0), (signal.SIGKILL, 10.0)):
            try:
                os.killpg(self.process.pid, sign)
                self.process.wait(seconds)
                return
            except ProcessLookupError:
                return
            except subprocess.TimeoutExpired:
                continue


def start_server(model_directory: str, folder: Path, *flags: str, **environment: str) -> Server:
    """`vllm serve` on the embedded model with these flags; returns when it answers."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = [
        str(Path(sys.executable).with_name("vllm")), "serve", model_directory, "--served-model-name", MODEL, "--host", "127.0.0.1",
        "--port", str(port), "--dtype", "bfloat16", "--max-model-len", "2048", "--max-num-seqs", "32", "--enforce-eager", *flags,
    ]  # fmt: skip
    log = folder / "server.log"
    with log.open("wb") as file:
        process = subprocess.Popen(words, stdout=file, stderr=subprocess.STDOUT, env=os.environ | environment, start_new_session=True)
    server = Server(f"http://127.0.0.1:{port}", process, log)
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if server.client.get("/health", timeout=5.0).status_code == 200:
                return server
        except httpx.TransportError:
            pass
        time.sleep(0.5)
    text = server.tail()
    server.stop()
    raise AssertionError(f"vllm serve {' '.join(flags)} did not start:\n{text}")


@pytest.fixture(scope="module")
def serve(model_directory: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Server]]:
    """serve(*flags) -> a running server, stopped after the module. Starting takes a minute: one per module."""
    started: list[Server] = []

    def start(*flags: str, **environment: str) -> Server:
        started.append(start_server(model_directory, tmp_path_factory.mktemp("vllm"), *flags, **environment))
        return started[-1]

    yield start
    for server in started:
        server.stop()


@pytest.fixture(scope="module")
def offline(model_directory: str) -> Iterator[Callable[..., Any]]:
    """offline(**kwargs) -> vllm.LLM in this process, its scheduler included (`scheduler_of`). The one before is given up."""
    import gc

    from vllm import LLM
    from vllm.triton_utils import dispatcher

    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    held: list[Any] = []

    def close() -> None:
        while held:
            held.pop().llm_engine.engine_core.shutdown()
        gc.collect()

    def make(**kwargs: Any) -> Any:
        close()
        defaults = {"dtype": "float32", "max_model_len": 1024, "max_num_seqs": 16, "enforce_eager": True, "disable_log_stats": False}
        held.append(LLM(model_directory, **(defaults | kwargs)))
        # vLLM points every module to its kernels anew for each LLM, and trips over numba's functions once ngram has loaded it.
        dispatcher._rebind_kernels = lambda overrides: None
        return held[-1]

    yield make
    close()
    del os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"]


def scheduler_of(llm: Any) -> Any:
    """The scheduler of an `offline` LLM."""
    return llm.llm_engine.engine_core.engine_core.scheduler


def flags_of(speculative: dict[str, Any] | None, headway: dict[str, Any] | None = None, scheduler: bool = True) -> list[str]:
    """As a user would write them."""
    words = ["--scheduler-cls", SCHEDULER] if scheduler else []
    if speculative:
        words += ["--speculative-config", json.dumps(speculative)]
    if headway:
        words += ["--additional-config", json.dumps({"headway": headway})]
    return words
