"""What the grammar of a request leaves no choice about: the names of a schema's fields, the rest of a word that has begun.

The grammar forces characters, not tokens: the target may spell them with others than these, so they are verified as any draft is. Every
copied draft, an empty one too, goes on with them (`engine/proposing.py`); this drafter proposes them alone. It has nothing for requests
whose text may have any form.
"""

from __future__ import annotations

from collections.abc import Sequence

from headway.drafters.drafter import ContinueDrafting, Drafter, DraftRequest, stop_early
from headway.types import Draft

FORCED = 0.9   # P(the target spells it with this token), before a policy learns how often it does


class Grammar(Drafter):
    needs_grammar = True

    def propose(self, requests: Sequence[DraftRequest], continue_drafting: ContinueDrafting) -> list[Draft]:
        return stop_early(requests, [with_forced(Draft([], confidence=[]), request) for request in requests], continue_drafting)


def with_forced(draft: Draft, request: DraftRequest) -> Draft:
    """A chain that is a function of the prefix, and what must follow it."""
    if request.matcher is None or draft.probs is not None or draft.parents is not None:
        return draft
    more = request.matcher.forced(draft.tokens, request.k - len(draft))
    if not more:
        return draft
    known = draft.confidence if draft.confidence is not None or draft.tokens else []
    return Draft([*draft.tokens, *more], confidence=None if known is None else [*known, *[FORCED] * len(more)])
