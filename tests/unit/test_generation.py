"""A request that says nothing about sampling gets what the model's makers recommend."""

from __future__ import annotations

import json

import pytest

from headway import LLM, SamplingParams
from headway.errors import ModelError
from headway.models.config import ModelConfig
from headway.models.generation import sampling_defaults
from headway.server.protocol import ChatCompletionRequest, CompletionRequest
from tests.tiny import tiny_model_dir


def recommend(directory, **values):
    path = directory / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def defaults_of(directory, name="tiny"):
    return sampling_defaults(name, ModelConfig.from_directory(directory).generation)


def test_reads_what_the_makers_recommend(tmp_path):
    directory = tiny_model_dir(tmp_path)
    assert defaults_of(directory) == {}
    recommend(directory, temperature=0.7, top_p=0.8, top_k=20, repetition_penalty=None, max_length=99)
    assert defaults_of(directory) == {"temperature": 0.7, "top_p": 0.8, "top_k": 20}


def test_a_built_in_model_has_its_own_unless_the_file_says_more(tmp_path):
    directory = tiny_model_dir(tmp_path)
    assert defaults_of(directory, "smollm2-135m") == {"temperature": 0.2, "top_p": 0.9}
    recommend(directory, temperature=0.5)
    assert defaults_of(directory, "smollm2-135m") == {"temperature": 0.5}


@pytest.mark.parametrize("values", [{"top_p": 1.5}, {"temperature": "warm"}, {"temperature": -1}])
def test_a_value_that_cannot_be_names_the_file(tmp_path, values):
    directory = tiny_model_dir(tmp_path)
    recommend(directory, **values)
    with pytest.raises(ModelError, match=r"generation_config\.json"):
        defaults_of(directory)


def test_a_request_overrides_what_it_names():
    defaults = {"temperature": 0.2, "top_p": 0.9}
    messages = [{"role": "user", "content": "x"}]
    assert ChatCompletionRequest(messages=messages).sampling_params(defaults).temperature == 0.2
    asked = ChatCompletionRequest(messages=messages, temperature=1.0).sampling_params(defaults)
    assert (asked.temperature, asked.top_p) == (1.0, 0.9)
    assert CompletionRequest(prompt="x").sampling_params({}) == SamplingParams()


def test_offline_calls_without_parameters_use_it(tmp_path):
    directory = tiny_model_dir(tmp_path)
    recommend(directory, temperature=0.0)
    llm = LLM(str(directory), dtype="float32", max_model_len=128, kv_cache_memory_bytes=1 << 20, speculative_config=None)
    assert llm.get_default_sampling_params() == SamplingParams(temperature=0.0)
    once, again = (llm.generate("abc", use_tqdm=False)[0].outputs[0].token_ids for _ in range(2))
    assert once == again == llm.generate("abc", SamplingParams(temperature=0.0), use_tqdm=False)[0].outputs[0].token_ids
