"""Trees of drafts: EAGLE-2's choice of nodes, and a network that sees at each node what it would see in a chain along its path."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headway.config import SpeculativeConfig
from headway.control.costs import CostModel
from headway.control.goodput.drafter_state import DrafterState, judged_nodes
from headway.control.policy import DrafterView, DraftView
from headway.drafters.core.chain import Prediction
from headway.drafters.core.eagle_network import load_eagle
from headway.drafters.core.feature_network import FeatureNetwork
from headway.drafters.core.tree import Level, TreeOptions, draft_trees
from headway.drafters.drafter import Committed, DraftRequest, never_stop
from headway.drafters.eagle import Eagle
from headway.drafters.medusa import Medusa
from headway.drafters.mlp_speculator import MLPSpeculator
from headway.engine.drafting import SequenceSampler
from headway.engine.verify import Verifier
from headway.errors import ConfigError
from headway.models.attention import KVCache
from headway.models.decoder import Decoder
from headway.models.loader import load_model
from headway.sampling_params import SamplingParams
from headway.types import Draft, SequenceFeedback, depths_of
from headway.types import Sequence as Sequence_
from tests.heads import eagle1_dir, eagle3_dir, medusa_dir, mlp_speculator_dir
from tests.sampling import DraftMaker, chi_square, reference_probs, simulate
from tests.tiny import tiny_model_dir
from tests.unit.test_distribution import ALPHA, SAMPLERS
from tests.unit.test_feature_chain import BLOCK, Text
from tests.unit.test_verify_trees import SMALL, Q

VOCAB = 11


class Likeliest:
    """A sampler of requests without parameters."""

    def candidates(
        self, logits: torch.Tensor, requests: Sequence[DraftRequest], drafted: Sequence[list[int]], count: int,
        token_ids: torch.Tensor | None = None,
    ) -> tuple[np.ndarray, np.ndarray]:
        assert len(logits) == len(requests) == len(drafted)
        probs, tokens = logits.softmax(-1).topk(count)
        return (tokens if token_ids is None else token_ids[tokens]).numpy(), probs.double().numpy()


def request(seq_id: int, k: int, room: int, last: int = 0) -> DraftRequest:
    return DraftRequest(seq_id, [last], 1, k, True, room=room)


def markov(
    requests: Sequence[DraftRequest], table: torch.Tensor, options: TreeOptions, continue_drafting: object = never_stop
) -> list[Draft]:
    """Drafts of a network whose state is the last token."""

    def go_on(level: Level, state: torch.Tensor) -> Prediction:
        assert all(len(parents) == options.topk * (level.depth + 1) for parents in level.parents)
        assert len(state) == level.tokens.numel()
        return Prediction(table[level.tokens.flatten()], level.tokens.flatten())

    last = torch.tensor([r.token_ids[-1] for r in requests])
    return draft_trees(requests, continue_drafting, Likeliest(), Prediction(table[last], last), go_on, None, options)   # type: ignore[arg-type]


def reference(table: np.ndarray, last: int, depth: int, topk: int, size: int) -> dict[tuple[int, ...], float]:
    """path -> value: expand the topk best of each level by their topk likeliest tokens, keep the `size` best of all."""
    made: dict[tuple[int, ...], float] = {}
    frontier: list[tuple[tuple[int, ...], float]] = [((), 1.0)]
    for _ in range(depth):
        level = []
        for path, value in frontier:
            row = table[(last, *path)[-1]]
            level += [((*path, int(token)), value * row[token]) for token in np.argsort(-row)[:topk]]
        made |= dict(level)
        frontier = sorted(level, key=lambda entry: -entry[1])[:topk]
    return dict(sorted(made.items(), key=lambda entry: -entry[1])[:size])


def paths_of(draft: Draft) -> list[tuple[int, ...]]:
    assert draft.parents is not None
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(draft.tokens, draft.parents, strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    return paths


@pytest.mark.parametrize(("depth", "topk", "size"), [(1, 3, 9), (4, 2, 6), (4, 4, 16), (6, 3, 40), (3, 11, 100)])
def test_the_nodes_are_eagle_2s(depth: int, topk: int, size: int) -> None:
    options = TreeOptions(topk=topk, num_draft_tokens=size)
    table = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(depth)) * 2
    requests = [request(i, max(1, depth - i), max(1, size - 3 * i), last=i) for i in range(3)]
    exact = table.double().softmax(-1).numpy()
    for asked, draft in zip(requests, markov(requests, table, options), strict=True):
        expected = reference(exact, asked.token_ids[-1], asked.k, topk, asked.room)
        found = paths_of(draft)
        assert len(set(found)) == len(found)
        assert set(found) == set(expected)
        values = [expected[path] for path in found]
        assert values == sorted(values, reverse=True), "in order of worth"
        assert draft.confidence == pytest.approx([expected[p] / expected.get(p[:-1], 1.0) for p in found], rel=1e-4)
        assert draft.probs is None
        assert draft.depth <= asked.k
        spine = draft.spine()
        assert spine.parents is None
        assert spine.tokens == [path[-1] for path in first_children(found)]


def first_children(paths: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    chain: list[tuple[int, ...]] = []
    while following := [path for path in paths if path[:-1] == (chain[-1] if chain else ())]:
        chain.append(following[0])
    return chain


def test_the_policy_is_asked_level_by_level() -> None:
    table = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(0)) * 2
    options = TreeOptions(topk=3, num_draft_tokens=30)
    seen: list[tuple[int, list[int]]] = []

    def continue_drafting(seq_ids: Sequence[int], position: int, confidence: np.ndarray) -> np.ndarray:
        assert ((confidence > 0.0) & (confidence <= 1.0)).all()
        seen.append((position, list(seq_ids)))
        return np.array([position < seq_id for seq_id in seq_ids])

    drafts = markov([request(seq_id, 4, 30, seq_id) for seq_id in range(4)], table, options, continue_drafting)
    assert [draft.depth for draft in drafts] == [1, 2, 3, 4]
    assert seen == [(0, [0, 1, 2, 3]), (1, [1, 2, 3]), (2, [2, 3])]


def growing(verifier: Verifier, q: np.ndarray, options: TreeOptions, room: int, k: int) -> DraftMaker:
    """Drafts of a Markov network q, as an engine would ask for them."""
    table = torch.from_numpy(np.log(q)).float()

    def make(seqs: list[Sequence_]) -> list[Draft | None]:
        sampler = SequenceSampler(verifier.sampler, {seq.seq_id: seq for seq in seqs})
        asked = [DraftRequest(seq.seq_id, seq.token_ids, 1, k, seq.params.greedy, room=room) for seq in seqs]

        def go_on(level: Level, state: torch.Tensor) -> Prediction:
            return Prediction(table[level.tokens.flatten()], level.tokens.flatten())

        last = torch.tensor([seq.token_ids[-1] for seq in seqs])
        return list(draft_trees(asked, never_stop, sampler, Prediction(table[last], last), go_on, None, options))

    return make


@pytest.mark.parametrize("sampler", ["plain", "top_k", "all"])
@pytest.mark.parametrize(("topk", "room", "k"), [(2, 5, 2), (3, 7, 3)])
@pytest.mark.parametrize("method", ["probabilistic", "greedy"])
def test_drafted_trees_keep_the_distribution(method: Any, topk: int, room: int, k: int, sampler: str) -> None:
    """Three tokens of a small vocabulary, several steps each. False alarm: 1e-6 for each combination."""
    verifier, params = Verifier(SpeculativeConfig(), 4, "cpu"), SamplingParams(max_tokens=None, **SAMPLERS[sampler])
    make = growing(verifier, Q, TreeOptions(topk=topk, num_draft_tokens=room, draft_sample_method=method), room, k)
    run = simulate(verifier, SMALL, params, make, length=3, trials=1500)
    assert chi_square(run.counts, SMALL.joint(params, 3)) > ALPHA
    assert 0.2 < run.first_accepted.mean() < k


def test_the_audit_sees_a_tree_cut_by_what_was_drawn() -> None:
    """Two siblings, not verified where the first one is an unlikely token: nobody may choose among tokens that were drawn."""
    verifier, params = Verifier(SpeculativeConfig(), 4, "cpu"), SamplingParams(max_tokens=None)
    grow = growing(verifier, Q, TreeOptions(topk=2, num_draft_tokens=2), 2, 1)

    def cut(seqs: list[Sequence_]) -> list[Draft | None]:
        return [draft if draft is None or draft.probs[0, draft.tokens[0]] > 0.3 else draft.truncated(0) for draft in grow(seqs)]   # type: ignore[index]

    run = simulate(verifier, SMALL, params, cut, length=2, trials=1500)
    assert chi_square(run.counts, SMALL.joint(params, 2)) < ALPHA


def test_what_is_drawn() -> None:
    """Different siblings with their parent's distribution, at most `room` nodes; confidence knows the prefix only. Greedy ones get none."""
    verifier = Verifier(SpeculativeConfig(), 4, "cpu")
    make = growing(verifier, Q, TreeOptions(topk=3, num_draft_tokens=10), 10, 4)
    shapes: dict[tuple[int, ...], set[tuple[float, ...]]] = {}
    for seed in range(40):
        seq = SMALL.sequence(SamplingParams(), seed)
        greedy, drawn = make([SMALL.sequence(SamplingParams(temperature=0.0), seed + 100), seq])
        assert greedy is not None
        assert drawn is not None
        assert greedy.probs is None
        assert drawn.probs is not None
        assert len(drawn) == len(drawn.probs) == 10
        paths = paths_of(drawn)
        assert len(set(paths)) == len(paths)
        for path, probs in zip(paths, drawn.probs, strict=True):
            before = (SMALL.start[-1], *path)[-2]
            np.testing.assert_allclose(probs.numpy(), reference_probs(np.log(Q[before]), seq, path[:-1]), rtol=1e-4)
            assert probs[path[-1]] > 0
        top = drawn.parents.index(0) if 0 in (drawn.parents or ()) else 3   # type: ignore[union-attr]
        shapes.setdefault(tuple(drawn.parents or ())[:3], set()).add(tuple((drawn.confidence or [])[: min(3, top)]))
    assert list(shapes) == [(-1, -1, -1)]
    assert len(shapes[-1, -1, -1]) == 1, "the same prefix, whatever was drawn"


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    directory = tiny_model_dir(tmp_path_factory.mktemp("target"), "llama", seed=3)
    return load_model(str(directory), dtype="float32", device="cpu", progress=False)


@pytest.fixture(scope="module", params=["eagle3", "two_layers", "eagle1"])
def network(request: pytest.FixtureRequest, target: Decoder, tmp_path_factory: pytest.TempPathFactory) -> FeatureNetwork:
    directory = tmp_path_factory.mktemp("heads") / "head"
    if request.param == "eagle1":
        return load_eagle(eagle1_dir(directory, target.directory), target)
    return load_eagle(eagle3_dir(directory, target.directory, num_layers=2 if request.param == "two_layers" else 1), target)


def probability(network: FeatureNetwork, text: Text, stop: int, path: tuple[int, ...]) -> float:
    """Of the last token of `path` behind the others, by a chain from an empty cache."""
    cache = KVCache(network.shape, 8, BLOCK, network.dtype, network.device)
    features = network.fuse([layer[:stop] for layer in text.hidden])
    plan = cache.plan([(list(range(8)), 0, stop)])
    x = network.forward(torch.tensor(text.tokens[1 : stop + 1]), torch.arange(stop), features, plan, cache)
    for position, token in enumerate(path):
        logits, features = network.predict(x[-1:])
        column = token if network.target_ids is None else int((network.target_ids == token).nonzero())
        if position == len(path) - 1:
            break
        plan = cache.plan([(list(range(8)), stop + position, 1)])
        x = network.forward(torch.tensor([token]), torch.tensor([stop + position]), features, plan, cache)
    return float(logits.softmax(-1)[0, column])


def test_every_node_sees_its_path(network: FeatureNetwork, target: Decoder) -> None:
    """Batched with others, drafted again after what was accepted, over several levels: confidence is that of a chain along the path."""
    chain = Eagle(Eagle.Options(topk=3, num_draft_tokens=30))
    chain.start(network, Likeliest(), 64, BLOCK, 1 << 24)   # type: ignore[arg-type]
    texts = [Text(target, network, seed) for seed in (1, 2)]
    for begin, stop in ((0, 20), (20, 23), (23, 24)):
        for seq_id, text in enumerate(texts):
            chain.commit([text.committed(seq_id, begin, stop)])
        asked = [dataclasses.replace(text.request(seq_id, stop), room=30 - seq_id) for seq_id, text in enumerate(texts)]
        for text, one, draft in zip(texts, asked, chain.propose(asked, never_stop), strict=True):
            assert len(draft) == one.room
            assert max(depths_of(draft.parents or ())) >= 2
            for path, sure in zip(paths_of(draft), draft.confidence or (), strict=True):
                assert sure == pytest.approx(probability(network, text, stop, path), rel=2e-3)


@pytest.mark.parametrize("kind", ["medusa", "mlp_speculator"])
def test_trees_of_heads_combine_the_likeliest_tokens_of_each(target: Decoder, tmp_path: Path, kind: str) -> None:
    """The best combinations by the product of probabilities; three heads, although more levels are asked for."""
    options = TreeOptions(topk=4, num_draft_tokens=15)
    make, drafter = (medusa_dir, Medusa(options)) if kind == "medusa" else (mlp_speculator_dir, MLPSpeculator(options))
    network = drafter.read(make(tmp_path / "heads", target.directory), target.config).load(target)
    drafter.start(network, Likeliest())   # type: ignore[arg-type]
    hidden = torch.randn(2, 6, 64, generator=torch.Generator().manual_seed(0)) * 3
    for seq_id in range(2):
        drafter.commit([Committed(seq_id, list(range(7)), 4, 1, 0, 0, (hidden[seq_id],))])
    asked = [DraftRequest(seq_id, list(range(7)), 4, 5, True, room=15 - 4 * seq_id) for seq_id in range(2)]
    for draft, one, states in zip(drafter.propose(asked, never_stop), asked, hidden, strict=True):
        assert len(draft) == one.room
        assert 2 <= draft.depth <= 3
        values = {(): 1.0}
        for path, sure in zip(paths_of(draft), draft.confidence or (), strict=True):
            state = network.begin(states[-1:])
            for head, token in enumerate((6, *path[:-1])):
                logits, state = network.step(head, state, torch.tensor([token]))
            assert sure == pytest.approx(float(logits.softmax(-1)[0, path[-1]]), rel=1e-4)
            values[path] = values[path[:-1]] * sure
        found = list(values.values())
        assert found == sorted(found, reverse=True)


def test_options_are_checked() -> None:
    def parse(**options: object) -> SpeculativeConfig:
        return SpeculativeConfig.parse({"method": "eagle", "model": "anywhere", **options})

    assert parse(topk=4).build_drafter().tree_size == 16
    assert parse(topk=4, draft_sample_method="greedy").build_drafter().deterministic
    assert not parse(topk=4, num_draft_tokens=7).build_drafter().deterministic
    for options, message in (
        ({"topk": 0}, "topk must be >= 1"),
        ({"num_draft_tokens": 8}, "give topk > 1, too"),
        ({"topk": 2, "num_draft_tokens": 0}, r"num_draft_tokens must be in \[1, 127\]"),
        ({"topk": 2, "num_draft_tokens": 128}, r"num_draft_tokens must be in \[1, 127\]"),
        ({"topk": 2, "confidence_head": "head.safetensors"}, "judges chains"),
    ):
        with pytest.raises(ConfigError, match=message):
            parse(**options)
    with pytest.raises(ConfigError, match="continues more than 128 tokens"):
        TreeOptions(topk=20).check_depth(8)


# ---------------------------------------------------------------- what goodput makes of them


def test_nodes_are_priced_by_the_calibrated_probability_of_their_path() -> None:
    drafter = DrafterState(DrafterView("eagle", True), 4, CostModel())
    view = DraftView(7, "eagle", 5, True, (0.6, 0.5, 0.3, 0.4, 0.2), (-1, 0, -1, 1, 2))
    chain = DraftView(8, "eagle", 2, True, (0.6, 0.5))
    values = drafter.values([view, chain])
    assert values[1, :2] == pytest.approx(values[0, :2]), "a path is worth what the chain is"
    assert (np.diff(values[0]) <= 0).all()
    assert (values[1, 2:] == 0).all()
    assert values[0, 2] == pytest.approx(values[0, :3].min())
    # Node 0 was accepted, and below it nothing; what hangs below the refused node 2 says nothing.
    feedback = SequenceFeedback(7, "eagle", 4, 5, 5, 1, 100, view.confidence, view.parents, (0,))
    assert feedback.depth == 3
    assert judged_nodes(feedback) == [(0, True, 0.6), (1, False, 0.5), (0, False, 0.3)]
    assert drafter.reach(view) == pytest.approx(values[0].tolist())
    assert drafter.reach(chain) == pytest.approx(values[1, :2].tolist())
    drafter.judge([feedback], [], 1)
