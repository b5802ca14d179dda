"""Puts the parts together for one scheduler: settings, policy, cost model, adapter, counters, trace."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headway import vllm_words
from headway.control.costs import CostModel
from headway.control.policy import DrafterView, Policy, Setup
from headway.errors import ConfigError
from headway.telemetry.learned_state import UNREADABLE, LearnedState
from headway.telemetry.trace import TraceWriter
from headway.version import __version__
from headway.vllm import compat
from headway.vllm.adapter import Adapter
from headway.vllm.scheduler_counters import Counters
from headway.vllm.settings import Settings, learned_path
from headway.vllm.telemetry import Sender

logger = logging.getLogger("vllm.headway")

TOKEN_ONLY = ("ngram", "suffix", "custom_class", "ngram_gpu")   # drafters without a forward pass, so without collectives
ALWAYS_ALL = ("suffix", "medusa")                               # vLLM asserts that they are asked for num_speculative_tokens


@dataclass(slots=True)
class Parts:
    """`adapter` None: vLLM's scheduler runs unchanged; `counters.off` says why."""

    counters: Counters
    sender: Sender
    adapter: Adapter | None = None
    drafts_all: bool = False
    learned: LearnedState | None = None

    def num_to_draft(self) -> int:
        assert self.adapter is not None
        k = self.adapter.num_to_draft()
        return self.counters.max_k if self.drafts_all else k

    def keep(self, *, idle: bool) -> None:
        """Between two steps; `idle`: the server has no work."""
        if self.adapter is not None and self.learned is not None:
            self.learned.save_now_and_then(idle=idle)

    def close(self) -> None:
        if self.adapter is not None:
            self.adapter.close()
            if self.learned is not None and not self.counters.off:
                self.learned.save()


def build(scheduler: Any, vllm_version: str) -> Parts:
    """Raises ConfigError for settings that cannot work; whatever else is in the way switches Headway off and is logged."""
    counters = Counters()
    parts = Parts(counters, Sender(counters))
    try:
        _assemble(parts, scheduler, vllm_version)
    except ConfigError:
        raise
    except Exception as error:
        parts.adapter = None
        counters.turn_off(f"vLLM {vllm_version} is not what was expected: {type(error).__name__}", error=True)
        logger.exception("Headway is off: vLLM %s is not what was expected", vllm_version)
    return parts


def _assemble(parts: Parts, scheduler: Any, vllm_version: str) -> None:
    config, counters = scheduler.vllm_config, parts.counters
    settings = Settings.parse(config.additional_config)
    spec = config.speculative_config
    method = str(spec.method) if spec else "none"
    name = settings.policy if isinstance(settings.policy, str) else str(settings.policy["name"])
    counters.describe(name, method, scheduler.num_spec_tokens)
    counters.turn_off(_off(settings, spec))
    if counters.off:
        logger.warning("Headway is off: %s", counters.off)
        return
    refuse_data_parallel(method, config.parallel_config.data_parallel_size)
    if not compat.is_tested(vllm_version):
        logger.warning("Headway was tested with vLLM %s; this is %s", " and ".join(compat.TESTED), vllm_version)
    parts.drafts_all = bool(config.scheduler_config.async_scheduling) or method in ALWAYS_ALL
    parts.learned = LearnedState(learned_path(settings, config, method))
    view = DrafterView(method, True, drafts_ahead=not config.scheduler_config.async_scheduling)
    policy = _policy(settings, view, scheduler.num_spec_tokens, parts.learned)
    trace = _trace(settings, config, method, scheduler, name)
    parts.adapter = Adapter(scheduler, policy, view, scheduler.num_spec_tokens, counters, trace=trace, copies=method == "ngram")
    logger.info(
        "Headway %s chooses k <= %d for each request and step (%s over %s, %d steps of cost data)",
        __version__, scheduler.num_spec_tokens, name, method, parts.learned.costs.num_observed if parts.learned.costs else 0,
    )  # fmt: skip


def _policy(settings: Settings, view: DrafterView, max_k: int, learned: LearnedState) -> Policy:
    """A policy of its own, started on the costs that are known, followed by `learned`."""
    costs, state = learned.costs or CostModel(), learned.learned(view.name)
    policy = settings.build_policy(max_k)
    try:
        policy.start(Setup((view,), max_k, costs, state))
    except UNREADABLE as error:
        if state is None:
            raise
        logger.warning("what the policy learned before cannot be read: %r", error)
        policy = settings.build_policy(max_k)
        policy.start(Setup((view,), max_k, costs))
    learned.follow(view.name, policy, costs)
    return policy


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


def drafter_options(spec: Any, method: str) -> dict[str, Any]:
    """What a recording says about vLLM's drafter, by vLLM's names."""
    keys = vllm_words.OPTIONS.get(method, ())
    return {key: value for key in keys if (value := getattr(spec, key, None)) is not None}


def _trace(settings: Settings, config: Any, method: str, scheduler: Any, policy: str) -> TraceWriter | None:
    if not settings.trace:
        return None
    header: Mapping[str, Any] = {
        "engine": f"vllm with headway {__version__}", "model": config.model_config.model, "dtype": str(config.model_config.dtype),
        "drafters": [method], "drafter_options": {method: drafter_options(config.speculative_config, method)},
        "policy": policy, "max_k": scheduler.num_spec_tokens, "max_num_seqs": scheduler.max_num_running_reqs,
        "max_num_batched_tokens": scheduler.max_num_scheduled_tokens,
    }  # fmt: skip
    rank = getattr(config.parallel_config, "data_parallel_index", 0)   # each data-parallel rank has a scheduler, so a trace, of its own
    return TraceWriter(f"{settings.trace}.{rank}" if rank else settings.trace, header)


