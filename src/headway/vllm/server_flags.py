"""`vllm serve` flags: those that bring Headway in, written; those that matter to it, read. No vLLM is imported here."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from headway.config import json_object
from headway.errors import ConfigError, unknown_key
from headway.vllm.settings import KEY, Settings, k_table
from headway.vllm_words import PROPOSER

SCHEDULER = "headway.vllm.Scheduler"
DEFAULT_METHOD = "headway"


@dataclass(frozen=True, slots=True)
class Method:
    """One of vLLM's drafters, as far as its flags go."""

    help: str
    max_k: int                      # default
    needs_model: bool = False
    is_async: bool = False          # vLLM schedules asynchronously with it, so the drafts stay on the device
    options: Mapping[str, Any] = field(default_factory=dict)


METHODS = {
    "headway": Method("Headway's suffix and ngram drafters, chosen per request", 8),
    "ngram": Method("vLLM's prompt lookup on the CPU", 8),
    "ngram_gpu": Method("vLLM's prompt lookup on the GPU", 8, is_async=True, options={"prompt_lookup_max": 5, "prompt_lookup_min": 2}),
    "suffix": Method("vLLM's suffix decoding; needs arctic-inference", 16),
    "draft_model": Method("a smaller model of the same vocabulary", 5, needs_model=True, is_async=True),
    "eagle": Method("a trained EAGLE head", 5, needs_model=True, is_async=True),
    "eagle3": Method("a trained EAGLE-3 head", 5, needs_model=True, is_async=True),
    "mtp": Method("the model's own multi-token prediction", 3, is_async=True),
    "medusa": Method("trained Medusa heads", 4, needs_model=True),
}


def serve_flags(
    *, method: str = DEFAULT_METHOD, draft_model: str | None = None, max_k: int | None = None, settings: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Flag -> value (a string, or what becomes JSON). `settings`: of `Settings`, only what is not its default. Raises ConfigError."""
    if method not in METHODS:
        raise ConfigError(unknown_key("method", method, METHODS))
    chosen = METHODS[method]
    if chosen.needs_model and not draft_model:
        raise ConfigError(f"--method {method} needs --draft-model: {chosen.help}, a directory or a hub id")
    if draft_model and not chosen.needs_model:
        raise ConfigError(f"--method {method} takes no --draft-model")
    k = chosen.max_k if max_k is None else max_k
    if k < 1:
        raise ConfigError(f"--max-k must be >= 1, got {k}")
    speculative: dict[str, Any] = {"method": method, "num_speculative_tokens": k, **chosen.options}
    if method == "headway":
        speculative |= {"method": "custom_class", "model": PROPOSER}
    elif draft_model:
        speculative["model"] = draft_model
    if chosen.is_async:
        speculative["num_speculative_tokens_per_batch_size"] = k_table(k)
    flags: dict[str, Any] = {"--scheduler-cls": SCHEDULER, "--speculative-config": speculative}
    if settings:
        Settings.parse({KEY: settings})
        flags["--additional-config"] = {KEY: dict(settings)}
    return flags


def notes(method: str) -> list[str]:
    """What the user of these flags should know beforehand."""
    chosen = METHODS[method]
    if chosen.is_async:
        return ["the table of batch sizes only names every k once, so that vLLM captures a CUDA graph for each; Headway chooses among them"]
    return [f"vLLM switches asynchronous scheduling off with {method!r}: drafts are made on the CPU, between steps"]


def command(model: str, flags: Mapping[str, Any]) -> str:
    """One shell command over several lines."""
    words = [f"vllm serve {shlex.quote(model)}"]
    words += [f"{name} {shlex.quote(value if isinstance(value, str) else json.dumps(value))}" for name, value in flags.items()]
    return " \\\n  ".join(words)


# -- reading ------------------------------------------------------------------------------------------------------------

# Flag -> what its value is. vLLM has hundreds; the others say nothing about speculation and are passed over.
KNOWN: dict[str, type] = {
    "speculative_config": dict, "additional_config": dict, "compilation_config": dict, "scheduler_cls": str,
    "data_parallel_size": int, "tensor_parallel_size": int, "pipeline_parallel_size": int, "api_server_count": int,
    "max_num_seqs": int, "max_model_len": int, "async_scheduling": bool, "enforce_eager": bool, "enable_lora": bool,
    "distributed_executor_backend": str, "kv_cache_memory_bytes": str, "gpu_memory_utilization": float, "disable_log_stats": bool,
}  # fmt: skip
SHORT = {
    "-sc": "speculative_config", "-cc": "compilation_config", "-dp": "data_parallel_size", "-tp": "tensor_parallel_size",
    "-pp": "pipeline_parallel_size", "-asc": "api_server_count",
}  # fmt: skip


def read_flags(words: Sequence[str]) -> dict[str, Any]:
    """The KNOWN flags among `words`, by their Python names. JSON may be given in vLLM's dotted form (`-sc.method ngram`), too.

    Raises ConfigError for a value that is not what its flag takes.
    """
    found: dict[str, Any] = {}
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if not word.startswith("-"):
            continue
        flag, equals, value = word.partition("=")
        name, _, path = (SHORT.get(flag.partition(".")[0]) or flag.partition(".")[0].removeprefix("--").replace("-", "_"), *_dot(flag))
        if name.removeprefix("no_") in KNOWN and KNOWN[name.removeprefix("no_")] is bool:
            found[name.removeprefix("no_")] = not name.startswith("no_")
            continue
        if name not in KNOWN:
            continue
        if not equals:
            if not rest:
                raise ConfigError(f"{flag} needs a value")
            value = rest.pop(0)
        if path:
            _put(found.setdefault(name, {}), path.split("."), value)
        else:
            found[name] = _value(flag, KNOWN[name], value)
    return found


def _dot(flag: str) -> tuple[str, str]:
    _, dot, path = flag.partition(".")
    return dot, path


def _put(into: dict[str, Any], path: list[str], value: str) -> None:
    for part in path[:-1]:
        into = into.setdefault(part, {})
    try:
        into[path[-1]] = json.loads(value)
    except json.JSONDecodeError:
        into[path[-1]] = value


def _value(flag: str, kind: type, text: str) -> Any:
    if kind is dict:
        return json_object(text, flag)
    try:
        return kind(text)
    except ValueError as error:
        raise ConfigError(f"{flag} must be a {'number' if kind is float else 'whole number'}, got {text!r}") from error
