"""Configuration: what is accepted, what it becomes, and that every error names what was wrong and what is accepted."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.config import DEFAULT_NUM_SPECULATIVE_TOKENS, POLICY_KEYS, EngineConfig, SpeculativeConfig
from headway.drafters.ngram import Ngram
from headway.errors import ConfigError, HeadwayError

TABLE = "num_speculative_tokens_per_batch_size"


def parse(value: Any) -> SpeculativeConfig:
    config = SpeculativeConfig.parse(value)
    assert config is not None
    return config


# -- what is accepted -----------------------------------------------------------------------------------------------


def test_off_is_none() -> None:
    assert SpeculativeConfig.parse(None) is None
    assert SpeculativeConfig.parse("off") is None
    assert SpeculativeConfig.parse(" off\n") is None


@pytest.mark.parametrize("value", ["default", {}, "{}", {"method": "suffix"}, "suffix", '{"method": "suffix", "policy": null}'])
def test_the_default(value: Any) -> None:
    assert parse(value) == SpeculativeConfig()
    assert parse(value).build_drafter().name == "suffix"
    assert parse(value).build_policy().name == "goodput"


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_each_method_has_its_own_default_k(method: str) -> None:
    assert parse(method).num_speculative_tokens == DEFAULT_NUM_SPECULATIVE_TOKENS[method]
    assert parse({"method": method, "num_speculative_tokens": 3}).num_speculative_tokens == 3


def test_json_and_mapping_are_the_same() -> None:
    given_keys = {
        "method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4, "prompt_lookup_min": 2,
        TABLE: [[1, 4, 5], [5, 9, 0]], "rejection_sample_method": "block",
    }  # fmt: skip
    config = parse(given_keys)
    assert config == parse(json.dumps(given_keys)) == parse(config)
    assert config.drafter_options == {"ngram": {"prompt_lookup_max": 4, "prompt_lookup_min": 2}}
    assert (config.policy, config.policy_options) == ("batch_table", {TABLE: ((1, 4, 5), (5, 9, 0))})
    assert given_keys["method"] == "ngram"   # the caller's mapping is left alone


@pytest.mark.parametrize(
    "value",
    [
        {TABLE: [[1, 9, 2]]},
        {"policy": "batch_table", TABLE: [[1, 9, 2]]},
        {"policy": {"name": "batch_table"}, TABLE: [[1, 9, 2]]},
        {"policy": {"name": "batch_table", TABLE: [[1, 9, 2]]}},
    ],
)
def test_ways_to_say_a_policy(value: dict[str, Any]) -> None:
    config = parse(value)
    assert (config.policy, config.policy_options) == ("batch_table", {TABLE: ((1, 9, 2),)})


class Twin(Ngram):
    """Declares the same options as another drafter."""


@pytest.mark.parametrize(
    "value",
    [
        {"method": ["suffix", "ngram"], "prompt_lookup_max": 3},
        {"method": "suffix,ngram", "prompt_lookup_max": 3},
        {"method": ["suffix", {"name": "ngram", "prompt_lookup_max": 3}]},
    ],
)
def test_several_drafters(value: dict[str, Any]) -> None:
    config = parse(value)
    assert config.methods == config.method == ("suffix", "ngram")
    assert config.num_speculative_tokens == 16
    assert config.drafter_options == {"ngram": {"prompt_lookup_max": 3}}
    assert [config.build_drafter(name).name for name in config.methods] == ["suffix", "ngram"]


def test_equal_option_names_are_told_apart() -> None:
    twin = "tests.unit.test_config:Twin"
    config = parse({"method": [{"name": twin, "prompt_lookup_max": 4}, {"name": "ngram", "prompt_lookup_max": 3}]})
    assert config.drafter_options == {twin: {"prompt_lookup_max": 4}, "ngram": {"prompt_lookup_max": 3}}
    assert parse({"method": ["ngram"]}) == parse({"method": {"name": "ngram"}}) == parse("ngram")


def test_synthetic_acceptance() -> None:
    config = parse({"num_speculative_tokens": 3, "rejection_sample_method": "synthetic", "synthetic_acceptance_rates": [1, 0.5, 0.5]})
    assert config.synthetic_acceptance_rates == (1.0, 0.5, 0.5)
    config = parse({"num_speculative_tokens": 3, "rejection_sample_method": "synthetic", "synthetic_acceptance_length": 4})
    assert config.synthetic_acceptance_length == 4.0


def test_configs_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        parse("ngram").method = "suffix"   # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        EngineConfig().seed = 1   # type: ignore[misc]


# -- what is not ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("{", "not valid JSON"),
        ("ngrams", "unknown drafter 'ngrams'. Did you mean 'ngram'"),
        ("", "unknown drafter ''"),
        ("[1]", "unknown drafter"),
        (3, "must be a JSON object, got 3"),
        ([("method", "ngram")], "must be a JSON object"),
        ({"method": "off"}, "unknown drafter 'off'"),
        ({"method": 3}, "method must be a drafter's name or a list.*Accepted: .*ngram"),
        ({"method": ["ngram", 3]}, "method must be a drafter's name or a list"),
        ({"method": []}, "method is an empty list. Accepted: .*ngram"),
        ({"method": ["ngram", "ngram"]}, "names the drafter 'ngram' twice"),
        ({"method": ["ngram", "sufix"]}, "unknown drafter 'sufix'. Did you mean 'suffix'"),
        ({"method": ["ngram", "suffix"], "model": "some/model"}, "method 'ngram', 'suffix' has no draft model"),
        ({"method": ["suffix", {"name": "ngram", "prompt_lookup": 3}]}, "unknown option of drafter 'ngram' 'prompt_lookup'. Did you mean"),
        ({"method": {"name": "ngram", "prompt_lookup_max": 3}, "prompt_lookup_max": 4}, "prompt_lookup_max is given twice"),
        ({"method": ["tests.unit.test_config:Twin", "ngram"], "prompt_lookup_max": 4}, "option of .*Twin', 'ngram'; say whose"),
        ({"metod": "ngram"}, "unknown key in the speculative config of method 'suffix': 'metod'. Did you mean 'method'"),
        ({7: 1}, "unknown key .*'7'"),
        ({"method": "ngram", "prompt_lookup": 3}, "Did you mean 'prompt_lookup_m.*Accepted: .*num_speculative_tokens, .*prompt_lookup_max"),
        ({"method": "suffix", "topk": 3}, "unknown key .*'topk'.*suffix_decoding_max_cached_requests"),
        ({"drafter_options": {}}, "unknown key"),
        ({"policy_options": {}}, "unknown key"),
        ({"num_speculative_tokens": 0}, "num_speculative_tokens must be >= 1, got 0.*off"),
        ({"num_speculative_tokens": "4"}, "num_speculative_tokens must be an integer, got '4'"),
        ({"num_speculative_tokens": 4.0}, "num_speculative_tokens must be an integer, got 4.0"),
        ({"num_speculative_tokens": True}, "num_speculative_tokens must be an integer, got True"),
        ({"method": "ngram", "model": "some/model"}, "method 'ngram' has no draft model"),
        ({"method": "eagle", "model": 3}, "model must be a string or null, got 3"),
        ({"policy": "goodputt"}, "unknown policy 'goodputt'"),
        ({"policy": 3}, "policy must be a name or"),
        ({"policy": {"k": 3}}, "policy must be a name or"),
        ({"policy": {"name": "static", "k": 3}}, "unknown option of policy 'static' 'k'. Accepted: name"),
        ({"policy": {"name": "batch_table", "tabel": []}}, "unknown option of policy 'batch_table' 'tabel'"),
        ({"policy": "static", TABLE: [[1, 2, 3]]}, f"{TABLE} is the policy 'batch_table'; it cannot be combined with the policy 'static'"),
        ({TABLE: [[1, 2, 3]], "disable_by_batch_size": 3}, "cannot be combined"),
        ({"policy": {"name": "batch_table", TABLE: [[1, 2, 3]]}, TABLE: [[1, 2, 4]]}, "given twice"),
        ({"rejection_sample_method": "strict"}, "'strict'. Accepted: block, lossy_typical, standard, synthetic"),
        ({"rejection_sample_method": 1}, "rejection_sample_method must be a string"),
        ({"rejection_sample_method": "synthetic"}, "needs exactly one of"),
        (
            {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": [1.0] * 16, "synthetic_acceptance_length": 2},
            "needs exactly one of",
        ),
        ({"synthetic_acceptance_length": 2.0}, "need rejection_sample_method"),
        ({"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": [0.5]}, "num_speculative_tokens=16 entries, got 1"),
        ({"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 18}, r"must be in \[1, 17\], got 18"),
        ({"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 0.5}, "must be in"),
        ({"rejection_sample_method": "lossy_typical", "typical_acceptance_threshold": 1.5}, r"must be in \[0, 1\], got 1.5"),
        ({"rejection_sample_method": "lossy_typical", "typical_acceptance_threshold": float("nan")}, r"must be in \[0, 1\]"),
        ({"rejection_sample_method": "lossy_typical", "typical_acceptance_alpha": -1}, "must be >= 0 and finite, got -1"),
        ({"rejection_sample_method": "lossy_typical", "typical_acceptance_alpha": float("inf")}, "must be >= 0 and finite"),
    ],
)  # fmt: skip
def test_bad_speculative_configs(value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SpeculativeConfig.parse(value)


@pytest.mark.parametrize("rates", [[0.5, 0.6], [1.2, 0.1], [0.5, -0.1], [float("nan"), 0.1], [0.5, float("nan")]])
def test_bad_synthetic_rates(rates: list[float]) -> None:
    with pytest.raises(ConfigError, match=r"must be in \[0, 1\] and never increase"):
        SpeculativeConfig.parse(
            {"num_speculative_tokens": 2, "rejection_sample_method": "synthetic", "synthetic_acceptance_rates": rates}
        )


values = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 40) | st.floats() | st.sampled_from(["ngram", "suffix", "static", "batch_table", "x", ""]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["name", TABLE, "k"]), inner, max_size=2),
    max_leaves=6,
)
keys = st.sampled_from([
    *(f.name for f in dataclasses.fields(SpeculativeConfig)), *POLICY_KEYS, "prompt_lookup_max", "prompt_lookup_min",
    "suffix_decoding_max_tree_depth", "suffix_decoding_max_cached_requests", "suffix_decoding_max_spec_factor",
    "suffix_decoding_min_token_prob", "nonsense",
])  # fmt: skip


@given(st.dictionaries(keys, values, max_size=5))
def test_any_mapping_gives_a_config_that_builds_or_a_config_error(given_keys: dict[str, Any]) -> None:
    try:
        config = parse(given_keys)
    except ConfigError:
        return
    for name in config.methods:
        config.build_drafter(name)
    config.build_policy()


# -- the engine -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs must be >= 1, got 0"),
        ({"max_num_seqs": "8"}, "max_num_seqs must be an integer, got '8'"),
        ({"max_model_len": -1}, "max_model_len must be >= 1"),
        ({"block_size": 0}, "block_size must be >= 1"),
        ({"kv_cache_memory_bytes": 0}, "kv_cache_memory_bytes must be >= 1"),
        ({"num_threads": 1.5}, "num_threads must be an integer or null"),
        ({"dtype": "bf16"}, "unknown dtype 'bf16'. .*Accepted: auto, bfloat16, float16, float32"),
        ({"gpu_memory_utilization": 0.0}, r"gpu_memory_utilization must be in \(0, 1\], got 0.0"),
        ({"gpu_memory_utilization": float("nan")}, "gpu_memory_utilization must be in"),
        ({"enable_prefix_caching": 1}, "enable_prefix_caching must be true or false, got 1"),
        ({"model": None}, "model must be a string, got None"),
        ({"speculative": "ngram"}, "speculative must be SpeculativeConfig or null, got 'ngram'"),
        ({"max_num_seqs": 600}, r"max_num_batched_tokens \(512\) must be >= max_num_seqs \(600\)"),
    ],
)
def test_bad_engine_configs(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**options)


def test_good_engine_configs() -> None:
    assert EngineConfig().speculative is None
    assert EngineConfig(gpu_memory_utilization=1, speculative=parse("ngram"), num_threads=None).num_threads is None


def test_every_field_is_explained() -> None:
    for cls in (EngineConfig, SpeculativeConfig):
        for field in dataclasses.fields(cls):
            assert field.metadata.get("help"), field.name


def test_errors_are_value_errors() -> None:
    assert issubclass(ConfigError, HeadwayError)
    assert issubclass(HeadwayError, ValueError)
