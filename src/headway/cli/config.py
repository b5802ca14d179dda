"""`headway config`: the configuration as the engine will see it, and where each value came from.

"auto" and empty values are resolved by looking at the model (downloaded when it is not here yet) and the machine; no weights are
loaded.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from headway.cli.flags import add_fields
from headway.cli.settings import Setting, add_engine_arguments, engine_config, server_options, source_of
from headway.config import EngineConfig
from headway.server.options import ServerOptions

if TYPE_CHECKING:
    from headway.models.config import ModelConfig
    from headway.models.decoder import Decoder

EPILOG = """examples:
  headway config
  headway config --spec-method ngram --spec-policy 'batch_table:num_speculative_tokens_per_batch_size=[[1,8,4],[9,64,0]]'
  headway config --config run.json --json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object: name -> value and source")
    add_engine_arguments(parser)
    add_fields(parser.add_argument_group("server"), ServerOptions)


def main(args: argparse.Namespace) -> int:
    config, settings = engine_config(args)
    options = server_options(args)
    settings = _resolved(config, settings)
    settings += [Setting(f"server.{name}", _shown(name, value), source_of(args, name)) for name, value in vars(options).items()]
    if args.json:
        print(json.dumps({setting.name: {"value": setting.value, "source": setting.source} for setting in settings}, indent=2))
        return 0
    width, values = max(len(setting.name) for setting in settings), [json.dumps(setting.value) for setting in settings]
    column = min(40, max(map(len, values)))
    for setting, value in zip(settings, values, strict=True):
        print(f"{setting.name:<{width}}  {value:<{column}}  {setting.source}")
    return 0


def _shown(name: str, value: Any) -> Any:
    return "(given)" if name == "api_key" and value else value


def _resolved(config: EngineConfig, settings: list[Setting]) -> list[Setting]:
    """The settings with what the model and the machine decide filled in. Raises ModelError, ConfigError."""
    import torch

    from headway.engine import cores
    from headway.engine.drafting import bind_drafters
    from headway.engine.memory import plan_memory
    from headway.models import hub, loader
    from headway.models.config import ModelConfig

    directory = hub.resolve(config.model)
    shape = ModelConfig.from_directory(directory)
    device = loader.pick_device(config.device)
    dtype = loader.pick_dtype(config.dtype, device)
    # Sizing the pool takes these of a Decoder and no weights.
    model = cast("Decoder", SimpleNamespace(config=shape, directory=directory, dtype=dtype, device=device))
    _, drafters = bind_drafters(config.speculative, config, model)
    memory = plan_memory(config, model, drafters)
    cores.set_threads(config.num_threads)
    threads = torch.get_num_threads()
    found: dict[str, tuple[Any, str]] = {
        "dtype": (str(dtype).removeprefix("torch."), "machine"),
        "device": (str(device), "machine"),
        "max_model_len": (memory.max_model_len, "model" if memory.max_model_len == shape.max_position else "machine"),
        "kv_cache_memory_bytes": (memory.kv_cache_bytes, "machine"),
        "num_threads": (threads, "machine"),
    }
    result = []
    for setting in settings:
        if setting.name in found and setting.value in (None, "auto"):
            value, source = found[setting.name]
            setting = replace(setting, value=value, source=source)
        result.append(setting)
    result += [Setting("native_kernels", *_kernels(device.type)), Setting("layers_in_one_call", *_stack(shape, device.type))]
    result += [Setting("model_directory", str(directory), "model")]
    shares = {"target.kv_cache_bytes": memory.target_kv_bytes}
    for name, taken in drafters.items():
        if taken.weight_bytes or taken.kv_bytes_per_block:
            shares |= {f"{name}.kv_cache_bytes": memory.drafter_kv_bytes[name], f"{name}.weight_bytes": taken.weight_bytes}
    return result + [Setting(f"memory.{name}", value, "machine") for name, value in shares.items()] if len(shares) > 1 else result


def _stack(shape: ModelConfig, device_type: str) -> tuple[bool, str]:
    """Whether the compiled kernels run all layers in one call, and why not; else they are called one by one."""
    from headway import native
    from headway.models.stack_native import missing

    chosen = native.choose().library
    if device_type != "cpu" or chosen is None or not chosen.linear_panel:
        return False, "no compiled products here"
    lacking = missing(shape)
    return lacking is None, "model" if lacking is None else f"the model has {lacking}"


def _kernels(device_type: str) -> tuple[str, str]:
    """Which compiled CPU kernels run, and why."""
    from headway import native

    chosen = native.choose()
    if device_type != "cpu":
        return "none", "they are for a CPU"
    return chosen.library.variant if chosen.library else "none", chosen.reason
