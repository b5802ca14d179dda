"""Distribution -> token, for a batch of logit rows; log probabilities; and where all randomness comes from.

Every random number is a pure function of (sequence seed, absolute position, purpose). Nothing depends on the batch, on the step or
on how many numbers were drawn before: a sequence samples the same tokens alone, in any batch, after a preemption, and however many
drafts were verified on the way.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from headway.engine.logits import CHUNK, COLUMN, Position, argmax, edit_logits, is_edited, is_restricted, restrict
from headway.types import Sequence, TokenLogprobs

BLOCK_BYTES = {"cpu": 8 << 20, "cuda": 256 << 20}   # f32 workspace; on CPU it should stay in cache
LOGPROB_ROWS = 32

_MASK = (1 << 64) - 1
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


class Purpose(IntEnum):
    """What a random number decides. BLOCK, SIBLING and DRAFT begin families: BLOCK + j judges draft j of the block that starts at a
    position, DRAFT + j draws it, SIBLING + j judges the j-th of several drafts for one position."""

    TOKEN = 0
    ACCEPT = 1
    RESIDUAL = 2
    SYNTHETIC = 3
    BLOCK = 16
    SIBLING = 1 << 12
    DRAFT = 1 << 16


def uniforms(seeds: SequenceOf[int], positions: ArrayLike, purposes: ArrayLike) -> NDArray[np.float64]:
    """One uniform double in [0, 1) with 53 random bits for each (seed, position, purpose): f64 [n].

    The three words are absorbed one after the other, each through the finaliser of SplitMix64 (Steele, Lea, Flood 2014, with
    Stafford's constants), so for a fixed seed and purpose the positions walk through a SplitMix64 stream with a scrambled start.
    """
    state = np.zeros(len(seeds), dtype=np.uint64)
    words = np.array([seed & _MASK for seed in seeds], dtype=np.uint64), np.atleast_1d(purposes), np.atleast_1d(positions)
    for word in words:
        state = state + (word.astype(np.uint64) + np.uint64(1)) * _GOLDEN
        state = (state ^ (state >> np.uint64(30))) * _MIX_1
        state = (state ^ (state >> np.uint64(27))) * _MIX_2
        state = state ^ (state >> np.uint64(31))
    return (state >> np.uint64(11)).astype(np.float64) * 2.0**-53


def draw(weights: Tensor, uniform: NDArray[np.float64]) -> list[int]:
    """Inverse-CDF sampling: for each row the token at which the cumulative weight passes uniform * total.

    weights  f32 [n, width], width a multiple of CHUNK, non-negative, rows need not sum to 1
    uniform  f64 [n] in [0, 1)

    Two levels, chunks then tokens, so only one chunk per row is summed up in f64. A token of weight 0 is never drawn unless all are 0.
    """
    count, width = weights.shape
    chunks = weights.view(count, width // CHUNK, CHUNK)
    chunk, rest = _pick(chunks.sum(-1).double(), torch.from_numpy(uniform).to(weights.device))
    inside = chunks.gather(1, chunk.view(-1, 1, 1).expand(-1, 1, CHUNK)).squeeze(1)
    token, _ = _pick(inside.double(), rest)
    tokens: list[int] = (chunk * CHUNK + token).tolist()
    return tokens


def _pick(weights: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """f64 weights [n, m], uniform [n] -> (index [n], the uniform left over inside the chosen interval [n])."""
    cumulative = weights.cumsum(-1)
    total = cumulative[:, -1:].contiguous()
    target = uniform.unsqueeze(-1) * total
    # Rounding can lift the target to the total: never go past the last positive weight.
    index = torch.minimum(torch.searchsorted(cumulative, target, right=True), torch.searchsorted(cumulative, total))
    index = index.clamp_(max=weights.shape[-1] - 1)
    width = weights.gather(-1, index)
    rest = (target - (cumulative.gather(-1, index) - width)) / width
    return index.squeeze(-1), rest.squeeze(-1).nan_to_num_(0.0).clamp_(0.0, 1.0)


class Span(NamedTuple):
    """Consecutive logit rows of one sequence: those after `first`, `first + 1`, ... of its drafts, `num_rows` of them."""

    seq: Sequence
    drafts: list[int]
    first: int
    num_rows: int


Target = tuple[int, Position]   # a row of the logits and what it decides


class Sampler:
    """Owns the f32 workspace; the rest is functions of the arguments."""

    def __init__(self, vocab_size: int, device: torch.device | str) -> None:
        self.vocab_size = vocab_size
        self.device = torch.device(device)
        self.width = -(-vocab_size // CHUNK) * CHUNK
        self.block_rows = max(1, BLOCK_BYTES.get(self.device.type, BLOCK_BYTES["cuda"]) // (4 * self.width))
        self._logits = torch.empty(0, self.width)
        self._probs = torch.empty(0, self.width)

    def sample(self, logits: Tensor, spans: SequenceOf[Span]) -> list[int]:
        """One token for each row of `logits` [n, vocab] (model dtype), the rows of `spans` in order."""
        plain: list[int] = []
        edited: list[Target] = []
        free: list[Target] = []
        restricted: list[Target] = []
        row = 0
        for seq, drafts, first, num_rows in spans:
            if seq.params.greedy and not is_edited(seq):
                plain.extend(range(row, row + num_rows))
            else:
                group = edited if seq.params.greedy else restricted if is_restricted(seq.params) else free
                group.extend((row + j, Position(seq, drafts, first + j)) for j in range(num_rows))
            row += num_rows
        if len(plain) == row:
            greedy: list[int] = argmax(logits).tolist()
            return greedy
        tokens = [0] * row
        if plain:
            _fill(tokens, plain, argmax(logits[plain]).tolist())
        for block in self._blocks(edited):
            _fill(tokens, [i for i, _ in block], argmax(self._processed(logits, block)).tolist())
        for group in (free, restricted):
            for block in self._blocks(group):
                uniform = token_uniforms([position for _, position in block])
                _fill(tokens, [i for i, _ in block], draw(self._weights(logits, block), uniform))
        return tokens

    def likely(self, logits: Tensor, positions: SequenceOf[Position]) -> list[int]:
        """The argmax at each position, row i of `logits` [n, vocab], after what can change it (bans, biases, penalties)."""
        tokens: list[int] = argmax(logits).tolist()
        edited = [(row, position) for row, position in enumerate(positions) if is_edited(position.seq)]
        for block in self._blocks(edited):
            _fill(tokens, [row for row, _ in block], argmax(self._processed(logits, block)).tolist())
        return tokens

    def candidates(self, logits: Tensor, positions: SequenceOf[Position], count: int) -> tuple[Tensor, Tensor]:
        """The `count` most likely tokens at each position, row i of `logits` [n, vocab], and their probabilities: int64 and f32 [n, count].
        Requests sample from these probabilities; those of greedy ones are at temperature 1, after what can change the argmax."""
        count = min(count, self.vocab_size)
        tokens = torch.empty(len(positions), count, dtype=torch.int64, device=self.device)
        probs = torch.empty(len(positions), count, device=self.device)
        for greedy in (True, False):
            mine = [(row, position) for row, position in enumerate(positions) if position.seq.params.greedy == greedy]
            for block in self._blocks(mine):
                p = torch.softmax(self._processed(logits, block), -1) if greedy else self.probabilities(logits, block)
                best, columns = p[:, : self.vocab_size].topk(count)
                rows = [row for row, _ in block]
                tokens[rows], probs[rows] = columns, best
        return tokens, probs

    def probabilities(self, logits: Tensor, rows: SequenceOf[Target]) -> Tensor:
        """What non-greedy requests sample from at these (row of `logits`, position) pairs: f32 [n, width], rows sum to 1.

        A view of the workspace, valid until the next call. Columns from vocab_size on are 0.
        """
        weights = self._weights(logits, rows)
        if any(is_restricted(position.seq.params) for _, position in rows):
            weights.div_(weights.view(len(rows), -1, CHUNK).sum(-1).sum(-1, keepdim=True))
        return weights

    def _weights(self, logits: Tensor, rows: SequenceOf[Target]) -> Tensor:
        """`probabilities` before the kept tokens are scaled up to sum to 1."""
        params = [p.seq.params for _, p in rows]
        x = self._processed(logits, rows)
        if any(p.temperature != 1.0 for p in params):
            x.div_(torch.tensor([p.temperature for p in params], device=self.device).unsqueeze(-1))
        probs = torch.softmax(x, -1, out=self._probs[: len(rows)])
        if any(is_restricted(p) for p in params):
            restrict(probs, params, self.vocab_size)
        return probs

    def _processed(self, logits: Tensor, rows: SequenceOf[Target]) -> Tensor:
        """These rows as f32 [n, width], padded with -inf, after everything that can change the argmax. A view of the workspace."""
        if len(self._logits) < len(rows):
            size = max(len(rows), min(self.block_rows, 2 * len(self._logits)))
            self._logits = torch.full((size, self.width), -torch.inf, device=self.device)
            self._probs = torch.empty_like(self._logits)
        x = self._logits[: len(rows)]
        first, last = rows[0][0], rows[-1][0]
        chosen = logits[first : last + 1] if last - first == len(rows) - 1 else logits[[i for i, _ in rows]]
        x[:, : self.vocab_size].copy_(chosen)
        edited = [(i, position) for i, (_, position) in enumerate(rows) if is_edited(position.seq)]
        if edited:
            edit_logits(x, edited, self.vocab_size)
        return x

    def _blocks(self, rows: list[Target]) -> Iterator[list[Target]]:
        for start in range(0, len(rows), self.block_rows):
            yield rows[start : start + self.block_rows]


def _fill(tokens: list[int], rows: list[int], values: list[int]) -> None:
    for row, value in zip(rows, values, strict=True):
        tokens[row] = value


def token_uniforms(positions: SequenceOf[Position]) -> NDArray[np.float64]:
    """The numbers that choose the tokens at these positions."""
    return uniforms([p.seq.seed for p in positions], [p.absolute for p in positions], Purpose.TOKEN)


@torch.inference_mode()
def token_logprobs(logits: Tensor, token_ids: SequenceOf[int], num_top: int) -> list[TokenLogprobs]:
    """Log probabilities (natural) of given tokens under the model itself, before any sampling parameter: vLLM's `raw_logprobs`.
    Tokens of probability 0, which a grammar forbids, are not among the most likely ones.

    logits     [n, vocab], any float dtype
    token_ids  one per row
    num_top    how many of the most likely tokens to report; equal ones by ascending id
    rank       1 + how many tokens are strictly more likely
    """
    out: list[TokenLogprobs] = []
    for start in range(0, len(token_ids), LOGPROB_ROWS):
        tokens = token_ids[start : start + LOGPROB_ROWS]
        logprobs = torch.log_softmax(logits[start : start + len(tokens)].float(), -1).cpu().numpy()
        for row, token in zip(logprobs, tokens, strict=True):
            rank = 1 + int(np.count_nonzero(row > row[token]))
            out.append(TokenLogprobs(token, float(row[token]), rank, _most_likely(row, num_top)))
    return out


def _most_likely(logprobs: NDArray[np.float32], count: int) -> tuple[tuple[int, float], ...]:
    """The `count` most likely (id, logprob) of a row [vocab]. The best of `count` disjoint columns bound the last of them from below."""
    if count == 0:
        return ()
    width = len(logprobs) // COLUMN
    bound = -np.inf
    if width >= count:
        bound = np.partition(logprobs[: COLUMN * width].reshape(COLUMN, width).max(0), -count)[-count]
    ids = np.flatnonzero(logprobs >= bound)
    best = ids[np.argsort(-logprobs[ids], kind="stable")[:count]]
    best = best[logprobs[best] > -np.inf]
    return tuple(zip(best.tolist(), logprobs[best].tolist(), strict=True))
