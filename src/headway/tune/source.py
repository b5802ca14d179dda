"""Whose drafts a schedule is for: the drafter of a recording, in Headway's words and in vLLM's."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headway import plugins, vllm_words
from headway.errors import ConfigError
from headway.telemetry.trace import Trace


@dataclass(frozen=True, slots=True)
class Source:
    """ours, vllms    its name in Headway and in vLLM; None: there is none
    options           as it was run, `model` (its network) among them
    """

    ours: str | None
    vllms: str | None
    options: Mapping[str, Any]

    @property
    def model(self) -> str | None:
        return self.options.get("model")

    @property
    def is_tree(self) -> bool:
        return int(self.options.get("topk", 1)) > 1

    @property
    def headway_options(self) -> dict[str, Any]:
        """Those that Headway's drafter declares."""
        if self.ours is None:
            return {}
        cls = plugins.load("drafter", self.ours)
        names = {field.name for field in dataclasses.fields(cls.Options)} if hasattr(cls, "Options") else set()
        return _of(self.options, names | ({"model"} if cls.takes_model else set()))

    @property
    def vllm_options(self) -> dict[str, Any]:
        return _of(self.options, set(vllm_words.OPTIONS.get(self.vllms or "", ())))


def of_headway(name: str, options: Mapping[str, Any]) -> Source:
    """A drafter of Headway. Raises ConfigError when it needs a network and has none."""
    model = options.get("model")
    if plugins.load("drafter", name).needs_model and model is None:
        raise _unnamed(name)
    return Source(name, vllm_words.method_for(name, model), options)


def of_vllm(method: str, options: Mapping[str, Any]) -> Source:
    """A method of vLLM. Raises ConfigError for a name that vLLM does not run, and when it needs a network and has none."""
    if method not in vllm_words.OPTIONS:
        raise ConfigError(f"the trace was recorded with {method!r}, which neither Headway nor vLLM drafts with")
    if method == "custom_class":
        options = {"model": vllm_words.PROPOSER, **options}
    ours = vllm_words.METHODS.get(method)
    if "model" in vllm_words.OPTIONS[method] and method not in vllm_words.MTP_METHODS and options.get("model") is None:
        raise _unnamed(method)
    return Source(ours, method, options)


def of_traces(traces: Sequence[Trace], model: str | None) -> tuple[str, Source]:
    """(the name that the traces know the drafter by, the drafter). `model` takes the place of the network that the traces name.

    Raises ConfigError for traces of different drafters or networks, and for a network that is not known.
    """
    drafters = {trace.drafters[:1] for trace in traces}
    if len(drafters) != 1 or not next(iter(drafters)):
        raise ConfigError(f"the traces must have drafts of one drafter, the same in each; found {sorted(map(list, drafters))}")
    [[name]] = drafters
    found = [_recorded(trace, name) for trace in traces]
    models = {str(options["model"]) for options in found if "model" in options}
    if model is None and len(models) > 1:
        raise ConfigError(f"the traces were recorded with different draft networks, {', '.join(sorted(models))}: --draft-model says which")
    options: dict[str, Any] = {}
    for each in reversed(found):
        options |= each
    if model is not None:
        options["model"] = model
    by_vllm = all(str(trace.header.get("engine", "")).startswith("vllm") for trace in traces)
    is_ours = name in plugins.names("drafter") or ":" in name
    source = of_headway(name, options) if is_ours and not by_vllm else of_vllm(name, options)
    if model is not None and "model" not in source.headway_options and "model" not in source.vllm_options:
        raise ConfigError(f"--draft-model was given, but {name!r} has no draft network")
    return name, source


def _recorded(trace: Trace, name: str) -> dict[str, Any]:
    """What the header says about the drafter's options."""
    options = trace.header.get("drafter_options", {})
    found = options.get(name, {}) if isinstance(options, Mapping) else None
    if not isinstance(found, Mapping):
        raise ConfigError(f"the trace's drafter_options must be an object of objects, got {options!r}")
    return dict(found)


def _of(options: Mapping[str, Any], names: set[str]) -> dict[str, Any]:
    return {key: value for key, value in options.items() if key in names and value is not None}


def _unnamed(name: str) -> ConfigError:
    return ConfigError(f"{name!r} drafts with a network, and nothing says which: --draft-model names it")
