"""Drafts drawn by the engine's own sampler keep the target's distribution. Each audit: false alarm 1e-6, seeds fixed."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from headway.config import SpeculativeConfig
from headway.drafters.drafter import DraftRequest
from headway.engine.drafting import SequenceSampler
from headway.engine.verify import Verifier
from headway.sampling_params import SamplingParams
from headway.types import Draft, Sequence
from tests.sampling import FloatArray, Markov, chi_square, make_sequence, reference_logits, reference_probs, simulate

VOCAB, K, LENGTH, TRIALS = 5, 3, 4, 4000
TARGET = Markov.random(VOCAB, seed=11, eos=(4,))
OTHER = torch.from_numpy(TARGET.table * 0.5 + np.random.default_rng(5).normal(size=(VOCAB, VOCAB))).float()
PARAMS = {
    "plain": SamplingParams(max_tokens=None),
    "all": SamplingParams(
        max_tokens=None, temperature=1.3, top_k=4, top_p=0.9, repetition_penalty=1.2, frequency_penalty=0.3, logit_bias={2: 0.5},
        min_tokens=2,
    ),
}


class Drafting:
    """Drafts K tokens from a Markov chain with `SequenceSampler`; stops a chain where a prefix-only rule says so."""

    def __init__(self, verifier: Verifier, stop_below: float = 0.0) -> None:
        self.sequences: dict[int, Sequence] = {}
        self.sampler = SequenceSampler(verifier.sampler, self.sequences)
        self.stop_below = stop_below

    def __call__(self, seqs: list[Sequence]) -> list[Draft | None]:
        self.sequences.update({seq.seq_id: seq for seq in seqs})
        requests = [DraftRequest(seq.seq_id, seq.token_ids, seq.num_prompt_tokens, K, False) for seq in seqs]
        drafted: list[list[int]] = [[] for _ in seqs]
        probs: list[list[torch.Tensor]] = [[] for _ in seqs]
        going = list(range(len(seqs)))
        for _ in range(K):
            logits = OTHER[[(requests[i].token_ids + drafted[i])[-1] for i in going]]
            sure = torch.softmax(logits, -1).amax(-1).tolist()
            going = [i for i, s in zip(going, sure, strict=True) if s >= self.stop_below]
            if not going:
                break
            logits = OTHER[[(requests[i].token_ids + drafted[i])[-1] for i in going]]
            tokens, rows = self.sampler.sampled(logits, [requests[i] for i in going], [drafted[i] for i in going])
            for i, token, row in zip(going, tokens, rows, strict=True):
                drafted[i].append(token)
                probs[i].append(row)
        return [Draft(tokens, torch.stack(rows)) if tokens else None for tokens, rows in zip(drafted, probs, strict=True)]


def verifier(method: str) -> Verifier:
    return Verifier(SpeculativeConfig(rejection_sample_method=method), VOCAB, "cpu")


@pytest.mark.parametrize("stop_below", [0.0, 0.45])
@pytest.mark.parametrize("sampler", PARAMS)
@pytest.mark.parametrize("method", ["standard", "block"])
def test_the_target_s_distribution_is_kept(method: str, sampler: str, stop_below: float) -> None:
    judge, params = verifier(method), PARAMS[sampler]
    run = simulate(judge, TARGET, params, Drafting(judge, stop_below), length=LENGTH, trials=TRIALS)
    assert 0 < run.first_accepted.mean() < K
    assert chi_square(run.counts, TARGET.joint(params, LENGTH)) > 1e-6


@pytest.mark.parametrize("sampler", PARAMS)
def test_drafts_come_from_the_distribution_that_is_reported(sampler: str) -> None:
    judge, params = verifier("standard"), PARAMS[sampler]
    seqs = [TARGET.sequence(params, seed) for seed in range(6000)]
    drafts = Drafting(judge)(seqs)
    counts = np.zeros((VOCAB, VOCAB), dtype=np.int64)
    expected: FloatArray = np.zeros((VOCAB, VOCAB))
    for draft in drafts:
        assert draft is not None
        counts[draft.tokens[0], draft.tokens[1]] += 1
    start, probs = seqs[0], OTHER.double().numpy()
    for token in range(VOCAB):
        first = reference_probs(probs[start.token_ids[-1]], start, [])[token]
        expected[token] = first * reference_probs(probs[token], start, [token])
    assert chi_square(counts, expected) > 1e-6
    for draft in drafts[:20]:
        assert draft is not None
        np.testing.assert_allclose(draft.probs[0].numpy(), reference_probs(probs[start.token_ids[-1]], start, []), atol=1e-5)


def test_the_likeliest_token_is_the_one_a_greedy_request_would_write() -> None:
    rng = np.random.default_rng(3)
    kinds = [
        SamplingParams(temperature=0.0, max_tokens=None),
        SamplingParams(temperature=0.0, max_tokens=None, repetition_penalty=3.0, logit_bias={1: 2.0}),
        SamplingParams(temperature=0.0, max_tokens=None, min_tokens=9),
    ]
    seqs = [make_sequence([0, 1, 2, 3], kinds[i % 3], num_prompt=2, seq_id=i, eos=(4,)) for i in range(30)]
    logits = rng.normal(size=(30, VOCAB))
    logits[:, 4] += 1.0
    drafted = [rng.integers(0, VOCAB, i % 4).tolist() for i in range(30)]
    sampler = SequenceSampler(verifier("standard").sampler, {seq.seq_id: seq for seq in seqs})
    requests = [DraftRequest(seq.seq_id, seq.token_ids, 2, K, True) for seq in seqs]
    found = sampler.likely(torch.from_numpy(logits).float(), requests, drafted)
    expected = [
        int(reference_logits(row, seq, [*seq.token_ids[2:], *draft]).argmax())
        for row, seq, draft in zip(logits, seqs, drafted, strict=True)
    ]
    assert found == expected
    assert found != logits.argmax(-1).tolist()
