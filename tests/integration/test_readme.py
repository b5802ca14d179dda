"""Every command and snippet of the README runs as it stands there."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BIN = Path(sys.executable).parent
ENVIRONMENT = {**os.environ, "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(ROOT / "examples")}


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


COMMANDS = [line for block in blocks("bash") for line in re.sub(r"\\\n\s*", "", block).splitlines() if line and not line.startswith("#")]
HEADWAY = [line for line in COMMANDS if line.startswith("headway") and not line.startswith("headway serve")]


def run(command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-c", command], cwd=ROOT, env=ENVIRONMENT, input="/exit\n", capture_output=True, text=True, timeout=280, check=False
    )


def test_the_readme_is_short_and_has_commands() -> None:
    lines = README.splitlines()
    assert len(lines) <= 150
    assert max(map(len, lines)) <= 110
    assert len(HEADWAY) >= 2


@pytest.mark.parametrize("command", HEADWAY)
def test_a_headway_command(command: str) -> None:
    done = run(command)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip() or command == "headway chat"


def test_the_make_targets_exist() -> None:
    targets = [word for line in COMMANDS if line.startswith("make") for word in shlex.split(line)[1:]]
    assert "serve" in targets
    for target in targets:
        assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE)


def test_the_server_answers_the_curl_lines() -> None:
    """`headway serve` is what `make serve` runs."""
    serve = "headway serve smollm2-135m --port 8000"
    silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    server = subprocess.Popen(["bash", "-c", f"exec {serve}"], cwd=ROOT, env=ENVIRONMENT, **silent)
    try:
        wait_for("http://127.0.0.1:8000/health", server)
        curls = [line for line in COMMANDS if line.startswith("curl")]
        assert curls
        for line in curls:
            done = run(line)
            assert '"choices"' in done.stdout, done.stdout + done.stderr
    finally:
        server.send_signal(signal.SIGTERM)
        assert server.wait(timeout=60) == 0


def wait_for(url: str, process: subprocess.Popen[bytes]) -> None:
    for _ in range(600):
        assert process.poll() is None, "the server ended"
        try:
            urllib.request.urlopen(url, timeout=2).close()
            return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    raise AssertionError("the server did not become ready")


MODULES = {match[1]: block for block in blocks("python") if (match := re.match(r"# (\w+)\.py", block))}


@pytest.mark.parametrize("snippet", [block for block in blocks("python") if block not in MODULES.values()])
def test_a_python_snippet(snippet: str) -> None:
    command = [sys.executable, "-c", snippet]
    done = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "SpecDecodeMetrics" in done.stdout


def test_the_drafter_and_the_policy_of_the_readme(tmp_path: Path) -> None:
    for name, source in MODULES.items():
        (tmp_path / f"{name}.py").write_text(source, encoding="utf-8")
    [names] = re.findall(r"`(--spec-method \S+ --spec-policy \S+)`", README)
    environment = {**ENVIRONMENT, "PYTHONPATH": str(tmp_path)}
    command = f'headway generate -p "a b c a b c a b" {names} --max-tokens 16 --temperature 0 --show-drafts'
    done = subprocess.run(["bash", "-c", command], env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "[+" in done.stdout or "[-" in done.stdout


def test_the_example_drafter_drafts() -> None:
    method = "--spec-method first_time_drafter:FirstTime"
    done = run(f'headway generate -p "a b c a b c a b" {method} --max-tokens 16 --temperature 0 --show-drafts')
    assert done.returncode == 0, done.stderr[-2000:]
    assert "[+" in done.stdout or "[-" in done.stdout
