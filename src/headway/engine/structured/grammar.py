"""From what a request asks of its text to a `Matcher` for each of its sequences."""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from headway.errors import InvalidRequestError
from headway.structured_outputs import KINDS, Matcher, StructuredOutputsParams

CHECK_S = 0.7              # together with the second compilation, in the engine's process, a refusal comes within a second
START_S = 30.0             # for the checking process to come up on a machine that is busy
MAX_COMPILED = 64          # grammars kept; an application sends the same few again and again
MAX_MESSAGE = 400          # characters of a reason: a compiler's may quote the whole grammar


class CompiledGrammar(Protocol):
    """`matcher` is cheap and may be called on the engine's thread."""

    def matcher(self, eos_token_ids: frozenset[int]) -> Matcher:
        """At the beginning of a text that one of these tokens may end."""


class Backend(Protocol):
    """A library of grammars."""

    limits: dict[str, int]
    """What the checking process is told, too."""

    def compile(self, grammar: str) -> CompiledGrammar:
        """Of what the checking process answered. Raises ValueError with the reason."""


class Compiler:
    """Compiles each grammar once. On any thread."""

    def __init__(self, make_backend: Callable[[], Backend]) -> None:
        """`make_backend`: called for the first grammar only."""
        self._make_backend = make_backend
        self._backend: Backend | None = None
        self._checker: Checker | None = None
        self._compiled: OrderedDict[tuple[str, str, bool], CompiledGrammar | str] = OrderedDict()
        self._lock, self._starting = threading.Lock(), threading.Lock()

    def compile(self, params: StructuredOutputsParams) -> CompiledGrammar:
        """Raises InvalidRequestError with the reason for what is no grammar, asks for what is not supported, or takes too long."""
        key = (params.kind, params.text, params.disable_any_whitespace)
        with self._lock:
            found = self._compiled.get(key)
        if found is None:
            found = self._compile(*key)
        with self._lock:
            self._compiled[key] = found
            self._compiled.move_to_end(key)
            while len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
        if isinstance(found, str):
            raise InvalidRequestError(f"{KINDS[params.kind]} cannot be used: {found}", param="structured_outputs")
        return found

    def _compile(self, kind: str, text: str, compact: bool) -> CompiledGrammar | str:
        """Or the reason why not."""
        with self._starting:
            backend = self._backend = self._backend or self._make_backend()
            checker = self._checker = self._checker or Checker(backend.limits)
        try:
            return backend.compile(checker.check({"kind": kind, "text": text, "compact": compact}))
        except ValueError as error:
            reason = " ".join(str(error).split())
            return reason if len(reason) <= MAX_MESSAGE else reason[:MAX_MESSAGE] + "..."


class Checker:
    """Asks a process that is killed where it takes longer than CHECK_S. One question at a time."""

    def __init__(self, limits: dict[str, int]) -> None:
        self._limits = limits
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._answers: queue.SimpleQueue[str] = queue.SimpleQueue()

    def check(self, question: dict[str, Any]) -> str:
        """The grammar in the library's own form. Raises ValueError with the reason."""
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._start()
            assert self._process is not None
            try:
                line = self._ask(json.dumps(question), CHECK_S)
            except queue.Empty:
                _kill(self._process)
                raise ValueError(f"it takes longer than {CHECK_S:g} s to compile") from None
        if not line:
            _kill(self._process)   # it is on its way out
            raise ValueError("it is nested too deeply or too complex to compile")
        answer = json.loads(line)
        if "error" in answer:
            raise ValueError(answer["error"])
        grammar: str = answer["grammar"]
        return grammar

    def _start(self) -> None:
        """Returns when the process answers, so that its start is nobody's time to compile."""
        process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("checker.py"))], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, text=True, encoding="utf-8",
        )   # fmt: skip
        assert process.stdout is not None
        answers: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=_read, args=(process, answers), name="headway-grammars", daemon=True).start()
        self._process, self._answers = process, answers
        weakref.finalize(self, _kill, process)
        self._ask(json.dumps(self._limits) + "\n" + json.dumps({"kind": "regex", "text": "a", "compact": False}), START_S)

    def _ask(self, lines: str, seconds: float) -> str:
        """The answer; "" when the process is gone. Raises queue.Empty when it takes longer."""
        assert self._process is not None
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(lines + "\n")
            self._process.stdin.flush()
        except (BrokenPipeError, ValueError):   # closed by the other end, or by `_read`
            return ""
        return self._answers.get(timeout=seconds)


def _kill(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()


def _read(process: subprocess.Popen[str], answers: queue.SimpleQueue[str]) -> None:
    """Until the process ends."""
    assert process.stdout is not None
    with process.stdout:
        for line in process.stdout:
            answers.put(line)
    answers.put("")
    if process.stdin is not None:
        process.stdin.close()
