"""Puts the parts together for one scheduler: settings, policy, cost model, chooser, counters, trace."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway import __version__
from headway.control.costs import FORMAT, CostModel
from headway.control.trace import TraceWriter
from headway.errors import ConfigError
from headway.vllm import compat
from headway.vllm.chooser import Chooser
from headway.vllm.counters import Counters
from headway.vllm.pilot import Pilot
from headway.vllm.settings import Settings
from headway.vllm.telemetry import Sender

logger = logging.getLogger("vllm.headway")

TOKEN_ONLY = ("ngram", "suffix", "custom_class", "ngram_gpu")   # drafters without a forward pass, so without collectives
ALWAYS_ALL = ("suffix", "medusa")                               # vLLM asserts that they are asked for num_speculative_tokens


@dataclass(slots=True)
class Parts:
    """`pilot` None: vLLM's scheduler runs unchanged; `counters.off` says why."""

    counters: Counters
    sender: Sender
    pilot: Pilot | None = None
    drafts_all: bool = False
    costs: CostModel | None = None
    costs_path: Path | None = None

    def num_to_draft(self) -> int:
        assert self.pilot is not None
        k = self.pilot.num_to_draft()
        return self.counters.max_k if self.drafts_all else k

    def close(self) -> None:
        if self.pilot is not None:
            self.pilot.close()
        if self.costs is not None and self.costs_path is not None and self.costs.num_observed:
            try:
                self.costs.save(self.costs_path)
            except OSError as error:
                logger.warning("cannot keep what steps cost in %s: %s", self.costs_path, error.strerror)


def build(scheduler: Any, vllm_version: str) -> Parts:
    """Raises ConfigError for settings that cannot work; what merely switches Headway off is logged."""
    config = scheduler.vllm_config
    settings = Settings.parse(config.additional_config)
    spec = config.speculative_config
    method = str(spec.method) if spec else "none"
    name = settings.policy if isinstance(settings.policy, str) else str(settings.policy["name"])
    counters = Counters(name, method, scheduler.num_spec_tokens)
    parts = Parts(counters, Sender(counters))
    counters.off = _off(settings, spec)
    if counters.off:
        logger.warning("Headway is off: %s", counters.off)
        return parts
    refuse_data_parallel(method, config.parallel_config.data_parallel_size)
    if not compat.is_tested(vllm_version):
        logger.warning("Headway was tested with vLLM %s; this is %s", " and ".join(compat.TESTED), vllm_version)
    parts.drafts_all = bool(config.scheduler_config.async_scheduling) or method in ALWAYS_ALL
    parts.costs_path = costs_path(settings, config, method)
    parts.costs = _load(parts.costs_path)
    chooser = Chooser(settings.build_policy(scheduler.num_spec_tokens), method, scheduler.num_spec_tokens, parts.costs)
    trace = _trace(settings, config, method, scheduler, name)
    parts.pilot = Pilot(scheduler, chooser, counters, trace=trace, copies=method == "ngram")
    logger.info(
        "Headway %s chooses k <= %d for each request and step (%s over %s, %d steps of cost data)",
        __version__, scheduler.num_spec_tokens, name, method, parts.costs.num_observed,
    )  # fmt: skip
    return parts


def refuse_data_parallel(method: str, data_parallel_size: int) -> None:
    """Ranks choose k by themselves. A drafter with a forward pass runs collectives, as many as k: different k would hang for ever."""
    if data_parallel_size > 1 and method not in TOKEN_ONLY:
        raise ConfigError(
            f"headway.vllm.Scheduler does not work with data_parallel_size {data_parallel_size} and the drafter {method!r}: ranks that "
            f"choose different k would hang in its collectives. Accepted: data_parallel_size 1 behind a router, or one of "
            f"{', '.join(TOKEN_ONLY)}"
        )


def _off(settings: Settings, spec: Any) -> str:
    if not settings.enabled:
        return "additional_config says enabled: false"
    return "" if spec else "there is no --speculative-config, so there are no drafts to choose from"


def costs_path(settings: Settings, config: Any, method: str) -> Path | None:
    """Where what steps cost is kept: a file per model, parallel layout, drafter and machine."""
    if settings.costs == "off":
        return None
    if settings.costs:
        return Path(settings.costs)
    model, parallel = config.model_config, config.parallel_config
    what = [
        model.model, str(model.dtype), str(model.quantization), parallel.tensor_parallel_size, parallel.pipeline_parallel_size,
        config.scheduler_config.max_num_batched_tokens, config.cache_config.block_size, method, config.num_speculative_tokens,
        _machine(), FORMAT,
    ]  # fmt: skip
    digest = hashlib.sha256(json.dumps(what, default=str).encode()).hexdigest()
    home = Path(os.environ.get("HEADWAY_HOME") or "~/.cache/headway").expanduser()
    return home / "vllm-costs" / f"{digest[:20]}.json"


def _machine() -> list[str]:
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 0
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8", errors="replace").splitlines() if info.exists() else []
    cpu = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "cpu")
    return [cpu, str(cpus), os.environ.get("OMP_NUM_THREADS", ""), _gpu()]


def _gpu() -> str:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else ""


def _load(path: Path | None) -> CostModel:
    try:
        return CostModel.load(path) if path else CostModel()
    except (OSError, ValueError):
        return CostModel()


def _trace(settings: Settings, config: Any, method: str, scheduler: Any, policy: str) -> TraceWriter | None:
    if not settings.trace:
        return None
    header: Mapping[str, Any] = {
        "engine": f"vllm with headway {__version__}", "model": config.model_config.model, "dtype": str(config.model_config.dtype),
        "drafters": [method], "policy": policy, "max_k": scheduler.num_spec_tokens, "max_num_seqs": scheduler.max_num_running_reqs,
        "max_num_batched_tokens": scheduler.max_num_scheduled_tokens,
    }  # fmt: skip
    rank = getattr(config.parallel_config, "data_parallel_index", 0)   # each data-parallel rank has a scheduler, so a trace, of its own
    return TraceWriter(f"{settings.trace}.{rank}" if rank else settings.trace, header)


