"""What a user may say: `--additional-config '{"headway": {...}}'` for the server, `vllm_xargs` for one request.

    {"headway": {"policy": {"name": "goodput", "tpot_slo_ms": 30}, "trace": "steps.jsonl"}}
    {"vllm_xargs": {"headway_enabled": 0}}        or headway_max_tokens, headway_tpot_slo_ms

vLLM passes both through unread. A wrong server setting ends the start with a ConfigError that names what is accepted.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway.config import SpeculativeConfig, option
from headway.control.costs import FORMAT
from headway.control.policy import Policy
from headway.errors import ConfigError, InvalidRequestError, unknown_key

KEY = "headway"              # in vLLM's additional_config
XARGS_PREFIX = "headway_"    # of the keys in vllm_xargs that are ours


@dataclass(frozen=True)
class Settings:
    """`additional_config["headway"]`. The drafter and num_speculative_tokens stay where vLLM has them, in its speculative config."""

    enabled: bool = option(True, "false: vLLM's own scheduler, unchanged")
    policy: str | Mapping[str, Any] = option("goodput", 'policy name, or {"name": ..., options}, as in `headway serve --spec`')
    trace: str | None = option(None, "file to write one JSON line per step to, for `headway replay` and `headway tune`")
    costs: str | None = option(None, "file that keeps what was learned between starts; default: in the user's cache; \"off\": nowhere")

    def __post_init__(self) -> None:
        if not isinstance(self.enabled, bool):
            raise ConfigError(f"headway.enabled must be true or false, got {self.enabled!r}")
        for name in ("trace", "costs"):
            if not isinstance(getattr(self, name), str | None):
                raise ConfigError(f"headway.{name} must be a string or null, got {getattr(self, name)!r}")

    @classmethod
    def parse(cls, additional_config: Any) -> Settings:
        """Of the whole `additional_config`; other plugins' keys are theirs. Raises ConfigError naming the accepted keys."""
        given = additional_config.get(KEY, {}) if isinstance(additional_config, Mapping) else {}
        if not isinstance(given, Mapping):
            raise ConfigError(f'additional_config["{KEY}"] must be a JSON object, got {given!r}')
        accepted = [spec.name for spec in dataclasses.fields(cls)]
        for key in given:
            if key not in accepted:
                raise ConfigError(unknown_key(f'key in additional_config["{KEY}"]', str(key), accepted))
        settings = cls(**given)
        settings.build_policy(1)
        return settings

    def build_policy(self, max_k: int) -> Policy:
        """Raises ConfigError for a policy or an option that does not exist."""
        config = SpeculativeConfig.parse({"method": "ngram", "num_speculative_tokens": max(1, max_k), "policy": self.policy})
        assert config is not None
        policy: Policy = config.build_policy()
        return policy


@dataclass(frozen=True, slots=True)
class RequestSettings:
    """One request's wishes, from `vllm_xargs`."""

    enabled: bool = True              # headway_enabled: 0 or 1
    max_tokens: int | None = None     # headway_max_tokens: drafts per step at most
    tpot_slo_ms: float | None = None  # headway_tpot_slo_ms: milliseconds per output token not to exceed, where that is possible

    @classmethod
    def parse(cls, extra_args: Mapping[str, Any] | None) -> RequestSettings:
        """Of `SamplingParams.extra_args`; keys without our prefix are others'. Raises InvalidRequestError."""
        given = {key: value for key, value in (extra_args or {}).items() if key.startswith(XARGS_PREFIX)}
        if not given:
            return _NOTHING_ASKED
        accepted = [XARGS_PREFIX + spec.name for spec in dataclasses.fields(cls)]
        for key in given:
            if key not in accepted:
                raise InvalidRequestError(unknown_key("key in vllm_xargs", key, accepted), param="vllm_xargs")
        enabled = _number(given, "headway_enabled", 1.0, "0 or 1", lambda value: value in (0.0, 1.0))
        most = _number(given, "headway_max_tokens", math.inf, "a whole number >= 0", lambda value: value >= 0.0 and value == int(value))
        slo = _number(given, "headway_tpot_slo_ms", math.inf, "a number > 0", lambda value: value > 0.0)
        return cls(bool(enabled), None if most == math.inf else int(most), None if slo == math.inf else slo)


_NOTHING_ASKED = RequestSettings()


def _number(given: Mapping[str, Any], key: str, default: float, accepted: str, ok: Any) -> float:
    """vLLM passes strings, too."""
    if key not in given:
        return default
    try:
        value = float(given[key])
    except (TypeError, ValueError):
        value = math.nan
    if not (math.isfinite(value) and ok(value)):
        raise InvalidRequestError(f"vllm_xargs: {key} must be {accepted}, got {given[key]!r}", param="vllm_xargs")
    return value


def k_table(max_k: int) -> list[list[int]]:
    """A `num_speculative_tokens_per_batch_size` that names every k from max_k to 0 once.

    The scheduler does not read k from it. It is there for vLLM: with a table, CUDA graphs are captured for each k in it, and new
    requests are not padded to 1 + max_k rows.
    """
    return [[size, size, max(0, max_k + 1 - size)] for size in range(1, max_k + 2)]


def learned_path(settings: Settings, config: Any, method: str) -> Path | None:
    """Where is kept what one start of a server leaves to the next: a file per model, drafter and machine. None: nowhere.

    config  vLLM's
    """
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
