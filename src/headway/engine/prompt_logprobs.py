"""Log probabilities of a prompt's own tokens, gathered while its chunks are computed."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from headway.engine.sampler import token_logprobs
from headway.types import Request, Row, TokenLogprobs

_CHUNK = 64   # positions whose logits exist at one time: 64 x 151,936 floats are 39 MB


class Collector:
    """One request's prompt logprobs. Position 0 has none: nothing precedes it."""

    def __init__(self, request: Request) -> None:
        self._prompt = request.prompt_token_ids
        self._num_top = request.params.prompt_logprobs or 0
        self._found: list[TokenLogprobs | None] = [None]

    def observe(self, row: Row, hidden: Tensor, logits: Callable[[Tensor], Tensor]) -> None:
        """`hidden` [row.length, hidden]: states at the row's positions; each speaks about the position after it."""
        for start in range(len(self._found) - 1 - row.start, row.length, _CHUNK):
            targets = self._prompt[row.start + start + 1 : row.start + min(start + _CHUNK, row.length) + 1]
            if start < 0 or not targets:
                return
            self._found += token_logprobs(logits(hidden[start : start + len(targets)]), targets, self._num_top)

    def result(self) -> list[TokenLogprobs | None]:
        return self._found
