"""Verifier: exact decisions of every rule, equality with plain decoding, log probabilities, what it refuses."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from headway.config import SpeculativeConfig
from headway.engine.sampler import Purpose, token_logprobs, uniforms
from headway.engine.verify import Verifier, conditional_rates
from headway.sampling_params import SamplingParams
from headway.types import Draft, Sequence
from tests.sampling import (
    DraftMaker,
    FloatArray,
    Markov,
    make_sequence,
    no_drafts,
    reference_logits,
    reference_probs,
    row_of,
    sampled_drafts,
    step_by_step,
)

VOCAB = 12
TARGET = Markov.random(VOCAB, seed=4, eos=(2,), bad_words=((3,), (5, 6), (7, 8, 9), (0, 4)), start=(0, 1, 5))

# Each option alone, at settings strong enough to change what is written, then all of them.
OPTIONS: dict[str, dict[str, Any]] = {
    "logit_bias": {"logit_bias": {1: 3.0, 4: -3.0}},
    "repetition_penalty": {"repetition_penalty": 2.0},
    "presence_penalty": {"presence_penalty": 2.0},
    "frequency_penalty": {"frequency_penalty": 1.5},
    "min_tokens": {"min_tokens": 12, "stop_token_ids": [6, 7]},
    "temperature": {"temperature": 2.0},
    "min_p": {"min_p": 0.3},
    "top_k": {"top_k": 2},
    "top_p": {"top_p": 0.5},
    "all": {
        "logit_bias": {1: 1.5, 4: -1.5}, "repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.4, "min_tokens": 12,
        "stop_token_ids": [6, 7], "temperature": 1.2, "min_p": 0.02, "top_k": 8, "top_p": 0.95,
    },
}


def verifier(method: str = "standard", **options: Any) -> Verifier:
    return Verifier(SpeculativeConfig(rejection_sample_method=method, **options), VOCAB, "cpu")


def guesses(truth: list[int], num_prompt: int, k: int, wrong: float, seed: int) -> DraftMaker:
    """Deterministic drafts that follow `truth`, each token replaced with probability `wrong`."""
    choose = np.random.default_rng(seed)

    def make(seqs: list[Sequence]) -> list[Draft | None]:
        start = seqs[0].num_output_tokens
        tokens = [t if choose.random() >= wrong else int(choose.integers(VOCAB)) for t in truth[start : start + k]]
        return [Draft(tokens)]

    return make


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("option", OPTIONS)
def test_verification_writes_what_plain_decoding_writes(option: str, temperature: float) -> None:
    """Token for token, log probabilities included, for every option at every verified position, seeded and greedy."""
    changed = accepted = refused = 0
    options = {"temperature": 1.0} | OPTIONS[option] | ({} if temperature else {"temperature": 0.0})
    params = SamplingParams(logprobs=3, max_tokens=None, **options)
    for seed in range(4):
        plain = TARGET.sequence(params, seed)
        plain_logprobs = [entry for verdict in step_by_step(verifier(), TARGET, plain, 24) for entry in verdict.logprobs or []]
        truth = plain.token_ids[plain.num_prompt_tokens :]
        for k in (1, 3, 8):
            seq = TARGET.sequence(params, seed)
            verdicts = step_by_step(verifier(), TARGET, seq, 24, guesses(truth, seq.num_prompt_tokens, k, 0.25, seed))
            written = seq.token_ids[seq.num_prompt_tokens :]
            assert written[:24] == truth
            assert [entry for verdict in verdicts for entry in verdict.logprobs or []][:24] == plain_logprobs
            accepted += sum(verdict.num_accepted for verdict in verdicts)
            refused += sum(verdict.num_accepted < k for verdict in verdicts)
        bare = make_sequence(TARGET.start, SamplingParams(temperature=temperature, max_tokens=None), seed=seed)
        step_by_step(verifier(), TARGET, bare, 24)
        changed += truth != bare.token_ids[bare.num_prompt_tokens :]
    assert accepted > 50
    assert refused > 10
    if temperature or option not in ("temperature", "min_p", "top_k", "top_p"):
        assert changed, "the option must matter for this test to say anything"


def test_rules_hold_inside_one_mixed_batch() -> None:
    """Greedy, sampled, point-mass, full-distribution and undrafted rows in one call decide as they do alone, in any order."""
    q = torch.softmax(torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(1)), -1)
    drafts = [Draft([1, 2, 3]), None, Draft([4, 5, 6], q), Draft([]), Draft([7]), Draft([7, 8], q[:2])]
    options = [{}, {"temperature": 0.0}, {"top_p": 0.9}, OPTIONS["all"], {"temperature": 0.0, "logprobs": 2}]
    for method in ("standard", "block", "lossy_typical"):
        cases = [(TARGET.sequence(SamplingParams(**o), 100 * i + j), d) for i, o in enumerate(options) for j, d in enumerate(drafts)]
        alone = [verifier(method).verify(TARGET.logits([s], [d]), [row_of(s)], [d])[0] for s, d in cases]
        cases_at_once = cases[::-1]
        batch = verifier(method)
        batch.sampler.block_rows = 6     # several blocks
        seqs, made = [s for s, _ in cases_at_once], [d for _, d in cases_at_once]
        assert batch.verify(TARGET.logits(seqs, made), [row_of(s) for s in seqs], made) == alone[::-1]


def random_case(seed: int, k: int, params: SamplingParams) -> tuple[Sequence, Draft, torch.Tensor, FloatArray, FloatArray]:
    """A sequence with a sampled draft: (sequence, draft, logits, p [k + 1, vocab] exactly, q [k, vocab])."""
    choose = np.random.default_rng(seed)
    seq = Markov.random(VOCAB, seed=4, start=(0, 1, 5)).sequence(params, seed)
    q = np.exp(choose.normal(size=(k, VOCAB)) * 1.5).astype(np.float32).astype(np.float64)
    q = (q / q.sum(-1, keepdims=True)).astype(np.float32).astype(np.float64)
    draft = Draft([int(choose.choice(VOCAB, p=row / row.sum())) for row in q], torch.from_numpy(q).float())
    logits = TARGET.logits([seq], [draft])
    p = np.array([reference_probs(row, seq, draft.tokens[:j]) for j, row in enumerate(logits.numpy())])
    return seq, draft, logits, p, q


def inverse_cdf(weights: FloatArray, uniform: float) -> int:
    cumulative = weights.cumsum()
    return int(np.searchsorted(cumulative, uniform * cumulative[-1], side="right"))


def number(seq: Sequence, position: int, purpose: int) -> float:
    return float(uniforms([seq.seed], [len(seq.token_ids) + position], purpose)[0])


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(temperature=1.5, top_k=7, frequency_penalty=0.5)])
def test_standard_decides_as_the_formula(params: SamplingParams) -> None:
    lengths = set()
    for seed in range(150):
        seq, draft, logits, p, q = random_case(seed, 3, params)
        kept = 0
        while kept < 3 and number(seq, kept, Purpose.ACCEPT) < min(1.0, p[kept, draft.tokens[kept]] / q[kept, draft.tokens[kept]]):
            kept += 1
        weights = p[3] if kept == 3 else np.maximum(p[kept] - q[kept], 0.0)
        token = inverse_cdf(weights, number(seq, kept, Purpose.TOKEN if kept == 3 else Purpose.RESIDUAL))
        verdict = verifier().verify(logits, [row_of(seq)], [draft])[0]
        assert (verdict.num_accepted, verdict.tokens) == (kept, [*draft.tokens[:kept], token])
        lengths.add(kept)
    assert lengths == {0, 1, 2, 3}


def block_reference(p: FloatArray, q: FloatArray, tokens: list[int], u: list[float]) -> tuple[int, FloatArray]:
    """Algorithm 2 of arXiv 2403.10444: (accepted, weights of the next token)."""
    k, kept = len(tokens), 0
    w = [1.0]
    for i, token in enumerate(tokens):
        w.append(min(1.0, w[i] * p[i, token] / q[i, token]))
    for i in range(1, k + 1):
        if i == k:
            h = w[k]
        else:
            rest = np.maximum(w[i] * p[i] - q[i], 0.0).sum()
            h = rest / (rest + 1.0 - w[i]) if rest + 1.0 - w[i] > 0 else 1.0
        if u[i - 1] < h:
            kept = i
    return kept, p[k] if kept == k else np.maximum(w[kept] * p[kept] - q[kept], 0.0)


@pytest.mark.parametrize("k", [1, 2, 4])
@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(temperature=1.5, top_k=7, frequency_penalty=0.5)])
def test_block_decides_as_the_formula(params: SamplingParams, k: int) -> None:
    lengths = set()
    for seed in range(150):
        seq, draft, logits, p, q = random_case(seed, k, params)
        numbers = [number(seq, 0, Purpose.BLOCK + j) for j in range(k)]
        kept, weights = block_reference(p, q, draft.tokens, numbers)
        token = inverse_cdf(weights, number(seq, kept, Purpose.TOKEN if kept == k else Purpose.RESIDUAL))
        verdict = verifier("block").verify(logits, [row_of(seq)], [draft])[0]
        assert (verdict.num_accepted, verdict.tokens) == (kept, [*draft.tokens[:kept], token])
        lengths.add(kept)
    assert lengths == set(range(k + 1))


def test_greedy_requests_match_the_argmax_even_when_the_draft_was_sampled() -> None:
    seq = TARGET.sequence(SamplingParams(temperature=0.0, presence_penalty=0.5))
    chain: list[int] = []
    for _ in range(4):
        chain.append(int(reference_logits(TARGET.table[(seq.token_ids + chain)[-1]], seq, chain).argmax()))
    unlikely = torch.full((3, VOCAB), 1.0 / VOCAB)
    for method in ("standard", "block", "lossy_typical"):
        for drafted, kept in ((chain[:3], 3), ([chain[0], chain[1], (chain[2] + 1) % VOCAB], 2), ([(chain[0] + 1) % VOCAB, 0, 0], 0)):
            for probs in (None, unlikely):
                draft = Draft(drafted, probs)
                verdict = verifier(method).verify(TARGET.logits([seq], [draft]), [row_of(seq)], [draft])[0]
                assert (verdict.num_accepted, verdict.tokens) == (kept, chain[: kept + 1])


def test_impossible_drafts_are_refused_and_never_emitted() -> None:
    """p(x) = 0 (removed by top_k), and a drafter that claims q(x) = 0 for what it drafted."""
    target = Markov.random(VOCAB, seed=4)
    params = SamplingParams(top_k=2)
    for seed in range(50):
        seq = target.sequence(params, seed)
        p = reference_probs(target.table[seq.token_ids[-1]], seq, ())
        impossible = int(p.argmin())
        for method in ("standard", "block"):
            for q in (torch.full((1, VOCAB), 1.0 / VOCAB), torch.nn.functional.one_hot(torch.tensor([0]), VOCAB).float()):
                draft = Draft([impossible], q)
                verdict = verifier(method).verify(target.logits([seq], [draft]), [row_of(seq)], [draft])[0]
                assert verdict.num_accepted == 0
                assert p[verdict.tokens[0]] > 0


def test_logprobs_are_the_models_own_at_each_position() -> None:
    """Raw: no penalty, temperature or truncation in them; one entry for each emitted token."""
    params = SamplingParams(logprobs=4, temperature=0.3, top_k=1, repetition_penalty=1.9, logit_bias={3: 5.0})
    seq = TARGET.sequence(params)
    plain = TARGET.sequence(params)
    step_by_step(verifier(), TARGET, plain, 3)
    draft = Draft([*plain.token_ids[plain.num_prompt_tokens :][:2], 2])
    logits = TARGET.logits([seq], [draft])
    verdict = verifier().verify(logits, [row_of(seq)], [draft])[0]
    assert verdict.num_accepted == 2
    assert verdict.logprobs == token_logprobs(logits[:3], verdict.tokens, 4)
    exact = torch.log_softmax(logits.double(), -1)
    for j, entry in enumerate(verdict.logprobs):
        assert entry.token_id == verdict.tokens[j]
        assert entry.logprob == pytest.approx(exact[j, verdict.tokens[j]].item(), abs=1e-5)


def test_logprobs_only_where_asked() -> None:
    seqs = [TARGET.sequence(SamplingParams(logprobs=n), i) for i, n in enumerate((None, 0, 5, 2, 5))]
    drafts: list[Draft | None] = [Draft([1, 2])] * 5
    verdicts = verifier().verify(TARGET.logits(seqs, drafts), [row_of(s) for s in seqs], drafts)
    assert verdicts[0].logprobs is None
    for verdict, num_top in zip(verdicts[1:], (0, 5, 2, 5), strict=True):
        assert verdict.logprobs is not None
        assert [len(entry.top) for entry in verdict.logprobs] == [num_top] * len(verdict.tokens)
        assert [entry.token_id for entry in verdict.logprobs] == verdict.tokens


# ---------------------------------------------------------------- lossy methods


def accepted_counts(checked: Verifier, tokens: list[int], trials: int, **options: Any) -> np.ndarray:
    seqs = [TARGET.sequence(SamplingParams(**options), i) for i in range(trials)]
    drafts: list[Draft | None] = [Draft(tokens)] * trials
    verdicts = checked.verify(TARGET.logits(seqs, drafts), [row_of(s) for s in seqs], drafts)
    assert all(v.tokens[: v.num_accepted] == tokens[: v.num_accepted] and len(v.tokens) == v.num_accepted + 1 for v in verdicts)
    return np.array([v.num_accepted for v in verdicts])


def test_synthetic_rates_are_met_whatever_the_tokens_are() -> None:
    """Marginal rates within five standard errors at 10,000 sequences (false alarm below 1e-6 each), greedy and sampled."""
    rates = (0.9, 0.5, 0.45, 0.0)
    checked = verifier("synthetic", num_speculative_tokens=4, synthetic_acceptance_rates=rates)
    for tokens, options in (([3, 3, 3, 3], {"temperature": 0.0}), ([1, 5, 6, 9], {})):
        counts = accepted_counts(checked, tokens, 5000, **options)
        for j, rate in enumerate(rates):
            assert abs((counts > j).mean() - rate) <= 5 * math.sqrt(rate * (1 - rate) / len(counts))


def test_synthetic_length_is_the_mean_with_the_least_spread() -> None:
    for length, fewest in ((1.0, 0), (2.6, 1), (5.0, 4)):
        checked = verifier("synthetic", num_speculative_tokens=4, synthetic_acceptance_length=length)
        counts = accepted_counts(checked, [1, 2, 3, 4], 5000)
        assert set(counts.tolist()) <= {fewest, fewest + 1}
        assert abs(1 + counts.mean() - length) <= 5 * 0.5 / math.sqrt(len(counts))


def test_synthetic_ends_with_the_targets_own_token_and_takes_shorter_drafts() -> None:
    checked = verifier("synthetic", num_speculative_tokens=3, synthetic_acceptance_rates=(1.0, 1.0, 0.0))
    seq = TARGET.sequence(SamplingParams(temperature=0.0, presence_penalty=2.0, frequency_penalty=2.0))
    # What would follow a 1, were it not penalised for being among the drafts already.
    favourite = int(reference_logits(TARGET.table[1], seq, []).argmax())
    assert reference_logits(TARGET.table[1], seq, [favourite, 1]).argmax() != favourite
    for tokens, kept in (([3, 3, 3], 2), ([favourite, 1, 3], 2), ([3], 1), ([], 0)):
        draft = Draft(tokens)
        verdict = checked.verify(TARGET.logits([seq], [draft]), [row_of(seq)], [draft])[0]
        own = reference_logits(TARGET.table[(seq.token_ids + tokens[:kept])[-1]], seq, tokens[:kept]).argmax()
        assert verdict.tokens == [*tokens[:kept], int(own)]


def test_conditional_rates() -> None:
    assert conditional_rates([0.8, 0.4, 0.0, 0.0]) == [0.8, 0.5, 0.0, 0.0]


def test_typical_acceptance_decides_as_the_formula() -> None:
    """Accept while p(x) > min(epsilon, delta * exp(-H(p))); both sides of the minimum occur."""
    sides = set()
    for seed in range(150):
        seq, draft, logits, p, _ = random_case(seed, 3, SamplingParams(temperature=0.3 + seed % 3, top_k=11))
        kept = 0
        while kept < 3:
            entropy = -sum(x * math.log(x) for x in p[kept] if x > 0)
            sides.add(0.5 * math.exp(-entropy) > 0.2)
            if p[kept, draft.tokens[kept]] <= min(0.2, 0.5 * math.exp(-entropy)):
                break
            kept += 1
        checked = verifier("lossy_typical", typical_acceptance_threshold=0.2, typical_acceptance_alpha=0.5)
        for given in (draft, Draft(draft.tokens)):
            verdict = checked.verify(logits, [row_of(seq)], [given])[0]
            assert verdict.num_accepted == kept
            assert verdict.tokens[:kept] == draft.tokens[:kept]
            assert p[kept, verdict.tokens[kept]] > 0
    assert sides == {True, False}


def test_only_the_lossless_methods_say_so() -> None:
    assert Verifier(None, VOCAB, "cpu").lossless
    assert verifier("standard").lossless
    assert verifier("block").lossless
    assert not verifier("lossy_typical").lossless
    assert not verifier("synthetic", num_speculative_tokens=2, synthetic_acceptance_length=1.5).lossless


# ---------------------------------------------------------------- shapes


def test_shapes_that_do_not_fit_are_refused() -> None:
    seq = TARGET.sequence(SamplingParams())
    draft = Draft([1, 2])
    logits = TARGET.logits([seq], [draft])
    with pytest.raises(ValueError, match=r"need logits \[3, 12\], got \[2, 12\]"):
        verifier().verify(logits[:2], [row_of(seq)], [draft])
    with pytest.raises(ValueError, match=r"Draft.probs must be \[2, 12\], got \[3, 12\]"):
        verifier().verify(logits, [row_of(seq)], [Draft([1, 2], torch.ones(3, VOCAB))])
    assert verifier().verify(logits[:0], [], []) == []


def test_the_logits_are_not_changed() -> None:
    seq = TARGET.sequence(SamplingParams(**OPTIONS["all"]))
    drafts = sampled_drafts(np.full((VOCAB, VOCAB), 1.0 / VOCAB), 3)([seq])
    for method in ("standard", "block", "lossy_typical"):
        logits = TARGET.logits([seq], drafts)
        before = logits.clone()
        verifier(method).verify(logits, [row_of(seq)], drafts)
        verifier(method).verify(logits[:1], [row_of(seq)], no_drafts([seq]))
        assert torch.equal(logits, before)
