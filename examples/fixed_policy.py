"""A complete policy: two drafts for everybody while at most four requests write.

    PYTHONPATH=examples headway generate -p "a b c a b c" --spec-policy fixed_policy:SmallBatches --max-tokens 16
"""

from __future__ import annotations

from collections.abc import Mapping

from headway.control.policy import BatchView, Policy
from headway.types import Choice


class SmallBatches(Policy):
    def plan(self, view: BatchView) -> Mapping[int, Choice]:
        """Before drafting: which drafter proposes how many tokens for which request. Who is left out gets none."""
        if view.num_decoding > 4:
            return {}
        able = [seq for seq in view.sequences if seq.decoding and seq.max_k > 0]
        return {seq.seq_id: Choice(view.drafters[0], min(2, seq.max_k)) for seq in able}
