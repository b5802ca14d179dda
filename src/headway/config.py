"""Configuration: dict | JSON | command-line flags -> frozen objects. Unknown keys and impossible combinations are errors.

Each field is declared once, here; `headway config`, the command-line flags and their help are made from it. Options of
a drafter or a policy live in its own file (a frozen dataclass `Options`) and are accepted here by the names declared there.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any, Literal

from headway import plugins, vllm_words
from headway.errors import ConfigError, unknown_key

DTYPES = ("auto", "float32", "bfloat16", "float16")
QUANTIZATIONS = ("int8",)
REJECTION_METHODS = ("standard", "block", "synthetic", "lossy_typical")
DEFAULT_METHOD = "suffix"
DEFAULT_POLICY = "goodput"
DEFAULT_NUM_SPECULATIVE_TOKENS = {"suffix": 16, "ngram": 4}

# vLLM's top-level keys that choose a policy by being present.
POLICY_KEYS = {"num_speculative_tokens_per_batch_size": "batch_table", "disable_by_batch_size": "disable_by_batch_size"}


def option(default: Any, help: str, **extra: Any) -> Any:
    """A dataclass field with its help text; `choices` and `alias` are the other metadata in use."""
    if isinstance(default, (list, dict)):
        return field(default_factory=lambda: default, metadata={"help": help, **extra})
    return field(default=default, metadata={"help": help, **extra})


def json_object(value: Any, what: str) -> dict[str, Any]:
    """`value`, or what it says when it is text. Raises ConfigError, which begins with `what`."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise ConfigError(f"{what} is not valid JSON: {error}") from error
    if not isinstance(value, Mapping):
        raise ConfigError(f"{what} must be a JSON object, got {value!r}")
    return dict(value)


@dataclass(frozen=True)
class SpeculativeConfig:
    """How to speculate. `parse` reads what vLLM's --speculative-config takes (see `vllm_words`), plus the key "policy"."""

    method: str | tuple[str, ...] = option(
        DEFAULT_METHOD, "drafter, or a list of drafters to choose from: names from `headway list drafters`, or package.module:Class"
    )
    num_speculative_tokens: int = option(DEFAULT_NUM_SPECULATIVE_TOKENS[DEFAULT_METHOD], "upper bound on drafts per sequence and step")
    policy: str = option(DEFAULT_POLICY, "how many drafts, step by step: a name from `headway list policies`, or package.module:Class")
    model: str | None = option(None, "draft model, for the drafters that have one")
    rejection_sample_method: str = option("standard", "how drafts are accepted", choices=REJECTION_METHODS)
    synthetic_acceptance_rates: tuple[float, ...] | None = option(None, "synthetic: marginal acceptance rate of each position")
    synthetic_acceptance_length: float | None = option(None, "synthetic: mean tokens per step, the bonus token included")
    typical_acceptance_threshold: float = option(0.09, "lossy_typical: probability floor (Medusa's epsilon)")
    typical_acceptance_alpha: float = option(0.3, "lossy_typical: entropy factor (Medusa's delta)")
    drafter_options: Mapping[str, Mapping[str, Any]] = option({}, "drafter -> its options, by the names its file declares")
    policy_options: Mapping[str, Any] = option({}, "options of the policy, by the names its file declares")

    def __post_init__(self) -> None:
        if self.num_speculative_tokens < 1:
            raise ConfigError(
                f"num_speculative_tokens must be >= 1, got {self.num_speculative_tokens}; "
                'to switch speculation off, leave the speculative config out or say "off"'
            )
        if self.rejection_sample_method not in REJECTION_METHODS:
            raise ConfigError(unknown_key("rejection_sample_method", str(self.rejection_sample_method), REJECTION_METHODS))
        if not 0.0 <= self.typical_acceptance_threshold <= 1.0:
            raise ConfigError(f"typical_acceptance_threshold must be in [0, 1], got {self.typical_acceptance_threshold}")
        if not 0.0 <= self.typical_acceptance_alpha < math.inf:
            raise ConfigError(f"typical_acceptance_alpha must be >= 0 and finite, got {self.typical_acceptance_alpha}")
        rates, length = self.synthetic_acceptance_rates, self.synthetic_acceptance_length
        if self.rejection_sample_method == "synthetic":
            if (rates is None) == (length is None):
                raise ConfigError(
                    'rejection_sample_method "synthetic" needs exactly one of synthetic_acceptance_rates and synthetic_acceptance_length'
                )
        elif rates is not None or length is not None:
            raise ConfigError("synthetic_acceptance_rates and synthetic_acceptance_length need rejection_sample_method \"synthetic\"")
        if rates is not None:
            if len(rates) != self.num_speculative_tokens:
                raise ConfigError(
                    f"synthetic_acceptance_rates must have num_speculative_tokens={self.num_speculative_tokens} entries, got {len(rates)}"
                )
            if any(not 0.0 <= rate <= 1.0 for rate in rates) or any(a < b for a, b in itertools.pairwise(rates)):
                raise ConfigError(f"synthetic_acceptance_rates must be in [0, 1] and never increase, got {list(rates)}")
        if length is not None and not 1.0 <= length <= self.num_speculative_tokens + 1:
            raise ConfigError(f"synthetic_acceptance_length must be in [1, {self.num_speculative_tokens + 1}], got {length}")

    @classmethod
    def parse(cls, value: str | Mapping[str, Any] | SpeculativeConfig | None) -> SpeculativeConfig | None:
        """None or "off" -> None; "default" -> the default; a method name, a JSON text or a mapping -> the checked config.

        What "default" and "auto" mean for a certain model: `drafters.core.automatic.spell_out`, to be asked before.

        Raises ConfigError, naming the accepted keys.
        """
        if value is None or isinstance(value, SpeculativeConfig):
            return value
        if isinstance(value, str):
            text = value.strip()
            if text == "off":
                return None
            if text == "default":
                return cls.parse({"method": DEFAULT_METHOD})
            if not text.startswith("{"):
                return cls.parse({"method": text})
        return cls._from_mapping(json_object(value, "the speculative config"))

    @classmethod
    def _from_mapping(cls, given: dict[str, Any]) -> SpeculativeConfig:
        given = vllm_words.to_headway(given)
        method, drafter_given = _split_method(given.pop("method", DEFAULT_METHOD))
        names = (method,) if isinstance(method, str) else method
        drafter_types = {name: _drafter_option_types(plugins.load("drafter", name)) for name in names}
        for name, options in drafter_given.items():
            for key in options:
                if key not in drafter_types[name]:
                    raise ConfigError(unknown_key(f"option of drafter {name!r}", str(key), [*drafter_types[name], "name"]))
        policy, policy_given = _split_policy(given.pop("policy", None))
        for key, implied in POLICY_KEYS.items():
            if key in given:
                if policy not in (None, implied):
                    raise ConfigError(f"{key} is the policy {implied!r}; it cannot be combined with the policy {policy!r}")
                if key in policy_given:
                    raise ConfigError(f"{key} is given twice: by itself and inside \"policy\"")
                policy, policy_given[key] = implied, given.pop(key)
        policy = policy or DEFAULT_POLICY
        policy_options = _option_types(plugins.load("policy", policy))
        for key in policy_given:
            if key not in policy_options:
                raise ConfigError(unknown_key(f"option of policy {policy!r}", str(key), [*policy_options, "name"]))
        own = {k: hint for k, hint in _field_types(cls).items() if k not in ("drafter_options", "policy_options", "method", "policy")}
        declared = {key: [name for name in names if key in drafter_types[name]] for types_of in drafter_types.values() for key in types_of}
        accepted = {*own, *declared, *POLICY_KEYS, "method", "policy"}
        given = {key: value for key, value in given.items() if key in accepted or not vllm_words.without_effect(key, _quoted(names))}
        for key, value in given.items():
            if key not in accepted:
                raise ConfigError(unknown_key(f"key in the speculative config of method {_quoted(names)}:", str(key), accepted))
            if key in declared and key not in own:
                _give_option(declared[key], str(key), value, drafter_given)
        if given.get("model") is not None and not any(plugins.load("drafter", name).takes_model for name in names):
            raise ConfigError(f"method {_quoted(names)} has no draft model, so \"model\" cannot be given")
        given.setdefault("num_speculative_tokens", max(DEFAULT_NUM_SPECULATIVE_TOKENS.get(name, 4) for name in names))
        config = cls(
            method=method,
            policy=policy,
            **{key: _checked(key, value, own[key]) for key, value in given.items() if key in own},
            drafter_options={
                name: {k: _checked(k, v, drafter_types[name][k]) for k, v in options.items()} for name, options in drafter_given.items()
            },
            policy_options={k: _checked(k, v, policy_options[k]) for k, v in policy_given.items()},
        )
        for name in names:
            _options("drafter", name, config.options_of(name))   # the ranges are checked now, not when the engine is built
            if plugins.load("drafter", name).needs_model and config.model_of(name) is None:
                raise ConfigError(f"method {name!r} needs \"model\": the network that drafts")
        _options("policy", policy, config.policy_options)
        return config

    @property
    def methods(self) -> tuple[str, ...]:
        """The drafters' names, in order of preference."""
        return (self.method,) if isinstance(self.method, str) else self.method

    def model_of(self, name: str) -> str | None:
        """The network of the drafter `name`: its own option, else the one `model` for all."""
        model: str | None = self.drafter_options.get(name, {}).get("model", self.model)
        return model

    def options_of(self, name: str) -> dict[str, Any]:
        """What was given for the fields of the drafter's `Options`."""
        return {key: value for key, value in self.drafter_options.get(name, {}).items() if key != "model"}

    def spelled_out(self, name: str) -> dict[str, Any]:
        """All options of the drafter `name` that have a value, defaults too, and its `model`: what a recording says about it."""
        cls = plugins.load("drafter", name)
        given = {"model": self.model_of(name) if cls.takes_model else None, **self.options_of(name)}
        options = {**dataclasses.asdict(_options("drafter", name, self.options_of(name))), **given} if hasattr(cls, "Options") else given
        return {key: value for key, value in options.items() if value is not None}

    def build_drafter(self, name: str | None = None) -> Any:
        """One of `methods`, by default the first (a `drafters.drafter.Drafter`)."""
        name = name or self.methods[0]
        return _build("drafter", name, self.options_of(name))

    def build_policy(self) -> Any:
        """The policy this config names (a `control.policy.Policy`)."""
        return _build("policy", self.policy, self.policy_options)


@dataclass(frozen=True)
class EngineConfig:
    """Everything the engine is built from. Zero and None mean "decide from the model and the machine"."""

    model: str = option("smollm2-135m", "a built-in name, a local Hugging Face directory, a GGUF file, or a hub id")
    dtype: str = option("auto", "weights and K/V cache; auto: the fastest on this device", choices=DTYPES)
    quantization: str | None = option(
        None, "int8: weights as 8-bit integers, up to twice as fast at few requests; changes the output a little (CPU with AVX2)",
        choices=QUANTIZATIONS,
    )
    lora: str | None = option(None, "directory of a LoRA adapter (PEFT's format), merged into the model's weights")
    device: str = option("auto", "cpu, cuda, cuda:N, or auto")
    seed: int = option(0, "seeds the requests that bring no seed of their own")
    max_model_len: int | None = option(None, "longest prompt plus output, in tokens")
    max_num_seqs: int = option(64, "sequences that may run in one step")
    max_num_batched_tokens: int = option(512, "known tokens in one step: decodes first, then prefill chunks")
    block_size: int = option(64, "tokens per K/V block")
    kv_cache_memory_bytes: int | None = option(None, "size of the K/V pool; default: from free memory")
    gpu_memory_utilization: float = option(0.9, "share of GPU memory for weights and K/V pool (CUDA only)")
    enable_prefix_caching: bool = option(True, "reuse K/V blocks of equal prefixes")
    num_threads: int | None = option(None, "CPU threads of the forward pass; default: torch's own choice")
    trace: str | None = option(None, "file to write one JSON line per step to, for `headway replay` and `headway tune`")
    profile: bool = option(True, "measure what steps cost before serving, for the policies that ask; kept on disk, 3 s the first time")
    speculative: SpeculativeConfig | None = option(None, "how to speculate; None: plain decoding")

    def __post_init__(self) -> None:
        for name, hint in _field_types(type(self)).items():
            _checked(name, getattr(self, name), hint)
        for name in ("max_num_seqs", "max_num_batched_tokens", "block_size", "max_model_len", "kv_cache_memory_bytes", "num_threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be >= 1, got {value}")
        if self.dtype not in DTYPES:
            raise ConfigError(unknown_key("dtype", self.dtype, DTYPES))
        if self.quantization is not None and self.quantization not in QUANTIZATIONS:
            raise ConfigError(unknown_key("quantization", self.quantization, QUANTIZATIONS))
        if not 0.0 < self.gpu_memory_utilization <= 1.0:
            raise ConfigError(f"gpu_memory_utilization must be in (0, 1], got {self.gpu_memory_utilization}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be >= max_num_seqs ({self.max_num_seqs}): "
                "every running sequence gets at least one token a step"
            )


def _split_method(value: Any) -> tuple[str | tuple[str, ...], dict[str, dict[str, Any]]]:
    """A name, "a,b", or a list of names and of {"name": ..., options} -> (name or names, drafter -> options)."""
    listed = value
    if isinstance(value, str):
        listed = value.split(",") if "," in value else [value]
    elif isinstance(value, Mapping):
        listed = [value]
    names: list[str] = []
    options: dict[str, dict[str, Any]] = {}
    for entry in listed if isinstance(listed, (list, tuple)) else [None]:
        name = entry.get("name") if isinstance(entry, Mapping) else entry
        if not isinstance(name, str):
            raise ConfigError(
                f'method must be a drafter\'s name or a list of names (or of {{"name": ..., options}}), got {value!r}. '
                f"Accepted: {', '.join(plugins.names('drafter'))}"
            )
        name = vllm_words.drafter(name.strip())
        if name in names:
            raise ConfigError(f"method names the drafter {name!r} twice")
        names.append(name)
        if isinstance(entry, Mapping) and len(entry) > 1:
            options[name] = {k: v for k, v in entry.items() if k != "name"}
    if not names:
        raise ConfigError(f"method is an empty list. Accepted: {', '.join(plugins.names('drafter'))}")
    return names[0] if len(names) == 1 else tuple(names), options


def _give_option(owners: list[str], key: str, value: Any, given: dict[str, dict[str, Any]]) -> None:
    """Hands a key at the top level to the one drafter that declares it."""
    if len(owners) > 1:
        raise ConfigError(
            f"{key} is an option of {_quoted(owners)}; say whose: \"method\": [{{\"name\": \"{owners[0]}\", \"{key}\": ...}}, ...]"
        )
    if key in given.get(owners[0], {}):
        raise ConfigError(f"{key} is given twice: by itself and inside \"method\"")
    given.setdefault(owners[0], {})[key] = value


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(repr(name) for name in names)


def _split_policy(value: Any) -> tuple[str | None, dict[str, Any]]:
    """ "name" | {"name": ..., options} -> (name, options)."""
    if value is None or isinstance(value, str):
        return value, {}
    if isinstance(value, Mapping) and isinstance(value.get("name"), str):
        return value["name"], {k: v for k, v in value.items() if k != "name"}
    raise ConfigError(f'policy must be a name or {{"name": ..., options}}, got {value!r}. Accepted: {", ".join(plugins.names("policy"))}')


def _field_types(cls: type[Any]) -> dict[str, Any]:
    hints = typing.get_type_hints(cls)
    return {f.name: hints[f.name] for f in fields(cls)}


def _option_types(cls: type[Any]) -> dict[str, Any]:
    return _field_types(cls.Options) if hasattr(cls, "Options") else {}


def _drafter_option_types(cls: type[Any]) -> dict[str, Any]:
    """A drafter with a network may be given its own "model" beside its options."""
    return _option_types(cls) | ({"model": str | None} if cls.takes_model else {})


def _options(kind: str, name: str, given: Mapping[str, Any]) -> Any:
    """The plugin's checked `Options`, None when it declares none."""
    cls = plugins.load(kind, name)
    if not hasattr(cls, "Options"):
        return None
    for spec in fields(cls.Options):
        if _is_required(spec) and spec.name not in given:
            raise ConfigError(f"{kind} {name!r} needs {spec.name}")
    return cls.Options(**given)


def _is_required(spec: Field[Any]) -> bool:
    return spec.default is MISSING and spec.default_factory is MISSING


def _build(kind: str, name: str, given: Mapping[str, Any]) -> Any:
    cls, options = plugins.load(kind, name), _options(kind, name, given)
    return cls() if options is None else cls(options)


def _checked(key: str, value: Any, hint: Any) -> Any:
    """`value` as `hint` says, or ConfigError. JSON lists become tuples, ints pass for floats."""
    ok, converted = _convert(value, hint)
    if not ok:
        raise ConfigError(f"{key} must be {_describe(hint)}, got {value!r}")
    return converted


def _convert(value: Any, hint: Any) -> tuple[bool, Any]:
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        for arm in typing.get_args(hint):
            ok, converted = _convert(value, arm)
            if ok:
                return True, converted
        return False, None
    if hint is Any:
        return True, value
    if origin is Literal:
        return value in typing.get_args(hint), value
    if hint is type(None):
        return value is None, None
    if origin is tuple:
        if not isinstance(value, (list, tuple)):
            return False, None
        args = typing.get_args(hint)
        arms = [args[0]] * len(value) if len(args) == 2 and args[1] is Ellipsis else list(args)
        if len(arms) != len(value):
            return False, None
        parts = [_convert(item, arm) for item, arm in zip(value, arms, strict=True)]
        return all(ok for ok, _ in parts), tuple(converted for _, converted in parts)
    if hint is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool), float(value) if isinstance(value, (int, float)) else None
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool), value
    if isinstance(hint, type):
        return isinstance(value, hint), value
    return False, None


def _describe(hint: Any) -> str:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_describe(arm) for arm in args)
    if origin is Literal:
        return " or ".join(repr(arm) for arm in args)
    if origin is tuple and len(args) == 2 and args[1] is Ellipsis:
        return f"a list, each entry {_describe(args[0])}"
    if origin is tuple:
        return f"[{', '.join(_describe(arm) for arm in args)}]"
    names = {int: "an integer", float: "a number", str: "a string", bool: "true or false", type(None): "null"}
    return names.get(hint) or str(getattr(hint, "__name__", hint))
