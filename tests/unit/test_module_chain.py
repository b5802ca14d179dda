"""Several multi-token prediction modules: each drafts for its own positions, over K/V of its own."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from headway.config import EngineConfig, SpeculativeConfig
from headway.drafters.core.feature_network import FeatureNetwork
from headway.drafters.core.module_chain import ModuleChain
from headway.drafters.core.mtp_network import MTPFile
from headway.drafters.drafter import DrafterContext, never_stop
from headway.drafters.mtp import MTP
from headway.engine.engine import Engine
from headway.errors import ConfigError, ModelError
from headway.models.attention import KVCache
from headway.models.decoder import Decoder
from headway.models.loader import load_model
from headway.sampling_params import SamplingParams
from headway.types import Request
from tests.heads import mtp_dir
from tests.tiny import tiny_model_dir
from tests.unit.test_feature_chain import BLOCK, Argmax, Text, chunks

K = 7
MODULES = [1, 2, 3]
LAYOUTS = ["speculators", "qwen", "mimo", "deepseek"]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    directory = tiny_model_dir(tmp_path_factory.mktemp("target"), "llama", seed=3)
    return load_model(str(directory), dtype="float32", device="cpu", progress=False)


def load(directory: Path, target: Decoder, layout: str, num_modules: int) -> list[FeatureNetwork]:
    file = MTPFile(mtp_dir(directory, target.directory, layout=layout, num_modules=num_modules), target.config)
    assert file.num_modules == num_modules
    return [file.load(target), *file.load_further(target)]


def make(modules: Sequence[FeatureNetwork], num_blocks: int = 64) -> ModuleChain:
    chain = MTP()
    chain.start(modules[0], Argmax(), num_blocks, BLOCK, 1 << 24)   # type: ignore[arg-type]
    chain.add_modules(modules[1:], num_blocks)
    return chain


@dataclass
class Outputs:
    """What a module made of labels first, first + 1, ...: label p holds token p + 1, so module j's position i has label i + j."""

    first: int
    rows: torch.Tensor


def naive(modules: Sequence[FeatureNetwork], text: Text, stop: int, k: int = K, begin: int = 0) -> list[int]:
    """Every module over the whole text for each token, from empty caches, by the definition: module j reads at position i token i + 1 + j
    and the output of module j - 1 at position i; behind the last one the first goes on."""
    tokens, drafts = text.tokens[: stop + 1], []
    for step in range(k):
        outputs = [Outputs(begin, torch.empty(0, 64)) for _ in modules]
        while len(outputs[step % len(modules)].rows) + outputs[step % len(modules)].first < stop + step:
            for index in range(len(modules)):
                outputs[index], x = one(modules, index, text, tokens, stop, outputs, begin)
                if index == step % len(modules):
                    last = x
        drafts.append(int(modules[step % len(modules)].predict(last[-1:])[0].argmax()))
        tokens = [*tokens, drafts[-1]]
    return drafts


def one(
    modules: Sequence[FeatureNetwork], index: int, text: Text, tokens: list[int], stop: int, outputs: list[Outputs], begin: int
) -> tuple[Outputs, torch.Tensor]:
    """(all outputs of a module, its last layer) from all that is known of the module before it."""
    module, before = modules[index], outputs[index - 1]
    first = begin + index
    features = before.rows
    if index == 0:
        behind = before.rows[stop - 1 - before.first :] if before.first + len(before.rows) >= stop else before.rows[:0]
        features = torch.cat([module.fuse([layer[begin:stop] for layer in text.hidden]), behind])
    features = features[: len(tokens) - 1 - first]
    num = len(features)
    if num == 0:
        return Outputs(first, torch.empty(0, 64)), torch.empty(0, 64)
    cache = KVCache(module.shape, 8, BLOCK, module.dtype, module.device)
    plan = cache.plan([(list(range(8)), 0, num)])
    read = torch.tensor(tokens[first + 1 : first + 1 + num])
    x = module.forward(read, torch.arange(begin, begin + num), features, plan, cache)
    return Outputs(first, module.predict(x)[1]), x


@pytest.mark.parametrize("num_modules", MODULES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_drafts_are_those_of_the_definition(target: Decoder, tmp_path: Path, layout: str, num_modules: int) -> None:
    modules = load(tmp_path / "m", target, layout, num_modules)
    text, chain = Text(target, modules[0], seed=1), make(modules)
    for start, stop in chunks(20, 1, 3, 5, 2, 40):
        chain.commit([text.committed(7, start, stop)])
        assert chain.propose([text.request(7, stop, K)], never_stop)[0].tokens == naive(modules, text, stop), f"behind {stop} positions"


def test_each_module_has_its_say(target: Decoder, tmp_path: Path) -> None:
    """With the first one alone the drafts are other ones from the second on."""
    modules = load(tmp_path / "m", target, "deepseek", 3)
    text = Text(target, modules[0], seed=1)
    found, alone = [], []
    for drafts, used in ((found, modules), (alone, modules[:1])):
        chain = make(used)
        chain.commit([text.committed(7, 0, 30)])
        drafts += chain.propose([text.request(7, 30, K)], never_stop)[0].tokens
    assert found[0] == alone[0]
    assert found[1:] != alone[1:]


def test_batched_paused_and_preempted_they_draft_the_same(target: Decoder, tmp_path: Path) -> None:
    modules = load(tmp_path / "m", target, "speculators", 3)
    texts, chain = [Text(target, modules[0], seed) for seed in range(3)], make(modules, num_blocks=13)
    lengths = [5, 33, 60]
    for seq_id, (text, length) in enumerate(zip(texts, lengths, strict=True)):
        chain.commit([text.committed(seq_id, 0, length)])
    requests = [text.request(seq_id, length, 2 + 2 * seq_id) for seq_id, (text, length) in enumerate(zip(texts, lengths, strict=True))]
    for draft, text, length, request in zip(chain.propose(requests, never_stop), texts, lengths, requests, strict=True):
        assert draft.tokens == naive(modules, text, length, request.k)
    chain.commit([texts[0].committed(0, 5, 9)])
    chain.commit([texts[0].committed(0, 9, 14)])   # not asked for in between
    assert chain.propose([texts[0].request(0, 14, K)], never_stop)[0].tokens == naive(modules, texts[0], 14)
    chain.commit([Text(target, modules[0], 9).committed(3, 0, 80)])   # takes the blocks of the others
    assert len(chain.propose([Text(target, modules[0], 9).request(3, 80, 2)], never_stop)[0]) == 2
    chain.stop(3)
    chain.commit([texts[1].committed(1, 33, 35)])
    assert chain.propose([texts[1].request(1, 35, K)], never_stop)[0].tokens == naive(modules, texts[1], 35)


def test_too_little_text_gets_no_draft(target: Decoder, tmp_path: Path) -> None:
    """The third module has nothing to continue before there are three positions."""
    modules = load(tmp_path / "m", target, "speculators", 3)
    text, chain = Text(target, modules[0], seed=1), make(modules)
    lengths = []
    for start, stop in chunks(1, 1, 1, 1):
        chain.commit([text.committed(7, start, stop)])
        lengths.append(len(chain.propose([text.request(7, stop, K)], never_stop)[0]))
    assert lengths == [0, 0, K, K]


def context(target: Decoder, directory: Path) -> DrafterContext:
    return DrafterContext(
        model=str(directory), directory=target.directory, target=target.config, dtype=torch.float32, device=torch.device("cpu"),
        block_size=BLOCK, max_num_seqs=4, num_speculative_tokens=4,
    )   # fmt: skip


def test_memory_is_planned_for_every_module(target: Decoder, tmp_path: Path) -> None:
    plans = [MTP().bind(context(target, mtp_dir(tmp_path / str(n), target.directory, num_modules=n))) for n in MODULES]
    one, two, three = plans
    module = KVCache.bytes_per_block(MTPFile(tmp_path / "1", target.config).shape, BLOCK, torch.float32)
    assert [plan.kv_bytes_per_block - one.kv_bytes_per_block for plan in plans] == [0, module, 2 * module]
    assert [two.weight_bytes, three.weight_bytes] == [2 * one.weight_bytes, 3 * one.weight_bytes]


@pytest.mark.parametrize("options", [{"topk": 2}, {"confidence_head": "head.safetensors"}])
def test_what_needs_a_single_module_says_so(target: Decoder, tmp_path: Path, options: dict[str, object]) -> None:
    drafter = MTP(MTP.Options(**options))   # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"is for a single module; .* has 2"):
        drafter.bind(context(target, mtp_dir(tmp_path / "m", target.directory, num_modules=2)))


def test_the_weights_say_how_many_there_are(target: Decoder, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    directory = mtp_dir(tmp_path / "m", target.directory, num_modules=2)
    config = (directory / "config.json").read_text()
    (directory / "config.json").write_text(config.replace('"num_nextn_predict_layers": 2', '"num_nextn_predict_layers": 3'))
    with pytest.raises(ModelError, match=r"config.json names 3 modules, the weights have 2"):
        MTPFile(directory, target.config)
    (directory / "config.json").write_text(config.replace('"num_nextn_predict_layers": 2', '"num_nextn_predict_layers": 1'))
    with caplog.at_level(logging.WARNING, "headway.mtp"):
        assert MTPFile(directory, target.config).num_modules == 2
    assert "names 1 modules, the weights have 2: all are used" in caplog.text


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("num_modules", [2, 3])
def test_the_engine_writes_what_it_writes_without(target: Decoder, tmp_path: Path, num_modules: int, dtype: str) -> None:
    module = mtp_dir(tmp_path / "m", target.directory, num_modules=num_modules)
    written = []
    for speculative in (None, {"method": "mtp", "model": str(module), "policy": "static", "num_speculative_tokens": 5}):
        engine = Engine(EngineConfig(
            model=str(target.directory), dtype=dtype, device="cpu", max_model_len=256, block_size=16, profile=False,
            speculative=SpeculativeConfig.parse(speculative),
        ))   # fmt: skip
        for i in range(3):
            params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
            engine.add(Request(f"r{i}", [5 + i, 6, 7, 8, 9] * (1 + 3 * i), params))
        texts: dict[str, list[int]] = {}
        while engine.has_work():
            for delta in engine.step():
                texts.setdefault(delta.request_id, []).extend(delta.token_ids)
            engine.check()
        written.append(texts)
    assert written[0] == written[1]
    assert sum(engine.metrics.verified.values()) > 0
