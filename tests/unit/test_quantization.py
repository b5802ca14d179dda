"""int8 weights in a whole model: close to bf16, equal to themselves in any company, counted, and refused where nothing multiplies them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from headway import native
from headway.bench import roofline
from headway.config import EngineConfig, SpeculativeConfig
from headway.engine.engine import Engine
from headway.errors import ConfigError, ModelError
from headway.models.attention import KVCache
from headway.models.decoder import Decoder
from headway.models.loader import load_model
from headway.sampling_params import SamplingParams
from headway.types import Request
from tests.tiny import tiny_model_dir

SIZES = {"intermediate_size": 128, "vocab_size": 320}
library = native.library()
needs_kernels = pytest.mark.skipif(library is None or not library.linear_panel, reason="no int8 products on this CPU")


def logits_of(model: Decoder, token_ids: list[int]) -> torch.Tensor:
    cache = KVCache(model.config, 2, 64, model.dtype, model.device)
    hidden, _ = model.forward(torch.tensor(token_ids), torch.arange(len(token_ids)), cache.plan([([0, 1], 0, len(token_ids))]), cache)
    return model.logits(hidden).float()


@needs_kernels
@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_close_to_bf16(tmp_path: Path, kind: str) -> None:
    directory = str(tiny_model_dir(tmp_path, kind, **SIZES))
    token_ids = torch.randint(0, 320, (90,), generator=torch.Generator().manual_seed(0)).tolist()
    exact = logits_of(load_model(directory, dtype="float32", device="cpu"), token_ids)
    errors = {
        quantization: (logits_of(load_model(directory, dtype="bfloat16", device="cpu", quantization=quantization), token_ids) - exact).std()
        for quantization in (None, "int8")
    }
    assert errors["int8"] > 0
    assert errors["int8"] < 3 * errors[None] < 0.2 * exact.std()


@needs_kernels
def test_what_it_weighs(tmp_path: Path) -> None:
    for tied in (True, False):
        directory = str(tiny_model_dir(tmp_path, tie_word_embeddings=tied, **SIZES))
        plain, quantized = (load_model(directory, dtype="bfloat16", device="cpu", quantization=how) for how in (None, "int8"))
        parts = [(layer.qkv, layer.o, layer.mlp.gate_up, layer.mlp.down) for layer in quantized.layers]
        products = [part.packed for layer in parts for part in layer]
        products.append(quantized.lm_head.packed)
        table = quantized.embedding.nbytes
        read = sum(p.weight.nbytes + p.scales.nbytes for p in products) + plain.weight_bytes - table
        read -= sum(2 * p.weight.nbytes for p in products[:-1]) + (0 if tied else table)
        assert quantized.weight_bytes == read + table
        assert roofline.measure(quantized).bytes_per_token == read


@needs_kernels
def test_speculation_and_batches_do_not_change_a_token(tmp_path: Path) -> None:
    directory = str(tiny_model_dir(tmp_path, **SIZES))
    prompts = [[5, 6, 7, 8] * 6, [9, 10, 11] * 7, list(range(40, 70))]

    def write(batched: bool, speculative: object) -> list[list[int]]:
        config = SpeculativeConfig.parse(speculative) if speculative else None
        engine = Engine(EngineConfig(
            model=directory, dtype="bfloat16", device="cpu", quantization="int8", kv_cache_memory_bytes=2**20, speculative=config
        ))
        outputs: list[list[int]] = [[] for _ in prompts]
        for index, prompt in enumerate(prompts):
            engine.add(Request(str(index), prompt, SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)))
            while engine.has_work() and (not batched or index == len(prompts) - 1):
                for delta in engine.step():
                    outputs[int(delta.request_id)] += delta.token_ids
        return outputs

    plain = write(False, None)
    assert write(True, None) == plain
    assert write(True, {"method": "ngram", "num_speculative_tokens": 4, "policy": "static"}) == plain


def test_refused_where_nothing_multiplies_it(tmp_path: Path) -> None:
    directory = str(tiny_model_dir(tmp_path, vocab_size=300))   # 300 outputs are no whole panels, float32 is no bf16
    for dtype in ("bfloat16", "float32"):
        with pytest.raises(ModelError, match="int8 weights need a CPU with AVX2"):
            load_model(directory, dtype=dtype, device="cpu", quantization="int8")
    with pytest.raises(ConfigError, match=r"unknown quantization 'int4'.*int8"):
        EngineConfig(quantization="int4")
