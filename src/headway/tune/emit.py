"""A schedule in the words of each engine.

Sources of the formats: vLLM's documentation of num_speculative_tokens_per_batch_size; SGLang's adaptive_spec_params.py; TensorRT-LLM's
llm_args.py before and after its pull request 10860; llama.cpp's server flags.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from headway.config import SpeculativeConfig
from headway.tune.plan import Plan, Range
from headway.tune.source import Source

# vLLM's proposers of these assert that k never differs from num_speculative_tokens.
FIXED_IN_VLLM = {"suffix": "suffix decoding", "medusa": "Medusa heads"}


@dataclass(frozen=True, slots=True)
class File:
    """What one engine is given. `notes`: what its user has to know."""

    name: str
    text: str
    usage: str
    notes: tuple[str, ...] = ()


def emit(plan: Plan, source: Source) -> tuple[list[File], list[str]]:
    """One file per engine and key semantics, and what is left out and why. Raises ConfigError for a config that Headway refuses."""
    files, left_out = [], []
    if source.ours is not None:
        files.append(headway(plan, source))
    else:
        left_out.append(f"headway.json: Headway has no drafter like vLLM's {source.vllms}")
    if source.vllms is None:
        left_out.append(f"vllm.json: vLLM has no drafter like {source.ours}")
    elif source.is_tree:
        left_out.append("vllm.json: the recording is of trees (topk > 1), and vLLM drafts chains")
    else:
        files.append(vllm(plan, source))
    files.append(sglang(plan))
    if source.ours == "ngram":
        files += [*trtllm(plan, source), llamacpp(plan, source)]
    else:
        left_out.append(f"trtllm-lower.yaml, trtllm-upper.yaml, llamacpp.txt: written for ngram only, and this is {plan.drafter}")
    return files, left_out


def table(plan: Plan) -> list[list[int]]:
    """vLLM's num_speculative_tokens_per_batch_size."""
    return [[part.first, part.last, part.k] for part in plan.ranges]


def _speculative(plan: Plan, method: str, options: dict[str, Any]) -> dict[str, Any]:
    config = {"method": method, "num_speculative_tokens": plan.max_k, **options}
    return config if len(plan.ranges) == 1 else {**config, "num_speculative_tokens_per_batch_size": table(plan)}


def headway(plan: Plan, source: Source) -> File:
    assert source.ours is not None
    config: Any = _speculative(plan, source.ours, source.headway_options) if plan.max_k else "off"
    SpeculativeConfig.parse(config)
    return File("headway.json", _json({"speculative_config": config}), "headway serve MODEL --config headway.json")


def vllm(plan: Plan, source: Source) -> File:
    assert source.vllms is not None
    usage = 'vllm serve MODEL --speculative-config "$(cat vllm.json)"'
    if not plan.max_k:
        return File("vllm.json", "null\n", "vllm serve MODEL", ("speculation does not pay here: leave --speculative-config out",))
    config = _speculative(plan, source.vllms, source.vllm_options)
    notes = ["vLLM counts requests that compute their prompt, too; with data parallelism it switches the table off"]
    if source.vllms in FIXED_IN_VLLM and "num_speculative_tokens_per_batch_size" in config:
        del config["num_speculative_tokens_per_batch_size"]
        what = FIXED_IN_VLLM[source.vllms]
        notes.append(f"vLLM 0.32 cannot vary k with {what}, so the table is left out: a recording with another drafter has one")
    return File("vllm.json", _json(config), usage, tuple(notes))


def sglang(plan: Plan) -> File:
    """Batch size from which on -> the step counts its own moving average may choose from. It names no drafter: that is in its flags."""
    document = {str(part.first): {"candidate_steps": list(part.candidates)} for part in plan.ranges}
    return File(
        "sglang.json", _json(document),
        "python -m sglang.launch_server ... --speculative-adaptive --speculative-adaptive-config sglang.json",
        (f"SGLang adapts for EAGLE and EAGLE3 with topk 1 only; these lengths were measured with {plan.drafter}",),
    )


def trtllm(plan: Plan, source: Source) -> list[File]:
    """The keys of draft_len_schedule were lower bounds at first, and are inclusive upper bounds since pull request 10860.

    Both want the first entry to equal max_draft_len, the largest length there is.
    """
    usage = "trtllm-serve MODEL --extra_llm_api_options "
    first = plan.ranges[0].k
    if first == 0:
        why = ("speculation does not pay for single requests: max_draft_len must be >= 1, so leave it out",)
        return [File(f"trtllm-{kind}.yaml", "{}\n", usage + f"trtllm-{kind}.yaml", why) for kind in ("lower", "upper")]
    capped = [Range(part.first, part.last, min(part.k, first), ()) for part in plan.ranges]
    notes = ("lengths above that of batch size 1 are cut to it: TensorRT-LLM wants the first to be the largest",) * (plan.max_k > first)
    schedules = {
        "lower": ({part.first: part.k for part in capped}, "keys are the first batch size of a range (releases before pull request 10860)"),
        "upper": ({part.last: part.k for part in capped}, "keys are the last batch size of a range (releases since then); 0 above"),
    }
    lookup = source.options.get("prompt_lookup_max")
    size = f"  max_matching_ngram_size: {lookup}\n" if lookup else ""
    return [
        File(
            f"trtllm-{kind}.yaml",
            f"# {meaning}\nspeculative_config:\n  decoding_type: NGram\n  max_draft_len: {first}\n{size}"
            f"  draft_len_schedule: {{{', '.join(f'{key}: {k}' for key, k in schedule.items())}}}\n",
            usage + f"trtllm-{kind}.yaml", (meaning, *notes),
        )
        for kind, (schedule, meaning) in schedules.items()
    ]


def llamacpp(plan: Plan, source: Source) -> File:
    """One k for ever: that of the smallest load."""
    k = plan.ranges[0].k
    size = source.options.get("prompt_lookup_max")
    lookup = f"--spec-ngram-simple-size-n {size} " if size else ""
    text = f"--spec-type ngram-simple {lookup}--spec-ngram-simple-size-m {k}\n" if k else "--spec-type none\n"
    notes = ("llama.cpp keeps one k: this is the one of a single request; for its draft-* types the flag is --spec-draft-n-max",)
    return File("llamacpp.txt", text, "llama-server -m MODEL.gguf $(cat llamacpp.txt)", notes)


def _json(value: Any) -> str:
    return json.dumps(value, indent=2) + "\n"
