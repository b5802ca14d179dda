"""The one interface of every drafter.

What a drafter needs is declared as class data; the engine reads the declarations and never asks which drafter it is.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from headway.control.policy import ContinueDrafting as ContinueDrafting
from headway.control.policy import never_stop as never_stop
from headway.structured_outputs import Matcher
from headway.types import Draft

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from headway.models.attention import KVCache
    from headway.models.config import ModelConfig
    from headway.models.decoder import Decoder

@dataclass(frozen=True, slots=True)
class DraftRequest:
    """One sequence that is to be continued by at most `k` >= 1 tokens. `token_ids` is the live history: do not change it.

    block_table    the sequence's blocks in the target's K/V cache, live: room for the history and, unless blocks ran out, k drafts
    num_tentative  so many tokens at the end of the history are drafts themselves: to be continued, not to be remembered
    room           for a drafter with a `tree_size`: nodes its tree may have, at a depth of at most k
    salt           what a drafter keeps of a sequence may show in drafts for sequences of the same salt only
    matcher        of a request whose text must have a certain form: where it stands. What it forbids is cut from a draft afterwards
    """

    seq_id: int
    token_ids: list[int]
    num_prompt_tokens: int
    k: int
    greedy: bool
    block_table: list[int] = field(default_factory=list)
    num_tentative: int = 0
    room: int = 0
    salt: bytes = b""
    matcher: Matcher | None = None


@dataclass(frozen=True, slots=True)
class Committed:
    """What a step added to one sequence: the drafter's chance to bring its own state to the same length.

    hidden       the target's hidden states that `hidden_layers` declared, in that order, one tensor [num_new_computed, hidden] per
                 layer, for the positions from `start` on whose K/V the step added and kept; None when nothing was declared
    start        position of the first token whose K/V the step added (a prefix-cache hit is skipped: it begins behind it)
    block_table  as in DraftRequest, but of the computed positions only; empty when the sequence finished
    salt         as in DraftRequest
    """

    seq_id: int
    token_ids: list[int]
    num_prompt_tokens: int
    num_new: int                 # tokens appended at the end of `token_ids` in this step
    num_accepted: int            # of which accepted drafts
    start: int = 0
    hidden: tuple[Any, ...] | None = None
    block_table: list[int] = field(default_factory=list)
    salt: bytes = b""


@dataclass(frozen=True, slots=True)
class DrafterContext:
    """What a drafter will work for, known before any of its weights is loaded.

    target      the target's dimensions
    directory   where the target came from: its tokenizer, and speculators that ship with it
    model       what the speculative config names as the drafter's network; None: nothing
    progress    whether downloads may show themselves
    """

    target: ModelConfig
    directory: Path
    model: str | None
    dtype: torch.dtype
    device: torch.device
    block_size: int
    max_num_seqs: int
    num_speculative_tokens: int
    progress: bool = False


@dataclass(frozen=True, slots=True)
class DrafterMemory:
    """What a drafter takes: its weights, and K/V beside each block of the target's."""

    weight_bytes: int = 0
    kv_bytes_per_block: int = 0


class DraftSampler(Protocol):
    """Logits of a draft network -> tokens, by the request's own parameters (penalties, bans, temperature, top_p, ...), so that the
    draft distribution is shaped as the target's will be.

    logits     [n, draft vocabulary], row i after `drafted[i]`, the tokens drafted for `requests[i]` so far
    token_ids  int64 [draft vocabulary]: the target's token of each column; the others are impossible. None: it is the target's vocabulary
    """

    def takes_largest(self, requests: Sequence[DraftRequest]) -> bool:
        """Whether `likely` is the largest logit for all of them, so that it need not be asked."""

    def likely(
        self, logits: Tensor, requests: Sequence[DraftRequest], drafted: Sequence[list[int]], token_ids: Tensor | None = None
    ) -> list[int]:
        """The most likely tokens: a function of the prefix."""

    def sampled(
        self, logits: Tensor, requests: Sequence[DraftRequest], drafted: Sequence[list[int]], token_ids: Tensor | None = None
    ) -> tuple[list[int], Tensor]:
        """For requests that are not greedy: tokens drawn with their sequences' own numbers, and the distributions f32 [n, vocab]."""

    def candidates(
        self, logits: Tensor, requests: Sequence[DraftRequest], drafted: Sequence[list[int]], count: int, token_ids: Tensor | None = None
    ) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """The `count` (or all) most likely tokens and their probabilities, most likely first: [n, count] each, a function of the prefix."""

    def branches(
        self, logits: Tensor, requests: Sequence[DraftRequest], drafted: Sequence[list[int]], counts: Sequence[int],
        firsts: Sequence[int], token_ids: Tensor | None = None,
    ) -> tuple[list[list[int]], Tensor]:
        """For requests that are not greedy: `counts[i]` different tokens drawn without replacement, in the order of drawing, and the
        distributions f32 [n, vocab]. The sequence's numbers `firsts[i]`, `firsts[i]` + 1, ... draw them: no two may draw with the same."""


@dataclass(frozen=True, slots=True)
class Target:
    """The loaded target, for drafters that own or share a network.

    cache        its K/V; position p of a sequence is in block `block_table[p // block_size]`, slot `p % block_size`
    generations  per block of the cache, how often it was given out: while the number stays, the block holds the same tokens
    """

    model: Decoder
    cache: KVCache
    generations: Sequence[int]
    max_model_len: int
    sampler: DraftSampler


class Drafter(ABC):
    """Proposes draft tokens. Lifecycle: `bind` and `load` once; per sequence propose / commit in any order and number, then `stop`.

    A drafter must tolerate gaps: a sequence that was not asked for some steps (k = 0) is caught up from `token_ids` when it is
    asked again. `start` is not needed: state is made lazily from the history, so preemption and prefix hits need no case of
    their own. A drafter that works on token ids alone implements `propose` and, if it wants to, `commit` and `stop`.
    """

    name: ClassVar[str] = ""
    takes_model: ClassVar[bool] = False             # `SpeculativeConfig.model` may name its network
    needs_model: ClassVar[bool] = False             # and must
    hidden_layers: tuple[int, ...] = ()             # target layers whose hidden states `commit` wants; -1: after the final norm
    deterministic: bool = True                      # drafts are a function of the prefix (Draft.probs is None)
    tree_size: int = 0                              # drafts trees of at most so many nodes (Draft.parents); 0: chains
    stepwise: bool = False                          # asks before it predicts a further token, so stopping early saves time
    needs_grammar: ClassVar[bool] = False           # drafts for requests only whose text must have a certain form
    reads_commits: ClassVar[bool] = False           # `commit` is to be called; a drafter that declares `hidden_layers` is told anyway

    def bind(self, context: DrafterContext) -> DrafterMemory:
        """What it will work for: reads configurations, no weights, and settles `hidden_layers`. Raises ConfigError or ModelError when
        it cannot work for this target."""
        return DrafterMemory()

    def load(self, target: Target) -> None:
        """The memory is planned and the target is there: loads weights, allocates K/V."""
        return

    @abstractmethod
    def propose(self, requests: Sequence[DraftRequest], continue_drafting: ContinueDrafting) -> list[Draft]:
        """One draft per request, in order; a draft may be shorter than k, or empty."""

    def commit(self, committed: Sequence[Committed]) -> None:
        """A step ended: tokens were appended to these sequences."""
        return

    def stop(self, seq_id: int) -> None:
        """The sequence finished or was aborted: forget it. Unknown ids are fine (it may never have drafted)."""
        return


def stop_early(requests: Sequence[DraftRequest], drafts: list[Draft], continue_drafting: ContinueDrafting) -> list[Draft]:
    """Trims drafts that were made in one go (ngram, suffix) where the policy would have stopped: position by position it is
    asked about the drafts that go on behind it and were not stopped so far."""
    if continue_drafting is never_stop:
        return drafts
    lengths = np.array([len(draft.tokens) for draft in drafts], dtype=np.int64)
    stops = np.minimum(lengths, 1)
    confidence = np.full((len(drafts), int(lengths.max(initial=0))), np.nan)
    for i, draft in enumerate(drafts):
        if draft.confidence is not None:
            confidence[i, : len(draft.confidence)] = draft.confidence
    for position in range(confidence.shape[1] - 1):
        asked = np.flatnonzero((lengths > position + 1) & (stops == position + 1))
        if len(asked) == 0:
            break
        going = continue_drafting([requests[i].seq_id for i in asked.tolist()], position, confidence[asked, position])
        stops[asked[going]] = position + 2
    return [draft.truncated(length) for draft, length in zip(drafts, stops.tolist(), strict=True)]
