"""What one start of a server leaves to the next: measured costs and what the policy learned, a file per model, drafter and machine.

It is a first guess only: the policy tests it and goes on learning. A file that cannot be read or written costs some time, nothing else.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headway.control.costs import FORMAT, CostModel
from headway.control.policy import Policy
from headway.vllm.settings import Settings

logger = logging.getLogger("vllm.headway")

LEAST_STEPS = 200     # observed, before they are worth a file
SAVE_EVERY_S = 60.0   # while the server has no work
SAVE_BUSY_S = 600.0   # while it has: a server that never rests may be killed, too


class Kept:
    """`costs` is the policy's own once it is started with it; `learned` is for `Setup.learned`."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self.costs, self.learned = _read(path) if path else (CostModel(), None)
        self._num_saved = self.costs.num_observed
        self._saved_at = time.monotonic()

    def save_now_and_then(self, policy: Policy, *, idle: bool) -> None:
        if time.monotonic() - self._saved_at >= (SAVE_EVERY_S if idle else SAVE_BUSY_S):
            self.save(policy)

    def save(self, policy: Policy) -> None:
        self._saved_at = time.monotonic()
        if self._path is None or self.costs.num_observed < self._num_saved + LEAST_STEPS:
            return
        self._num_saved = self.costs.num_observed
        partial = self._path.with_suffix(".partial")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            partial.write_text(json.dumps({"costs": self.costs.to_json(), "learned": policy.learned()}), encoding="utf-8")
            partial.replace(self._path)
        except OSError as error:
            self._path = None
            logger.warning("cannot keep what Headway learned in %s: %s", partial, error.strerror)


def _read(path: Path) -> tuple[CostModel, Mapping[str, Any] | None]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        learned = document["learned"]
        return CostModel.from_json(document["costs"]), learned if isinstance(learned, Mapping) else None
    except FileNotFoundError:
        return CostModel(), None
    except (OSError, ValueError, KeyError, TypeError) as error:
        logger.warning("what Headway learned before cannot be read from %s: %r", path, error)
        return CostModel(), None


def path_of(settings: Settings, config: Any, method: str) -> Path | None:
    """`config` is vLLM's. Raises nothing; None: keep nothing."""
    if settings.costs == "off":
        return None
    if settings.costs:
        return Path(settings.costs)
    model, parallel = config.model_config, config.parallel_config
    what = [
        model.model, str(model.dtype), str(model.quantization), parallel.tensor_parallel_size, parallel.pipeline_parallel_size,
        config.scheduler_config.max_num_batched_tokens, config.cache_config.block_size, method, config.num_speculative_tokens,
        settings.policy, _machine(), FORMAT,
    ]  # fmt: skip
    digest = hashlib.sha256(json.dumps(what, default=str).encode()).hexdigest()
    home = Path(os.environ.get("HEADWAY_HOME") or "~/.cache/headway").expanduser()
    return home / "vllm" / f"{digest[:20]}.json"


def _machine() -> list[str]:
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 0
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8", errors="replace").splitlines() if info.exists() else []
    cpu = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "cpu")
    return [cpu, str(cpus), os.environ.get("OMP_NUM_THREADS", ""), _gpu()]


def _gpu() -> str:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else ""
