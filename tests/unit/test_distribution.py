"""Does speculation write what the target would? Chi-square audits of the joint distribution of the first tokens.

Every audit compares the exact joint distribution of the first 3 (or 4) tokens with thousands of sequences. ALPHA is the odds of
a false alarm of one audit over the choice of its seeds; the seeds are fixed, so each audit gives the same answer every time.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from headway.config import SpeculativeConfig
from headway.engine import verify as verify_module
from headway.engine.sampler import Purpose, uniforms
from headway.engine.verify import Verifier
from headway.sampling_params import SamplingParams
from tests.sampling import (
    FloatArray,
    Markov,
    all_prefixes,
    chi_square,
    likely_drafts,
    likely_trees,
    no_drafts,
    reference_probs,
    sampled_drafts,
    sampled_trees,
    simulate,
)

ALPHA = 1e-6
VOCAB, LENGTH, TRIALS = 5, 3, 4000

SAMPLERS = {
    "plain": {},
    "temperature": {"temperature": 0.6},
    "top_k": {"top_k": 3},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.2},
    "penalties": {"repetition_penalty": 1.4, "frequency_penalty": 0.5, "presence_penalty": 0.3},
    "bans": {"min_tokens": 2, "logit_bias": {1: -1.0, 3: 0.7}},
    "all": {
        "temperature": 1.3, "top_k": 4, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.2, "frequency_penalty": 0.3,
        "presence_penalty": 0.2, "logit_bias": {2: 0.5}, "min_tokens": 2,
    },
}
TARGET = Markov.random(VOCAB, seed=11, eos=(4,), bad_words=((2, 3), (1, 1)))


def verifier(method: str, vocab: int = VOCAB, **options: object) -> Verifier:
    return Verifier(SpeculativeConfig(rejection_sample_method=method, **options), vocab, "cpu")  # type: ignore[arg-type]


def draft_chain(vocab: int, seed: int = 5, scale: float = 1.0, near: FloatArray | None = None) -> FloatArray:
    """Transition probabilities of a drafter: random, or a noisy copy of the logits `near`."""
    logits = np.random.default_rng(seed).normal(size=(vocab, vocab)) * scale + (0.0 if near is None else near)
    q = np.exp(logits - logits.max(-1, keepdims=True))
    chain: FloatArray = q / q.sum(-1, keepdims=True)
    return chain


Q = draft_chain(VOCAB, near=TARGET.table * 0.5)


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize(
    ("method", "kind"), [("standard", "none"), ("standard", "point-mass"), ("standard", "sampled"), ("block", "sampled")]
)
def test_every_sampler_keeps_its_distribution(method: str, kind: str, sampler: str) -> None:
    """False alarm: 1e-6 for each combination."""
    params = SamplingParams(max_tokens=None, **SAMPLERS[sampler])
    drafts = {"none": no_drafts, "point-mass": likely_drafts(Q, 2), "sampled": sampled_drafts(Q, 2)}[kind]
    run = simulate(verifier(method), TARGET, params, drafts, length=LENGTH, trials=TRIALS)
    assert chi_square(run.counts, TARGET.joint(params, LENGTH)) > ALPHA
    if kind != "none":
        assert 0 < run.first_accepted.mean() < 2, "drafts must be both accepted and refused for the audit to say anything"


ALLOWED = np.array([[1, 1, 1, 0, 0], [0, 1, 1, 1, 0], [1, 0, 1, 0, 1], [0, 0, 0, 1, 1], [1, 1, 0, 1, 1]], dtype=np.bool_)
CONSTRAINED = dataclasses.replace(TARGET, allowed=ALLOWED)
MASKED_Q = Q * ALLOWED / (Q * ALLOWED).sum(-1, keepdims=True)


CONSTRAINED_DRAFTS = {
    "none": ("standard", no_drafts), "point mass": ("standard", likely_drafts(MASKED_Q, 3)),
    "sampled": ("standard", sampled_drafts(MASKED_Q, 3)),
    "block": ("block", sampled_drafts(MASKED_Q, 3)), "point mass, unmasked": ("standard", likely_drafts(Q, 3)),
    "sampled, unmasked": ("standard", sampled_drafts(Q, 3)), "block, unmasked": ("block", sampled_drafts(Q, 3)),
    "tree": ("standard", likely_trees(MASKED_Q, (2, 2))), "tree, unmasked": ("standard", likely_trees(Q, (2, 2))),
    "sampled tree": ("standard", sampled_trees(MASKED_Q, (2, 2))), "sampled tree, unmasked": ("standard", sampled_trees(Q, (2, 2))),
}   # fmt: skip


@pytest.mark.parametrize(
    ("kind", "sampler"),
    [(kind, each) for kind in CONSTRAINED_DRAFTS for each in SAMPLERS if "tree" not in kind or each in ("plain", "bans")],
)
def test_a_grammar_keeps_the_masked_distribution(kind: str, sampler: str) -> None:
    """Also with drafts that no grammar was asked about. False alarm: 1e-6 for each combination."""
    method, drafts = CONSTRAINED_DRAFTS[kind]
    params = SamplingParams(max_tokens=None, **SAMPLERS[sampler])
    trials = 1000 if kind.startswith("sampled tree") else TRIALS   # each of these goes down its own tree
    run = simulate(verifier(method), CONSTRAINED, params, drafts, length=LENGTH, trials=trials)
    assert chi_square(run.counts, CONSTRAINED.joint(params, LENGTH)) > ALPHA
    assert kind == "none" or run.first_accepted.mean() > 0


@pytest.mark.parametrize("k", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", ["point-mass", "sampled"])
@pytest.mark.parametrize("method", ["standard", "block"])
def test_every_draft_length_keeps_the_distribution(method: str, kind: str, k: int) -> None:
    """Four tokens, so that several steps follow one another. False alarm: 1e-6 for each combination."""
    target = Markov.random(4, seed=2)
    q = draft_chain(4, seed=3, near=target.table * 0.3)
    params = SamplingParams(max_tokens=None)
    drafts = likely_drafts(q, k) if kind == "point-mass" else sampled_drafts(q, k)
    run = simulate(verifier(method, 4), target, params, drafts, length=4, trials=5000)
    assert chi_square(run.counts, target.joint(params, 4)) > ALPHA


def test_one_hot_draft_distributions_are_judged_like_point_masses() -> None:
    """A deterministic drafter that reports q = 1 at its token. False alarm: 1e-6 for each method."""
    follow = np.eye(VOCAB)[Q.argmax(-1)]
    params = SamplingParams(max_tokens=None)
    for method in ("standard", "block"):
        run = simulate(verifier(method), TARGET, params, sampled_drafts(follow, 3), length=LENGTH, trials=TRIALS)
        assert chi_square(run.counts, TARGET.joint(params, LENGTH)) > ALPHA


def biased_residual(p, q, group, kept, factors):  # type: ignore[no-untyped-def]
    """After a refusal samples the target itself instead of what the draft left over."""
    return p[verify_module._judges(group, kept)]


def position_keyed(seeds, positions, purposes):  # type: ignore[no-untyped-def]
    """Block verification with numbers keyed by the judged position: a number that refused is met again by the next block."""
    purposes = np.atleast_1d(purposes)
    if purposes[0] >= Purpose.BLOCK:
        return uniforms(seeds, np.asarray(positions) + (purposes - Purpose.BLOCK), Purpose.ACCEPT)
    return uniforms(seeds, positions, purposes)


@pytest.mark.parametrize(("method", "defect"), [("standard", "residual"), ("block", "residual"), ("block", "reused numbers")])
def test_the_audit_sees_a_biased_verifier(monkeypatch: pytest.MonkeyPatch, method: str, defect: str) -> None:
    """The audits above have the power to fail: they find these defects, the first one at odds far below ALPHA."""
    target = Markov.random(4, seed=2)
    q = draft_chain(4, seed=3, near=target.table * 0.3)
    if defect == "residual":
        monkeypatch.setattr(verify_module, "_residuals", biased_residual)
    else:
        monkeypatch.setattr(verify_module, "uniforms", position_keyed)
    run = simulate(verifier(method, 4), target, SamplingParams(max_tokens=None), sampled_drafts(q, 4), length=4, trials=10000)
    assert chi_square(run.counts, target.joint(SamplingParams(), 4)) < ALPHA * (1e-6 if defect == "residual" else 1.0)


def expected_accepted(target: Markov, q: FloatArray, k: int, method: str) -> float:
    """Mean number of accepted drafts in a first step: the sum over prefixes x of q(x) P(x accepted | x), exactly.

    standard  P(x accepted | x) = product of min(1, p(x_i)/q(x_i))
    block     P(x accepted | x) = w_i, w_i = min(1, w_{i-1} p(x_i)/q(x_i))
    """
    seq = target.sequence(SamplingParams())
    p = np.array([reference_probs(row, seq, ()) for row in target.table])
    total = 0.0
    for length in range(1, k + 1):
        for prefix in all_prefixes(target.vocab, length):
            last, mass, weight = target.start[-1], 1.0, 1.0
            for token in prefix:
                ratio = p[last, token] / q[last, token]
                weight = min(1.0, weight * ratio) if method == "block" else weight * min(1.0, ratio)
                mass *= q[last, token]
                last = token
            total += mass * weight
    return total


def test_acceptance_matches_theory_and_block_accepts_more() -> None:
    """Means of 12,000 first steps within five standard errors (false alarm below 1e-6 each)."""
    target = Markov.random(4, seed=2)
    q, k = draft_chain(4, seed=3, near=target.table * 0.3), 4
    means = {}
    for method in ("standard", "block"):
        run = simulate(verifier(method, 4), target, SamplingParams(max_tokens=None), sampled_drafts(q, k), length=1, trials=12000)
        means[method] = expected_accepted(target, q, k, method)
        error = run.first_accepted.std() / np.sqrt(len(run.first_accepted))
        assert abs(run.first_accepted.mean() - means[method]) < 5 * error, method
    assert means["block"] > means["standard"] + 0.05


def test_point_mass_drafts_are_accepted_with_the_targets_probability() -> None:
    """P(first i drafts kept) is the target's probability of them, whichever method is configured. Five standard errors."""
    drafts = likely_drafts(Q, 3)
    params = SamplingParams(max_tokens=None)
    chain = drafts([TARGET.sequence(params)])[0]
    assert chain is not None
    joint = TARGET.joint(params, 3)
    exact = sum(joint[tuple(chain.tokens[:i])].sum() for i in (1, 2, 3))
    for run in (
        simulate(verifier("standard"), TARGET, params, drafts, length=1, trials=12000),
        simulate(verifier("block"), TARGET, params, sampled_drafts(np.eye(VOCAB)[Q.argmax(-1)], 3), length=1, trials=12000),
    ):
        assert abs(run.first_accepted.mean() - exact) < 5 * run.first_accepted.std() / np.sqrt(len(run.first_accepted))


def test_equal_draft_and_target_are_always_accepted() -> None:
    target = Markov.random(VOCAB, seed=11)
    p = np.array([reference_probs(row, target.sequence(SamplingParams()), ()) for row in target.table])
    for method in ("standard", "block"):
        run = simulate(verifier(method), target, SamplingParams(max_tokens=None), sampled_drafts(p, 4), length=1, trials=2000)
        assert run.first_accepted.mean() > 3.99
