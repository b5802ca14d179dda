"""A schedule in the words of each engine, and how to start a server with it.

Sources of the formats: vLLM's documentation of num_speculative_tokens_per_batch_size; SGLang's server_args.py and adaptive_spec_params.py;
TensorRT-LLM's llm_args.py before and after its pull request 10860, and of 1.4; llama.cpp's server flags.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from typing import Any

from headway import vllm_words
from headway.config import SpeculativeConfig
from headway.tune import emit_trtllm
from headway.tune.files import File, Serving
from headway.tune.plan import Plan
from headway.tune.source import Source

# vLLM's proposers of these assert that k never differs from num_speculative_tokens.
FIXED_IN_VLLM = {"suffix": "suffix decoding", "medusa": "Medusa heads"}
SGLANG = {"ngram": "NGRAM", "eagle": "EAGLE", "eagle3": "EAGLE3", "mtp": "EAGLE", "draft_model": "STANDALONE"}
ADAPTIVE_IN_SGLANG = ("eagle", "eagle3", "mtp")
LLAMACPP = {"ngram": "ngram-simple", "draft_model": "draft-simple", "eagle3": "draft-eagle3", "mtp": "draft-mtp"}
# A server that is given 16-bit weights can store them like this by itself; the others need a checkpoint that was made so.
ONLINE_IN_VLLM = ("fp8", "bitsandbytes")


def emit(plan: Plan, source: Source, serving: Serving | None = None) -> tuple[list[File], list[str]]:
    """The files of each engine, and what is left out and why. Raises ConfigError for a config that Headway refuses."""
    files, left_out = [], []
    kind = kind_of(source)
    if source.ours is not None:
        files.append(headway(plan, source))
    else:
        left_out.append(f"headway.json: Headway has no drafter like vLLM's {source.vllms}")
    if (why := _not_for_vllm(source, serving)) is None:
        files += vllm(plan, source, serving)
    else:
        left_out.append(f"vllm.json: {why}")
    others = (
        ("sglang.txt", SGLANG, sglang),
        ("trtllm-*.yaml", emit_trtllm.DECODING_TYPES, emit_trtllm.write),
        ("llamacpp.txt", LLAMACPP, llamacpp),
    )
    for name, known, write in others:
        if kind not in known:
            left_out.append(f"{name}: written for {', '.join(known)}, and this is {plan.drafter}")
        elif source.is_tree:
            left_out.append(f"{name}: the recording is of trees (topk > 1), and the schedule is of chains")
        else:
            files += write(plan, source, kind, serving)
    return files, left_out


def kind_of(source: Source) -> str:
    """What drafts, whoever names it."""
    name = source.vllms or source.ours or ""
    return "mtp" if vllm_words.METHODS.get(name) == "mtp" else name


def table(plan: Plan) -> list[list[int]]:
    """vLLM's num_speculative_tokens_per_batch_size."""
    return [[part.first, part.last, part.k] for part in plan.ranges]


def _speculative(plan: Plan, method: str, options: Mapping[str, Any]) -> dict[str, Any]:
    config = {"method": method, "num_speculative_tokens": plan.max_k, **options}
    return config if len(plan.ranges) == 1 else {**config, "num_speculative_tokens_per_batch_size": table(plan)}


def headway(plan: Plan, source: Source) -> File:
    assert source.ours is not None
    config: Any = _speculative(plan, source.ours, source.headway_options) if plan.max_k else "off"
    SpeculativeConfig.parse(config)
    return File("headway.json", _json({"speculative_config": config}), "headway serve MODEL --config headway.json")


def _not_for_vllm(source: Source, serving: Serving | None) -> str | None:
    if source.vllms is None:
        return f"vLLM has no drafter like {source.ours}"
    if source.is_tree:
        return "the recording is of trees (topk > 1), and vLLM drafts chains"
    if serving is not None and serving.draft_tp != serving.tp and (source.vllms == "draft_model" or serving.draft_tp != 1):
        return f"vLLM runs a {source.vllms} on as many devices as the target, {serving.tp}, and the plan has it on {serving.draft_tp}"
    return None


def vllm(plan: Plan, source: Source, serving: Serving | None) -> list[File]:
    assert source.vllms is not None
    notes = ["vLLM counts requests that compute their prompt, too; with data parallelism it switches the table off"]
    config: dict[str, Any] | None = None
    if plan.max_k:
        config = _speculative(plan, source.vllms, source.vllm_options)
        if serving is not None and serving.draft_tp != serving.tp:
            config["draft_tensor_parallel_size"] = serving.draft_tp
        if source.vllms in FIXED_IN_VLLM and config.pop("num_speculative_tokens_per_batch_size", None):
            what = FIXED_IN_VLLM[source.vllms]
            notes.append(f"vLLM 0.32 cannot vary k with {what}, so the table is left out: a recording with another drafter has one")
        files = [File("vllm.json", _json(config), 'vllm serve MODEL --speculative-config "$(cat vllm.json)"', tuple(notes))]
    else:
        why = ("speculation does not pay here: leave --speculative-config out",)
        files = [File("vllm.json", "null\n", "vllm serve MODEL", why)]
    return files if serving is None else [*files, _vllm_server(config, serving)]


def _vllm_server(config: dict[str, Any] | None, serving: Serving) -> File:
    """What `vllm serve` is started with. YAML, of which JSON is a part."""
    settings: dict[str, Any] = {
        "model": serving.model, "tensor-parallel-size": serving.tp, "pipeline-parallel-size": serving.pp,
        "max-num-seqs": serving.max_num_seqs, "max-model-len": serving.max_model_len, "gpu-memory-utilization": serving.utilization,
    }  # fmt: skip
    notes: tuple[str, ...] = ()
    if serving.kv_dtype != "auto":
        settings["kv-cache-dtype"] = serving.kv_dtype
    if serving.quantization in ONLINE_IN_VLLM:
        settings["quantization"] = serving.quantization
    elif serving.quantization is not None:
        notes = (f"the model must be a checkpoint that was quantised to {serving.quantization}",)
    if config is not None:
        settings["speculative-config"] = config
    text = "".join(f"{key}: {json.dumps(value)}\n" for key, value in settings.items())
    return File("vllm.yaml", text, "vllm serve --config vllm.yaml", notes)


def sglang(plan: Plan, source: Source, kind: str, serving: Serving | None) -> list[File]:
    """Flags, and for EAGLE heads a file: batch size from which on -> the step counts that its own moving average may choose from."""
    words, notes = _sglang_server(serving), list[str]()
    adapts = kind in ADAPTIVE_IN_SGLANG and len(plan.ranges) > 1
    if plan.max_k:
        words += ["--speculative-algorithm", SGLANG[kind]]
        if source.model is not None:
            words += ["--speculative-draft-model-path", source.model]
        if kind != "ngram":
            words += ["--speculative-num-steps", str(plan.max_k), "--speculative-eagle-topk", "1"]
        words += ["--speculative-num-draft-tokens", str(plan.max_k + 1)]
        if adapts:
            words += ["--speculative-adaptive", "--speculative-adaptive-config", "sglang.json"]
        elif len(plan.ranges) > 1:
            notes.append(f"SGLang keeps one length with {SGLANG[kind]}: it adapts for EAGLE heads only")
    else:
        notes.append("speculation does not pay here: no flag switches it on")
    start = "python -m sglang.launch_server " + ("" if serving else "--model-path MODEL ") + "$(cat sglang.txt)"
    files = [File("sglang.txt", _flags(words), start, tuple(notes))]
    if adapts:
        slots = {str(part.first): {"candidate_steps": list(part.candidates)} for part in plan.ranges}
        files.append(File("sglang.json", _json(slots), "named by sglang.txt"))
    return files


def _sglang_server(serving: Serving | None) -> list[str]:
    if serving is None:
        return []
    words = [
        "--model-path", serving.model, "--tp-size", str(serving.tp), "--pp-size", str(serving.pp),
        "--max-running-requests", str(serving.max_num_seqs), "--context-length", str(serving.max_model_len),
    ]  # fmt: skip
    words += ["--kv-cache-dtype", "fp8_e4m3"] if serving.kv_dtype == "fp8" else []
    return words + (["--quantization", "fp8"] if serving.quantization == "fp8" else [])


def llamacpp(plan: Plan, source: Source, kind: str, serving: Serving | None) -> list[File]:
    """One k for ever: that of the smallest load."""
    k = plan.ranges[0].k
    words, notes = ["--spec-type", LLAMACPP[kind] if k else "none"], ["llama.cpp keeps one k: this is the one of a single request"]
    if k and kind == "ngram":
        size = source.options.get("prompt_lookup_max")
        words += ["--spec-ngram-simple-size-n", str(size)] if size else []
        words += ["--spec-ngram-simple-size-m", str(k)]
    elif k:
        words += ["--spec-draft-n-max", str(k)]
        if source.model is not None:
            words += ["--spec-draft-model", "DRAFT.gguf"]
            notes.append(f"DRAFT.gguf is {source.model}, converted")
    if serving is not None:
        words += ["--parallel", str(serving.max_num_seqs), "--ctx-size", str(serving.max_num_seqs * serving.max_model_len)]
        words += ["--cache-type-k", "q8_0", "--cache-type-v", "q8_0"] if serving.kv_dtype == "fp8" else []
        if serving.tp > 1:
            notes.append("llama.cpp spreads layers over devices by itself: what a device holds is not as planned")
    return [File("llamacpp.txt", _flags(words), "llama-server -m MODEL.gguf $(cat llamacpp.txt)", tuple(notes))]


def _flags(words: list[str]) -> str:
    return " ".join(map(shlex.quote, words)) + "\n"


def _json(value: Any) -> str:
    return json.dumps(value, indent=2) + "\n"
