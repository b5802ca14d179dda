"""Sampler: every parameter against a float64 reference, the random numbers, the draw, log probabilities."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from headway.engine import sampler as sampler_module
from headway.engine.logits import Position, argmax, banned_tokens
from headway.engine.sampler import Purpose, Sampler, Span, draw, token_logprobs, uniforms
from headway.sampling_params import SamplingParams
from headway.types import Sequence
from tests.sampling import chi_square, make_sequence, reference_logits, reference_probs

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "hot": {"temperature": 1.7},
    "cold": {"temperature": 0.05},
    "min_p": {"min_p": 0.1},
    "top_k": {"top_k": 5},
    "top_k 1": {"top_k": 1},
    "top_k above the vocabulary": {"top_k": 100_000},
    "top_p": {"top_p": 0.9},
    "tiny top_p": {"top_p": 1e-6},
    "low top_p": {"top_p": 0.35},
    "top_p near 1": {"top_p": 0.999},
    "top_k and top_p": {"top_k": 40, "top_p": 0.7},
    "min_p and top_p": {"min_p": 0.02, "top_p": 0.9},
    "min_p, top_k and top_p": {"min_p": 0.001, "top_k": 300, "top_p": 0.95, "temperature": 1.4},
    "bias": {"logit_bias": {1: 2.5, 7: -100.0, 3: 0.5}},
    "repetition": {"repetition_penalty": 1.5},
    "repetition below 1": {"repetition_penalty": 0.7},
    "frequency": {"frequency_penalty": 0.8},
    "presence": {"presence_penalty": -1.5},
    "min_tokens": {"min_tokens": 6, "stop_token_ids": [3, 9]},
    "everything": {
        "temperature": 0.8, "min_p": 0.01, "top_k": 12, "top_p": 0.95, "repetition_penalty": 1.2, "frequency_penalty": 0.3,
        "presence_penalty": 0.4, "logit_bias": {5: 1.0}, "min_tokens": 5, "stop_token_ids": [2],
    },
}
OUTPUT = [4, 5, 4, 4]
DRAFTS = [6, 4, 5]
BAD_WORDS = ((8,), (5, 10), (4, 5, 11), (1, 12))


def decoding(options: dict[str, Any], seed: int = 0) -> Sequence:
    """A sequence with prompt [0, 1], output [4, 5, 4, 4] and bad words of one to three tokens."""
    params = SamplingParams(max_tokens=None, **options)
    return make_sequence([0, 1, *OUTPUT], params, num_prompt=2, seed=seed, eos=(2,), bad_words=BAD_WORDS)


# ---------------------------------------------------------------- argmax


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [1, 7, 256, 1000, 1024, 3072, 50257 // 7])
def test_argmax_is_torchs_first_index_included(width: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(width)
    for spread in (1, 3, 1000):     # few distinct values: ties everywhere
        logits = torch.randint(-spread, spread + 1, (9, width), generator=generator).to(dtype)
        assert argmax(logits).tolist() == logits.float().numpy().argmax(-1).tolist()
    assert argmax(logits[::2]).tolist() == logits[::2].float().numpy().argmax(-1).tolist()
    assert argmax(logits[:0]).tolist() == []


# ---------------------------------------------------------------- random numbers


def test_uniforms_are_a_function_of_their_arguments_only() -> None:
    seeds, positions = [0, 1, 2, 2**64 - 1, -1, 7], [0, 5, 5, 5, 5, 2**40]
    batch = uniforms(seeds, positions, Purpose.TOKEN)
    alone = [uniforms([s], [p], Purpose.TOKEN)[0] for s, p in zip(seeds, positions, strict=True)]
    assert batch.tolist() == alone
    assert batch[3] == batch[4], "seeds count modulo 2^64"
    assert len(set(batch.tolist())) == 5
    assert ((batch >= 0) & (batch < 1)).all()


PURPOSES = [Purpose.TOKEN, Purpose.ACCEPT, Purpose.RESIDUAL, Purpose.SYNTHETIC, Purpose.BLOCK, Purpose.BLOCK + 1]


def streams() -> dict[str, np.ndarray]:
    """The most regular inputs there are: 0, 1, 2, ... along each of the three arguments."""
    count = np.arange(40_000)
    zero = np.zeros_like(count)
    grid = np.array(list(itertools.product(range(200), range(200))))
    return {
        "seeds": uniforms(count.tolist(), zero, Purpose.TOKEN),
        "positions": uniforms(zero.tolist(), count, Purpose.TOKEN),
        "purposes": uniforms(zero.tolist(), zero, count),
        "high seeds": uniforms([int(i) << 40 for i in count], zero, Purpose.TOKEN),
        "seed x position": uniforms(grid[:, 0].tolist(), grid[:, 1], Purpose.ACCEPT),
        "diagonal": uniforms(count.tolist(), count, Purpose.TOKEN),
        "antidiagonal": uniforms(count[::-1].tolist(), count, Purpose.TOKEN),
    }


@pytest.mark.parametrize("stream", streams())
def test_uniforms_are_uniform_and_successive_ones_independent(stream: str) -> None:
    """Kolmogorov-Smirnov, chi-square of successive pairs, and balance of 24 bits. False alarm: 1e-6 for each of the 27 checks."""
    u = streams()[stream]
    assert stats.kstest(u, "uniform").pvalue > 1e-6
    for lag in (1, 200):
        cells = (u[:-lag] * 16).astype(int) * 16 + (u[lag:] * 16).astype(int)
        assert chi_square(np.bincount(cells, minlength=256), np.full(256, 1 / 256)) > 1e-6
    for bit in range(1, 25):
        ones = int(((u * 2.0**bit).astype(np.int64) & 1).sum())
        assert stats.binomtest(ones, len(u)).pvalue > 1e-6


def test_purposes_do_not_share_randomness() -> None:
    """Same seeds and positions, two purposes: independent. False alarm: 1e-6 for each of the 15 pairs."""
    seeds, positions = [i // 100 for i in range(40_000)], np.arange(40_000) % 100
    for a, b in itertools.combinations(PURPOSES, 2):
        x, y = uniforms(seeds, positions, a), uniforms(seeds, positions, b)
        cells = (x * 16).astype(int) * 16 + (y * 16).astype(int)
        assert chi_square(np.bincount(cells, minlength=256), np.full(256, 1 / 256)) > 1e-6


# ---------------------------------------------------------------- drawing


def test_draw_is_the_inverse_cdf() -> None:
    generator = np.random.default_rng(0)
    weights = generator.exponential(size=(200, 192)) ** 4
    weights[generator.random(weights.shape) < 0.3] = 0.0
    weights = weights.astype(np.float32)
    uniform = generator.random(200)
    cumulative = weights.astype(np.float64).cumsum(-1)
    wanted = [int(np.searchsorted(c, u * c[-1], side="right")) for c, u in zip(cumulative, uniform, strict=True)]
    assert draw(torch.from_numpy(weights), uniform) == wanted


def test_draw_at_the_ends_never_takes_a_token_of_weight_0() -> None:
    weights = torch.zeros(3, 256)
    weights[:, 5], weights[:, 200] = 1.0, 3.0
    assert draw(weights, np.array([0.0, 0.25, np.nextafter(1.0, 0.0)])) == [5, 200, 200]
    assert draw(torch.zeros(1, 256), np.array([0.7])) == [0], "all weights 0: any token, but a token"


def test_draw_resolves_the_tail() -> None:
    """A token of probability 1e-12 among 49,151 others owns an interval of that length, to 1 %, however late it comes."""
    weights = torch.full((1, 49152), 1 / 49152)
    weights[0, 45_000] = 1e-12

    def first_uniform_at_or_after(token: int) -> float:
        low, high = 0.0, 1.0
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (low, middle) if draw(weights, np.array([middle]))[0] >= token else (middle, high)
        return high

    length = first_uniform_at_or_after(45_001) - first_uniform_at_or_after(45_000)
    assert length == pytest.approx(1e-12 / weights.double().sum().item(), rel=0.01)


def test_rare_tokens_are_as_frequent_as_they_should_be() -> None:
    """Weights over five orders of magnitude in a wide row, 400,000 draws. False alarm: 1e-6."""
    weights = np.zeros(640)
    weights[[0, 63, 64, 100, 639]] = [1.0, 1e-1, 1e-2, 1e-3, 1e-4]
    rows = torch.from_numpy(weights).float().repeat(8000, 1)
    counts = np.zeros(640, dtype=np.int64)
    for start in range(0, 400_000, 8000):
        uniform = uniforms(list(range(start, start + 8000)), np.zeros(8000, dtype=np.int64), Purpose.TOKEN)
        counts += np.bincount(draw(rows, uniform), minlength=640)
    assert chi_square(counts, weights / weights.sum()) > 1e-6


# ---------------------------------------------------------------- distributions


def probabilities(logits: torch.Tensor, seqs: list[Sequence], depth: int) -> np.ndarray:
    targets = [(row, Position(seq, DRAFTS, depth)) for row, seq in enumerate(seqs)]
    return Sampler(logits.shape[1], "cpu").probabilities(logits, targets).numpy().copy()


@pytest.mark.parametrize("depth", [0, 1, 3])
@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_matches_the_reference_at_every_depth(option: str, depth: int) -> None:
    vocab = 16
    seq = decoding(OPTIONS[option])
    logits = torch.randn(20, vocab, generator=torch.Generator().manual_seed(depth)) * 2
    found = probabilities(logits, [seq] * len(logits), depth)
    for row, ours in zip(logits.numpy(), found, strict=True):
        wanted = reference_probs(row, seq, OUTPUT + DRAFTS[:depth])
        np.testing.assert_allclose(ours[:vocab], wanted, atol=2e-6)
        assert not ours[:vocab][wanted == 0.0].any(), "removed"
        assert ours[:vocab][wanted > 1e-37].all(), "kept"
        assert not ours[vocab:].any()


@pytest.mark.parametrize("scale", [0.3, 1.5, 4.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_restrictions_match_the_reference_on_a_wide_vocabulary(dtype: torch.dtype, scale: float) -> None:
    """Flat rows, whose kept set needs the whole row, and peaked ones, found among the best columns; bf16 brings ties."""
    vocab = 8000
    logits = (torch.randn(len(OPTIONS), vocab, generator=torch.Generator().manual_seed(1)) * scale).to(dtype)
    seqs = [decoding(options) for options in OPTIONS.values()]
    for depth in (0, 3):
        found = probabilities(logits, seqs, depth)
        for name, row, seq, ours in zip(OPTIONS, logits.float().numpy(), seqs, found, strict=True):
            wanted = reference_probs(row, seq, OUTPUT + DRAFTS[:depth])
            np.testing.assert_allclose(ours[:vocab], wanted, atol=2e-6, rtol=2e-5, err_msg=name)
            # float32 sums may move the end of a top_p set by a token.
            assert abs(int((ours[:vocab] > 0).sum()) - int((wanted > 1e-38).sum())) <= (seq.params.top_p < 1.0), name


def test_tokens_that_tie_with_the_last_kept_one_are_all_kept() -> None:
    logits = torch.tensor([[0.0, 1.0, 1.0, 1.0, -1.0, 0.0, 0.0, 0.0]])
    kept = {
        name: set(np.flatnonzero(probabilities(logits, [make_sequence([0], SamplingParams(**options))], 0)[0]).tolist())
        for name, options in (("top_k", {"top_k": 2}), ("top_p", {"top_p": 0.3}), ("both", {"top_k": 4, "top_p": 0.9}))
    }
    assert kept == {"top_k": {1, 2, 3}, "top_p": {1, 2, 3}, "both": {0, 1, 2, 3, 5, 6, 7}}


def test_a_kept_set_wider_than_the_search_is_still_exact() -> None:
    """top_k above what the best columns hold, over probabilities that underflow to 0: the search must notice that it saw too little."""
    logits = torch.full((2, 16384), -200.0)
    logits[:, ::3] = torch.linspace(0.0, 1.0, len(range(0, 16384, 3)))
    logits[1, ::3] -= torch.arange(len(range(0, 16384, 3))) % 7
    params = SamplingParams(top_k=5000, top_p=0.99)
    seq = make_sequence([0], params)
    for row, ours in zip(logits.numpy(), probabilities(logits, [seq, seq], 0), strict=True):
        np.testing.assert_allclose(ours, reference_probs(row, seq, []), atol=1e-8)


@pytest.mark.parametrize("option", OPTIONS)
def test_greedy_takes_the_processed_argmax(option: str) -> None:
    seq = decoding({**OPTIONS[option], "temperature": 0.0})
    logits = torch.randn(50, 16, generator=torch.Generator().manual_seed(3)).bfloat16() * 2
    tokens = Sampler(16, "cpu").sample(logits, [Span(seq, DRAFTS, 0, 4), Span(seq, DRAFTS, 2, 2)] * 8 + [Span(seq, DRAFTS, 1, 2)])
    depths = [0, 1, 2, 3, 2, 3] * 8 + [1, 2]
    wanted = [int(reference_logits(row, seq, OUTPUT + DRAFTS[:d]).argmax()) for row, d in zip(logits.float(), depths, strict=True)]
    assert tokens == wanted


# ---------------------------------------------------------------- bans


def test_bad_words_look_at_the_output_and_the_drafts_but_not_at_the_prompt() -> None:
    seq = make_sequence([5, 4, 7], SamplingParams(), num_prompt=2, bad_words=((4, 7, 9), (7, 10), (7, 3, 11), (12,), (4, 13)))
    assert banned_tokens(Position(seq, [3, 4], 0), 100) == {10, 12}
    assert banned_tokens(Position(seq, [3, 4], 1), 100) == {11, 12}
    assert banned_tokens(Position(seq, [3, 4], 2), 100) == {12, 13}


def test_a_row_cannot_forbid_everything() -> None:
    seq = make_sequence([0], SamplingParams(min_tokens=3, stop_token_ids=[1, 99]), eos=(0,), bad_words=((2,), (3,)))
    assert banned_tokens(Position(seq, [], 0), 5) == {0, 1, 2, 3}
    assert banned_tokens(Position(seq, [], 0), 4) == set()
    assert Sampler(4, "cpu").sample(torch.zeros(1, 4), [Span(seq, [], 0, 1)])[0] in range(4)


# ---------------------------------------------------------------- batches


def test_a_row_samples_the_same_token_alone_and_in_any_batch() -> None:
    vocab, count = 5003, 60
    logits = (torch.randn(count, vocab, generator=torch.Generator().manual_seed(5)) * 3).bfloat16()
    names = list(OPTIONS)
    seqs = [decoding(OPTIONS[names[i % len(names)]] | ({"temperature": 0.0} if i % 7 == 0 else {}), seed=i) for i in range(count)]
    spans = [Span(seq, DRAFTS, i % 4, 1) for i, seq in enumerate(seqs)]
    together = Sampler(vocab, "cpu").sample(logits, spans)
    alone = [Sampler(vocab, "cpu").sample(logits[i : i + 1], [spans[i]])[0] for i in range(count)]
    order = torch.randperm(count, generator=torch.Generator().manual_seed(1)).tolist()
    small = Sampler(vocab, "cpu")
    small.block_rows = 7
    shuffled = small.sample(logits[order], [spans[i] for i in order])
    assert together == alone
    assert [together[i] for i in order] == shuffled


def test_sampling_does_not_touch_the_logits() -> None:
    logits = torch.randn(4, 16)
    before = logits.clone()
    seq = decoding(OPTIONS["everything"])
    Sampler(16, "cpu").sample(logits, [Span(seq, DRAFTS, 0, 4)])
    assert torch.equal(logits, before)


# ---------------------------------------------------------------- log probabilities


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logprobs_ranks_and_tops(dtype: torch.dtype) -> None:
    logits = (torch.randn(70, 2001, generator=torch.Generator().manual_seed(0)) * 3).to(dtype)
    tokens = [(37 * i) % 2001 for i in range(70)]
    exact = torch.log_softmax(logits.double(), -1).numpy()
    for entry, token, row in zip(token_logprobs(logits, tokens, 20), tokens, exact, strict=True):
        assert entry.token_id == token
        assert entry.logprob == pytest.approx(row[token], abs=2e-5)
        assert entry.rank == 1 + (row > row[token] + 1e-12).sum()
        wanted = sorted(range(len(row)), key=lambda i: (-row[i], i))[:20]
        assert [i for i, _ in entry.top] == wanted
        np.testing.assert_allclose([v for _, v in entry.top], row[wanted], atol=2e-5)


def test_logprobs_of_ties_and_of_small_vocabularies() -> None:
    entry = token_logprobs(torch.tensor([[1.0, 2.0, 2.0, 0.0]]), [2], 3)[0]
    assert entry.rank == 1
    assert [i for i, _ in entry.top] == [1, 2, 0]
    assert len(token_logprobs(torch.zeros(1, 4), [0], 20)[0].top) == 4
    assert token_logprobs(torch.zeros(1, 4), [3], 0)[0].top == ()
    assert token_logprobs(torch.zeros(0, 4), [], 5) == []


def test_logprobs_do_not_depend_on_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = (torch.randn(9, 3001) * 2).bfloat16()
    together = token_logprobs(logits, list(range(9)), 5)
    monkeypatch.setattr(sampler_module, "LOGPROB_ROWS", 1)
    assert token_logprobs(logits, list(range(9)), 5) == together
