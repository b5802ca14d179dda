"""Stop when a rejection has become likely: SpecDec++'s rule, with any drafter's confidence.

A draft goes on behind position j while

    1 - product of confidence_i over i <= j   <=   rejection_threshold

and the token at which it stops is verified with the others: its confidence became known with all there is to draft it.

The confidence of a position is the drafter's estimate that the target accepts it, made from the prefix before it (match length and
counts for ngram and suffix, a trained head or the draft distribution's maximum for models), so the rule is lossless for sampled
drafts, too. A position without confidence counts as certain. The first drafter of the list drafts, at most num_speculative_tokens.

Source: Huang et al., "SpecDec++" (arXiv 2405.19715): the threshold policy of section 3 and h = 0.3 of its examples; there a head is
trained for it. It knows nothing of cost: it drafts as much at batch 64 as at batch 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headway.config import option
from headway.control.policies.static import same_for_all
from headway.control.policy import AdaptivePolicy, BatchView, DraftView
from headway.errors import ConfigError
from headway.types import Choice


class Confidence(AdaptivePolicy):
    @dataclass(frozen=True)
    class Options:
        rejection_threshold: float = option(0.3, "stop where the probability of at least one rejection exceeds this, in [0, 1]")

        def __post_init__(self) -> None:
            if not 0.0 <= self.rejection_threshold <= 1.0:
                raise ConfigError(f"rejection_threshold must be in [0, 1], got {self.rejection_threshold}")

    def __init__(self, options: Options | None = None) -> None:
        self._least = 1.0 - (options or self.Options()).rejection_threshold
        self._product: dict[int, float] = {}   # seq_id -> of the confidences so far, in this step

    def plan(self, view: BatchView) -> Mapping[int, Choice]:
        self._product = {}
        return same_for_all(view, view.max_k)

    def stops_early(self, drafter: str) -> bool:
        return True

    def continue_drafting(self, seq_ids: Sequence[int], position: int, confidence: NDArray[np.float64]) -> NDArray[np.bool_]:
        so_far = np.array([self._product.get(seq_id, 1.0) for seq_id in seq_ids])
        product = so_far * np.where(np.isfinite(confidence), confidence, 1.0)
        self._product.update(zip(seq_ids, product.tolist(), strict=True))
        going: NDArray[np.bool_] = product >= self._least - 1e-12
        return going

    def select(self, drafts: Sequence[DraftView], view: BatchView) -> Mapping[int, int]:
        return {draft.seq_id: self._length(draft) for draft in drafts}

    def _length(self, draft: DraftView) -> int:
        """The same rule for a drafter that does not ask `continue_drafting`. One that makes trees does, level by level."""
        if draft.parents is not None:
            return draft.length
        product = 1.0
        for position, confidence in enumerate(draft.confidence or ()):
            product *= confidence if np.isfinite(confidence) else 1.0
            if product < self._least - 1e-12:
                return position + 1
        return draft.length
