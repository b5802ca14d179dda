"""vLLM's SpeculativeConfig: its words are those that Headway's server knows, and it accepts what `headway tune` writes."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from vllm.config.speculative import MTPModelTypes, SpeculativeConfig, SpeculativeMethod
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup

from headway import vllm_words
from headway.tune import emit
from headway.tune.plan import Plan, Point, plan
from headway.tune.source import Source, of_headway, of_vllm
from tests.heads import eagle1_dir, eagle3_dir, medusa_dir
from tests.tiny import tiny_model_dir
from tests.unit.test_vllm_words import FIELDS


def names(kind: Any) -> Iterator[str]:
    """Of a Literal, nested or not."""
    for arm in get_args(kind):
        yield from names(arm) if get_args(arm) else [arm]


def test_every_field_and_method_is_known() -> None:
    assert list(FIELDS) == [field.name for field in dataclasses.fields(SpeculativeConfig)]
    assert set(vllm_words.MTP_METHODS) == set(names(MTPModelTypes))
    assert set(vllm_words.METHODS) | set(vllm_words.REFUSED_METHODS) == {*names(SpeculativeMethod), "[ngram]"}


def test_what_has_no_effect_is_silent_at_vllm_s_default() -> None:
    defaults = {field.name: field.default for field in dataclasses.fields(SpeculativeConfig)}
    for key, meaning in vllm_words.NO_EFFECT_KEYS.items():
        default = getattr(defaults[key], "default", defaults[key])   # a pydantic Field has one inside
        assert default == meaning.default, key


def falling(drafter: str) -> Plan:
    return plan(drafter, [Point(1, {0: 50.0, 2: 90.0, 4: 120.0}), Point(16, {0: 300.0, 2: 330.0, 4: 280.0})], 16)


def sources(folder: Path, target: Path) -> dict[str, Source]:
    head3, head1 = str(eagle3_dir(folder / "h3", target)), str(eagle1_dir(folder / "h1", target))
    heads = str(medusa_dir(folder / "m", target))
    return {
        "ngram": of_headway("ngram", {"prompt_lookup_max": 4, "prompt_lookup_min": 2}),
        "suffix": of_headway("suffix", {"suffix_decoding_max_tree_depth": 24}),
        "eagle3": of_headway("eagle", {"model": head3, "topk": 1, "draft_sample_method": "probabilistic"}),
        "eagle": of_headway("eagle", {"model": head1, "topk": 1}),
        "eagle3 of vLLM": of_vllm("eagle3", {"model": head3, "draft_sample_method": "greedy"}),
        "draft_model": of_headway("draft_model", {"model": str(target)}),
        "medusa": of_headway("medusa", {"model": heads, "topk": 1}),
        "custom_class": of_vllm("custom_class", {}),
    }


KINDS = ["ngram", "suffix", "eagle3", "eagle", "eagle3 of vLLM", "draft_model", "medusa", "custom_class"]


@pytest.mark.parametrize("kind", KINDS)
def test_vllm_accepts_what_tune_writes(kind: str, tmp_path: Path) -> None:
    if kind == "suffix" and importlib.util.find_spec("arctic_inference") is None:
        pytest.skip("vLLM's suffix decoding needs arctic-inference")
    target = tiny_model_dir(tmp_path / "target", "llama")
    source = sources(tmp_path, target)[kind]
    [file] = [file for file in emit.emit(falling(source.ours or kind), source)[0] if file.name == "vllm.json"]
    given = json.loads(file.text)
    config = EngineArgs(model=str(target), speculative_config=given, max_num_seqs=16).create_engine_config().speculative_config
    assert config is not None
    assert (config.method, config.num_speculative_tokens) == (kind.partition(" ")[0], 4)
    table = config.num_speculative_tokens_per_batch_size
    assert (table is None) == (kind in ("suffix", "medusa"))
    if table is not None:
        lookup = build_dynamic_sd_schedule_lookup([list(entry) for entry in table], 16, 4)
        assert [lookup[size] for size in (1, 4, 5, 16)] == [4, 4, 2, 2]
