"""From committed tokens to text: incremental decoding and stop strings, one object per sequence."""

from __future__ import annotations

import bisect

from headway.engine.tokenizer import Tokenizer
from headway.types import Sequence


class TextOutput:
    """Writes one sequence's text and watches for its stop strings.

    Text that could still turn out to be the start of a stop string is held back until that is decided.
    """

    def __init__(self, tokenizer: Tokenizer, seq: Sequence) -> None:
        params = seq.params
        self._stream = tokenizer.stream(seq.request.prompt_token_ids, params.skip_special_tokens)
        self._stops = sorted(params.stop_strings)
        self._include_stop = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._num_tokens = 0
        self._held = ""
        self.stopped_by: str | None = None

    def push(self, token_ids: list[int]) -> tuple[str, int]:
        """(new text, how many of the tokens belong to the output). Fewer than given when a stop string ended it.

        Tokens are looked at one by one, so a stop string ends the text at the same token however many a step brought.
        """
        written = []
        for count, token in enumerate(token_ids, start=1):
            self._num_tokens += 1
            text = self._stream.push(token)
            if not self._stops:
                written.append(text)
                continue
            self._held += text
            if self._num_tokens >= self._min_tokens and self._cut_at_stop():
                written.append(self._held)
                self._held = ""
                return "".join(written), count
            free = len(self._held) - self._undecided()
            written.append(self._held[:free])
            self._held = self._held[free:]
        return "".join(written), len(token_ids)

    def flush(self, drop_last_token: bool = False) -> str:
        """The rest of the text, when the sequence ends without a stop string."""
        text, self._held = self._held, ""
        return text if drop_last_token else text + self._stream.flush()

    def _cut_at_stop(self) -> bool:
        found = [(at, stop) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if not found:
            return False
        at, self.stopped_by = min(found)
        self._held = self._held[: at + len(self.stopped_by) if self._include_stop else at]
        return True

    def _undecided(self) -> int:
        """Length of the longest end of the held text that begins a stop string."""
        longest = min(len(self._held), max(len(stop) for stop in self._stops) - 1)
        for length in range(longest, 0, -1):
            end = self._held[-length:]
            at = bisect.bisect_left(self._stops, end)   # those that begin with it come next
            if at < len(self._stops) and self._stops[at].startswith(end):
                return length
        return 0
