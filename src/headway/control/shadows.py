"""Drafts that were not verified, compared with what the target writes later: evidence about a drafter that cost no verification."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from headway.types import Draft, ShadowFeedback


class Written(Protocol):
    """A sequence as far as its text is written. `token_ids` is live."""

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

    def __init__(self, sequences: Mapping[int, Written]) -> None:
        """`sequences`: all that run, by seq_id; live."""
        self._sequences = sequences
        self._live: dict[int, list[_Shadow]] = {}
        self._resolved: list[ShadowFeedback] = []

    def add(self, seq_id: int, drafter: str, draft: Draft, num_verified: int) -> None:
        """`draft` follows the last known token of the sequence; its first `num_verified` tokens go to verification now. Of a tree that
        is not verified at all, the chain of first children is compared."""
        if draft.parents is not None:
            if num_verified:
                return
            draft = draft.spine()
        start = len(self._sequences[seq_id].token_ids)
        if not draft.tokens:
            self.tell(ShadowFeedback(seq_id, drafter, 0, 0, 0, num_context=start))
        elif draft.probs is None and len(draft) > num_verified and not self.waits(seq_id, drafter):
            self._live.setdefault(seq_id, []).append(_Shadow(drafter, draft, num_verified, start, num_verified))

    def tell(self, shadow: ShadowFeedback) -> None:
        """Counts a draft that was judged already."""
        self._resolved.append(shadow)

    def waits(self, seq_id: int, drafter: str) -> bool:
        """Whether an earlier draft is still being compared."""
        return any(shadow.drafter == drafter for shadow in self._live.get(seq_id, ()))

    def compare(self, seq_id: int) -> None:
        """A step wrote tokens: call before the sequence is stopped."""
        live = self._live.get(seq_id)
        if live:
            token_ids = self._sequences[seq_id].token_ids
            self._live[seq_id] = [shadow for shadow in live if not self._judged(shadow, seq_id, token_ids)]

    def stop(self, seq_id: int) -> None:
        """The sequence ended: what could be compared counts, the rest is cut off."""
        for shadow in self._live.pop(seq_id, ()):
            self._resolve(seq_id, shadow, shadow.next)

    def resolved(self) -> tuple[ShadowFeedback, ...]:
        """What was judged since the last call."""
        found, self._resolved = tuple(self._resolved), []
        return found

    def _judged(self, shadow: _Shadow, seq_id: int, token_ids: Sequence[int]) -> bool:
        # The tail of a draft whose head was refused in this step says nothing: it continues another text.
        written = token_ids[shadow.start : shadow.position]
        if shadow.next == shadow.num_verified and written != shadow.draft.tokens[: shadow.num_verified]:
            return True
        for token in token_ids[shadow.position :]:
            if token != shadow.draft.tokens[shadow.next]:
                self._resolve(seq_id, shadow, len(shadow.draft))
                return True
            shadow.confirm()
            if shadow.next == len(shadow.draft):
                self._resolve(seq_id, shadow, shadow.next)
                return True
        return False

    def _resolve(self, seq_id: int, shadow: _Shadow, num_drafts: int) -> None:
        if num_drafts > shadow.num_verified:
            confidence = shadow.draft.confidence
            self.tell(ShadowFeedback(
                seq_id, shadow.drafter, shadow.num_verified, num_drafts, shadow.next - shadow.num_verified,
                None if confidence is None else tuple(confidence[:num_drafts]), shadow.start,
            ))  # fmt: skip


@dataclass(slots=True)
class KnownDraft(Draft):
    """A draft where it is known beforehand what the target will write: the first `num_right` tokens of it."""

    num_right: int = 0

    def truncated(self, length: int) -> KnownDraft:
        if length >= len(self.tokens):
            return self
        confidence = None if self.confidence is None else self.confidence[:length]
        return KnownDraft(self.tokens[:length], self.probs, confidence, None, min(self.num_right, length))


class KnownShadows(Shadows):
    """Shadow drafts of a host whose drafts are `KnownDraft`: judged at once."""

    def __init__(self) -> None:
        super().__init__({})

    def add(self, seq_id: int, drafter: str, draft: Draft, num_verified: int) -> None:
        assert isinstance(draft, KnownDraft)
        if draft.probs is None and draft.num_right >= num_verified:   # the tail of a refused draft says nothing
            confidence = tuple(draft.confidence) if draft.confidence else None
            self.tell(ShadowFeedback(seq_id, drafter, num_verified, len(draft), draft.num_right - num_verified, confidence))
