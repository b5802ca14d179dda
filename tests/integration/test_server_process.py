"""`headway serve` as a process: ready line, SIGTERM under load, ports that are taken."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from headway.config import EngineConfig
from headway.errors import ConfigError
from headway.server.options import ServerOptions
from headway.server.serve import serve
from tests.tiny import tiny_model_dir

LONG = {"prompt": "one two", "max_tokens": 1500, "temperature": 0, "ignore_eos": True, "stream": True}


HANGING = """
import sys, time
from headway.cli.main import main
from headway.engine.engine import Engine
Engine.step = lambda self: time.sleep(10**6)
sys.exit(main())
"""

TELLING = """
import faulthandler
watch = faulthandler.dump_traceback_later
def told(timeout, **kwargs):
    print(f"ends within {timeout} s", file=sys.stderr, flush=True)
    watch(timeout, **kwargs)
faulthandler.dump_traceback_later = told
"""

TOKENIZING = """
import sys
from headway.cli.main import main
from headway.engine.tokenizer import Tokenizer
encode = Tokenizer.encode_aside
def forever(self, texts, add_special_tokens=True):
    print("tokenizing", file=sys.stderr, flush=True)
    while True:
        encode(self, texts, add_special_tokens)
Tokenizer.encode_aside = forever
sys.exit(main())
"""


class Process:
    """A started `headway serve`, its address read from the line that it prints when it is ready."""

    def __init__(self, directory: Path, *flags: str, program: tuple[str, ...] = ("-m", "headway.cli.main")) -> None:
        command = [sys.executable, *program, "serve", str(directory), "--port", "0", "--served-model-name", "tiny"]
        memory = ["--kv-cache-memory-bytes", "32M", "--dtype", "float32"]
        self.process = subprocess.Popen([*command, *memory, *flags], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self._stderr: list[str] = []
        self._reader = threading.Thread(target=self._read_stderr)
        self._reader.start()
        assert self.process.stdout is not None
        self.hello = ""
        while not (found := re.search(r"http://[0-9.]+:[0-9]+", self.hello)):
            line = self.process.stdout.readline()
            assert line, "".join(self._stderr)
            self.hello += line
        self.url = found[0]
        self.hello += self.process.stdout.readline() + self.process.stdout.readline()

    def _read_stderr(self) -> None:
        assert self.process.stderr is not None
        self._stderr.extend(self.process.stderr)

    def stop(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def exit_code(self) -> int:
        return self.process.wait(60)

    def close(self) -> None:
        self.process.kill()   # does nothing to a process that has ended
        self.process.wait(60)
        self._reader.join(60)
        for pipe in (self.process.stdout, self.process.stderr):
            assert pipe is not None
            pipe.close()


@pytest.fixture
def long_dir(tmp_path: Path) -> Path:
    return tiny_model_dir(tmp_path, max_position_embeddings=2048)


@pytest.fixture
def start(long_dir: Path) -> Iterator:
    started: list[Process] = []

    def start(*flags: str, **options: tuple[str, ...]) -> Process:
        started.append(Process(long_dir, *flags, **options))
        return started[-1]

    yield start
    for server in started:
        server.close()


def events(server: Process, begun: threading.Barrier) -> list[dict]:
    found: list[dict] = []
    with httpx.stream("POST", f"{server.url}/v1/completions", json=LONG, timeout=120) as response:
        assert response.status_code == 200
        for line in response.iter_lines():
            if line.startswith("data: {"):
                found.append(json.loads(line[6:]))
                if len(found) == 1:
                    begun.wait(60)
            elif line == "data: [DONE]":
                return found
    raise AssertionError("the stream broke off")


def test_sigterm_under_load_completes_what_runs_and_exits_with_0(start):
    server = start()
    curl = server.hello
    assert f"curl {server.url}/v1/chat/completions" in curl
    body = json.loads(re.search(r"-d '(.*)'", curl)[1])
    assert httpx.post(f"{server.url}/v1/chat/completions", json=body | {"max_tokens": 2}, timeout=60).status_code == 200
    begun = threading.Barrier(5)
    with ThreadPoolExecutor(4) as threads, httpx.Client(base_url=server.url, timeout=60) as client:
        running = [threads.submit(events, server, begun) for _ in range(4)]
        begun.wait(60)
        server.stop(signal.SIGTERM)
        draining = any(client.get("/health").status_code == 503 for _ in range(20))
        refused = client.post("/v1/completions", json=LONG)
        answers = [future.result() for future in running]
    assert draining
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "shutting_down"
    assert {events[-1]["choices"][0]["finish_reason"] for events in answers} == {"length"}
    assert len({"".join(event["choices"][0]["text"] for event in events) for events in answers}) == 1
    assert server.exit_code() == 0
    assert "Traceback" not in "".join(server._stderr)


def test_the_printed_command_works_with_the_key_from_the_environment(start, monkeypatch):
    monkeypatch.setenv("HEADWAY_API_KEY", "geheim")
    server = start()
    assert "geheim" not in server.hello
    header = re.search(r'-H "(Authorization): ([^"]*)"', server.hello)
    assert header
    for value, status in ((os.path.expandvars(header[2]), 200), (header[2], 401)):
        assert httpx.get(f"{server.url}/v1/models", headers={header[1]: value}).status_code == status
    other = start("--api-key", "eins", "--api-key", "zwei")
    assert "Bearer YOUR_API_KEY" in other.hello
    for key, status in (("eins", 200), ("zwei", 200), ("geheim", 401)):
        assert httpx.get(f"{other.url}/v1/models", headers={"Authorization": f"Bearer {key}"}).status_code == status
    for process in (server, other):
        process.stop(signal.SIGTERM)
        assert process.exit_code() == 0
        assert not any(key in text for key in ("geheim", "eins", "zwei") for text in (process.hello, *process._stderr))


def test_sigint_with_a_short_drain_time_says_so_in_the_stream(start):
    server = start("--drain-timeout-s", "0")
    begun = threading.Barrier(2)
    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(events, server, begun)
        begun.wait(60)
        server.stop(signal.SIGINT)
        assert "shut down" in running.result()[-1]["error"]["message"]
    assert server.exit_code() == 0


def test_a_second_sigterm_ends_at_once(start):
    server = start("--drain-timeout-s", "600", program=("-c", HANGING))
    with httpx.stream("POST", f"{server.url}/v1/completions", json=LONG, timeout=60):
        server.stop(signal.SIGTERM)
        while httpx.get(f"{server.url}/health").status_code != 503:
            pass
        server.stop(signal.SIGTERM)
        assert server.exit_code() == -signal.SIGTERM


def test_a_step_that_never_ends_does_not_keep_the_server(start):
    server = start("--drain-timeout-s", "0", program=("-c", HANGING))
    with httpx.stream("POST", f"{server.url}/v1/completions", json=LONG, timeout=60) as response:
        server.stop(signal.SIGTERM)
        assert "shut down" in "".join(response.iter_text())
    assert server.exit_code() == 1
    assert "hangs" in "".join(server._stderr)


def test_the_time_to_end_is_a_part_of_the_drain_time(start):
    server = start("--drain-timeout-s", "5.5", program=("-c", HANGING.replace("import sys, time", "import sys, time" + TELLING)))
    with httpx.stream("POST", f"{server.url}/v1/completions", json=LONG, timeout=60) as response:
        server.stop(signal.SIGTERM)
        assert "shut down" in "".join(response.iter_text())
    assert server.exit_code() == 1
    assert "ends within 5.5 s" in "".join(server._stderr)


def test_a_text_that_is_being_tokenized_does_not_keep_the_server(start):
    server = start("--drain-timeout-s", "0", program=("-c", TOKENIZING))
    with ThreadPoolExecutor(1) as threads:
        asked = threads.submit(httpx.post, f"{server.url}/tokenize", json={"prompt": "word " * 2000}, timeout=60)
        while not any("tokenizing" in line for line in server._stderr):
            assert server.process.poll() is None
        server.stop(signal.SIGTERM)
        assert server.exit_code() == 0, "".join(server._stderr)
        assert asked.exception(60) is not None or asked.result().status_code >= 400


def test_a_taken_port_is_an_error_before_the_model_is_loaded():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}"):
            serve(EngineConfig(model="/there/is/no/model"), ServerOptions(port=port))
    with pytest.raises(ConfigError, match=r"cannot listen on no\.such\.host\.invalid"):
        serve(EngineConfig(model="/there/is/no/model"), ServerOptions(host="no.such.host.invalid"))
