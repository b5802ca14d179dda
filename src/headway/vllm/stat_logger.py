"""Headway's metrics on vLLM's own /metrics, under the names our server uses. vLLM loads this by entry point (`vllm.stat_logger_plugins`).

Counters and gauges of prometheus_client, as vLLM's own are, so that several API servers add up. They appear with the first numbers
that arrive: a vLLM without Headway's scheduler shows none. Whatever goes wrong here is logged once and ends the metrics, not the server.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from typing import Any

from prometheus_client import Counter, Gauge, Histogram
from vllm.v1.metrics.loggers import AggregateStatLoggerBase

from headway.telemetry.counters import CHOSEN_K, K_BUCKETS, Measurement, measurements
from headway.vllm.telemetry import Received, detach

LABELS = ("model_name", "engine")

logger = logging.getLogger("vllm.headway")

# One set per process, however often vLLM makes its loggers: a name can be registered once.
_families: dict[str, Any] = {}


class StatLogger(AggregateStatLoggerBase):  # type: ignore[misc]
    """One per API server process, for all of its engines."""

    def __init__(self, vllm_config: Any, engine_indexes: list[int]) -> None:
        self._model = str(vllm_config.model_config.served_model_name)
        self._received: dict[int, Received] = {}
        self._shown: dict[tuple[str, ...], float] = {}       # (metric, labels) -> what a counter was increased to by this object
        self._reasons: dict[tuple[str, ...], tuple[str, ...]] = {}
        self._shown_k: dict[int, tuple[list[int], float]] = {}
        self._failed = False

    def record(self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0) -> None:
        """After each step of engine `engine_idx`."""
        if scheduler_stats is None or self._failed:
            return
        try:
            growth = detach(scheduler_stats)
            if growth is not None:
                received = self._received.setdefault(engine_idx, Received())
                received.absorb(growth)
                self._show(received, engine_idx)
        except Exception:
            self._failed = True
            logger.exception("Headway's metrics end here; serving goes on")

    def log_engine_initialized(self) -> None:
        return

    def _show(self, received: Received, engine_idx: int) -> None:
        common = (self._model, str(engine_idx))
        for found in _measured(received):
            family = _family(Gauge if found.gauge else Counter, found.name, found.help, found.labels)
            for extra, value in found.values.items():
                if "reason" in found.labels:
                    extra = self._one_reason(family, found.name, common, extra)
                series = family.labels(*common, *extra)
                if found.gauge:
                    series.set(value)
                else:
                    key = (found.name, *common, *extra)
                    series.inc(max(0.0, value - self._shown.get(key, 0.0)))
                    self._shown[key] = max(value, self._shown.get(key, 0.0))
        self._show_k(received, engine_idx, common)

    def _one_reason(self, family: Any, name: str, common: tuple[str, str], extra: tuple[str, ...]) -> tuple[str, ...]:
        """A series per reason would stay for ever: the one before is taken back, and where that is impossible there is no reason."""
        if "PROMETHEUS_MULTIPROC_DIR" in os.environ:
            return (*extra[:-1], "")
        before = self._reasons.get((name, *common))
        if before is not None and before != extra:
            family.remove(*common, *before)
        self._reasons[(name, *common)] = extra
        return extra

    def _show_k(self, received: Received, engine_idx: int, common: tuple[str, str]) -> None:
        name, help = CHOSEN_K
        series = _family(Histogram, name, help, (), buckets=K_BUCKETS).labels(*common)
        now = received.counters.chosen_k
        counts, total = self._shown_k.get(engine_idx, ([0] * len(now.counts), 0.0))
        # `observe` takes one value at a time; these are the two things it does.
        for bucket, have, shown in zip(series._buckets, now.counts, counts, strict=True):
            bucket.inc(have - shown)
        series._sum.inc(now.total - total)
        self._shown_k[engine_idx] = (list(now.counts), now.total)


# Counts of the plugin itself, by their names in `Received.others`.
OTHERS = {
    "num_errors": ("headway:errors", "Exceptions inside the controller; each leaves k to vLLM's own configuration."),
    "num_fallback_steps": ("headway:fallback_steps", "Steps in which k was left to vLLM's own configuration."),
    "num_stale_outputs": ("headway:stale_outputs", "Outputs of preempted requests, which were not learned from."),
    "num_invalid_requests": ("headway:invalid_requests", "Requests whose vllm_xargs were not understood and so ignored."),
}


def _measured(received: Received) -> Iterator[Measurement]:
    state = received.state
    drafters = (state["drafter"],) if state.get("drafter") else ()
    yield from measurements(received.counters, drafters, state.get("max_k") or 0, state.get("policy") or "none")
    for attribute, (name, help) in OTHERS.items():
        yield Measurement(name, help, {(): received.others[attribute]})
    help = "Time inside Headway's hooks, the policy's included; part of the time in steps."
    yield Measurement("headway:plugin_seconds", help, {(): received.others["plugin_ms"] / 1e3})
    help = "1 while the controller decides; 0 when it is off, and why."
    off = state.get("off") or ""
    yield Measurement("headway:controller", help, {(off,): float(not off)}, ("reason",), gauge=True)


def _family(kind: type, name: str, help: str, labels: tuple[str, ...], **options: Any) -> Any:
    if name not in _families:
        if kind is Gauge:
            options["multiprocess_mode"] = "mostrecent"
        _families[name] = kind(name, help, labelnames=(*LABELS, *labels), **options)
    return _families[name]
