"""What a trace tells about each sequence: how much it wrote, and where each drafter would have been right.

Per drafter and output position there is one of four codes. A step that began at position p, whose drafter proposed n of the k tokens it
was asked for, of which v were verified and a accepted, says:

    p .. p + a - 1      HIT    the drafter has this token right
    p + a               MISS   when a < v: it proposes another one
    p + n               NONE   when everything it proposed was accepted and n < k: it has nothing to propose there
    everything else     UNKNOWN

A draft that was compared with what the target wrote instead of being verified says the same, from where it was drafted on; a drafter
that was looked at and had nothing to propose says NONE.

Unknown positions are filled with draws from the trace's own statistics: how often each code follows each other code. So one trace, recorded
at any k, can be decided again at another one. Assumed: whether a drafter is right at a position does not depend on where its draft
began. That is nearly true for drafters that look the text up, and a model for the others.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from headway.telemetry.trace import Trace
from headway.types import SequenceFeedback, ShadowFeedback

UNKNOWN, MISS, HIT, NONE = -1, 0, 1, 2
ENDLESS = 1 << 20   # a drafter that was not seen to run out


@dataclass(slots=True)
class Drafts:
    """What one drafter would propose in one sequence. codes, limits: [num_output]; confidence by the position where a draft began."""

    codes: NDArray[np.int8]
    limits: NDArray[np.int64]     # the longest draft that begins here, right or wrong
    confidence: dict[int, tuple[float, ...]]

    def draft(self, position: int, k: int) -> tuple[int, int]:
        """(length of the draft that begins at `position`, how many of its tokens are right)"""
        end = min(len(self.codes), position + k)
        length = min(k, int(self.limits[position]), end - position)
        right = 0
        while right < length and self.codes[position + right] == HIT:
            right += 1
        if right < length and self.codes[position + right] == NONE:
            length = right
        return length, right


@dataclass(slots=True)
class Recorded:
    """One sequence of the trace. num_in_flight: how many were in flight once it had started, itself included."""

    seq_id: int
    num_prompt: int
    num_output: int = 0
    first: int = 0
    last: int = 0
    num_in_flight: int = 1
    drafts: dict[str, Drafts] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Evidence:
    sequences: tuple[Recorded, ...]   # in the order in which they started
    drafters: tuple[str, ...]         # those that drafted in the trace
    known: dict[str, float]           # share of output positions whose code was recorded, by drafter
    prefill_share: float              # prompt tokens computed / prompt tokens: less than 1 with a prefix cache


def gather(trace: Trace, seed: int = 0, in_flight: int | None = None) -> Evidence:
    """Codes of every sequence and drafter, the unknown ones drawn with `seed`. in_flight: how many sequences, whatever was recorded."""
    recorded: dict[int, Recorded] = {}
    marks: dict[tuple[int, str], _Marks] = {}
    drafted: dict[str, None] = {}
    for index, step in enumerate(trace.steps):
        for seq in step.feedback.sequences:
            record = recorded.setdefault(seq.seq_id, Recorded(seq.seq_id, seq.num_context, first=index))
            position = seq.num_context - record.num_prompt
            record.last = index
            record.num_output = max(record.num_output, position + seq.num_accepted + 1)
            if seq.k > 0:
                marks.setdefault((seq.seq_id, seq.drafter), _Marks()).see(position, seq)
                drafted.setdefault(seq.drafter)
        at = {seq.seq_id: seq.num_context for seq in step.feedback.sequences}
        for seq_id, drafter, k, num_proposed in step.feedback.lookups:
            if seq_id in at:
                marks.setdefault((seq_id, drafter), _Marks()).limit(at[seq_id] - recorded[seq_id].num_prompt, num_proposed, k)
                drafted.setdefault(drafter)
        for shadow in step.feedback.shadows:
            if shadow.num_context and shadow.seq_id in recorded and shadow.num_drafts:
                position = shadow.num_context - recorded[shadow.seq_id].num_prompt
                if position >= 0:
                    marks.setdefault((shadow.seq_id, shadow.drafter), _Marks()).see_shadow(position, shadow)
                    drafted.setdefault(shadow.drafter)
    sequences = sorted(recorded.values(), key=lambda record: (record.first, record.seq_id))
    ends: list[int] = []
    for record in sequences:
        while ends and ends[0] < record.first:
            heapq.heappop(ends)
        heapq.heappush(ends, record.last)
        record.num_in_flight = in_flight or len(ends)
    drafters = tuple(name for name in (*trace.drafters, *drafted) if name in drafted)
    known = {name: _fill(name, sequences, marks, np.random.default_rng(seed)) for name in dict.fromkeys(drafters)}
    computed = sum(step.feedback.num_prefill_tokens for step in trace.steps)
    prompts = sum(record.num_prompt for record in sequences)
    return Evidence(tuple(sequences), tuple(known), known, min(1.0, computed / prompts) if prompts else 1.0)


class _Marks:
    """The codes of one sequence and drafter, as they come in."""

    def __init__(self) -> None:
        self.codes: dict[int, int] = {}
        self.limits: dict[int, int] = {}
        self.confidence: dict[int, tuple[float, ...]] = {}

    def see(self, position: int, seq: SequenceFeedback) -> None:
        self.codes.update(dict.fromkeys(range(position, position + seq.num_accepted), HIT))
        if seq.num_accepted < seq.num_drafts:
            self.codes[position + seq.num_accepted] = MISS
        elif seq.num_drafts == seq.num_proposed < seq.k:
            self.codes[position + seq.num_proposed] = NONE
        self.limit(position, seq.num_proposed, seq.k)
        if seq.confidence is not None:
            self.confidence[position] = seq.confidence

    def limit(self, position: int, num_proposed: int, k: int) -> None:
        """How long the draft is that begins here, when it is asked for `k` tokens."""
        self.limits[position] = num_proposed if num_proposed < k else ENDLESS
        if num_proposed == 0:
            self.codes[position] = NONE

    def see_shadow(self, position: int, shadow: ShadowFeedback) -> None:
        first = position + shadow.num_verified
        self.codes.update(dict.fromkeys(range(first, first + shadow.num_confirmed), HIT))
        if shadow.num_verified + shadow.num_confirmed < shadow.num_drafts:
            self.codes[first + shadow.num_confirmed] = MISS
        if shadow.num_verified == 0:
            self.limits.setdefault(position, shadow.num_drafts)
        if shadow.confidence is not None:
            self.confidence.setdefault(position, shadow.confidence)


def _fill(name: str, sequences: Iterable[Recorded], marks: dict[tuple[int, str], _Marks], random: np.random.Generator) -> float:
    """Gives every sequence its `Drafts` of this drafter; returns the share of positions that were known."""
    # follows[b, a]: how often code a stood behind code b; one of each, so that nothing is impossible
    follows = np.ones((3, 3))
    limits: list[int] = []
    for (_, drafter), mark in marks.items():
        if drafter == name:
            limits += mark.limits.values()
            for position, code in mark.codes.items():
                if position - 1 in mark.codes:
                    follows[mark.codes[position - 1], code] += 1
    chances = np.cumsum(follows / follows.sum(axis=1, keepdims=True), axis=1)
    num_known = num_positions = 0
    pool = np.array(limits or [ENDLESS], dtype=np.int64)   # tails alone do not say how long a draft is
    for record in sequences:
        mark = marks.get((record.seq_id, name), _Marks())
        codes = np.full(record.num_output, UNKNOWN, dtype=np.int8)
        for position, code in mark.codes.items():
            if position < len(codes):
                codes[position] = code
        num_known += int((codes != UNKNOWN).sum())
        num_positions += len(codes)
        draws = random.random(len(codes))
        before = MISS
        for position in range(len(codes)):
            if codes[position] == UNKNOWN:
                codes[position] = int(np.searchsorted(chances[before], draws[position]).clip(0, 2))
            before = int(codes[position])
        drawn = pool[random.integers(0, len(pool), len(codes))]
        for position, limit in mark.limits.items():
            if position < len(drawn):
                drawn[position] = limit
        record.drafts[name] = Drafts(codes, np.where(codes == NONE, 0, np.maximum(drawn, 1)), mark.confidence)
    return num_known / max(1, num_positions)
