"""The facts as vLLM itself resolves them: its parser, then its configuration. Loads the model's configuration, no weights, no device."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from headway.vllm import compat
from headway.vllm.facts import Facts

DTYPE_BYTES = {"torch.float32": 4, "torch.bfloat16": 2, "torch.float16": 2}


def resolved(facts: Facts, words: Sequence[str]) -> Facts:
    """`facts` as vLLM has them instead of as the flags alone told. What vLLM refuses is kept as `refusal`, and the rest stays as it was."""
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler

    version = str(facts.version)
    missing = tuple(dict.fromkeys(compat.problems(version, Scheduler) + compat.problems(version, AsyncScheduler)))
    facts = replace(facts, missing=missing)
    try:
        with _quiet():
            args = _parse(words)
            facts = replace(facts, api_servers=getattr(args, "api_server_count", None) or facts.api_servers)
            config = _engine_config(args)
    except SystemExit as refused:   # vLLM's parser ends the process
        return replace(facts, refusal=str(refused))
    except Exception as error:
        return replace(facts, refusal=" ".join(str(error).split()))
    return _read(facts, config)


def _parse(words: Sequence[str]) -> argparse.Namespace:
    make_arg_parser = importlib.import_module("vllm.entrypoints.launchers.cli_args").make_arg_parser
    parser = make_arg_parser(importlib.import_module("vllm.utils.argparse_utils").FlexibleArgumentParser())

    def refuse(message: str) -> None:
        raise SystemExit(message)

    parser.error = refuse
    args: argparse.Namespace = parser.parse_args(list(words))
    if getattr(args, "model_tag", None) is not None:
        args.model = args.model_tag
    return args


def _engine_config(args: argparse.Namespace) -> Any:
    arg_utils = importlib.import_module("vllm.engine.arg_utils")
    context = importlib.import_module("vllm.usage.usage_lib").UsageContext
    return arg_utils.AsyncEngineArgs.from_cli_args(args).create_engine_config(usage_context=context.OPENAI_API_SERVER)


def _read(facts: Facts, config: Any) -> Facts:
    platform = importlib.import_module("vllm.platforms").current_platform
    spec, scheduler, parallel = config.speculative_config, config.scheduler_config, config.parallel_config
    facts = replace(
        facts,
        device=str(platform.device_type),
        async_scheduling=bool(scheduler.async_scheduling),
        v2_runner=bool(config.use_v2_model_runner),
        cudagraphs=config.compilation_config.cudagraph_mode.name,
        max_num_seqs=scheduler.max_num_seqs,
        data_parallel=parallel.data_parallel_size,
        tensor_parallel=parallel.tensor_parallel_size,
        pipeline_parallel=parallel.pipeline_parallel_size,
        ray=parallel.distributed_executor_backend == "ray",
        lora=config.lora_config is not None,
        kv_tokens=_kv_tokens(config),
    )
    if spec is None:
        return facts
    return replace(
        facts,
        method=str(spec.method),
        model=spec.model,
        max_k=spec.num_speculative_tokens,
        table=spec.num_speculative_tokens_per_batch_size or facts.table,
        rejection=spec.rejection_sample_method,
        adaptive=bool(spec.enable_adaptive_verification),
    )


def _kv_tokens(config: Any) -> int | None:
    """Known beforehand only where the cache's size is given in bytes (on a CPU, or with --kv-cache-memory-bytes)."""
    num_bytes, model = config.cache_config.kv_cache_memory_bytes, config.model_config
    width = DTYPE_BYTES.get(str(model.dtype))
    if not num_bytes or width is None or config.cache_config.cache_dtype != "auto" or model.use_mla:
        return None
    per_token = 2 * width * model.get_num_layers(config.parallel_config) * model.get_num_kv_heads(config.parallel_config)
    return int(num_bytes // (per_token * model.get_head_size()))


@contextlib.contextmanager
def _quiet() -> Any:
    """vLLM's log of a start is not this command's output."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.disable(before)
