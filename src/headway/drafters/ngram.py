"""Prompt lookup: what followed the last time the text ended like this?

The longest n-gram, of prompt_lookup_max down to prompt_lookup_min tokens, that ends the history and occurred before is
looked up; the draft copies what followed its most recent occurrence. A copy that reaches the end of the history goes on
with what it has just copied, so a periodic text ("a b a b") is continued for all k tokens, not for one period.

Source: Saxena, "Prompt Lookup Decoding" (2023). A step costs the tokens it added and one look-up per n, whatever the
length of the history.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headway.config import option
from headway.drafters.core.ngram_index import NgramIndex, acceptance
from headway.drafters.drafter import ContinueDrafting, Drafter, DraftRequest, stop_early
from headway.errors import ConfigError
from headway.types import Draft

DEFAULT_LOOKUP = 5
MEASURED_MATCH = 24   # the confidence looks at a match this far back, also beyond prompt_lookup_max


class Ngram(Drafter):
    @dataclass(frozen=True)
    class Options:
        """Names and defaults are vLLM's: neither given means 5 and 5, one given means both are that."""

        prompt_lookup_max: int | None = option(None, "longest n-gram to look up; default: prompt_lookup_min, else 5")
        prompt_lookup_min: int | None = option(None, "shortest n-gram to look up; default: prompt_lookup_max, else 5")

        def __post_init__(self) -> None:
            for name in ("prompt_lookup_max", "prompt_lookup_min"):
                value = getattr(self, name)
                if value is not None and value < 1:
                    raise ConfigError(f"{name} must be >= 1, got {value}")
            shortest, longest = self.bounds
            if shortest > longest:
                raise ConfigError(f"prompt_lookup_min ({shortest}) must be <= prompt_lookup_max ({longest})")

        @property
        def bounds(self) -> tuple[int, int]:
            """(shortest, longest) with the defaults filled in."""
            shortest, longest = self.prompt_lookup_min, self.prompt_lookup_max
            return shortest or longest or DEFAULT_LOOKUP, longest or shortest or DEFAULT_LOOKUP

    def __init__(self, options: Options | None = None) -> None:
        shortest, longest = (options or self.Options()).bounds
        self._orders = range(shortest, longest + 1)
        self._indices: dict[int, NgramIndex] = {}

    def propose(self, requests: Sequence[DraftRequest], continue_drafting: ContinueDrafting) -> list[Draft]:
        return stop_early(requests, [self._draft(request) for request in requests], continue_drafting)

    def stop(self, seq_id: int) -> None:
        self._indices.pop(seq_id, None)

    def _draft(self, request: DraftRequest) -> Draft:
        history = request.token_ids
        known = len(history) - request.num_tentative
        index = self._indices.get(request.seq_id)
        if index is None or index.end > known:
            index = self._indices[request.seq_id] = NgramIndex(self._orders)
        index.extend(history[index.end : known])
        for order in reversed(self._orders):
            if order >= len(history):
                continue
            tail = history[-order:]
            for position in index.occurrences(tail, order, len(history) - 1):
                if history[position + 1 - order : position + 1] == tail:
                    return _copy(history, position, order, request.k)
        return Draft([])


def _copy(history: list[int], position: int, matched: int, k: int) -> Draft:
    """The k tokens after `position`, where the last `matched` tokens of `history` are known to have occurred."""
    tokens = history[position + 1 : position + 1 + k]
    while len(tokens) < k:
        tokens += tokens[: k - len(tokens)]
    limit = min(position + 1, MEASURED_MATCH)
    while matched < limit and history[position - matched] == history[-1 - matched]:
        matched += 1
    return Draft(tokens, confidence=[acceptance(1, 1, matched + j) for j in range(k)])
