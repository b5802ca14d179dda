"""TensorRT-LLM's settings, `trtllm-serve --extra_llm_api_options FILE`, in the words of its releases (llm_args.py).

    trtllm-lower.yaml   before pull request 10860: a key of draft_len_schedule is the first batch size of a range; only the drafters that
                        run beside the target (NGram, Draft_Target) can vary their length
    trtllm-upper.yaml   since then: it is the last batch size of a range, and no drafts are made above the last
    trtllm-1.4.yaml     as upper, and speculation ends for good when fewer drafts are accepted than it needs to pay (acceptance_rate_*)

All want the first entry to equal max_draft_len, the largest length there is. Unknown keys are errors.
"""

from __future__ import annotations

import json
from typing import Any

from headway.tune.files import File, Serving
from headway.tune.plan import Plan, Range
from headway.tune.source import Source

DECODING_TYPES = {"ngram": "NGram", "draft_model": "Draft_Target", "eagle3": "Eagle3", "mtp": "MTP"}
VARIED_FROM_THE_START = ("ngram", "draft_model")
# Requests whose acceptance is averaged before speculation may end: enough that one odd request does not end it.
ACCEPTANCE_WINDOW = 200
MEANINGS = {
    "lower": "keys are the first batch size of a range (releases before pull request 10860)",
    "upper": "keys are the last batch size of a range (releases since then); 0 above",
}


def write(plan: Plan, source: Source, kind: str, serving: Serving | None) -> list[File]:
    usage = "trtllm-serve MODEL --extra_llm_api_options "
    first, server = plan.ranges[0].k, _server(serving)
    releases = ["lower", "upper"] if kind in VARIED_FROM_THE_START else ["upper"]
    if first == 0:
        why = ("speculation does not pay for single requests: max_draft_len must be >= 1, so leave it out",)
        return [File(f"trtllm-{name}.yaml", _yaml(server), f"{usage}trtllm-{name}.yaml", why) for name in releases]
    capped = [Range(part.first, part.last, min(part.k, first), ()) for part in plan.ranges]
    notes = ("lengths above that of batch size 1 are cut to it: TensorRT-LLM wants the first to be the largest",) * (plan.max_k > first)
    if serving is not None and serving.draft_tp != serving.tp:
        notes += (f"TensorRT-LLM runs the draft on all {serving.tp} devices; the plan has it on {serving.draft_tp}",)
    schedules = {"lower": {part.first: part.k for part in capped}, "upper": {part.last: part.k for part in capped}}
    files = []
    for name in releases:
        config = _drafter(source, kind, first) | {"draft_len_schedule": schedules[name]}
        text = f"# {MEANINGS[name]}\n" + _yaml(server | {"speculative_config": config})
        files.append(File(f"trtllm-{name}.yaml", text, f"{usage}trtllm-{name}.yaml", (MEANINGS[name], *notes)))
    if serving is not None and serving.least_accepted is not None:
        config |= {"acceptance_rate_window_size": ACCEPTANCE_WINDOW, "acceptance_rate_threshold": round(serving.least_accepted, 3)}
        meaning = "1.4: speculation ends for good when fewer drafts are accepted than it needs to pay"
        text = f"# {meaning}\n" + _yaml(server | {"speculative_config": config})
        files.append(File("trtllm-1.4.yaml", text, f"{usage}trtllm-1.4.yaml", (meaning, *notes)))
    return files


def _drafter(source: Source, kind: str, k: int) -> dict[str, Any]:
    config: dict[str, Any] = {"decoding_type": DECODING_TYPES[kind], "max_draft_len": k}
    if source.model is not None:
        config["speculative_model"] = source.model
    if kind == "ngram" and (size := source.options.get("prompt_lookup_max")):
        config["max_matching_ngram_size"] = size
    return config


def _server(serving: Serving | None) -> dict[str, Any]:
    if serving is None:
        return {}
    settings: dict[str, Any] = {
        "tensor_parallel_size": serving.tp, "pipeline_parallel_size": serving.pp, "max_batch_size": serving.max_num_seqs,
        "max_seq_len": serving.max_model_len,
    }  # fmt: skip
    return settings if serving.kv_dtype != "fp8" else {**settings, "kv_cache_config": {"dtype": "fp8"}}


def _yaml(settings: dict[str, Any]) -> str:
    """Of nested dictionaries whose innermost values are numbers, strings and one schedule."""
    if not settings:
        return "{}\n"
    lines = []
    for key, value in settings.items():
        if isinstance(value, dict):
            lines += [f"{key}:", *(f"  {name}: {_inline(inner)}" for name, inner in value.items())]
        else:
            lines.append(f"{key}: {_inline(value)}")
    return "\n".join(lines) + "\n"


def _inline(value: Any) -> str:
    """Keys of a schedule are numbers, which JSON cannot write; a plain word needs no quotes."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {inner}" for key, inner in value.items()) + "}"
    return value if isinstance(value, str) and value.isidentifier() else json.dumps(value)
