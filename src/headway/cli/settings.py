"""Flags -> EngineConfig, with the provenance of every value.

    source              meaning
    default             nobody said anything
    flag --x            the command line
    file PATH           the file given with --config
    shipped for MODEL   the speculator that comes with Headway (published for MODEL: one from the hub), in the default and with "auto"
    method suffix       the default of the chosen drafter's own option, or what choosing it implies
    policy batch_table  likewise for the policy
    implied by KEY      a key chose it by being present
    env NAME            an environment variable
    model, machine      "auto" and empty values, once the model and the machine were looked at
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headway import plugins
from headway.cli.flags import add_fields, positive_int, read_fields, underlay
from headway.config import POLICY_KEYS, EngineConfig, SpeculativeConfig
from headway.drafters.core.automatic import spell_out
from headway.errors import ConfigError
from headway.server.options import API_KEY_VARIABLE, ServerOptions

SHORTCUTS = {"spec_method": "method", "spec_model": "model", "spec_tokens": "num_speculative_tokens", "spec_policy": "policy"}
DEFAULT_SPECULATION = "default"


@dataclass(frozen=True, slots=True)
class Setting:
    """One resolved value. `name` is the config key; speculation's are prefixed with "speculative."."""

    name: str
    value: Any
    source: str


def add_engine_arguments(parser: argparse.ArgumentParser, *, skip: tuple[str, ...] = (), speculation: bool = True) -> None:
    """MODEL, one flag per field of EngineConfig, the speculation flags and --config."""
    parser.add_argument("model_name", nargs="?", metavar="MODEL", default=argparse.SUPPRESS, help="the same as --model")
    add_fields(parser.add_argument_group("engine"), EngineConfig, skip=("speculative", *skip))
    if speculation:
        _add_speculation_arguments(parser)
    parser.add_argument(
        "--config", dest="config_file", metavar="FILE.json", default=argparse.SUPPRESS,
        help="a JSON object with these flags' names as keys; a flag on the command line wins over the file",
    )


def _add_speculation_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("speculation", argument_default=argparse.SUPPRESS)
    group.add_argument(
        "-sc", "--speculative-config", "--spec", dest="speculative_config", metavar="JSON",
        help='off, default, auto, a drafter\'s name, or JSON such as {"method": "ngram", "num_speculative_tokens": 4} (default: default)',
    )
    group.add_argument("--spec-method", metavar="NAME", help="drafter, see `headway list drafters`; or auto")
    group.add_argument("--spec-model", metavar="MODEL", help="draft model, for the drafters that have one")
    group.add_argument("--spec-tokens", type=positive_int, metavar="N", help="upper bound on drafts per sequence and step")
    group.add_argument("--spec-policy", metavar="NAME[:KEY=VALUE,...]", help="how many drafts, step by step; see `headway list policies`")


def engine_config(args: argparse.Namespace) -> tuple[EngineConfig, list[Setting]]:
    """The config and its provenance. Raises ConfigError."""
    given = dict(vars(args))
    if "model_name" in given:
        if "model" in given:
            raise ConfigError("the model was given twice: as MODEL and as --model")
        given["model"] = given["model_name"]
    speculative, settings = speculation(args, given.get("model", EngineConfig.model))
    values = {f.name: given[f.name] for f in dataclasses.fields(EngineConfig) if f.name in given and f.name != "speculative"}
    config = EngineConfig(**values, speculative=speculative)
    own = [
        Setting(f.name, getattr(config, f.name), source_of(args, "model_name" if f.name == "model" and "model_name" in given else f.name))
        for f in dataclasses.fields(EngineConfig) if f.name != "speculative"
    ]
    return config, own + settings


def server_options(args: argparse.Namespace) -> ServerOptions:
    """The server's settings; API keys that neither a flag nor the file gives come from $HEADWAY_API_KEY. Raises ConfigError."""
    keys = os.environ.get(API_KEY_VARIABLE)
    if keys is not None and not hasattr(args, "api_key"):
        if not keys.strip(", \t\n"):
            raise ConfigError(f"the environment variable {API_KEY_VARIABLE} is empty: unset it to serve without a key")
        underlay(args, argparse.Namespace(api_key=[keys]), f"env {API_KEY_VARIABLE}")
    return read_fields(args, ServerOptions)


def source_of(args: argparse.Namespace, name: str) -> str:
    source: str = args.sources.get(name, "default")
    if source != "flag":
        return source
    return "flag MODEL" if name == "model_name" else "flag --" + name.replace("_", "-")


def speculation(args: argparse.Namespace, model: str) -> tuple[SpeculativeConfig | None, list[Setting]]:
    """The speculation flags, read as one config for this model. Raises ConfigError for a combination of both spellings."""
    shortcuts = {name: getattr(args, name) for name in SHORTCUTS if hasattr(args, name)}
    if shortcuts and hasattr(args, "speculative_config"):
        names = ", ".join("--" + name.replace("_", "-") for name in shortcuts)
        raise ConfigError(f"{names} cannot be combined with --speculative-config: put it into the JSON")
    if shortcuts:
        value: Any = {SHORTCUTS[name]: policy_from_text(given) if name == "spec_policy" else given for name, given in shortcuts.items()}
        sources = {SHORTCUTS[name]: source_of(args, name) for name in shortcuts}
    else:
        value, sources = getattr(args, "speculative_config", DEFAULT_SPECULATION), {}
    value, filled_in = spell_out(value, model)
    source = source_of(args, "speculative_config")
    config = SpeculativeConfig.parse(value)
    if config is None:
        return None, [Setting("speculative", None, source)]
    if isinstance(value, str):
        value = json.loads(value) if value.lstrip().startswith("{") else {"method": config.method}
    return config, _speculation_settings(config, value, {**dict.fromkeys(value, source), **sources, **filled_in})


def _speculation_settings(config: SpeculativeConfig, given: Mapping[str, Any], sources: dict[str, str]) -> list[Setting]:
    implied_policy = next((key for key, policy in POLICY_KEYS.items() if key in given and policy == config.policy), None)
    if isinstance(given.get("policy"), Mapping):
        sources = {**sources, **dict.fromkeys(given["policy"], sources["policy"])}
    settings = []
    for field in dataclasses.fields(config):
        if field.name.endswith("_options"):
            continue
        source = sources.get(field.name, "default")
        if source == "default" and field.name == "num_speculative_tokens":
            source = f"method {','.join(config.methods)}"
        elif source == "default" and field.name == "policy" and implied_policy:
            source = f"implied by {implied_policy}"
        settings.append(Setting(f"speculative.{field.name}", getattr(config, field.name), source))
    several = len(config.methods) > 1
    plugged = [("method", name, config.options_of(name)) for name in config.methods]
    for kind, name, options in (*plugged, ("policy", config.policy, config.policy_options)):
        cls = plugins.load("drafter" if kind == "method" else "policy", name)
        defaults = dataclasses.asdict(cls.Options(**options)) if hasattr(cls, "Options") else {}
        prefix = f"speculative.{name}." if kind == "method" and several else "speculative."
        if kind == "method" and "model" in config.drafter_options.get(name, {}):
            settings.append(Setting(prefix + "model", config.model_of(name), sources.get("model", sources["method"])))
        settings += [
            Setting(prefix + key, value, sources.get(key, sources.get(kind, "default")) if key in options else f"{kind} {name}")
            for key, value in defaults.items()
        ]
    return settings


def policy_from_text(text: str) -> dict[str, Any]:
    """ "name:key=value,..." -> {"name": name, key: value}. Values are JSON where they can be, text otherwise.

    "package.module:Class" is a name too, so a colon starts options only when an "=" follows before the next colon.
    """
    name, _, tail = text.rpartition(":")
    if not name or "=" not in tail:
        return {"name": text}
    options: dict[str, Any] = {}
    for part in _split(tail):
        key, equals, value = part.partition("=")
        if not equals or not key.strip():
            raise ConfigError(f"--spec-policy {text!r}: {part!r} is not KEY=VALUE")
        try:
            options[key.strip()] = json.loads(value)
        except json.JSONDecodeError:
            options[key.strip()] = value
    return {"name": name, **options}


def _split(text: str) -> list[str]:
    """At commas outside brackets."""
    parts, depth = [""], 0
    for char in text:
        depth += (char in "[{") - (char in "]}")
        if char == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += char
    return parts
