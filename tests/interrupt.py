"""Ctrl-C at a known step of a training run."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest


@contextmanager
def interrupted_after(monkeypatch: pytest.MonkeyPatch, trainer: type[Any], step: int) -> Iterator[None]:
    """Within, a `trainer` gets SIGINT once it has made `step` steps; the block must end in KeyboardInterrupt."""
    train_step = trainer.train_step

    def interrupting(self: Any, num_steps: int) -> Any:
        found = train_step(self, num_steps)
        if self.step == step:
            signal.raise_signal(signal.SIGINT)
        return found

    with monkeypatch.context() as patched:
        patched.setattr(trainer, "train_step", interrupting)
        with pytest.raises(KeyboardInterrupt):
            yield
