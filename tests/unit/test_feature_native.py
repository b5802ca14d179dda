"""A feature network in one call of the compiled kernels: the bits of its operations one by one, over ragged rows and several passes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headway import native
from headway.drafters._eagle_network import load_eagle
from headway.drafters._feature_native import StepPlan
from headway.drafters._feature_network import FeatureNetwork
from headway.drafters._mtp_network import MTPFile
from headway.models.attention import KVCache
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


def features(num: int) -> torch.Tensor:
    return torch.randn(num, 64, generator=torch.Generator().manual_seed(num)).to(torch.bfloat16)


def draft(network: FeatureNetwork, num_passes: int, in_one_call: bool) -> tuple[list[Any], list[torch.Tensor]]:
    """Two sequences with 3 and 18 unread positions, then `num_passes` of one row each, the second across the end of a block."""
    cache = KVCache(network.shape, 8, BLOCK, network.dtype, network.device)
    for pages in cache.layers:
        pages.zero_()
    tables, lengths = [[0, 1], [2, 3, 4]], [3, 18]
    rows = [(table, 0, length) for table, length in zip(tables, lengths, strict=True)]
    positions = torch.cat([torch.arange(length) for length in lengths])
    compiled, network.native = network.native, network.native if in_one_call else None
    try:
        ends = torch.tensor([2, 20])
        found = network.steps(torch.arange(30, 51), positions, features(21), cache.plan(rows), cache, ends)
        said = [(p.logits.argmax(-1) if p.best is None else p.best, p.logits, p.state, p.confidence) for p in found]
        tokens, state, at = ids(network, found[0].logits), found[0].state, torch.tensor(lengths)
        steps = [(table, length, 1) for table, length in zip(tables, lengths, strict=True)]
        both = torch.arange(2)
        if in_one_call:
            plan = StepPlan(steps, num_passes, at, BLOCK, network.rope)
            found = network.steps(tokens, at, state, plan, cache, both, num_passes)
        else:
            found = []
            for i in range(num_passes):
                plan_of_one = cache.plan([(table, start + i, 1) for table, start, _ in steps])
                found += network.steps(tokens, at + i, state, plan_of_one, cache, both)
                tokens, state = ids(network, found[-1].logits), found[-1].state
    finally:
        network.native = compiled
    said = [(ids(network, p.logits) if p.best is None else p.best, p.confidence) for p in found]
    return [*said, found[-1].logits, found[-1].state], cache.layers


def ids(network: FeatureNetwork, logits: torch.Tensor) -> torch.Tensor:
    best = logits.argmax(-1)
    return best if network.target_ids is None else network.target_ids[best]


def test_one_call_has_the_bits_of_its_operations(network: FeatureNetwork) -> None:
    (*ours, our_logits, our_state), our_pages = draft(network, 15, in_one_call=True)
    (*theirs, logits, state), pages = draft(network, 15, in_one_call=False)
    assert len(ours) == len(theirs) == 15
    assert all(torch.equal(best, expected) for (best, _), (expected, _) in zip(ours, theirs, strict=True))
    assert len({tuple(best.tolist()) for best, _ in ours}) > 1
    assert torch.equal(our_logits, logits)
    assert torch.equal(our_state, state)
    assert all(torch.equal(*layers) for layers in zip(our_pages, pages, strict=True))
    np.testing.assert_allclose(ours[-1][1], logits.float().softmax(-1).amax(-1).numpy(), rtol=1e-4)


def test_nothing_wrong_reaches_the_kernels(target: Decoder, tmp_path: Path) -> None:
    network = eagle3(target, tmp_path / "head")
    cache = KVCache(network.shape, 2, BLOCK, network.dtype, network.device)

    def run(token: int = 5, picked: int = 0, dtype: torch.dtype = torch.bfloat16, num: int = 1) -> None:
        at, plan = torch.zeros(1, dtype=torch.int64), cache.plan([([0], 0, 1)])
        network.steps(torch.tensor([token]), at, features(1).to(dtype), plan, cache, torch.tensor([picked]), num)

    run()
    for mistake in ({"token": 320}, {"token": -1}, {"picked": 1}, {"dtype": torch.float32}, {"num": 2}):
        with pytest.raises(ValueError, match=r"must be contiguous|need a plan"):
            run(**mistake)   # type: ignore[arg-type]


def test_what_does_not_pack_runs_operation_by_operation(target: Decoder, tmp_path: Path) -> None:
    assert eagle3(target, tmp_path / "odd", inner_size=80).native is None
    assert eagle3(target, tmp_path / "vocabulary", draft_vocab=200).native is None
    wide = load_model(str(target.directory), dtype="float32", device="cpu", progress=False)
    assert eagle3(wide, tmp_path / "wide").native is None


def test_a_target_s_output_layer_in_int8_runs_operation_by_operation(target: Decoder, tmp_path: Path) -> None:
    narrow = load_model(str(target.directory), dtype="bfloat16", device="cpu", progress=False, quantization="int8")
    network = load_eagle(eagle1_dir(tmp_path / "head", target.directory, **INNER), narrow)
    assert network.lm_head.packed is not None
    assert (network.lm_head.packed.scales is None) == (network.native is not None)
