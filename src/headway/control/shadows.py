"""Drafts that were not verified, compared with what the target writes later: evidence about a drafter that cost no verification."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from headway.types import Draft, ShadowFeedback


class Written(Protocol):
    """A sequence as far as its text is written. `token_ids` is live."""

    @property
    def seq_id(self) -> int: ...

    @property
    def token_ids(self) -> Sequence[int]: ...


@dataclass(slots=True)
class _Shadow:
    """A draft for the positions from `start` on, confirmed up to `next`."""

    drafter: str
    draft: Draft
    num_verified: int
    start: int
    next: int

    @property
    def position(self) -> int:
        """Where the next token of the draft would stand."""
        return self.start + self.next

    def confirm(self) -> None:
        """The target wrote the next token, too."""
        self.next += 1


class Shadows:
    """At most one shadow draft per sequence and drafter; until it is judged, others are dropped."""

    def __init__(self) -> None:
        self._live: dict[int, list[_Shadow]] = {}
        self._resolved: list[ShadowFeedback] = []
        self._asked: dict[tuple[int, str], int] = {}   # known tokens when the drafter was last asked

    def catch_up(self, drafter: str, seq_id: int, num_tokens: int) -> int:
        """Tokens the drafter has not been asked about before, the newest not counted; from now on it has."""
        seen = self._asked.get((seq_id, drafter), 0)
        self._asked[seq_id, drafter] = num_tokens
        return max(0, num_tokens - 1 - seen)

    def add(self, seq: Written, drafter: str, draft: Draft, num_verified: int) -> None:
        """`draft` follows the last known token of `seq`; its first `num_verified` tokens go to verification now. Of a tree that is not
        verified at all, the chain of first children is compared."""
        if draft.parents is not None:
            if num_verified:
                return
            draft = draft.spine()
        if not draft.tokens:
            self._resolved.append(ShadowFeedback(seq.seq_id, drafter, 0, 0, 0, num_context=len(seq.token_ids)))
        elif draft.probs is None and len(draft) > num_verified and not self.waits(seq.seq_id, drafter):
            shadow = _Shadow(drafter, draft, num_verified, len(seq.token_ids), num_verified)
            self._live.setdefault(seq.seq_id, []).append(shadow)

    def waits(self, seq_id: int, drafter: str) -> bool:
        """Whether an earlier draft is still being compared."""
        return any(shadow.drafter == drafter for shadow in self._live.get(seq_id, ()))

    def compare(self, seq: Written) -> None:
        """A step wrote tokens: call before the sequence is stopped."""
        live = self._live.get(seq.seq_id)
        if live:
            self._live[seq.seq_id] = [shadow for shadow in live if not self._judged(shadow, seq)]

    def stop(self, seq_id: int) -> None:
        """The sequence ended: what could be compared counts, the rest is cut off."""
        for shadow in self._live.pop(seq_id, ()):
            self._resolve(seq_id, shadow, shadow.next)
        for key in [key for key in self._asked if key[0] == seq_id]:
            del self._asked[key]

    def resolved(self) -> tuple[ShadowFeedback, ...]:
        """What was judged since the last call."""
        found, self._resolved = tuple(self._resolved), []
        return found

    def _judged(self, shadow: _Shadow, seq: Written) -> bool:
        # The tail of a draft whose head was refused in this step says nothing: it continues another text.
        written = seq.token_ids[shadow.start : shadow.position]
        if shadow.next == shadow.num_verified and written != shadow.draft.tokens[: shadow.num_verified]:
            return True
        for token in seq.token_ids[shadow.position :]:
            if token != shadow.draft.tokens[shadow.next]:
                self._resolve(seq.seq_id, shadow, len(shadow.draft))
                return True
            shadow.confirm()
            if shadow.next == len(shadow.draft):
                self._resolve(seq.seq_id, shadow, shadow.next)
                return True
        return False

    def _resolve(self, seq_id: int, shadow: _Shadow, num_drafts: int) -> None:
        if num_drafts > shadow.num_verified:
            confidence = shadow.draft.confidence
            self._resolved.append(ShadowFeedback(
                seq_id, shadow.drafter, shadow.num_verified, num_drafts, shadow.next - shadow.num_verified,
                None if confidence is None else tuple(confidence[:num_drafts]), shadow.start,
            ))  # fmt: skip
