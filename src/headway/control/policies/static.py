"""Always k: every sequence that decodes gets num_speculative_tokens drafts, at any load."""

from __future__ import annotations

from collections.abc import Mapping

from headway.control.policy import BatchView, Policy
from headway.types import Choice


def same_for_all(view: BatchView, k: int) -> dict[int, Choice]:
    """At most `k` drafts, from the user's first drafter, for each sequence that decodes and may draft."""
    return {seq.seq_id: Choice(view.drafters[0], min(k, seq.max_k)) for seq in view.sequences if seq.decoding and min(k, seq.max_k) > 0}


class Static(Policy):
    def plan(self, view: BatchView) -> Mapping[int, Choice]:
        return same_for_all(view, view.max_k)
