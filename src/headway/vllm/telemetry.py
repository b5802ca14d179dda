"""How the scheduler's counters reach the process that serves /metrics.

vLLM schedules in one process and answers HTTP in another (or in several, or on another machine). After each step the scheduler sends it
`SchedulerStats`. Headway's counters travel in there: what they grew by, as JSON, in the key of a dictionary of numbers that is empty
unless LoRA is used and that nothing reads otherwise. So they arrive wherever vLLM's own numbers do, once each, and a process that does
not load `headway.vllm.stat_logger` (which takes them out again) is not disturbed.

    scheduler:  self._sender = Sender(counters);  in make_stats:  self._sender.attach(stats, idle=not self.has_unfinished_requests())
    logger:     growth = detach(stats);  received.absorb(growth)

No vLLM is imported here.
"""

from __future__ import annotations

import json
import logging
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from headway.telemetry.counters import Histogram, StepCounters

KEY = "headway:"             # begins the key that carries the growth
INTERVAL_S = 0.25            # between two of them, while there is work
# Numbers that are not counts: sent as they are.
STATE = ("max_k", "started", "calibration_error")

logger = logging.getLogger("vllm.headway")


class Sender:
    """The scheduler's end, owned by its thread. Of the attributes of `counters`, int and float are counts, but for STATE; str are state."""

    def __init__(self, counters: StepCounters) -> None:
        self.counters = counters
        self._sent: dict[str, float] = {}
        self._sent_rows: Counter[tuple[str, int, int, int]] = Counter()
        self._sent_k = Histogram(counters.chosen_k.bounds)
        self._sent_at = float("-inf")
        self._failed = False

    def attach(self, stats: Any, *, idle: bool) -> None:
        """Puts what was counted since the last time into `stats` (a SchedulerStats, or None), when it is time or `idle`. Never raises."""
        now = time.monotonic()
        if stats is None or self._failed or (now - self._sent_at < INTERVAL_S and not idle):
            return
        try:
            if growth := self._growth():
                stats.waiting_lora_adapters[KEY + json.dumps(growth, separators=(",", ":"), default=float)] = 0
            self._sent_at = now
        except Exception:
            self._failed = True
            logger.exception("Headway's metrics end here; serving goes on")

    def _growth(self) -> dict[str, Any]:
        counters = self.counters
        have = {name: value for name, value in counters.snapshot().items() if name not in STATE}
        numbers = {name: value - self._sent.get(name, 0) for name, value in have.items() if value != self._sent.get(name, 0)}
        if not numbers:
            return {}
        grown_k, rows = counters.chosen_k.since(self._sent_k), counters.verified.copy()
        growth = {
            "numbers": numbers,
            "chosen_k": grown_k.counts,
            "chosen_k_total": grown_k.total,
            "verified": [[*key, count - self._sent_rows[key]] for key, count in rows.items() if count != self._sent_rows[key]],
            "step_time_error": counters.step_time_error,
            "last_change": counters.last_change,
            "state": {name: value for name, value in vars(counters).items() if isinstance(value, str | None) or name in STATE},
        }
        self._sent, self._sent_rows = have, rows
        self._sent_k.add(grown_k.counts, grown_k.total)
        return growth


@dataclass(slots=True)
class Received:
    """The other end: the counters of one engine, as far as this process was told."""

    counters: StepCounters = field(default_factory=StepCounters)
    others: Counter[str] = field(default_factory=Counter)       # counts that are no StepCounters'
    state: dict[str, Any] = field(default_factory=dict)

    def absorb(self, growth: dict[str, Any]) -> None:
        c = self.counters
        for name, value in growth["numbers"].items():
            if hasattr(c, name):
                setattr(c, name, getattr(c, name) + value)
            else:
                self.others[name] += value
        c.chosen_k.add(growth["chosen_k"], growth["chosen_k_total"])
        c.verified.update({(drafter, *numbers): rows for drafter, *numbers, rows in growth["verified"]})
        if growth["step_time_error"] is not None:
            c.set_step_time_error(growth["step_time_error"])
        if growth["last_change"] is not None:
            c.set_last_change(*growth["last_change"])
        self.state = growth["state"]


def detach(stats: Any) -> dict[str, Any] | None:
    """Takes the growth out of `stats`; None when there is none."""
    carrier = getattr(stats, "waiting_lora_adapters", None)
    if not carrier:
        return None
    key = next((key for key in carrier if key.startswith(KEY)), None)
    if key is None:
        return None
    del carrier[key]
    growth: dict[str, Any] = json.loads(key.removeprefix(KEY))
    return growth
