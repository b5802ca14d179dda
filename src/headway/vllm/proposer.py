"""What vLLM loads with `{"method": "custom_class", "model": "headway.vllm.Proposer"}`: suffix decoding and prompt lookup, per request.

vLLM hands over rows of token ids and no request ids. A row is recognised by what it says: a known request is a row whose text begins with
that request's tokens (its own row first, since rows move rarely). A mistaken identity costs a worse draft, never a wrong token: drafts are
verified. A request whose row is gone has ended (or was preempted, and is met again as a new one); what it wrote joins the
response cache, which is bounded.

Of the two drafts of a request the one that promises more accepted tokens is proposed; how far each drafter's promises can be
trusted is measured on what the target wrote after every draft, proposed or not.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.drafters.drafter import Committed, Drafter, DraftRequest, never_stop
from headway.drafters.ngram import Ngram
from headway.drafters.suffix import Suffix
from headway.types import Draft
from headway.vllm.settings import Settings

IntArray = NDArray[np.int32]

LOOKUP = (2, 4)          # prompt_lookup_min and _max
_COMPARED = 16           # tokens at the end of what is known that a row must repeat
_TRUST_MEMORY = 400.0    # drafts
_TRUST_PRIOR = 4.0       # tokens promised and kept, before any were


class ScoredDraft(list[int]):
    """A draft as vLLM wants it, a list; on its way to the scheduler (through a pickle) it keeps what is known about it.

    confidence  as in types.Draft
    draft_ms    on the first row of a step: what all of its drafts took
    """

    def __init__(self, tokens: Sequence[int] = (), confidence: Sequence[float] = ()) -> None:
        super().__init__(tokens)
        self.confidence = tuple(confidence)
        self.draft_ms = 0.0


@dataclass(slots=True, eq=False)
class _Known:
    """A request: its tokens as far as they were seen, and what each drafter last said would follow them."""

    seq_id: int
    token_ids: list[int]
    num_prompt_tokens: int
    promised: list[tuple[int, list[int], float]] = field(default_factory=list)   # (drafter, tokens, expected to be accepted)

    def begins(self, row: IntArray) -> bool:
        end = len(self.token_ids)
        return end <= len(row) and row[max(0, end - _COMPARED) : end].tolist() == self.token_ids[-_COMPARED:]


class Proposer:
    """`vllm_config` is vLLM's; only a few of its numbers are read."""

    def __init__(self, vllm_config: Any) -> None:
        Settings.parse(vllm_config.additional_config)   # a wrong key ends the start here, too
        speculative = vllm_config.speculative_config
        self.max_k = int(speculative.num_speculative_tokens)
        self._max_model_len = int(vllm_config.model_config.max_model_len)
        # Rows come without their requests' salts, so all of them share the responses: 0 keeps none.
        suffix = Suffix.Options(suffix_decoding_max_cached_requests=speculative.suffix_decoding_max_cached_requests)
        ngram = Ngram.Options(prompt_lookup_min=LOOKUP[0], prompt_lookup_max=LOOKUP[1])
        self._drafters: tuple[Drafter, ...] = (Suffix(suffix), Ngram(ngram))
        self._kept = [_TRUST_PRIOR] * len(self._drafters)
        self._promised = [_TRUST_PRIOR] * len(self._drafters)
        self._rows: list[_Known | None] = []
        self._seq_ids = itertools.count()

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """There is none."""

    def propose(
        self, sampled_token_ids: Sequence[Sequence[int]], num_tokens_no_spec: NDArray[np.int32], token_ids_cpu: IntArray, **_: Any
    ) -> list[ScoredDraft]:
        """vLLM's interface. Row i wrote `sampled_token_ids[i]` (nothing: it is not to be drafted for) and now has
        num_tokens_no_spec[i] tokens, token_ids_cpu[i, :...]. Returns one list per row, at most `max_k` tokens long."""
        began = time.perf_counter()
        lengths = num_tokens_no_spec[: len(sampled_token_ids)].tolist()
        rows = [token_ids_cpu[i, :length] for i, length in enumerate(lengths)]
        writing = [i for i, sampled in enumerate(sampled_token_ids) if len(sampled) and lengths[i] < self._max_model_len - 1]
        known = self._recognise(rows, writing, [len(sampled) for sampled in sampled_token_ids])
        drafts = [ScoredDraft() for _ in rows]
        for i, draft in zip(writing, self._draft([known[i] for i in writing]), strict=True):
            drafts[i] = ScoredDraft(draft.tokens, draft.confidence or ())
        if drafts:
            drafts[0].draft_ms = (time.perf_counter() - began) * 1e3
        return drafts

    # -- who is who ----------------------------------------------------------------------------------------------------

    def _recognise(self, rows: list[IntArray], writing: list[int], num_sampled: list[int]) -> dict[int, _Known]:
        """The request of each row in `writing`, brought up to date; requests whose rows are gone are forgotten."""
        before = self._rows + [None] * (len(rows) - len(self._rows))
        now: list[_Known | None] = [None] * len(rows)
        for i, row in enumerate(rows):   # a row that writes nothing keeps its request
            at = before[i]
            if at is not None and at.begins(row):
                now[i], before[i] = at, None
        moved = [known for known in before if known is not None]
        for i in writing:
            if now[i] is None:
                same = max((known for known in moved if known.begins(rows[i])), key=lambda known: len(known.token_ids), default=None)
                if same is not None:
                    moved.remove(same)
                now[i] = same or self._meet(rows[i], num_sampled[i])
        for gone in moved:
            for drafter in self._drafters:
                drafter.stop(gone.seq_id)
        self._rows = now
        found = {i: item for i in writing if (item := now[i]) is not None}
        for i, item in found.items():
            self._catch_up(item, rows[i])
        return found

    def _meet(self, row: IntArray, num_sampled: int) -> _Known:
        token_ids = row.tolist()
        known = _Known(next(self._seq_ids), token_ids, len(token_ids) - num_sampled)
        for drafter in self._drafters:
            drafter.commit([Committed(known.seq_id, token_ids, known.num_prompt_tokens, num_sampled, 0)])
        return known

    def _catch_up(self, known: _Known, row: IntArray) -> None:
        start = len(known.token_ids)
        written = row[start:].tolist()
        known.token_ids += written
        for index, tokens, expected in known.promised:
            kept = next((at for at, (ours, theirs) in enumerate(zip(tokens, written, strict=False)) if ours != theirs), None)
            if kept is None:
                if len(written) < len(tokens):
                    continue   # not verified to its end: nothing is known about the rest
                kept = len(tokens)
            fade = 1.0 - 1.0 / _TRUST_MEMORY
            self._kept[index] = self._kept[index] * fade + kept
            self._promised[index] = self._promised[index] * fade + expected
        known.promised = []

    # -- drafting ------------------------------------------------------------------------------------------------------

    def _draft(self, known: list[_Known]) -> list[Draft]:
        requests = [
            DraftRequest(
                item.seq_id, item.token_ids, item.num_prompt_tokens, min(self.max_k, self._max_model_len - 1 - len(item.token_ids)), True
            )
            for item in known
        ]
        best, most = [Draft([])] * len(known), [0.0] * len(known)
        for index, drafter in enumerate(self._drafters):
            trust = self._kept[index] / self._promised[index]
            for i, draft in enumerate(drafter.propose(requests, never_stop)):
                if draft.tokens:
                    expected = _expected(draft)
                    known[i].promised.append((index, draft.tokens, expected))
                    if trust * expected > most[i]:
                        best[i], most[i] = draft, trust * expected
        return best


def _expected(draft: Draft) -> float:
    """Tokens that will be accepted, if the drafter's confidence is right."""
    reached, total = 1.0, 0.0
    for confidence in draft.confidence or ():
        reached *= confidence
        total += reached
    return total
