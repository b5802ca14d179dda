"""Exact references for sampling tests: vLLM's order of operations in float64, a small Markov model, a chi-square audit."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import stats

from headway.engine.verify import Verifier
from headway.sampling_params import SamplingParams
from headway.types import Draft, Request, Row, Sequence, Verdict

FloatArray = NDArray[np.float64]


class BigramMatcher:
    """A grammar that says which token may follow which: `allowed` [vocab, vocab]. Where it stands is read from the sequence."""

    error = None

    def __init__(self, allowed: NDArray[np.bool_], seq: Sequence) -> None:
        self.allowed, self._seq = allowed, seq

    def mask(self, path: SequenceOf[int]) -> bytes | None:
        if self.num_legal((), path) < len(path):
            return None
        return np.packbits(self.allowed[[*self._seq.token_ids, *path][-1]], bitorder="little").tobytes()

    def num_legal(self, path: SequenceOf[int], tokens: SequenceOf[int]) -> int:
        last, count = [*self._seq.token_ids, *path][-1], 0
        for token in tokens:
            if not self.allowed[last, token]:
                break
            last, count = token, count + 1
        return count

    def forced(self, path: SequenceOf[int], limit: int) -> list[int]:
        return []

    def advance(self, token: int) -> bool:
        return False


def make_sequence(
    token_ids: SequenceOf[int],
    params: SamplingParams,
    *,
    num_prompt: int | None = None,
    seed: int = 0,
    seq_id: int = 0,
    eos: SequenceOf[int] = (),
    bad_words: SequenceOf[tuple[int, ...]] = (),
) -> Sequence:
    num_prompt = len(token_ids) if num_prompt is None else num_prompt
    request = Request(str(seq_id), list(token_ids[:num_prompt]), params)
    return Sequence(
        seq_id, request, 0, seed, frozenset(eos), frozenset(params.stop_token_ids or ()), tuple(bad_words), params.max_tokens or 1 << 20,
        list(token_ids), num_prompt, len(token_ids) - 1,
    )


def row_of(seq: Sequence, k: int = 0) -> Row:
    return Row(seq, len(seq.token_ids) - 1, 1, k)


def reference_logits(logits: Any, seq: Sequence, output: SequenceOf[int]) -> FloatArray:
    """What greedy requests take the argmax of, when `output` is all that was written after the prompt."""
    params = seq.params
    x = np.array(logits, dtype=np.float64)
    prompt, output = seq.token_ids[: seq.num_prompt_tokens], list(output)
    if isinstance(seq.matcher, BigramMatcher):
        x[~seq.matcher.allowed[(*seq.token_ids[: seq.num_prompt_tokens], *output)[-1]]] = -np.inf
    for *prefix, last in seq.bad_words_token_ids:
        if len(prefix) <= len(output) and output[len(output) - len(prefix) :] == prefix:
            x[last] = -np.inf
    if len(output) < params.min_tokens:
        x[sorted(seq.eos_token_ids | seq.stop_token_ids)] = -np.inf
    for token, bias in (params.logit_bias or {}).items():
        x[token] += bias
    for token in set(prompt) | set(output):
        x[token] = x[token] / params.repetition_penalty if x[token] > 0 else x[token] * params.repetition_penalty
    for token in set(output):
        x[token] -= params.frequency_penalty * output.count(token) + params.presence_penalty
    return x


def reference_probs(logits: Any, seq: Sequence, output: SequenceOf[int]) -> FloatArray:
    """The distribution of the token that follows prompt + `output`."""
    params = seq.params
    x = reference_logits(logits, seq, output) / params.temperature
    p = np.exp(x - x.max())
    p /= p.sum()
    p[p < params.min_p * p.max()] = 0.0
    if params.top_k > 0:
        p[p < np.sort(p)[::-1][min(params.top_k, len(p)) - 1]] = 0.0
    if params.top_p < 1.0:
        order = np.sort(p)[::-1]
        before = np.cumsum(order) - order
        p[p < order[before < params.top_p * p.sum()].min()] = 0.0
    return p / p.sum()


@dataclass
class Markov:
    """A target whose logits depend on the last token only: `table` [vocab, vocab]."""

    table: FloatArray
    start: tuple[int, ...] = (0, 1)
    eos: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    allowed: NDArray[np.bool_] | None = None   # constrained: which token may follow which
    vocab: int = field(init=False)

    def __post_init__(self) -> None:
        self.vocab = len(self.table)

    @classmethod
    def random(cls, vocab: int, seed: int, scale: float = 1.5, **extra: Any) -> Markov:
        return cls(np.random.default_rng(seed).normal(size=(vocab, vocab)) * scale, **extra)

    def sequence(self, params: SamplingParams, seed: int = 0) -> Sequence:
        seq = make_sequence(self.start, params, seed=seed, seq_id=seed, eos=self.eos, bad_words=self.bad_words)
        seq.matcher = None if self.allowed is None else BigramMatcher(self.allowed, seq)
        return seq

    def joint(self, params: SamplingParams, length: int) -> FloatArray:
        """Exact P(first `length` output tokens): [vocab] * length."""
        seq = self.sequence(params)
        joint = np.zeros((self.vocab,) * length)

        def fill(output: tuple[int, ...], mass: float) -> None:
            if len(output) == length:
                joint[output] = mass
                return
            probs = reference_probs(self.table[(self.start + output)[-1]], seq, output)
            for token in np.flatnonzero(probs):
                fill((*output, int(token)), mass * probs[token])

        fill((), 1.0)
        return joint

    def logits(self, seqs: SequenceOf[Sequence], drafts: SequenceOf[Draft | None]) -> torch.Tensor:
        """The rows `Verifier.verify` wants."""
        last = [t for seq, d in zip(seqs, drafts, strict=True) for t in (seq.token_ids[-1], *(d.tokens if d is not None else ()))]
        return torch.from_numpy(self.table[last]).float()


DraftMaker = Callable[[list[Sequence]], "list[Draft | None]"]


def sampled_drafts(
    q: FloatArray, k: int, seed: int = 1, confidence: Callable[[FloatArray, NDArray[np.int64]], FloatArray] | None = None
) -> DraftMaker:
    """Drafts drawn from the Markov chain with transition probabilities q [vocab, vocab], with their distributions.

    confidence  makes Draft.confidence from the distributions [n, k, vocab] and the tokens drawn from them [n, k]
    """
    rng = np.random.default_rng(seed)
    cumulative = q.cumsum(-1)
    rows = torch.from_numpy(q).float()

    def make(seqs: list[Sequence]) -> list[Draft | None]:
        last = np.array([seq.token_ids[-1] for seq in seqs])
        before, tokens = [], []
        for _ in range(k):
            before.append(last)
            last = np.minimum((cumulative[last] <= rng.random((len(seqs), 1))).sum(-1), len(q) - 1)
            tokens.append(last)
        came_from, chosen = np.stack(before, -1), np.stack(tokens, -1)
        probs = rows[torch.from_numpy(came_from)]
        sure = None if confidence is None else confidence(q[came_from], chosen).tolist()
        return [Draft(chosen[i].tolist(), probs[i], None if sure is None else sure[i]) for i in range(len(seqs))]

    return make


def likely_drafts(q: FloatArray, k: int) -> DraftMaker:
    """Deterministic drafts: the most likely chain under q."""
    follow = q.argmax(-1)

    def make(seqs: list[Sequence]) -> list[Draft | None]:
        last = np.array([seq.token_ids[-1] for seq in seqs])
        columns = []
        for _ in range(k):
            last = follow[last]
            columns.append(last)
        return [Draft(tokens) for tokens in np.stack(columns, -1).tolist()]

    return make


def likely_trees(q: FloatArray, widths: SequenceOf[int]) -> DraftMaker:
    """Deterministic trees: at depth d every node has the `widths[d]` likeliest tokens under q as children."""
    follow = (-q).argsort(-1)

    def make(seqs: list[Sequence]) -> list[Draft | None]:
        return [_grown(seq.token_ids[-1], widths, lambda last, width: follow[last, :width].tolist())[0] for seq in seqs]

    return make


def sampled_trees(q: FloatArray, widths: SequenceOf[int], seed: int = 1) -> DraftMaker:
    """Sampled trees: at depth d every node has `widths[d]` children, drawn from q without replacement."""
    rng = np.random.default_rng(seed)
    rows = torch.from_numpy(q).float()

    def make(seqs: list[Sequence]) -> list[Draft | None]:
        drafts: list[Draft | None] = []
        for seq in seqs:
            draft, before = _grown(seq.token_ids[-1], widths, lambda last, width: rng.choice(len(q), width, False, q[last]).tolist())
            draft.probs = rows[before]
            drafts.append(draft)
        return drafts

    return make


def _grown(root: int, widths: SequenceOf[int], children: Callable[[int, int], list[int]]) -> tuple[Draft, list[int]]:
    """(the tree, the token that comes before each node)"""
    tokens: list[int] = []
    parents: list[int] = []
    level = [-1]
    for width in widths:
        grown = []
        for node in level:
            for token in children(root if node < 0 else tokens[node], width):
                grown.append(len(tokens))
                tokens.append(int(token))
                parents.append(node)
        level = grown
    return Draft(tokens, parents=tuple(parents)), [root if parent < 0 else tokens[parent] for parent in parents]


def no_drafts(seqs: list[Sequence]) -> list[Draft | None]:
    return [None] * len(seqs)


@dataclass
class Simulation:
    counts: NDArray[np.int64]            # [vocab] * length: how often each output began with these tokens
    first_accepted: NDArray[np.int64]    # [trials] drafts accepted in the first step


def simulate(
    verifier: Verifier, target: Markov, params: SamplingParams, drafts: DraftMaker, *, length: int, trials: int, first_seed: int = 0
) -> Simulation:
    """Writes `length` tokens for each of `trials` consecutive seeds, as an engine would."""
    gc.disable()    # it would walk through these thousands of records again and again
    try:
        return _simulate(verifier, target, params, drafts, length, trials, first_seed)
    finally:
        gc.enable()


def _simulate(
    verifier: Verifier, target: Markov, params: SamplingParams, drafts: DraftMaker, length: int, trials: int, first_seed: int
) -> Simulation:
    seqs = [target.sequence(params, first_seed + i) for i in range(trials)]
    active, accepted = seqs, []
    while active:
        proposed = drafts(active)
        verdicts = verifier.verify(target.logits(active, proposed), [row_of(seq) for seq in active], proposed)
        for seq, verdict in zip(active, verdicts, strict=True):
            seq.token_ids.extend(verdict.tokens)
        if not accepted:
            accepted = [verdict.num_accepted for verdict in verdicts]
        active = [seq for seq in active if seq.num_output_tokens < length]
    outputs = np.array([seq.token_ids[seq.num_prompt_tokens :][:length] for seq in seqs])
    counts = np.bincount(np.ravel_multi_index(tuple(outputs.T), (target.vocab,) * length), minlength=target.vocab**length)
    return Simulation(counts.reshape((target.vocab,) * length), np.array(accepted))


def chi_square(counts: NDArray[np.int64], probs: FloatArray, smallest: float = 5.0) -> float:
    """p-value of the counts under `probs`; cells that expect fewer than `smallest` are pooled. 0 when something impossible occurred."""
    counts, probs = counts.ravel(), probs.ravel()
    if counts[probs == 0.0].any():
        return 0.0
    expected = probs * counts.sum()
    large = expected >= smallest
    observed = np.append(counts[large], counts[~large].sum())
    wanted = np.append(expected[large], expected[~large].sum())
    if wanted[-1] < smallest:
        observed, wanted = np.append(observed[:-2], observed[-2:].sum()), np.append(wanted[:-2], wanted[-2:].sum())
    return float(stats.chisquare(observed, wanted * observed.sum() / wanted.sum()).pvalue)


def step_by_step(verifier: Verifier, target: Markov, seq: Sequence, length: int, drafts: DraftMaker = no_drafts) -> list[Verdict]:
    """Decodes one sequence until it has `length` output tokens or more."""
    verdicts = []
    while seq.num_output_tokens < length:
        proposed = drafts([seq])
        verdicts += verifier.verify(target.logits([seq], proposed), [row_of(seq)], proposed)
        seq.token_ids.extend(verdicts[-1].tokens)
    return verdicts


def all_prefixes(vocab: int, length: int) -> itertools.product[tuple[int, ...]]:
    return itertools.product(range(vocab), repeat=length)
