"""What is written to the terminal: colour when it is one, readable marks when it is not."""

from __future__ import annotations

import codecs
import os
from typing import IO, TYPE_CHECKING

from headway.types import OutputDelta

if TYPE_CHECKING:
    from headway.engine.tokenizer import Tokenizer

GREEN = "\x1b[32m"
RED_STRUCK = "\x1b[9;31m"
RESET = "\x1b[0m"


def colored(stream: IO[str]) -> bool:
    """True for a terminal that takes colour (https://no-color.org is honoured)."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def legend(color: bool) -> str:
    accepted, rejected = mark("drafted and accepted", True, color), mark("drafted and rejected", False, color)
    return f"{accepted}  {rejected}  written by the model itself"


def mark(text: str, accepted: bool, color: bool) -> str:
    """Green or struck red; without colour [+text] and [-text]."""
    if color:
        return f"{GREEN if accepted else RED_STRUCK}{text}{RESET}"
    return f"[{'+' if accepted else '-'}{text}]"


class DraftWriter:
    """Writes steps token by token: accepted drafts, then the rejected ones, then the model's own token."""

    def __init__(self, tokenizer: Tokenizer, stream: IO[str], color: bool) -> None:
        self._tokenizer = tokenizer
        self._stream = stream
        self._color = color
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def write(self, delta: OutputDelta) -> None:
        num_accepted = sum(delta.from_draft)
        accepted = "".join(map(self._text, delta.token_ids[:num_accepted]))
        rejected = b"".join(map(self._bytes, delta.rejected)).decode("utf-8", "replace")
        own = "".join(map(self._text, delta.token_ids[num_accepted:]))
        self._stream.write(mark(accepted, True, self._color) if accepted else "")
        self._stream.write(mark(rejected, False, self._color) if rejected else "")
        self._stream.write(own)

    def _bytes(self, token_id: int) -> bytes:
        if not self._tokenizer.decode([token_id]):
            return b""   # a special token
        return self._tokenizer.token_bytes(token_id)

    def _text(self, token_id: int) -> str:
        return self._decoder.decode(self._bytes(token_id))
