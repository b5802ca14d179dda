"""A complete drafter: draft what followed the first occurrence of the last token.

    PYTHONPATH=examples headway generate -p "a\nb\na\n" --spec-method first_time_drafter:FirstTime --max-tokens 16
"""

from __future__ import annotations

from collections.abc import Sequence

from headway.drafters.drafter import ContinueDrafting, Drafter, DraftRequest, stop_early
from headway.types import Draft


class FirstTime(Drafter):
    def propose(self, requests: Sequence[DraftRequest], continue_drafting: ContinueDrafting) -> list[Draft]:
        """One draft per request: the tokens that followed the first occurrence of its last token."""
        drafts = []
        for request in requests:
            history = request.token_ids
            after = history.index(history[-1]) + 1
            drafts.append(Draft(history[after : after + request.k]))
        return stop_early(requests, drafts, continue_drafting)
