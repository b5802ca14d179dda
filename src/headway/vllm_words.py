"""vLLM's speculative config, read as Headway's: its names of methods, and its keys that mean nothing here.

A config that works for `vllm serve --speculative-config` works for `headway serve --speculative-config`: methods are translated, keys
that have no effect here are said so in the log, and what cannot be done is refused with the reason. The words are those of vLLM 0.31 and
0.32 (vllm/config/speculative.py); tests/vllm compares them with the installed one.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway.errors import ConfigError

logger = logging.getLogger("headway.config")

MTP_METHODS = (
    "deepseek_mtp", "dots3_note_mtp", "mimo_mtp", "mimo_v2_mtp", "glm4_moe_mtp", "glm4_moe_lite_mtp", "glm_ocr_mtp", "ernie_mtp",
    "nemotron_h_mtp", "exaone_moe_mtp", "exaone4_5_mtp", "qwen3_next_mtp", "qwen4_exp_mtp", "qwen3_5_mtp", "longcat_flash_mtp",
    "bailing_hybrid_v3_mtp", "minimax_m3_mtp", "bailing_hybrid_mtp", "mtp", "kimi_k3_mtp", "pangu_ultra_moe_mtp", "step3p5_mtp",
    "hy_v3_mtp", "hy_v4_mtp", "gemma4_mtp", "inkling_mtp", "glm5_next_mtp",
)   # fmt: skip

METHODS: dict[str, str] = {
    **dict.fromkeys(MTP_METHODS, "mtp"),
    **{name: name for name in ("ngram", "suffix", "draft_model", "medusa", "mlp_speculator", "eagle")},
    "eagle3": "eagle",
    "ngram_gpu": "ngram",
    "[ngram]": "ngram",
}
"""vLLM's method -> Headway's drafter."""

PROPOSER = "headway.vllm.Proposer"

REFUSED_METHODS = {
    "custom_class": 'vLLM loads a proposer of its own interface; here "method": "package.module:Class" names a drafter',
    "dflash": "its drafters predict all tokens in one pass, which is not supported",
    "dspark": "its drafters predict all tokens in one pass, which is not supported",
    "extract_hidden_states": "it does not speculate: it writes the target's hidden states to disk",
}
"""vLLM's method -> why there is none here."""

_NETWORK = ("model", "draft_sample_method")
OPTIONS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys((*MTP_METHODS, "eagle", "eagle3", "draft_model"), _NETWORK),
    **dict.fromkeys(("ngram", "ngram_gpu"), ("prompt_lookup_max", "prompt_lookup_min")),
    **dict.fromkeys(("medusa", "custom_class", "dflash", "dspark"), ("model",)),
    "suffix": (
        "suffix_decoding_max_tree_depth", "suffix_decoding_max_cached_requests", "suffix_decoding_max_spec_factor",
        "suffix_decoding_min_token_prob",
    ),
}   # fmt: skip
"""vLLM's method -> the keys that say what it drafts. Methods that vLLM's engine does not run are not among them."""

OWN_KEYS = (
    "method", "model", "num_speculative_tokens", "num_speculative_tokens_per_batch_size", "rejection_sample_method",
    "synthetic_acceptance_rates", "synthetic_acceptance_length",
)   # fmt: skip
"""Mean the same here."""

DRAFTER_KEYS = tuple(dict.fromkeys(key for keys in OPTIONS.values() for key in keys if key != "model"))
"""Mean the same here with the drafters that have them, and nothing with the others, as in vLLM."""


@dataclass(frozen=True, slots=True)
class NoEffect:
    """A key that is accepted. `why`: what is the case here, said in the log unless the value is vLLM's `default`."""

    default: Any
    why: str


NO_EFFECT_KEYS = {
    "enforce_eager": NoEffect(None, "draft networks run eagerly"),
    "draft_tensor_parallel_size": NoEffect(None, "the draft network runs in the one process there is"),
    "quantization": NoEffect(None, "the draft network is read as it was saved; its products are 8-bit where the kernels have them"),
    "moe_backend": NoEffect(None, "draft networks have no experts"),
    "attention_backend": NoEffect(None, "the draft network attends as the target does"),
    "kv_cache_dtype": NoEffect(None, "K/V has the dtype of the weights"),
    "max_model_len": NoEffect(None, "drafts are made up to the target's own length"),
    "revision": NoEffect(None, "the default revision is taken; give a directory to have another one"),
    "code_revision": NoEffect(None, "no code of a model's repository is run"),
    "index_share_for_mtp_iteration": NoEffect(None, "modules with sparse attention are not supported"),
    "disable_padded_drafter_batch": NoEffect(False, "no batch is padded"),
    "disable_eagle_block_drop": NoEffect(False, "no block of the prefix cache is dropped for drafters"),
    "use_local_argmax_reduction": NoEffect(False, "there is one process, so nothing is gathered"),
    "use_heterogeneous_vocab": NoEffect(False, "a draft model must have the target's vocabulary"),
    "parallel_drafting": NoEffect(False, "draft tokens are predicted one after the other"),
    "draft_load_config": NoEffect(None, "the draft network is read from safetensors or PyTorch files"),
    "enable_adaptive_verification": NoEffect(False, "the policy decides how many drafts are verified"),
    "dspark_draft_topk": NoEffect(None, "there is no dspark drafter"),
}

REFUSED_KEYS = {
    "tensor_parallel_size": "vLLM refuses it, too: it means draft_tensor_parallel_size",
    "target_model_config": "vLLM fills it in itself",
    "target_parallel_config": "vLLM fills it in itself",
    "draft_model_config": "vLLM fills it in itself",
    "draft_parallel_config": "vLLM fills it in itself",
}

KEYS = (*OWN_KEYS, *DRAFTER_KEYS, *NO_EFFECT_KEYS, *REFUSED_KEYS)
"""All fields of vLLM's SpeculativeConfig."""


def to_headway(given: Mapping[str, Any]) -> dict[str, Any]:
    """The config without vLLM's own words, as far as that needs no knowledge of drafters. Raises ConfigError for what cannot be done."""
    config = {key: value for key, value in given.items() if value is not None or key not in KEYS}   # null: not given
    for key, why in REFUSED_KEYS.items():
        if key in config:
            raise ConfigError(f"{key} cannot be given: {why}")
    for key, meaning in NO_EFFECT_KEYS.items():
        if key in config and config.pop(key) != meaning.default:
            logger.warning("speculative config: %s has no effect here: %s", key, meaning.why)
    model = config.get("model")
    if "method" not in config and isinstance(model, str):
        config["method"] = method_of(model)
    if config.get("method") == "custom_class" and model == PROPOSER:
        logger.warning("speculative config: %s drafts with suffix and ngram; here these are two drafters", PROPOSER)
        config["method"] = ["suffix", "ngram"]
        del config["model"]
    elif isinstance(model, str) and model == config.get("method") and METHODS.get(model) in ("ngram", "suffix"):
        del config["model"]   # vLLM's own way of writing "no model"
    return config


def drafter(method: str) -> str:
    """Headway's drafter for vLLM's name; other names come back as they are. Raises ConfigError for a method that there is none for."""
    if method in REFUSED_METHODS:
        raise ConfigError(f"vLLM's method {method!r} is not available here: {REFUSED_METHODS[method]}")
    return METHODS.get(method, method)


def method_for(drafter: str, model: str | None) -> str | None:
    """vLLM's method for a drafter of Headway with this network; None: vLLM has none."""
    if drafter == "eagle" and model is not None and _is_eagle3(model):
        return "eagle3"
    return drafter if drafter in OPTIONS and METHODS.get(drafter) == drafter else None


def without_effect(key: str, methods: str) -> bool:
    """Whether it is an option of drafters that are not among `methods` (as text); said so in the log."""
    if key not in DRAFTER_KEYS:
        return False
    logger.warning("speculative config: %s has no effect with the method %s", key, methods)
    return True


def method_of(model: str) -> str:
    """What vLLM takes a `model` without `method` for: by its configuration where that is on disk, else by its name."""
    if model in METHODS:
        return model
    if not Path(model).exists() and "/" not in model and len(parts := model.split(".")) > 1 and all(part.isidentifier() for part in parts):
        return "custom_class"
    return _by_config(_config(model)) or _by_name(model)


def _is_eagle3(model: str) -> bool:
    config = _config(model)
    names = f"{config.get('speculators_model_type')} {config.get('architectures')}" if config else model
    return "eagle3" in names.lower()


def _config(model: str) -> dict[str, Any]:
    """Its config.json, where it is a directory that has one."""
    try:
        config = json.loads((Path(model) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}


def _by_config(config: Mapping[str, Any]) -> str | None:
    kinds = (config.get("speculators_model_type"), config.get("model_type"))
    found = next((kind for kind in kinds if kind in METHODS or kind in REFUSED_METHODS), None)
    if found is None and "medusa_num_heads" in config:
        found = "medusa"
    if found is None and "eagle" in str(config.get("architectures", "")).lower():
        found = "eagle"
    return found


def _by_name(model: str) -> str:
    name = model.lower()
    if "eagle-" in name or "eagle3" in name:
        return "eagle"
    return next((kind for kind in ("dflash", "dspark") if kind in name), "draft_model")
