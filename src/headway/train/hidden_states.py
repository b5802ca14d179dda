"""The target's hidden states for every text: on disk as far as the limit allows, computed again beyond it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from headway.models.attention import KVCache
from headway.models.decoder import Decoder
from headway.train.data import Text
from headway.train.hidden_state_file import HiddenStateFile

PASS_TOKENS = 2048
_BLOCK = 64


class Example(NamedTuple):
    """One text with what the target computes of it.

    token_ids      int64 [length]
    hidden         [length, layers * hidden], the layers the head reads, side by side
    last           [length, hidden], after the final norm: what the target's output layer reads
    log_normalizer float32 [length]: logsumexp of the target's logits
    num_prompt     rows before it are not learned
    """

    token_ids: Tensor
    hidden: Tensor
    last: Tensor
    log_normalizer: Tensor
    num_prompt: int


def compute(target: Decoder, layers: Sequence[int], texts: Sequence[Text]) -> list[Example]:
    """One pass of the target over all of them."""
    lengths = [len(text.token_ids) for text in texts]
    tables, begin = [], 0
    for length in lengths:
        tables.append(list(range(begin, begin - (-length // _BLOCK))))
        begin += -(-length // _BLOCK)
    cache = KVCache(target.config, begin, _BLOCK, target.dtype, target.device)
    token_ids = torch.tensor([token for text in texts for token in text.token_ids], device=target.device)
    positions = torch.cat([torch.arange(length) for length in lengths]).to(target.device)
    plan = cache.plan([(table, 0, length) for table, length in zip(tables, lengths, strict=True)])
    last, hidden = target.forward(token_ids, positions, plan, cache, tuple(layers))
    with torch.inference_mode():
        normalizer = torch.cat([target.logits(part).float().logsumexp(-1) for part in torch.split(last, 256)])
    parts = (token_ids, torch.cat(hidden, -1), last, normalizer)
    # Cloned: what inference mode made cannot take part in autograd.
    ids, states, ends, normalizers = (torch.split(part.clone(), lengths) for part in parts)
    return [
        Example(ids[i], states[i], ends[i], normalizers[i], text.num_prompt) for i, text in enumerate(texts)
    ]


def passes(texts: Sequence[Text], max_tokens: int = PASS_TOKENS) -> Iterator[list[int]]:
    """Indices of consecutive texts that go through the target together."""
    group: list[int] = []
    total = 0
    for index, text in enumerate(texts):
        if group and total + len(text.token_ids) > max_tokens:
            yield group
            group, total = [], 0
        group.append(index)
        total += len(text.token_ids)
    if group:
        yield group


class HiddenStates:
    """`get(indices)` for any texts: those within `max_bytes` from files (feature_file.py), the others computed each time."""

    def __init__(self, target: Decoder, layers: Sequence[int], texts: Sequence[Text], directory: Path, max_bytes: int) -> None:
        self.target, self.layers, self.texts = target, tuple(layers), texts
        self.file = HiddenStateFile(directory, target, layers, max_bytes)
        self.offsets = np.cumsum([0, *(len(text.token_ids) for text in texts)])
        self.num_stored = sum(self.file.fits(int(end)) for end in self.offsets[1:])
        self._views: tuple[Tensor, Tensor] | None = None

    def store(self, advance: Callable[[int], None]) -> None:
        """Fills the files, going on where an earlier run or whoever wrote the texts stopped; `advance` counts tokens."""
        if self.num_stored == 0:
            return
        texts = self.texts[: self.num_stored]
        self.file.begin(texts)
        advance(self.file.num_rows)
        texts = texts[self.file.num_texts :]
        for group in passes(texts):
            for index, example in zip(group, compute(self.target, self.layers, [texts[i] for i in group]), strict=True):
                self.file.append(texts[index], torch.cat([example.hidden, example.last], -1), example.log_normalizer)
                advance(len(example.token_ids))
        self._views = self.file.read()

    def get(self, indices: Sequence[int]) -> list[Example]:
        found: dict[int, Example] = {}
        missing = [i for i in indices if i >= self.num_stored or self._views is None]
        for group in passes([self.texts[i] for i in missing]):
            group = [missing[i] for i in group]
            found.update(zip(group, compute(self.target, self.layers, [self.texts[i] for i in group]), strict=True))
        return [found[i] if i in found else self._stored(i) for i in indices]

    def _stored(self, index: int) -> Example:
        assert self._views is not None
        rows = slice(int(self.offsets[index]), int(self.offsets[index + 1]))
        text, device = self.texts[index], self.target.device
        states, normalizers = (view[rows].to(device) for view in self._views)
        split = self.file.width - self.target.config.hidden_size
        token_ids = torch.tensor(text.token_ids, device=device)
        return Example(token_ids, states[:, :split], states[:, split:], normalizers, text.num_prompt)
