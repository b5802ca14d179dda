"""What the scheduler counts, and how it reaches the process that serves /metrics.

vLLM's scheduler lives in the EngineCore process, its stat loggers in the API server's. The records vLLM sends between them have no field
for others (a foreign key in `kv_connector_stats` ends vLLM's own logger), so the scheduler writes its counters to a small file, whole,
every PUBLISH_S seconds and whenever it runs out of work, and a stat logger reads the file when it is scraped:

    path = stats_path(settings, vllm_config, engine_index)     the same in both processes: the name is vLLM's instance id
    counters = read(path)                                      Counters, or None while there is none

Cumulative since the scheduler's start; `started` tells a restart. Both processes run on the same machine, in every layout in which the
scheduler is local to its API server (tensor and pipeline parallelism; data parallel ranks of the same node).
"""

from __future__ import annotations

import contextlib
import getpass
import json
import logging
import os
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headway.control.counters import StepCounters
from headway.vllm.settings import Settings

logger = logging.getLogger(__name__)

FORMAT = 1
PUBLISH_S = 0.5


class Counters(StepCounters):
    """`StepCounters` of every step, and what went wrong. `off` says why the controller is not at work; "" while it is."""

    def __init__(self, policy: str = "", drafter: str = "", max_k: int = 0) -> None:
        super().__init__()
        self.policy, self.drafter, self.max_k = policy, drafter, max_k
        self.started = time.time()
        self.off = ""
        self.num_errors = 0              # exceptions inside the controller
        self.num_fallback_steps = 0      # steps with the configured static k since
        self.num_stale_outputs = 0       # outputs of requests that were preempted meanwhile: not learned from
        self.num_invalid_requests = 0    # vllm_xargs that were not understood, and so ignored
        self.calibration_error: float | None = None

    def to_json(self) -> dict[str, Any]:
        plain = {name: value for name, value in vars(self).items() if isinstance(value, int | float | str | None)}
        return {
            "format": FORMAT, **plain,
            "last_change": self.last_change,
            "chosen_k": [self.chosen_k.counts, self.chosen_k.total],
            "verified": [[*key, rows] for key, rows in self.verified.items()],
            "step_errors": [round(error, 4) for error in self._step_errors],
        }  # fmt: skip

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Counters:
        """Raises ValueError for anything that `to_json` did not write."""
        counters = cls()
        try:
            if document["format"] != FORMAT:
                raise ValueError(f"counters of format {document['format']!r}; this version reads {FORMAT}")
            for name, value in vars(counters).items():
                if isinstance(value, int | float | str | None) and name != "last_change":
                    setattr(counters, name, document[name])
            change = document["last_change"]
            counters.last_change = (str(change[0]), float(change[1])) if change else None
            counts, total = document["chosen_k"]
            counters.chosen_k.counts, counters.chosen_k.total = [int(count) for count in counts], float(total)
            counters.verified = Counter({(str(d), int(n), int(a)): int(rows) for d, n, a, rows in document["verified"]})
            counters._step_errors.extend(float(error) for error in document["step_errors"])
        except (KeyError, TypeError, IndexError) as error:
            raise ValueError(f"not Headway's counters: {error!r}") from error
        return counters


class Publisher:
    """Writes counters to a file that readers always see whole. A folder that cannot be written to costs a warning, not the server."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._next = 0.0
        self._usable = True

    def publish(self, counters: Counters, *, now: bool = False) -> None:
        at = time.monotonic()
        if not self._usable or (at < self._next and not now):
            return
        self._next = at + PUBLISH_S
        partial = self.path.with_suffix(".partial")
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            partial.write_text(json.dumps(counters.to_json(), separators=(",", ":"), default=int), encoding="utf-8")
            partial.replace(self.path)
        except OSError as error:
            self._usable = False
            logger.warning("Headway's counters will not be on /metrics: cannot write %s: %s", self.path, error.strerror)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.path.unlink()


def read(path: Path) -> Counters | None:
    """What the scheduler last published; None while there is nothing that can be read."""
    try:
        return Counters.from_json(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return None


def stats_path(settings: Settings, vllm_config: Any, engine_index: int) -> Path:
    """Where the counters of one engine are. vLLM marks the instance id of a data-parallel rank; the mark is dropped for the index."""
    instance = str(vllm_config.instance_id).partition("_dp")[0]
    folder = Path(settings.stats) if settings.stats else Path(tempfile.gettempdir()) / f"headway-vllm-{_user()}"
    return folder / f"{instance}-{engine_index}.json"


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):   # a container's user without a name
        return str(os.getuid())
