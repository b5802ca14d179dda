"""A feature network in one call of the compiled kernels: the bits of its operations one by one, over ragged rows and several passes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headway import native
from headway.drafters.core.eagle_network import load_eagle
from headway.drafters.core.feature_network import FeatureNetwork
from headway.drafters.core.mtp_network import MTPFile
from headway.models.attention import KVCache
from headway.models.attention_native import make_plan
from headway.models.decoder import Decoder
from headway.models.loader import load_model
from tests.heads import eagle1_dir, eagle3_dir, mtp_dir
from tests.tiny import tiny_model_dir

library = native.library()
if library is None or not library.linear_panel:
    pytest.skip("no packed products", allow_module_level=True)

BLOCK = 16
INNER = {"inner_size": 96}   # the kernels take multiples of 64 outputs


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    directory = tiny_model_dir(tmp_path_factory.mktemp("target"), "llama", seed=3)
    return load_model(str(directory), dtype="bfloat16", device="cpu", progress=False)


def eagle3(target: Decoder, directory: Path, **options: Any) -> FeatureNetwork:
    return load_eagle(eagle3_dir(directory, target.directory, **{"draft_vocab": 192, **INNER, **options}), target)


def mtp(target: Decoder, directory: Path, layout: str) -> FeatureNetwork:
    return MTPFile(mtp_dir(directory, target.directory, layout=layout, **INNER), target.config).load(target)


NETWORKS: dict[str, Callable[[Decoder, Path], FeatureNetwork]] = {
    "eagle3": eagle3,
    "trained here": lambda t, d: eagle3(t, d, norm_before_residual=True, fc_norm=True),
    "norm before fusing": lambda t, d: eagle3(t, d, norm_before_fc=True),
    "normed output": lambda t, d: eagle3(t, d, norm_output=True),
    "whole vocabulary, two layers": lambda t, d: eagle3(t, d, draft_vocab=None, num_layers=2),
    "eagle1": lambda t, d: load_eagle(eagle1_dir(d, t.directory, **INNER), t),
    "mtp": lambda t, d: mtp(t, d, "speculators"),
    "mtp, feature first": lambda t, d: mtp(t, d, "mimo"),
}


@pytest.fixture(scope="module", params=sorted(NETWORKS))
def network(request: pytest.FixtureRequest, target: Decoder, tmp_path_factory: pytest.TempPathFactory) -> FeatureNetwork:
    made = NETWORKS[request.param](target, tmp_path_factory.mktemp("heads") / "head")
    assert made.native is not None
    return made


def features(num: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(num, 64, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


def draft(network: FeatureNetwork, num_passes: int, in_one_call: bool) -> tuple[list[Any], list[torch.Tensor]]:
    """Two sequences with 3 and 18 unread positions, then passes of one row each, the second across the end of a block."""
    cache = KVCache(network.shape, 8, BLOCK, network.dtype, network.device)
    for pages in cache.layers:
        pages.zero_()
    tables, lengths = [[0, 1], [2, 3, 4]], [3, 18]
    rows = [(table, 0, length) for table, length in zip(tables, lengths, strict=True)]
    parts = [tuple(features(length, seed) for seed in range(len(network.hidden_layers))) for length in lengths]
    tokens, positions, ends = list(range(30, 51)), [i for length in lengths for i in range(length)], [2, 20]
    if in_one_call:
        following = [length + i for i in range(num_passes - 1) for length in lengths]
        plan = make_plan(rows, BLOCK, "cpu", ahead=num_passes - 1)
        found = network.steps(tokens, positions + following, parts, plan, cache, ends, num_passes)
    else:
        compiled, network.native = network.native, None
        found = network.steps(tokens, positions, network.fuse_parts(parts), cache.plan(rows), cache, ends)
        for i in range(num_passes - 1):
            plan = cache.plan([(table, length + i, 1) for table, length in zip(tables, lengths, strict=True)])
            at = [length + i for length in lengths]
            found += network.steps(ids(network, found[-1].logits).tolist(), at, found[-1].state, plan, cache, [0, 1])
        network.native = compiled
    said = [(ids(network, p.logits).tolist() if p.best is None else p.best.tolist(), p.confidence) for p in found]
    return [*said, found[-1].logits, found[-1].state], cache.layers


def ids(network: FeatureNetwork, logits: torch.Tensor) -> torch.Tensor:
    best = logits.argmax(-1)
    return best if network.target_ids is None else network.target_ids[best]


def test_one_call_has_the_bits_of_its_operations(network: FeatureNetwork) -> None:
    (*ours, our_logits, our_state), our_pages = draft(network, 15, in_one_call=True)
    (*theirs, logits, state), pages = draft(network, 15, in_one_call=False)
    assert len(ours) == len(theirs) == 15
    assert [best for best, _ in ours] == [best for best, _ in theirs]
    assert len({tuple(best) for best, _ in ours}) > 1
    assert torch.equal(our_logits, logits)
    assert torch.equal(our_state, state)
    assert all(torch.equal(*layers) for layers in zip(our_pages, pages, strict=True))
    np.testing.assert_allclose(ours[-1][1], logits.float().softmax(-1).amax(-1).numpy(), rtol=1e-4)


def test_the_network_s_own_output_goes_on_as_in_one_call(network: FeatureNetwork) -> None:
    """One row, then three passes that read features instead of hidden states: the same as four behind the row."""
    found = []
    for first in (1, 4):
        cache = KVCache(network.shape, 2, BLOCK, network.dtype, network.device)
        for pages in cache.layers:
            pages.zero_()
        hidden = [tuple(features(1, seed) for seed in range(len(network.hidden_layers)))]
        plan = make_plan([([1, 0], 14, 1)], BLOCK, "cpu", ahead=first - 1)
        said = network.steps([7], range(9, 9 + first), hidden, plan, cache, [0], first)
        if first == 1:
            assert said[0].best is not None
            plan = make_plan([([1, 0], 15, 1)], BLOCK, "cpu", ahead=2)
            said = network.steps(said[0].best.tolist(), range(10, 13), said[0].state, plan, cache, [0], 3)
        found.append(said[-1])
    assert torch.equal(found[0].logits, found[1].logits)
    assert torch.equal(found[0].state, found[1].state)


def test_nothing_wrong_reaches_the_kernels(target: Decoder, tmp_path: Path) -> None:
    network = eagle3(target, tmp_path / "head")
    cache = KVCache(network.shape, 2, BLOCK, network.dtype, network.device)
    num_hidden = len(network.hidden_layers)

    def run(token: int = 5, picked: int = 0, given: Any = None, num: int = 1, ahead: int = 0) -> None:
        plan = make_plan([([0], 0, 1)], BLOCK, "cpu", ahead=ahead)
        network.steps([token], [0] * (1 + ahead), features(1) if given is None else given, plan, cache, [picked], num)

    run()
    run(given=[(features(1),) * num_hidden])
    run(num=3, ahead=2)
    mistakes: list[dict[str, Any]] = [
        {"token": 320}, {"token": -1}, {"picked": 1}, {"given": features(1).float()}, {"num": 2}, {"ahead": 1}, {"given": features(2)},
        {"given": [(features(1),) * (num_hidden + 1)]}, {"given": [(features(2),) * num_hidden]},
        {"given": [(features(1),) * num_hidden] * 2}, {"given": [(features(1)[:, :32],) * num_hidden]},
        {"given": [(features(1).float(),) * num_hidden]},
    ]
    for mistake in mistakes:
        with pytest.raises(ValueError, match=r"must be|need a plan"):
            run(**mistake)
    with pytest.raises(ValueError, match="needs 2 blocks"):
        run(num=17, ahead=16)


def test_a_head_s_own_products_are_8_bit_integers(target: Decoder, tmp_path: Path) -> None:
    """Half the bytes of each step's read; the drafts are verified, so they need not be exact. The target's own are as they were loaded."""
    network, shared = eagle3(target, tmp_path / "own"), load_eagle(eagle1_dir(tmp_path / "shared", target.directory, **INNER), target)
    layer, fused = network.layers[0], network.wiring.fuse
    assert fused is not None
    products = [fused.packed, network.lm_head.packed, layer.qkv.packed, layer.o.packed, layer.mlp.gate_up.packed, layer.mlp.down.packed]
    assert all(product is not None and product.scales is not None for product in products)
    assert shared.lm_head.packed is not None
    assert shared.lm_head.packed.scales is None


def test_what_does_not_pack_runs_operation_by_operation(target: Decoder, tmp_path: Path) -> None:
    assert eagle3(target, tmp_path / "odd", inner_size=72).native is None
    assert eagle3(target, tmp_path / "vocabulary", draft_vocab=200).native is None
    wide = load_model(str(target.directory), dtype="float32", device="cpu", progress=False)
    assert eagle3(wide, tmp_path / "wide").native is None


def test_a_target_s_output_layer_in_int8_runs_in_one_call(target: Decoder, tmp_path: Path) -> None:
    narrow = load_model(str(target.directory), dtype="bfloat16", device="cpu", progress=False, quantization="int8")
    network = load_eagle(eagle1_dir(tmp_path / "head", target.directory, **INNER), narrow)
    assert network.lm_head.packed is not None
    assert network.lm_head.packed.scales is not None
    (*ours, our_logits, _), _ = draft(network, 5, in_one_call=True)
    (*theirs, logits, _), _ = draft(network, 5, in_one_call=False)
    assert torch.equal(our_logits, logits)
    assert [best for best, _ in ours] == [best for best, _ in theirs]
