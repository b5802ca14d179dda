"""Every family: greedy text equals transformers', alone and with speculation, and bits do not depend on which rows share a pass."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from headway import native
from headway.config import EngineConfig, SpeculativeConfig
from headway.engine.engine import Engine
from headway.models import families, stack_native
from headway.models.attention import KVCache
from headway.models.decoder import Decoder
from headway.models.loader import load_model
from headway.sampling_params import SamplingParams
from headway.types import Request
from tests.tiny import ARCHITECTURE, tiny_model_dir
from tests.unit.test_models import random_ids, reference_config

FAMILIES = sorted(ARCHITECTURE)
PROMPTS = [([5 + i, 6, 7, 8 + i, 9] * 9)[: 20 + 6 * i] for i in range(4)]
OUTPUT_LEN = 24
ALPHABET = (20, 60, 130, 250)   # all that is written: of so few tokens much repeats, and drafts are made


def test_every_family_is_tested() -> None:
    assert set(families.names()) - {"gemma3"} == set(FAMILIES)   # gemma3 is gemma3_text inside a larger model, see below


@pytest.fixture(scope="module", params=FAMILIES)
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_dir(tmp_path_factory.mktemp("family"), request.param, seed=3)


def written(directory: Path, speculative: SpeculativeConfig | None) -> tuple[list[list[int]], int]:
    """(greedy text of each prompt, all at once; tokens drafted)"""
    shape = {"max_model_len": 256, "block_size": 16, "profile": False}
    engine = Engine(EngineConfig(model=str(directory), dtype="float32", device="cpu", speculative=speculative, **shape))
    for i, prompt in enumerate(PROMPTS):
        bias = dict.fromkeys(ALPHABET, 80.0)
        engine.add(Request(f"r{i}", prompt, SamplingParams(temperature=0.0, max_tokens=OUTPUT_LEN, ignore_eos=True, logit_bias=bias)))
    texts: dict[str, list[int]] = {}
    while engine.has_work():
        for delta in engine.step():
            texts.setdefault(delta.request_id, []).extend(delta.token_ids)
    return [texts[f"r{i}"] for i in range(len(PROMPTS))], sum(engine.metrics.verified.values())


def reference_text(directory: Path) -> list[list[int]]:
    from transformers import AutoModelForCausalLM

    config = reference_config(directory)
    model = AutoModelForCausalLM.from_pretrained(directory, config=config, dtype=torch.float32, attn_implementation="eager")
    texts = []
    for prompt in PROMPTS:
        ids = list(prompt)
        with torch.inference_mode():
            for _ in range(OUTPUT_LEN):
                logits = model(torch.tensor([ids])).logits[0, -1]
                ids.append(max(ALPHABET, key=lambda token: float(logits[token])))
        texts.append(ids[len(prompt) :])
    return texts


def test_greedy_text_is_transformers_with_speculation_and_without(directory: Path) -> None:
    plain, _ = written(directory, None)
    assert plain == reference_text(directory)
    for method in ("suffix", "ngram"):
        speculative = SpeculativeConfig.parse({"method": method, "num_speculative_tokens": 4, "policy": "static"})
        drafted, num_drafted = written(directory, speculative)
        assert drafted == plain
        assert num_drafted > 0, "nothing was ever drafted: the test proves nothing"


def logits_by(model: Decoder, token_ids: list[int], lengths: list[int]) -> torch.Tensor:
    """Of one sequence in passes of these many tokens."""
    cache = KVCache(model.config, 8, 16, model.dtype, model.device)
    parts, start = [], 0
    for length in lengths:
        plan = cache.plan([(list(range(8)), start, length)])
        tokens = torch.tensor(token_ids[start : start + length])
        parts.append(model.logits(model.forward(tokens, torch.arange(start, start + length), plan, cache)[0]))
        start += length
    return torch.cat(parts)


@pytest.mark.skipif(native.library() is None or not native.choose().library.linear_panel, reason="no compiled products")  # type: ignore[union-attr]
def test_what_is_said_of_the_layers_is_what_runs(directory: Path) -> None:
    model = load_model(str(directory), dtype="bfloat16", device="cpu")
    assert (model.stack is None) == (stack_native.missing(model.config) is not None)


@pytest.mark.skipif(native.library() is None or not native.choose().library.linear_panel, reason="bits are promised with the kernels")  # type: ignore[union-attr]
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bits_do_not_depend_on_which_rows_share_a_pass(directory: Path, dtype: str) -> None:
    model = load_model(str(directory), dtype=dtype, device="cpu")
    token_ids = random_ids(60, 320)
    whole = logits_by(model, token_ids, [60])
    for lengths in ([1] * 60, [40, 1, 5, 3, 11]):
        assert torch.equal(logits_by(model, token_ids, lengths), whole)


def test_a_language_model_inside_a_larger_one(tmp_path: Path) -> None:
    """Gemma 3 as it is published: text_config, and `language_model.` in the names, in either place."""
    from safetensors.torch import load_file, save_file

    directory = tiny_model_dir(tmp_path, "gemma3_text")
    token_ids = random_ids(40, 320)
    expected = logits_by(load_model(str(directory), dtype="float32", device="cpu"), token_ids, [40])
    text = json.loads((directory / "config.json").read_text())
    whole = {"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"], "text_config": text, "eos_token_id": [1, 106]}
    (directory / "config.json").write_text(json.dumps(whole))
    state = load_file(directory / "model.safetensors")
    for renamed in (
        {f"language_model.{name}": tensor for name, tensor in state.items()},
        {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in state.items()},
    ):
        save_file({**renamed, "vision_tower.embeddings.weight": torch.ones(2)}, directory / "model.safetensors")
        model = load_model(str(directory), dtype="float32", device="cpu")
        assert torch.equal(logits_by(model, token_ids, [40]), expected)
