"""A complete drafter: draft what followed the first occurrence of the last token.

    PYTHONPATH=examples headway generate -p "a\nb\na\n" --spec-method first_time_drafter:FirstTime --max-tokens 16
"""

from __future__ import annotations

from collections.abc import Sequence

from headway.drafters.drafter import Drafter, DraftRequest, Keep, apply_keep
from headway.types import Draft


class FirstTime(Drafter):
    def propose(self, requests: Sequence[DraftRequest], keep: Keep) -> list[Draft]:
        """One draft per request: the tokens that followed the first occurrence of its last token."""
        drafts = []
        for request in requests:
            history = request.token_ids
            first = history.index(history[-1])
            drafts.append(Draft(history[first + 1 : first + 1 + request.k] if first + 1 < len(history) else []))
        return apply_keep(requests, drafts, keep)
