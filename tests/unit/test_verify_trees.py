"""Trees of drafts: decided as chains along every path, equal to plain decoding, distributed as the target, by the published rule."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from headway.config import SpeculativeConfig
from headway.engine import verify as verify_module
from headway.engine.sampler import Purpose, uniforms
from headway.engine.verify import Verifier
from headway.sampling_params import SamplingParams
from headway.types import Draft, Sequence
from tests.sampling import (
    DraftMaker,
    FloatArray,
    Markov,
    chi_square,
    likely_drafts,
    likely_trees,
    reference_probs,
    row_of,
    sampled_drafts,
    sampled_trees,
    simulate,
    step_by_step,
)
from tests.unit.test_distribution import ALPHA, SAMPLERS, draft_chain
from tests.unit.test_verify import OPTIONS, TARGET, VOCAB, inverse_cdf, number, verifier

SMALL = Markov.random(4, seed=2, eos=(3,), bad_words=((2, 1), (0, 0)))
Q = draft_chain(4, seed=3, near=SMALL.table * 0.3)


def small_verifier() -> Verifier:
    return Verifier(SpeculativeConfig(), 4, "cpu")


def with_parents(make: DraftMaker) -> DraftMaker:
    """Chains, said to be trees."""

    def made(seqs: list[Sequence]) -> list[Draft | None]:
        return [None if d is None else Draft(d.tokens, d.probs, parents=tuple(range(-1, len(d) - 1))) for d in make(seqs)]

    return made


@pytest.mark.parametrize("make", [likely_drafts(Q, 3), sampled_drafts(Q, 3)], ids=["point-mass", "sampled"])
def test_a_tree_without_branches_is_decided_as_the_chain(make: DraftMaker) -> None:
    seqs = [SMALL.sequence(SamplingParams(temperature=0.5 * (i % 3), logprobs=2), i) for i in range(60)]
    chains = make(seqs)
    trees = with_parents(lambda _: chains)(seqs)
    rows, logits = [row_of(seq) for seq in seqs], SMALL.logits(seqs, chains)
    found, expected = (small_verifier().verify(logits, rows, drafts) for drafts in (trees, chains))
    for tree, chain in zip(found, expected, strict=True):
        assert (tree.tokens, tree.num_accepted, tree.logprobs) == (chain.tokens, chain.num_accepted, chain.logprobs)
        assert tree.path == tuple(range(tree.num_accepted))


def bushy(truth: list[int], seed: int) -> DraftMaker:
    """Deterministic trees in random order, in which the true continuation is hidden for some tokens."""
    choose = np.random.default_rng(seed)

    def make(seqs: list[Sequence]) -> list[Draft | None]:
        start = seqs[0].num_output_tokens
        depth = int(choose.integers(0, 5))
        true = truth[start : start + depth]
        nodes = [(-1, int(choose.integers(VOCAB)))]
        last = -1
        for token in true:
            if (last, token) not in nodes:
                nodes.append((last, token))
            last = nodes.index((last, token))
            for _ in range(int(choose.integers(0, 3))):
                other = (int(choose.integers(-1, len(nodes))), int(choose.integers(VOCAB)))
                if other not in nodes:
                    nodes.append(other)
        return [Draft([token for _, token in nodes], parents=tuple(parent for parent, _ in nodes))]

    return make


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("option", OPTIONS)
def test_deterministic_trees_write_what_plain_decoding_writes(option: str, temperature: float) -> None:
    """Every option sees the right prefix at every node: tokens and log probabilities are equal, seeded and greedy."""
    accepted = branched = 0
    options: dict[str, Any] = {"temperature": 1.0} | OPTIONS[option] | ({} if temperature else {"temperature": 0.0})
    params = SamplingParams(logprobs=3, max_tokens=None, **options)
    for seed in range(4):
        plain = TARGET.sequence(params, seed)
        plain_logprobs = [entry for verdict in step_by_step(verifier(), TARGET, plain, 24) for entry in verdict.logprobs or []]
        truth = plain.token_ids[plain.num_prompt_tokens :]
        seq = TARGET.sequence(params, seed)
        verdicts = step_by_step(verifier(), TARGET, seq, 24, bushy(truth, seed))
        assert seq.token_ids[seq.num_prompt_tokens :][:24] == truth
        assert [entry for verdict in verdicts for entry in verdict.logprobs or []][:24] == plain_logprobs
        accepted += sum(verdict.num_accepted for verdict in verdicts)
        branched += sum(verdict.path != tuple(range(verdict.num_accepted)) for verdict in verdicts)
    assert accepted > 20
    assert branched > 5


@pytest.mark.parametrize("widths", [(2,), (3, 2), (1, 2, 1), (4, 1)])
@pytest.mark.parametrize("kind", [likely_trees, sampled_trees])
def test_every_shape_keeps_the_distribution(kind: Any, widths: tuple[int, ...]) -> None:
    """Three tokens, so that steps follow one another. False alarm: 1e-6 for each combination."""
    params = SamplingParams(max_tokens=None)
    run = simulate(small_verifier(), SMALL, params, kind(Q, widths), length=3, trials=4000)
    assert chi_square(run.counts, SMALL.joint(params, 3)) > ALPHA
    assert 0 < run.first_accepted.mean() <= len(widths)


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("kind", [likely_trees, sampled_trees])
def test_every_sampler_keeps_its_distribution(kind: Any, sampler: str) -> None:
    """False alarm: 1e-6 for each combination."""
    params = SamplingParams(max_tokens=None, **SAMPLERS[sampler])
    run = simulate(small_verifier(), SMALL, params, kind(Q, (2, 2)), length=3, trials=4000)
    assert chi_square(run.counts, SMALL.joint(params, 3)) > ALPHA


@pytest.mark.parametrize("defect", ["residual of the target", "with replacement"])
def test_the_audit_sees_a_biased_rule(monkeypatch: pytest.MonkeyPatch, defect: str) -> None:
    """Sampling the target itself after refusals, or judging the second sibling by the distribution of the first."""
    right = verify_module._first_accepted

    def wrong(p: torch.Tensor, q: torch.Tensor | None, tokens: list[int], numbers: FloatArray) -> tuple[int | None, torch.Tensor]:
        if defect == "residual of the target":
            return right(p.clone(), q, tokens, numbers)[0], p
        for i, token in enumerate(tokens):
            found, p = right(p, q, [token], numbers[i : i + 1])
            if found is not None:
                return i, p
        return None, p

    monkeypatch.setattr(verify_module, "_first_accepted", wrong)
    run = simulate(small_verifier(), SMALL, SamplingParams(max_tokens=None), sampled_trees(Q, (3, 2)), length=3, trials=10000)
    assert chi_square(run.counts, SMALL.joint(SamplingParams(), 3)) < ALPHA


def test_siblings_are_judged_as_the_formula() -> None:
    """Algorithm of Sequoia's appendix, in float64, with the numbers of the request."""
    kept = set()
    for seed in range(200):
        params = SamplingParams(temperature=1.5, top_k=3) if seed % 2 else SamplingParams()
        seq = SMALL.sequence(params, seed)
        draft = sampled_trees(Q, (3,), seed)([seq])[0]
        assert draft is not None
        logits = SMALL.logits([seq], [draft])
        p, q = reference_probs(logits[0].numpy(), seq, ()), Q[seq.token_ids[-1]].copy()
        expected = None
        for i, token in enumerate(draft.tokens):
            if number(seq, 0, Purpose.SIBLING + i if i else Purpose.ACCEPT) < min(1.0, p[token] / q[token]):
                last = reference_probs(logits[1 + i].numpy(), seq, (token,))
                expected = (i,), [token, inverse_cdf(last, number(seq, 1, Purpose.TOKEN))]
                break
            p = np.maximum(p - q, 0.0) / np.maximum(p - q, 0.0).sum()
            q[token] = 0.0
            q /= q.sum()
        verdict = small_verifier().verify(logits, [row_of(seq)], [draft])[0]
        assert (verdict.path, verdict.tokens) == (expected or ((), [inverse_cdf(p, number(seq, 0, Purpose.RESIDUAL))]))
        kept.add(verdict.path)
    assert kept == {(), (0,), (1,), (2,)}


def test_more_siblings_are_accepted_more_often() -> None:
    means = [
        simulate(small_verifier(), SMALL, SamplingParams(max_tokens=None), sampled_trees(Q, (width,)), length=1, trials=2000)
        .first_accepted.mean()
        for width in (1, 2, 3)
    ]
    assert means[0] + 0.05 < means[1] < means[2] - 0.02


def test_impossible_siblings_are_refused_and_never_written() -> None:
    """A drafter that names tokens its distribution excludes, more siblings than it has tokens for among them."""
    one_hot = torch.nn.functional.one_hot(torch.tensor([0, 0, 0]), 4).float()
    for seed in range(50):
        seq = SMALL.sequence(SamplingParams(top_k=2), seed)
        p = reference_probs(SMALL.table[seq.token_ids[-1]], seq, ())
        draft = Draft([int(p.argmin()), 1, 2], one_hot, parents=(-1, -1, -1))
        verdict = small_verifier().verify(SMALL.logits([seq], [draft]), [row_of(seq)], [draft])[0]
        assert p[verdict.tokens[0]] > 0


def test_trees_beside_chains_and_plain_rows_decide_as_alone() -> None:
    tree, sampled = likely_trees(Q, (2, 2)), sampled_trees(Q, (2, 2))
    seqs = [SMALL.sequence(SamplingParams(temperature=0.7 * (i % 2), logprobs=1 if i % 3 else None), i) for i in range(24)]
    makers: list[DraftMaker] = [tree, sampled, likely_drafts(Q, 2), lambda seqs: [None], sampled_drafts(Q, 2)]
    drafts = [makers[i % 5]([seq])[0] for i, seq in enumerate(seqs)]
    alone = [small_verifier().verify(SMALL.logits([s], [d]), [row_of(s)], [d])[0] for s, d in zip(seqs, drafts, strict=True)]
    batch = small_verifier()
    batch.sampler.block_rows = 6
    assert batch.verify(SMALL.logits(seqs, drafts), [row_of(s) for s in seqs], drafts) == alone


def test_what_is_no_tree_is_refused() -> None:
    seq = TARGET.sequence(SamplingParams())
    draft = Draft([1, 2, 3], parents=(-1, 0, 0))
    logits = TARGET.logits([seq], [draft])
    for method in ("block", "lossy_typical"):
        with pytest.raises(ValueError, match=f"'{method}' judges chains of drafts"):
            verifier(method).verify(logits, [row_of(seq)], [draft])
    for parents in ((-1, 0), (-1, 1, 0), (0, 0, 0), (-1, -2, 0)):
        with pytest.raises(ValueError, match="must come before them"):
            verifier().verify(logits, [row_of(seq)], [Draft([1, 2, 3], parents=parents)])


def test_numbers_of_siblings_are_their_own() -> None:
    found = [float(uniforms([5], [9], verify_module._sibling(i))[0]) for i in range(40)]
    assert len(set(found)) == 40
