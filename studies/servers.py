"""Servers that benchmarks start, stop and continue."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

BIN = Path(sys.executable).parent
START_S = 600.0


class Server:
    """A server process and all its children."""

    def __init__(self, name: str, command: list[str], port: int, env: dict[str, str]) -> None:
        self.name, self.url = name, f"http://127.0.0.1:{port}"
        started = time.monotonic()
        self.process = subprocess.Popen(
            command, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env={**os.environ, **env}
        )
        while not self._answers():
            if self.process.poll() is not None or time.monotonic() - started > START_S:
                self.stop()
                raise SystemExit(f"{name} did not start: {' '.join(command)}")
            time.sleep(0.1)
        self.ready_s = round(time.monotonic() - started, 1)

    def sleep(self) -> None:
        """Stopped (SIGSTOP) until it is measured: an idle vLLM polls."""
        self._signal(signal.SIGSTOP)

    @contextmanager
    def awake(self, settle_s: float = 0.0) -> Iterator[None]:
        """It runs inside, after `settle_s` seconds to find itself, and sleeps again behind, whatever happened."""
        self._signal(signal.SIGCONT)
        try:
            time.sleep(settle_s)
            yield
        finally:
            self.sleep()

    def stop(self) -> None:
        self._signal(signal.SIGCONT)
        self._signal(signal.SIGKILL)
        self.process.wait()

    def _signal(self, number: int) -> None:
        for pid in _session(self.process.pid):
            os.kill(pid, number)

    def _answers(self) -> bool:
        try:
            return bool(urllib.request.urlopen(self.url + "/health", timeout=2).status == 200)
        except (urllib.error.URLError, OSError):
            return False


def _session(leader: int) -> list[int]:
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == leader:
            found.append(int(entry.name))
    return found


def vllm_env(executable: str, kv_cache_gib: int, all_cores: bool) -> dict[str, str]:
    """What a vLLM server on a CPU is started with: the OpenMP it asks for, where it is installed, and a pool of `kv_cache_gib`.

    all_cores  by default vLLM leaves one core to its scheduler; then it computes on that one, too
    """
    env = {"VLLM_CPU_KVCACHE_SPACE": str(kv_cache_gib)}
    if all_cores:
        env["VLLM_CPU_NUM_OF_RESERVED_CPU"] = "0"
    openmp = Path(executable).absolute().parents[1] / "lib" / "libiomp5.so"
    if openmp.exists():   # without it, speculation is slow
        env["LD_PRELOAD"] = str(openmp)
    return env


def vllm_version(executable: str) -> str:
    """Of the environment that the `vllm` executable is in."""
    python = str(Path(executable).with_name("python"))
    code = "import importlib.metadata as m; print(m.version('vllm'))"
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
