"""Chains of drafts from hidden states: the same drafts asked always or after a pause, alone or batched, preempted, behind a prefix hit."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest
import torch

from headway.drafters.core.eagle_network import load_eagle
from headway.drafters.core.feature_chain import FeatureChain
from headway.drafters.core.feature_network import FeatureNetwork
from headway.drafters.core.mtp_network import MTPFile
from headway.drafters.drafter import Committed, DraftRequest, never_stop
from headway.drafters.eagle import Eagle
from headway.models.attention import KVCache
from headway.models.decoder import Decoder
from headway.models.loader import load_model
from headway.types import Draft
from tests.heads import eagle1_dir, eagle3_dir, mtp_dir
from tests.tiny import tiny_model_dir

BLOCK = 16
K = 4


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    directory = tiny_model_dir(tmp_path_factory.mktemp("target"), "llama", seed=3)
    return load_model(str(directory), dtype="float32", device="cpu", progress=False)


@pytest.fixture(scope="module", params=["eagle3", "two_layers", "eagle1", "mtp"])
def network(request: pytest.FixtureRequest, target: Decoder, tmp_path_factory: pytest.TempPathFactory) -> FeatureNetwork:
    directory = tmp_path_factory.mktemp("heads") / "head"
    if request.param == "mtp":
        return MTPFile(mtp_dir(directory, target.directory), target.config).load(target)
    if request.param == "eagle1":
        return load_eagle(eagle1_dir(directory, target.directory), target)
    return load_eagle(eagle3_dir(directory, target.directory, num_layers=2 if request.param == "two_layers" else 1), target)


class Text:
    """A fixed text and the target's hidden states at each of its positions."""

    def __init__(self, target: Decoder, network: FeatureNetwork, seed: int, length: int = 90) -> None:
        self.tokens = torch.randint(3, 300, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
        cache = KVCache(target.config, 8, BLOCK, target.dtype, target.device)
        plan = cache.plan([(list(range(8)), 0, length)])
        _, self.hidden = target.forward(torch.tensor(self.tokens), torch.arange(length), plan, cache, network.hidden_layers)

    def committed(self, seq_id: int, start: int, stop: int) -> Committed:
        """Positions [start, stop) were computed, so stop + 1 tokens are known."""
        return Committed(seq_id, self.tokens[: stop + 1], 1, 1, 0, start, tuple(layer[start:stop] for layer in self.hidden))

    def request(self, seq_id: int, stop: int, k: int = K) -> DraftRequest:
        return DraftRequest(seq_id, self.tokens[: stop + 1], 1, k, True)


class Argmax:
    """A sampler of requests without parameters; those that are not greedy draw from the softmax."""

    def takes_largest(self, requests: Sequence[DraftRequest]) -> bool:
        return False

    def likely(
        self, logits: torch.Tensor, requests: Sequence[DraftRequest], drafted: Sequence[list[int]], token_ids: torch.Tensor | None = None
    ) -> list[int]:
        assert [len(tokens) for tokens in drafted] == [len(drafted[0])] * len(requests)
        return (logits.argmax(-1) if token_ids is None else token_ids[logits.argmax(-1)]).tolist()

    def sampled(
        self, logits: torch.Tensor, requests: Sequence[DraftRequest], drafted: Sequence[list[int]], token_ids: torch.Tensor | None = None
    ) -> tuple[list[int], torch.Tensor]:
        wide = torch.full((len(logits), 320), float("-inf"))
        probs = wide.index_copy_(1, torch.arange(320) if token_ids is None else token_ids, logits).softmax(-1)
        return torch.multinomial(probs, 1, generator=torch.Generator().manual_seed(len(drafted[0]))).flatten().tolist(), probs


def make(network: FeatureNetwork, num_blocks: int = 64, store_bytes: int = 1 << 24) -> FeatureChain:
    chain = Eagle()
    chain.start(network, Argmax(), num_blocks, BLOCK, store_bytes)
    return chain


def chunks(*sizes: int) -> Iterator[tuple[int, int]]:
    start = 0
    for size in sizes:
        yield start, start + size
        start += size


def naive(network: FeatureNetwork, text: Text, stop: int, begin: int = 0) -> Draft:
    """The whole prefix in one pass from an empty cache, then one row at a time."""
    cache = KVCache(network.shape, 8, BLOCK, network.dtype, network.device)
    blocks, rows = list(range(8)), stop - begin
    features = network.fuse([layer[begin:stop] for layer in text.hidden])
    plan = cache.plan([(blocks, 0, rows)])
    x = network.forward(torch.tensor(text.tokens[begin + 1 : stop + 1]), torch.arange(begin, stop), features, plan, cache)
    draft = Draft([], confidence=[])
    for position in range(K):
        logits, features = network.predict(x[-1:])
        token = logits.argmax(-1)
        draft.confidence.append(float(logits.softmax(-1).max()))   # type: ignore[union-attr]
        draft.tokens.append(int(token if network.target_ids is None else network.target_ids[token]))
        plan = cache.plan([(blocks, rows + position, 1)])
        x = network.forward(torch.tensor(draft.tokens[-1:]), torch.tensor([stop + position]), features, plan, cache)
    return draft


def same(found: Draft, expected: Draft) -> bool:
    assert found.confidence is not None
    np.testing.assert_allclose(found.confidence, expected.confidence, rtol=2e-3)   # the chain amplifies rounding
    return found.tokens == expected.tokens


SCHEDULES: dict[str, tuple[int, ...]] = {
    "one by one": (20, *[1] * 30),
    "accepted drafts": (20, 1, 3, 5, 2, 4, 1, 5, 5, 2, 2),
    "chunked prefill": (16, 16, 7, 1, 2, 3, 5),
    "long pieces": (40, 10),
}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_drafts_are_those_of_the_whole_prefix(network: FeatureNetwork, target: Decoder, schedule: str) -> None:
    text, chain = Text(target, network, seed=1), make(network)
    for start, stop in chunks(*SCHEDULES[schedule]):
        chain.commit([text.committed(7, start, stop)])
        assert same(chain.propose([text.request(7, stop)], never_stop)[0], naive(network, text, stop))


@pytest.mark.parametrize("pause", [1, 7, 30])
def test_a_pause_changes_no_draft(network: FeatureNetwork, target: Decoder, pause: int, monkeypatch: pytest.MonkeyPatch) -> None:
    text, chain = Text(target, network, seed=2), make(network)
    calls = []
    forward = network.forward
    monkeypatch.setattr(network, "forward", lambda *a, **k: calls.append(1) or forward(*a, **k))
    chain.commit([text.committed(7, 0, 20)])
    chain.propose([text.request(7, 20)], never_stop)
    asked = len(calls)
    for stop in range(21, 21 + pause):
        chain.commit([text.committed(7, stop - 1, stop)])
    assert len(calls) == asked, "a pause runs nothing"
    assert same(chain.propose([text.request(7, 20 + pause)], never_stop)[0], naive(network, text, 20 + pause))


def test_batched_requests_draft_what_they_draft_alone(network: FeatureNetwork, target: Decoder) -> None:
    texts, chain = [Text(target, network, seed) for seed in range(4)], make(network)
    lengths = [5, 33, 12, 60]
    for seq_id, (text, length) in enumerate(zip(texts, lengths, strict=True)):
        chain.commit([text.committed(seq_id, 0, length)])
    requests = [text.request(seq_id, length, 1 + seq_id) for seq_id, (text, length) in enumerate(zip(texts, lengths, strict=True))]
    for found, text, length, request in zip(chain.propose(requests, never_stop), texts, lengths, requests, strict=True):
        assert same(found, naive(network, text, length).truncated(request.k))


def test_preemption_loses_nothing(network: FeatureNetwork, target: Decoder) -> None:
    text, chain = Text(target, network, seed=4), make(network)
    chain.commit([text.committed(1, 0, 30)])
    chain.propose([text.request(1, 30)], never_stop)
    chain.commit([text.committed(1, 0, 16)])     # computed again from the start
    chain.commit([text.committed(1, 16, 34)])
    assert same(chain.propose([text.request(1, 34)], never_stop)[0], naive(network, text, 34))


def test_a_prefix_hit_drafts_from_the_whole_prefix(network: FeatureNetwork, target: Decoder) -> None:
    text, chain = Text(target, network, seed=5), make(network)
    chain.commit([text.committed(1, 0, 50)])
    chain.stop(1)
    chain.commit([text.committed(2, 48, 55)])
    assert same(chain.propose([text.request(2, 55)], never_stop)[0], naive(network, text, 55))


def test_what_was_never_seen_is_left_out(network: FeatureNetwork, target: Decoder) -> None:
    text, chain = Text(target, network, seed=5), make(network, store_bytes=0)
    chain.commit([text.committed(2, 48, 55)])
    assert same(chain.propose([text.request(2, 55)], never_stop)[0], naive(network, text, 55, begin=48))
    chain.commit([text.committed(2, 55, 57)])
    assert same(chain.propose([text.request(2, 57)], never_stop)[0], naive(network, text, 57, begin=48))


@pytest.mark.parametrize("store_bytes", [0, 1 << 24], ids=["no store", "store"])
def test_a_full_pool_takes_from_those_not_asked(network: FeatureNetwork, target: Decoder, store_bytes: int) -> None:
    texts, chain = [Text(target, network, seed) for seed in (6, 7)], make(network, num_blocks=4, store_bytes=store_bytes)
    for seq_id in (0, 1):
        chain.commit([texts[seq_id].committed(seq_id, 0, 36)])
        assert same(chain.propose([texts[seq_id].request(seq_id, 36)], never_stop)[0], naive(network, texts[seq_id], 36))
    chain.commit([texts[0].committed(0, 36, 38)])
    begin = 0 if store_bytes else 32   # hidden states of the block being filled are still there
    assert same(chain.propose([texts[0].request(0, 38)], never_stop)[0], naive(network, texts[0], 38, begin))
    both = chain.propose([texts[0].request(0, 38), texts[1].request(1, 36)], never_stop)
    assert [len(draft) for draft in both] == [0, 0], "no room for both, and nothing new to read for the first"


def test_stopped_sequences_give_their_blocks_back(network: FeatureNetwork, target: Decoder) -> None:
    text, chain = Text(target, network, seed=8), make(network, num_blocks=4)
    for seq_id in range(6):
        chain.commit([text.committed(seq_id, 0, 50)])
        assert len(chain.propose([text.request(seq_id, 50)], never_stop)[0]) == K
        chain.stop(seq_id)
        chain.stop(seq_id)
    assert sorted(chain._free) == [0, 1, 2, 3]


def test_unknown_sequences_and_those_without_hidden_states_get_no_draft(network: FeatureNetwork, target: Decoder) -> None:
    text, chain = Text(target, network, seed=9), make(network)
    assert [len(draft) for draft in chain.propose([text.request(3, 20)], never_stop)] == [0]
    chain.commit([text.committed(3, 0, 10)])
    assert [len(draft) for draft in chain.propose([text.request(3, 20), text.request(3, 10)], never_stop)] == [0, K]
    assert chain.propose([], never_stop) == []


def stop_below(limit: float) -> tuple[Callable[..., np.ndarray], list[tuple[int, list[int]]]]:
    asked: list[tuple[int, list[int]]] = []

    def continue_drafting(seq_ids: Sequence[int], position: int, confidence: np.ndarray) -> np.ndarray:
        asked.append((position, list(seq_ids)))
        return confidence >= limit

    return continue_drafting, asked


def test_the_policy_stops_position_by_position(network: FeatureNetwork, target: Decoder) -> None:
    texts, chain = [Text(target, network, seed) for seed in (10, 11, 12)], make(network)
    for seq_id, text in enumerate(texts):
        chain.commit([text.committed(seq_id, 0, 30)])
    whole = [naive(network, text, 30) for text in texts]
    limit = sorted(c for draft in whole for c in draft.confidence or [])[5]
    continue_drafting, asked = stop_below(limit - 1e-6)
    found = chain.propose([text.request(seq_id, 30) for seq_id, text in enumerate(texts)], continue_drafting)
    for draft, full in zip(found, whole, strict=True):
        sure = np.array(full.confidence) >= limit - 1e-6
        assert same(draft, full.truncated(K if sure.all() else int(sure.argmin()) + 1))
    assert asked[0] == (0, [0, 1, 2])
    for (position, seq_ids), (before, earlier) in zip(asked[1:], asked, strict=False):
        assert position == before + 1
        assert set(seq_ids) <= set(earlier)


def test_sampled_drafts_come_with_their_distributions(network: FeatureNetwork, target: Decoder) -> None:
    """Greedy and sampled requests in one batch; a reduced vocabulary leaves the other tokens impossible."""
    texts, chain = [Text(target, network, seed) for seed in (13, 14)], make(network)
    for seq_id, text in enumerate(texts):
        chain.commit([text.committed(seq_id, 0, 30)])
    sampled = dataclasses.replace(texts[1].request(1, 30), greedy=False)
    greedy, drawn = chain.propose([texts[0].request(0, 30), sampled], never_stop)
    assert greedy.probs is None
    assert same(greedy, naive(network, texts[0], 30))
    assert drawn.probs is not None
    assert drawn.probs.shape == (K, 320)
    torch.testing.assert_close(drawn.probs.sum(-1), torch.ones(K))
    assert all(drawn.probs[position, token] > 0 for position, token in enumerate(drawn.tokens))
    np.testing.assert_allclose(drawn.confidence, drawn.probs.amax(-1).numpy(), rtol=1e-4)
    if network.target_ids is not None:
        assert int((drawn.probs > 0).any(0).sum()) <= len(network.target_ids)
