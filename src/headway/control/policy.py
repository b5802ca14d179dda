"""What a policy may see and what it may ask for.

A policy proposes, the scheduler bounds what it proposed. It sees numbers only: no tensors, no blocks, no token ids.

Losslessness is part of the contract. When drafts are sampled, whether draft position j is verified may depend on the
prefix before j, on prefix-only functions of the draft distribution at j (`confidence`), and on statistics fixed before
the token at j was drawn; never on the token drawn at j or its probability. Deterministic drafts and greedy requests
are free of this. Whether a drafter that samples is asked at all may depend on deterministic drafts of others (lookups):
they are functions of the prefix, and nothing was drawn yet. `DraftView` carries nothing that could break the rule, and
tests/unit/test_anticipation.py shows what happens to the output distribution when a drafter smuggles it in.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from headway.control.costs import CostModel
from headway.types import Choice, Feedback, Forecast


@dataclass(frozen=True, slots=True)
class DrafterView:
    """One configured drafter."""

    name: str
    deterministic: bool         # its drafts are always a function of the prefix; else only those of greedy requests are
    drafts_ahead: bool = False  # it drafts to max_k before it is asked: what is asked for only bounds what is verified
    stepwise: bool = False      # it asks `continue_drafting` before it predicts a further token, so stopping saves time


@dataclass(frozen=True, slots=True)
class Setup:
    """What a policy gets once, before the first step."""

    drafters: tuple[DrafterView, ...]   # in the user's order of preference
    max_k: int                          # num_speculative_tokens: the hard upper bound
    costs: CostModel                    # of this machine, profiled when the policy `needs_costs`, else empty; the policy's own from now on
    learned: Mapping[str, Any] | None = None   # what `Policy.learned` of the same policy gave in an earlier run


@dataclass(frozen=True, slots=True)
class SequenceView:
    """One sequence that could run in the step to be planned."""

    seq_id: int
    num_context: int          # known tokens
    num_output: int
    decoding: bool            # its next row samples from a single known token: only these can speculate
    max_k: int                # what the request, its remaining tokens and the context limit allow; 0: do not draft
    greedy: bool
    priority: int
    num_drafts: int           # verified so far in this sequence
    num_accepted: int
    num_pending: int = 1      # known tokens that are not computed yet: 1 when it decodes, what is left of its prompt before
    tpot_slo_ms: float | None = None   # milliseconds per output token that this request should not exceed


@dataclass(frozen=True, slots=True)
class BatchView:
    """The whole step to be planned, before anything is drafted."""

    step: int
    sequences: tuple[SequenceView, ...]
    num_waiting: int
    num_free_blocks: int
    token_budget: int
    drafters: tuple[str, ...]   # configured, in the user's order of preference
    max_k: int                  # num_speculative_tokens: the hard upper bound

    @property
    def num_decoding(self) -> int:
        """The batch size that speculation is about: sequences that decode. Prefill chunks do not count."""
        return sum(seq.decoding for seq in self.sequences)


@dataclass(frozen=True, slots=True)
class DraftView:
    """One finished draft, without its tokens. Of a tree, `length` counts nodes: the first ones are the best tree of their number."""

    seq_id: int
    drafter: str
    length: int
    deterministic: bool
    confidence: tuple[float, ...] | None
    parents: tuple[int, ...] | None = None      # as in `Draft`


class Policy(ABC):
    """Decides how much to speculate: `plan` before drafting, `select` before verification, `observe` after the step.

    Only `plan` must be written. A policy that has options declares a frozen dataclass `Options` in its file and takes one in `__init__`.
    A policy that also compares drafters or stops them while they draft is an `AdaptivePolicy`.
    """

    name: str = ""
    needs_costs: ClassVar[bool] = False   # start it with a measured cost model

    # What the policy says about itself: read after `select`, written into the step's Feedback.
    reason: str = ""                      # why it last changed what it does: "one of a few phrases" or "a phrase: with numbers"
    forecast: Forecast | None = None      # what it expects of the step it has just chosen

    def start(self, setup: Setup) -> None:
        """Once, before the first step. Raises ValueError, TypeError or KeyError for a `setup.learned` that it cannot read."""
        return

    @abstractmethod
    def plan(self, view: BatchView) -> Mapping[int, Choice]:
        """Before drafting: seq_id -> Choice. A sequence left out gets k = 0. Only decoding sequences are honoured."""

    def select(self, drafts: Sequence[DraftView], view: BatchView) -> Mapping[int, int]:
        """After drafting: seq_id -> how many of its drafts to verify. A sequence left out has all of them verified."""
        return {}

    def observe(self, feedback: Feedback) -> None:
        """After the step: what happened."""
        return

    def learned(self) -> dict[str, Any]:
        """What a later start may begin with, beside the cost model: JSON, handed over as `Setup.learned`. Called between steps.

        Whoever runs the policy may ignore it.
        """
        return {}


ContinueDrafting = Callable[[Sequence[int], int, NDArray[np.float64]], NDArray[np.bool_]]
"""`AdaptivePolicy.continue_drafting`: (seq_ids, position, confidence [n]) -> which go on drafting behind that position."""


def never_stop(seq_ids: Sequence[int], position: int, confidence: NDArray[np.float64]) -> NDArray[np.bool_]:
    """The `ContinueDrafting` that lets every draft go on."""
    return np.ones(len(seq_ids), dtype=np.bool_)


class AdaptivePolicy(Policy):
    """A policy with a say in more of the step. The defaults of its hooks do what is done for every other policy."""

    def rests(self, step: int) -> bool:
        """Whether it is settled that `plan` asks nobody in this step to come: nobody need draft for it, and `plan` may be left out."""
        return False

    def shadow(self, view: BatchView) -> Mapping[int, Choice]:
        """After `plan`: drafts to make but not to verify, seq_id -> Choice; see `ShadowFeedback` for what comes back.

        For sequences that the plan leaves to another drafter, or to none. Its price is the drafting.
        """
        return {}

    def choose_lookup(self, drafts: Sequence[DraftView], view: BatchView) -> Mapping[int, str]:
        """After the drafters in `Choice.lookups` were asked, before any other is: seq_id -> which of them drafts for this sequence.

        A sequence left out goes on to the drafter of its `Choice`. One that is not stays with the lookup chosen, also when that is empty:
        then nobody drafts for it in this step. Default: the first drafter in the user's order that found something.

        drafts  those that were found and are not empty; several of one sequence in the user's order of preference
        """
        return {draft.seq_id: draft.drafter for draft in reversed(drafts)}

    def stops_early(self, drafter: str) -> bool:
        """Whether `continue_drafting` is to be asked while `drafter` drafts in this step. Where it is not, several tokens can be predicted
        in one go. Default: no. A policy that writes its own `continue_drafting` says yes here."""
        return False

    def continue_drafting(self, seq_ids: Sequence[int], position: int, confidence: NDArray[np.float64]) -> NDArray[np.bool_]:
        """While drafting: which of these sequences should go on behind `position` (0-based)? Default: all of them.

        The token at `position` is drafted already: what it is drawn from had to be computed to know this confidence.

        confidence  [n] the drafter's prefix-only confidence at that position, NaN when it has none
        """
        return never_stop(seq_ids, position, confidence)


class Plain(AdaptivePolicy):
    """Nobody drafts. Its hooks are the defaults."""

    def plan(self, view: BatchView) -> Mapping[int, Choice]:
        return {}


def hooks_of(policy: Policy) -> AdaptivePolicy:
    """Where to call the hooks of `AdaptivePolicy`: the policy itself when it is one, else their defaults."""
    return policy if isinstance(policy, AdaptivePolicy) else Plain()
