"""Every field and every method of vLLM's SpeculativeConfig is understood, or refused with its reason."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from headway import vllm_words
from headway.config import SpeculativeConfig
from headway.errors import ConfigError
from tests.heads import eagle1_dir, eagle3_dir, medusa_dir, mlp_speculator_dir, mtp_dir
from tests.tiny import tiny_model_dir

TABLE = [[1, 4, 4], [5, 64, 0]]
SAME, NOTHING, REFUSED = "means the same", "has no effect", "is refused"

# The fields of vLLM 0.31's and 0.32's SpeculativeConfig, in their order: an example, and what it comes to here.
FIELDS: dict[str, tuple[Any, str]] = {
    "enforce_eager": (True, NOTHING),
    "num_speculative_tokens": (3, SAME),
    "model": ("org/draft", SAME),
    "method": ("eagle3", SAME),
    "draft_tensor_parallel_size": (2, NOTHING),
    "tensor_parallel_size": (2, REFUSED),
    "quantization": ("fp8", NOTHING),
    "moe_backend": ("triton", NOTHING),
    "attention_backend": ("FLASH_ATTN", NOTHING),
    "kv_cache_dtype": ("fp8", NOTHING),
    "max_model_len": (512, NOTHING),
    "revision": ("main", NOTHING),
    "code_revision": ("main", NOTHING),
    "index_share_for_mtp_iteration": (True, NOTHING),
    "disable_padded_drafter_batch": (True, NOTHING),
    "disable_eagle_block_drop": (True, NOTHING),
    "use_local_argmax_reduction": (True, NOTHING),
    "use_heterogeneous_vocab": (True, NOTHING),
    "prompt_lookup_max": (4, NOTHING),
    "prompt_lookup_min": (2, NOTHING),
    "parallel_drafting": (True, NOTHING),
    "target_model_config": ({}, REFUSED),
    "target_parallel_config": ({}, REFUSED),
    "num_speculative_tokens_per_batch_size": (TABLE, SAME),
    "draft_model_config": ({}, REFUSED),
    "draft_parallel_config": ({}, REFUSED),
    "suffix_decoding_max_tree_depth": (12, NOTHING),
    "suffix_decoding_max_cached_requests": (100, NOTHING),
    "suffix_decoding_max_spec_factor": (2.0, NOTHING),
    "suffix_decoding_min_token_prob": (0.2, NOTHING),
    "draft_load_config": ({"load_format": "safetensors"}, NOTHING),
    "rejection_sample_method": ("block", SAME),
    "synthetic_acceptance_rates": ([0.9, 0.5, 0.5], SAME),
    "synthetic_acceptance_length": (2.5, SAME),
    "enable_adaptive_verification": (True, NOTHING),
    "draft_sample_method": ("greedy", SAME),
    "dspark_draft_topk": (8, NOTHING),
}
BASE = {"method": "eagle3", "model": "org/draft", "num_speculative_tokens": 3}


def parse(value: Any) -> SpeculativeConfig:
    config = SpeculativeConfig.parse(value)
    assert config is not None
    return config


def test_the_table_is_complete() -> None:
    """tests/vllm compares it with the installed vLLM."""
    assert set(vllm_words.KEYS) == set(FIELDS)


@pytest.mark.parametrize("key", FIELDS)
def test_every_field(key: str, caplog: pytest.LogCaptureFixture) -> None:
    value, meaning = FIELDS[key]
    given = {**BASE, key: value} | ({"rejection_sample_method": "synthetic"} if key.startswith("synthetic") else {})
    if meaning == REFUSED:
        with pytest.raises(ConfigError, match=f"{key} cannot be given: vLLM"):
            parse(given)
        return
    with caplog.at_level(logging.WARNING, "headway.config"):
        config = parse(json.dumps(given))
    found = {**vars(config), **config.options_of("eagle"), **config.policy_options}
    assert (config.method, config.model) == ("eagle", "org/draft")
    if meaning == NOTHING:
        assert config == parse(BASE)
        [record] = caplog.records
        assert record.getMessage().startswith(f"speculative config: {key} has no effect")
    else:
        assert caplog.records == []
        expected = "eagle" if key == "method" else value
        assert json.loads(json.dumps(found[key])) == expected


@pytest.mark.parametrize("key", FIELDS)
def test_what_is_not_given_is_null(key: str, caplog: pytest.LogCaptureFixture) -> None:
    """A tool that writes every field writes null for those that nobody set."""
    with caplog.at_level(logging.WARNING, "headway.config"):
        assert parse({"method": "ngram", **BASE, key: BASE.get(key)}) == parse(BASE)
    assert caplog.records == []


def test_defaults_of_vllm_are_silent(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "headway.config"):
        parse({**BASE, "parallel_drafting": False, "use_heterogeneous_vocab": False, "enable_adaptive_verification": False})
    assert caplog.records == []


@pytest.mark.parametrize("method", vllm_words.METHODS)
def test_every_method_with_a_drafter(method: str) -> None:
    drafter = vllm_words.METHODS[method]
    model = {} if drafter in ("ngram", "suffix") else {"model": "org/draft"}
    assert parse({"method": method, **model}).method == drafter
    assert parse({"method": [{"name": method, **model}]}).methods == (drafter,)


@pytest.mark.parametrize("method", vllm_words.REFUSED_METHODS)
def test_every_method_without_one_says_why(method: str) -> None:
    with pytest.raises(ConfigError, match=f"vLLM's method '{method}' is not available here: ") as caught:
        parse({"method": method, "model": "org/draft"})
    assert "unknown" not in str(caught.value)


def test_our_own_proposer_is_its_two_drafters() -> None:
    assert parse({"method": "custom_class", "model": "headway.vllm.Proposer", "num_speculative_tokens": 8}).methods == ("suffix", "ngram")
    assert parse({"model": "headway.vllm.Proposer", "num_speculative_tokens": 8}).methods == ("suffix", "ngram")


@pytest.mark.parametrize(
    ("model", "method"),
    [
        ("org/Llama-3.2-1B", "draft_model"),
        ("smollm2-135m", "draft_model"),
        ("yuhuili/EAGLE-LLaMA3-Instruct-8B", "eagle"),
        ("RedHatAI/Qwen3-8B-speculator.eagle3", "eagle"),
        ("ngram", "ngram"),
        ("[ngram]", "ngram"),
        ("suffix", "suffix"),
    ],
)
def test_a_model_without_a_method(model: str, method: str) -> None:
    config = parse({"model": model, "num_speculative_tokens": 3})
    assert config.method == method
    assert config.model == (None if method in ("ngram", "suffix") else model)


@pytest.mark.parametrize("model", ["some.module.Proposer", "org/x-dflash-b16", "deepseek-ai/dspark_qwen3_8b_block7"])
def test_a_model_that_says_a_method_without_a_drafter(model: str) -> None:
    with pytest.raises(ConfigError, match="is not available here"):
        parse({"model": model, "num_speculative_tokens": 3})


def test_a_directory_says_what_it_is(tmp_path: Path) -> None:
    target = tiny_model_dir(tmp_path / "target", "llama")
    made = {
        "draft_model": target,
        "eagle": eagle3_dir(tmp_path / "a", target),
        "mtp": mtp_dir(tmp_path / "b", target),
        "medusa": medusa_dir(tmp_path / "c", target),
        "mlp_speculator": mlp_speculator_dir(tmp_path / "d", target),
    }
    assert {method: parse({"model": str(path)}).method for method, path in made.items()} == {method: method for method in made}
    assert parse({"model": str(eagle3_dir(tmp_path / "e", target, layout="eagle"))}).method == "eagle"
    assert parse({"model": str(medusa_dir(tmp_path / "f", target, layout="converted"))}).method == "medusa"
    assert parse({"model": str(eagle1_dir(tmp_path / "eagle-head", target))}).method == "eagle"
    (tmp_path / "c" / "config.json").write_text("[]")
    assert parse({"model": str(tmp_path / "c")}).method == "draft_model"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({**BASE, "draft_tensor_paralel_size": 2}, "unknown key .*draft_tensor_paralel_size"),
        ({"method": "eagle4", "model": "org/draft"}, "unknown drafter 'eagle4'"),
        ({"method": "eagle,eagle3", "model": "org/draft"}, "names the drafter 'eagle' twice"),
        ({"method": "deepseek_mtp", "topkk": 3}, "unknown key in the speculative config of method 'mtp': 'topkk'"),
        ({"method": "eagle3", "num_speculative_tokens": 3}, "needs \"model\""),
    ],
)
def test_other_words_are_still_errors(value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(value)
