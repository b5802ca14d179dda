"""The one interface of every drafter.

What a drafter needs is declared as class data; the engine reads the declarations and never asks which drafter it is.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from headway.control.policy import Policy
from headway.types import Draft

Keep = Callable[[Sequence[int], int, NDArray[np.float64]], NDArray[np.bool_]]
"""`Policy.keep`: (seq_ids, position, confidence [n]) -> which go on drafting at that position."""


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """One sequence that is to be continued by at most `k` >= 1 tokens. `token_ids` is the live history: do not change it."""

    seq_id: int
    token_ids: list[int]
    num_prompt_tokens: int
    k: int
    greedy: bool


@dataclass(frozen=True, slots=True)
class Committed:
    """What a step added to one sequence: the drafter's chance to bring its own state to the same length.

    start   position of the first token whose K/V the step added (a prefix-cache hit is skipped: it begins behind it)
    hidden  the target's hidden states that `hidden_layers` declared, one tensor [num_new_computed, hidden] per layer,
            for the positions from `start` whose K/V the step added and kept; None when nothing was declared
    """

    seq_id: int
    token_ids: list[int]
    num_prompt_tokens: int
    num_new: int                 # tokens appended at the end of `token_ids` in this step
    num_accepted: int            # of which accepted drafts
    start: int = 0
    hidden: tuple[Any, ...] | None = None


class Drafter(ABC):
    """Proposes draft tokens. Lifecycle per sequence: propose / commit in any order and number, then `stop`.

    A drafter must tolerate gaps: a sequence that was not asked for some steps (k = 0) is caught up from `token_ids` when it is
    asked again. `start` is not needed: state is made lazily from the history, so preemption and prefix hits need no case of
    their own.
    """

    name: ClassVar[str] = ""
    hidden_layers: ClassVar[tuple[int, ...]] = ()   # target layers whose hidden states `commit` wants; -1: after the final norm
    own_kv: ClassVar[bool] = False                  # keeps K/V of its own, to be accounted in the KV budget
    takes_model: ClassVar[bool] = False             # `SpeculativeConfig.model` names its network
    deterministic: ClassVar[bool] = True            # drafts are a function of the prefix (Draft.probs is None)

    @abstractmethod
    def propose(self, requests: Sequence[DraftRequest], keep: Keep) -> list[Draft]:
        """One draft per request, in order; a draft may be shorter than k, or empty."""

    def commit(self, committed: Sequence[Committed]) -> None:
        """A step ended: tokens were appended to these sequences."""
        return

    def stop(self, seq_id: int) -> None:
        """The sequence finished or was aborted: forget it. Unknown ids are fine (it may never have drafted)."""
        return


def keep_all(seq_ids: Sequence[int], position: int, confidence: NDArray[np.float64]) -> NDArray[np.bool_]:
    """The `Keep` that never stops a draft."""
    return np.ones(len(seq_ids), dtype=np.bool_)


def apply_keep(requests: Sequence[DraftRequest], drafts: list[Draft], keep: Keep) -> list[Draft]:
    """Trims drafts that were made in one go (ngram, suffix) where the policy would have stopped: position by position it is
    asked about the drafts that reach there and were kept so far."""
    if keep is keep_all or getattr(keep, "__func__", None) is Policy.keep:
        return drafts
    lengths = np.array([len(draft.tokens) for draft in drafts], dtype=np.int64)
    kept = np.zeros_like(lengths)
    confidence = np.full((len(drafts), int(lengths.max(initial=0))), np.nan)
    for i, draft in enumerate(drafts):
        if draft.confidence is not None:
            confidence[i, : len(draft.confidence)] = draft.confidence
    for position in range(confidence.shape[1]):
        asked = np.flatnonzero((lengths > position) & (kept == position))
        if len(asked) == 0:
            break
        going = keep([requests[i].seq_id for i in asked.tolist()], position, confidence[asked, position])
        kept[asked[going]] = position + 1
    return [draft.truncated(length) for draft, length in zip(drafts, kept.tolist(), strict=True)]
