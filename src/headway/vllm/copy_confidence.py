"""How good a draft that was copied from the request's own text may be: vLLM's ngram drafter does not say, the text does.

The longer the match before the place it was copied from, the likelier the copy goes on. That is the confidence Headway's own ngram
drafter gives (drafters/ngram.py), found again from the outside; the policy calibrates it on what is accepted.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import lru_cache

from headway.drafters.core.ngram_index import acceptance
from headway.drafters.ngram import MEASURED_MATCH

_LOOKED_UP = (4, 3, 2, 1)   # tokens before the copy that must match, tried in this order
_CODE = "i"
_SIZE = array(_CODE).itemsize


class History:
    """A request's tokens as bytes, in which a search is one call into C."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        self._token_ids = token_ids
        self._bytes = bytearray()

    def confidence(self, draft: Sequence[int]) -> list[float] | None:
        """[len(draft)] for a draft that follows the last token; None when it was not copied from here."""
        matched = self._matched(draft)
        return list(_confidence(matched, len(draft))) if matched else None

    def _matched(self, draft: Sequence[int]) -> int:
        """Tokens that agree before the copy and before the draft."""
        known, tokens = self._bytes, self._token_ids
        known += array(_CODE, tokens[len(known) // _SIZE :]).tobytes()
        copied = array(_CODE, draft).tobytes()
        end = len(known)
        for order in _LOOKED_UP:
            if order * _SIZE >= end:
                continue
            at = _find(known, bytes(known[-order * _SIZE :]) + copied)
            if at >= 0:
                position, matched = at // _SIZE + order - 1, order   # of the last token before the copy
                last = end // _SIZE - 1
                limit = min(position + 1, MEASURED_MATCH)
                while matched < limit and tokens[position - matched] == tokens[last - matched]:
                    matched += 1
                return matched
        return 0


@lru_cache(maxsize=4096)
def _confidence(matched: int, length: int) -> tuple[float, ...]:
    return tuple(acceptance(1, 1, matched + j) for j in range(length))


def _find(known: bytearray, pattern: bytes) -> int:
    """Offset of the first place where whole tokens are equal; -1: none."""
    at = known.find(pattern)
    while at >= 0 and at % _SIZE:
        at = known.find(pattern, at + 1)
    return at
