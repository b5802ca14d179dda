"""/metrics: the engine's counters as Prometheus text, under vLLM's names where vLLM has one and under `headway:` otherwise.

A custom collector reads `EngineMetrics` when it is scraped; nothing is counted twice, and every app has a registry of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from headway.config import SpeculativeConfig
from headway.engine.metrics import EngineMetrics
from headway.server.async_engine import AsyncEngine
from headway.spec_decode_metrics import SpecDecodeMetrics
from headway.telemetry.counters import CHOSEN_K, Histogram, measurements

FINISH_REASONS = ("stop", "length", "abort", "error")


class EngineCollector(Collector):
    """Yields one metric family per counter; drafters and positions are there before they were used."""

    def __init__(self, metrics: EngineMetrics, bridge: AsyncEngine, model: str, speculative: SpeculativeConfig | None) -> None:
        self.metrics = metrics
        self.bridge = bridge
        self.labels = {"model_name": model, "engine": "0"}
        self.drafters = speculative.methods if speculative else ()
        self.num_positions = speculative.num_speculative_tokens if speculative else 0
        self.policy = speculative.policy if speculative else "none"

    def collect(self) -> Iterator[Metric]:
        m = self.metrics
        yield self._gauge("vllm:num_requests_running", "Sequences in the running batch.", m.num_running)
        yield self._gauge("vllm:num_requests_waiting", "Sequences waiting to run.", m.num_waiting)
        yield self._gauge("vllm:kv_cache_usage_perc", "K/V cache usage; 1 means full.", m.kv_cache_usage)
        yield self._counter("vllm:prompt_tokens", "Prompt tokens, cached ones included.", m.num_prompt_tokens)
        yield self._counter("vllm:generation_tokens", "Tokens written.", m.num_generation_tokens)
        yield self._counter("vllm:num_preemptions", "Sequences preempted.", m.num_preemptions)
        yield self._counter("vllm:prefix_cache_queries", "Tokens looked up in the prefix cache.", m.prefix_cache_queries)
        yield self._counter("vllm:prefix_cache_hits", "Tokens found in the prefix cache.", m.prefix_cache_hits)
        finished = m.finished.copy()
        by_reason: dict[tuple[str, ...], float] = {(reason,): finished[reason] for reason in FINISH_REASONS}
        yield self._counters("vllm:request_success", "Sequences finished, by reason.", ("finished_reason",), by_reason)
        yield self._histogram("vllm:time_to_first_token_seconds", "Time to first token.", m.time_to_first_token)
        yield self._histogram("vllm:inter_token_latency_seconds", "Time per token after the first.", m.inter_token_latency)
        yield self._histogram("vllm:e2e_request_latency_seconds", "Time from arrival to the last token.", m.e2e_latency)
        yield from self._speculation()
        yield from self._steps()
        yield self._counter("headway:requests_rejected", "Requests refused because the queue was full.", self.bridge.num_rejected)
        yield self._counter("headway:requests_dropped", "Requests whose client did not read.", self.bridge.memory.num_dropped)

    def _speculation(self) -> Iterator[Metric]:
        by_drafter = {name: SpecDecodeMetrics() for name in self.drafters} | self.metrics.speculation()
        total = SpecDecodeMetrics()
        for stats in by_drafter.values():
            total.add(stats)
        yield self._counter("vllm:spec_decode_num_drafts", "Speculative steps, summed over sequences.", total.num_spec_steps)
        yield self._counter("vllm:spec_decode_num_draft_tokens", "Drafts verified.", total.num_draft_tokens)
        yield self._counter("vllm:spec_decode_num_accepted_tokens", "Drafts accepted.", total.num_accepted_tokens)
        yield self._counters(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Drafts accepted, by position.",
            ("position",),
            {(str(at),): count for at, count in enumerate(self._padded(total.num_accepted_per_pos))},
        )

    def _steps(self) -> Iterator[Metric]:
        for found in measurements(self.metrics, self.drafters, self.num_positions, self.policy):
            kind = GaugeMetricFamily if found.gauge else CounterMetricFamily
            family = kind(found.name, found.help, labels=(*self.labels, *found.labels))
            for extra, value in found.values.items():
                family.add_metric((*self.labels.values(), *extra), value)
            yield family
        yield self._histogram(*CHOSEN_K, self.metrics.chosen_k)

    def _padded(self, counts: list[int]) -> list[int]:
        return counts + [0] * (self.num_positions - len(counts))

    def _gauge(self, name: str, help: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, help, labels=tuple(self.labels))
        family.add_metric(tuple(self.labels.values()), value)
        return family

    def _counter(self, name: str, help: str, value: float) -> Metric:
        return self._counters(name, help, (), {(): value})

    def _counters(self, name: str, help: str, labels: tuple[str, ...], values: Mapping[tuple[str, ...], float]) -> Metric:
        family = CounterMetricFamily(name, help, labels=(*self.labels, *labels))
        for extra, value in values.items():
            family.add_metric((*self.labels.values(), *extra), value)
        return family

    def _histogram(self, name: str, help: str, histogram: Histogram) -> Metric:
        counts, total = list(histogram.counts), histogram.total
        buckets, so_far = [], 0
        for bound, count in zip((*map(str, histogram.bounds), "+Inf"), counts, strict=True):
            so_far += count
            buckets.append((bound, float(so_far)))
        family = HistogramMetricFamily(name, help, labels=tuple(self.labels))
        family.add_metric(tuple(self.labels.values()), buckets, total)
        return family


def build_registry(collector: EngineCollector) -> CollectorRegistry:
    """A registry with the engine's counters and this process' memory, CPU time and files."""
    registry = CollectorRegistry()
    registry.register(collector)
    ProcessCollector(registry=registry)
    return registry
