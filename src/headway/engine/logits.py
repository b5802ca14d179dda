"""From raw logits to the distribution a request asked for, for a batch of logit rows.

Order of operations (vLLM's): what the request's grammar forbids, bad words, min_tokens, logit_bias, repetition / frequency / presence
penalties, temperature, min_p, top_k, top_p. The first group can change the argmax, so greedy rows pass through it too; the rest cannot.

min_p, top_k and top_p each keep the tokens above some probability, so all three together are one lower bound per row. Finding
the bound never sorts the vocabulary unless the kept set is huge, and tokens that tie with the bound are all kept, which makes
the kept set a function of the row alone: no sort order, no batch, no tie-breaking comes into it.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headway import native
from headway.native import ops
from headway.sampling_params import SamplingParams
from headway.types import Sequence

CHUNK = 64                              # f32 rows are padded to a multiple of this
ARGMAX_CHUNKS = (1024, 512, 256, 128)
COLUMN = 16                             # tokens that share one maximum in the search for the largest probabilities
TINY = 1e-38                            # no token is less likely and drawn: uniforms have 53 bits
SEARCH_COLUMNS = 256                    # columns looked at before a whole row is sorted


IntArray = NDArray[np.int64]
Part = tuple[int, IntArray, "float | NDArray[np.float32]"]   # (row, token ids, one value for all or one for each)


class Position(NamedTuple):
    """One logit row: it decides the token that follows `seq.token_ids + drafts[:depth]`."""

    seq: Sequence
    drafts: list[int]
    depth: int

    @property
    def absolute(self) -> int:
        """Index in the sequence of the token this row decides."""
        return len(self.seq.token_ids) + self.depth

    def mask(self) -> bytes | None:
        """The tokens that the request's grammar allows here, as `Matcher.mask` gives them; None: any."""
        return None if self.seq.matcher is None else self.seq.matcher.mask(self.drafts[: self.depth])


def argmax(logits: Tensor) -> Tensor:
    """[n, width] -> int64 [n]; the first index wins ties, as in torch.argmax.

    On CPU torch.argmax over bf16 is about ten times slower than reading the row: without the compiled kernel, take the maximum of each
    chunk first (vectorised), then search the winning chunk only.
    """
    count, width = logits.shape
    library = native.library() if logits.device.type == "cpu" else None
    if library is not None and logits.stride(1) == 1:
        return ops.argmax(library, logits)
    chunk = next((c for c in ARGMAX_CHUNKS if width % c == 0 and width > c), 0)
    if logits.device.type != "cpu" or count == 0:
        return logits.argmax(-1)
    if not chunk or not logits.is_contiguous():
        return logits.max(-1).indices
    chunks = logits.view(-1, chunk)
    winner = chunks.amax(-1).view(count, -1).max(-1).indices
    first_chunk = torch.arange(0, chunks.shape[0], width // chunk)
    return winner * chunk + chunks.index_select(0, winner + first_chunk).max(-1).indices


def is_edited(seq: Sequence) -> bool:
    """Whether any row of `seq` in this step needs `edit_logits`."""
    params = seq.params
    return bool(
        seq.matcher is not None
        or params.logit_bias
        or seq.bad_words_token_ids
        or params.min_tokens > seq.num_output_tokens
        or params.repetition_penalty != 1.0
        or params.frequency_penalty != 0.0
        or params.presence_penalty != 0.0
    )


def is_restricted(params: SamplingParams) -> bool:
    """Whether min_p, top_k or top_p may remove a token."""
    return params.top_p < 1.0 or params.top_k > 0 or params.min_p > 0.0


def edit_logits(logits: Tensor, edited: SequenceOf[tuple[int, Position]], vocab_size: int) -> None:
    """Applies everything that can change the argmax to these (row, position) pairs of `logits` f32 [n, >= vocab_size], in place."""
    mask_logits(logits, edited, vocab_size)
    banned = [(row, np.array(sorted(tokens)), 0.0) for row, position in edited if (tokens := banned_tokens(position, vocab_size))]
    if banned:
        logits.index_put_(_scattered(logits, banned)[0], torch.tensor(-torch.inf, device=logits.device))
    biases: dict[int, tuple[IntArray, NDArray[np.float32]]] = {}
    for _, (seq, _, _) in edited:
        if seq.params.logit_bias and id(seq) not in biases:
            bias = seq.params.logit_bias
            biases[id(seq)] = np.array(list(bias), dtype=np.int64), np.array(list(bias.values()), dtype=np.float32)
    if biases:
        where, values = _scattered(logits, [(row, *biases[id(p.seq)]) for row, p in edited if id(p.seq) in biases])
        logits.index_put_(where, values, accumulate=True)
    _penalise(logits, edited)


def mask_logits(logits: Tensor, positions: SequenceOf[tuple[int, Position]], vocab_size: int) -> None:
    """Sets what the grammars of these (row, position) pairs forbid to -inf, in place. logits f32 [n, >= vocab_size].

    On CPU numpy does it: torch would wake its threads for so little.
    """
    for row, position in positions:
        mask = position.mask()
        if mask is None:
            continue
        bits = np.frombuffer(mask, dtype=np.uint8)
        if logits.device.type == "cpu":
            forbidden = np.unpackbits(~bits, count=vocab_size, bitorder="little").view(np.bool_)
            np.copyto(logits[row, :vocab_size].numpy(), -np.inf, where=forbidden)
        else:
            each_bit = torch.tensor([1 << bit for bit in range(8)], dtype=torch.uint8, device=logits.device)
            allowed = torch.tensor(bits, device=logits.device).unsqueeze(-1).bitwise_and(each_bit).view(-1)[:vocab_size]
            logits[row, :vocab_size].masked_fill_(allowed == 0, -torch.inf)


def banned_tokens(position: Position, vocab_size: int) -> set[int]:
    """What bad_words and min_tokens forbid at this position. A bad word is matched against the output, not the prompt (vLLM's rule).

    A row that would forbid the whole vocabulary, or all that its grammar allows, forbids nothing: there would be no token to write.
    """
    seq, drafts, depth = position
    banned: set[int] = set()
    if seq.num_output_tokens + depth < seq.params.min_tokens:
        banned |= {token for token in seq.eos_token_ids | seq.stop_token_ids if 0 <= token < vocab_size}
    if seq.bad_words_token_ids:
        longest = max(len(word) for word in seq.bad_words_token_ids) - 1
        tail = tuple(seq.token_ids[max(seq.num_prompt_tokens, len(seq.token_ids) - longest) :] + drafts[:depth])
        for word in seq.bad_words_token_ids:
            prefix = word[:-1]
            if not prefix or tail[-len(prefix) :] == prefix:
                banned.add(word[-1])
    mask = position.mask() if banned else None
    if mask is not None and banned.issuperset(np.flatnonzero(np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")).tolist()):
        return set()
    return banned if len(banned) < vocab_size else set()


def _penalise(logits: Tensor, edited: SequenceOf[tuple[int, Position]]) -> None:
    """Repetition over prompt and output (logit > 0: divide, else multiply), then frequency and presence over the output only."""
    histories: dict[int, IntArray] = {}
    repeated: list[Part] = []
    counted: list[Part] = []
    present: list[Part] = []
    for row, (seq, drafts, depth) in edited:
        params = seq.params
        if params.repetition_penalty == 1.0 and params.frequency_penalty == 0.0 and params.presence_penalty == 0.0:
            continue
        if id(seq) not in histories:
            histories[id(seq)] = np.array(seq.token_ids, dtype=np.int64)
        history = np.concatenate((histories[id(seq)], np.array(drafts[:depth], dtype=np.int64)))
        output = history[seq.num_prompt_tokens :]
        if params.repetition_penalty != 1.0:
            repeated.append((row, history, params.repetition_penalty))
        if params.frequency_penalty != 0.0:
            counted.append((row, output, params.frequency_penalty))
        if params.presence_penalty != 0.0:
            present.append((row, output, params.presence_penalty))
    # All values are read before any is written, so a token that occurs twice is penalised once.
    if repeated:
        where, penalty = _scattered(logits, repeated)
        values = logits[where]
        logits.index_put_(where, torch.where(values > 0, values / penalty, values * penalty))
    if counted:
        where, penalty = _scattered(logits, counted)
        logits.index_put_(where, -penalty, accumulate=True)
    if present:
        where, penalty = _scattered(logits, present)
        logits.index_put_(where, logits[where] - penalty)


def _scattered(logits: Tensor, parts: SequenceOf[Part]) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """(row, token ids, values) parts -> ((rows, token ids), values), one entry per token id, on the logits' device."""
    rows = np.repeat(np.array([row for row, _, _ in parts], dtype=np.int64), [len(tokens) for _, tokens, _ in parts])
    tokens = np.concatenate([tokens for _, tokens, _ in parts])
    values = np.concatenate([np.broadcast_to(np.float32(value), tokens.shape) for _, tokens, value in parts])
    on_device = [torch.from_numpy(array).to(logits.device) for array in (rows, tokens, values)]
    return (on_device[0], on_device[1]), on_device[2]


def restrict(probs: Tensor, params: SequenceOf[SamplingParams], vocab_size: int) -> None:
    """Sets what min_p, top_k and top_p remove to 0, in place; the kept values of a row are scaled by a common factor.

    probs  f32 [n, width], rows sum to 1

    Dividing by the floor first makes one scalar threshold serve all rows; comparing and masking is several times slower.
    """
    probs.div_(_floors(probs, params, vocab_size).clamp_(min=TINY).unsqueeze(-1))
    torch.threshold_(probs, 1.0 - 2.0**-24, 0.0)


def _floors(probs: Tensor, params: SequenceOf[SamplingParams], vocab_size: int) -> Tensor:
    """The smallest probability that min_p, top_k and top_p keep in each row: f32 [n].

    top_p keeps the most likely tokens of what min_p and top_k left, up to and including the one with which their share reaches it.
    """
    min_p = [p.min_p for p in params]
    searched = [i for i, p in enumerate(params) if p.top_p < 1.0 or 0 < p.top_k < vocab_size]
    floors = torch.zeros(len(params), dtype=probs.dtype, device=probs.device)
    if any(min_p):
        floors = probs.amax(-1) * torch.tensor(min_p, dtype=probs.dtype, device=probs.device)
    if searched:
        top_k = torch.tensor([p.top_k if 0 < p.top_k < vocab_size else 0 for p in params], device=probs.device)
        top_p = torch.tensor([p.top_p for p in params], dtype=torch.float64, device=probs.device)
        library = native.library() if probs.device.type == "cpu" else None
        if library is not None:
            return ops.top_floors(library, probs, floors, top_k, top_p)
        pending = torch.tensor(searched, device=probs.device)
        for columns in (SEARCH_COLUMNS, probs.shape[1]):
            rows = probs if len(pending) == len(params) else probs.index_select(0, pending)
            found, sure = _search(*_largest(rows, columns), floors[pending], top_k[pending], top_p[pending])
            floors[pending[sure]] = found[sure]
            pending = pending[~sure]
            if not len(pending):
                break
    return floors


def _largest(probs: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    """The largest probabilities of each row, descending [n, m], and a bound [n]: every value above it is among them.

    The row is cut into columns of COLUMN tokens (strided, so that their maxima vectorise); whatever exceeds the maximum of the
    best column left out must lie in the columns looked at. On CPU numpy's partition and sort run many times faster than torch's,
    which carry indices along; on a GPU sorting is cheap. A bound of -1: nothing is left out.
    """
    count, width = probs.shape
    nothing = torch.full((count,), -1.0, device=probs.device)
    if probs.device.type != "cpu":
        return probs.sort(-1, descending=True).values, nothing
    grid = probs.view(count, COLUMN, width // COLUMN)
    left_out = grid.shape[2] - columns - 1
    if left_out < 0:
        return _descending(probs.numpy()), nothing
    best = grid.amax(1).numpy()
    chosen = np.argpartition(best, left_out, axis=-1)[:, left_out:]
    inside = np.take_along_axis(grid.numpy(), chosen[:, None, 1:], axis=2).reshape(count, -1)
    return _descending(inside), torch.from_numpy(np.take_along_axis(best, chosen[:, :1], axis=1).squeeze(-1))


def _descending(values: NDArray[np.float32]) -> Tensor:
    return torch.from_numpy(np.sort(values, -1)).flip(-1)


def _search(values: Tensor, bound: Tensor, floors: Tensor, top_k: Tensor, top_p: Tensor) -> tuple[Tensor, Tensor]:
    """The floors under min_p, top_k and top_p as far as `values` show them, and whether they show enough: (f32 [n], bool [n]).

    values, bound as from `_largest`; floors [n] those of min_p; top_k [n] with 0 for off.
    """
    width = values.shape[1]
    complete = bound <= 0.0     # all that is left out has probability 0
    kth = values.gather(-1, (top_k.clamp(1, width) - 1).unsqueeze(-1)).squeeze(-1)
    floors = torch.where(top_k > 0, torch.maximum(floors, kth), floors)
    seen = complete | ((floors == 0) & (top_k == 0)) | ((top_k <= width) & (floors > bound))
    cumulative = torch.where(values >= floors.unsqueeze(-1), values, 0.0).double().cumsum(-1)
    target = top_p * torch.where(floors > 0, cumulative[:, -1], 1.0)
    crossing = torch.searchsorted(cumulative, target.unsqueeze(-1)).clamp_(max=width - 1)
    last = values.gather(-1, crossing).squeeze(-1)
    reached = cumulative.gather(-1, crossing).squeeze(-1) >= target
    sure = seen & (complete | (top_p >= 1.0) | (reached & (last > bound)))
    return torch.where(top_p < 1.0, torch.maximum(floors, last), floors), sure
