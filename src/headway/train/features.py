"""The target's hidden states for every text: on disk as far as the limit allows, computed again beyond it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from headway.models.attention import KVCache
from headway.models.decoder import Decoder
from headway.train.data import Text

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


class Features:
    """`get(indices)` for any texts. Files: features.bin (hidden states, raw), normalizers.bin (float32), features.json."""

    def __init__(self, target: Decoder, layers: Sequence[int], texts: Sequence[Text], directory: Path, max_bytes: int) -> None:
        self.target, self.layers, self.texts = target, tuple(layers), texts
        self.width = (len(self.layers) + 1) * target.config.hidden_size
        row_bytes = self.width * target.dtype.itemsize + 4
        ends = np.cumsum([0, *(len(text.token_ids) for text in texts)])
        self.offsets = ends
        self.num_stored = int(np.searchsorted(ends * row_bytes, max_bytes, side="right")) - 1
        self._paths = directory / "features.bin", directory / "normalizers.bin", directory / "features.json"
        self._hidden: Tensor | None = None
        self._normalizers: Tensor | None = None

    def store(self, advance: Callable[[int], None]) -> None:
        """Fills the files, going on where an earlier run stopped; `advance` counts tokens."""
        hidden_path, normalizer_path, index_path = self._paths
        texts = self.texts[: self.num_stored]
        rows = int(self.offsets[self.num_stored])
        if rows == 0:
            return
        done = self._stored_before(index_path)
        size = self.target.dtype.itemsize
        whole = {hidden_path: rows * self.width * size, normalizer_path: rows * 4}
        if not all(path.exists() and path.stat().st_size == num_bytes for path, num_bytes in whole.items()):
            done = 0
        mode: Any = "r+" if done else "w+"
        hidden = np.memmap(hidden_path, np.dtype(f"uint{8 * size}"), mode, shape=(rows, self.width))
        normalizers = np.memmap(normalizer_path, np.dtype("float32"), mode, shape=(rows,))
        views = torch.from_numpy(hidden).view(self.target.dtype), torch.from_numpy(normalizers)
        advance(int(self.offsets[done]))
        for group in passes(texts[done:]):
            first, stop = self.offsets[done + group[0]], self.offsets[done + group[-1] + 1]
            examples = compute(self.target, self.layers, [texts[done + i] for i in group])
            views[0][first:stop] = torch.cat([torch.cat([e.hidden, e.last], -1) for e in examples]).cpu()
            views[1][first:stop] = torch.cat([e.log_normalizer for e in examples]).cpu()
            advance(int(stop - first))
            hidden.flush()
            normalizers.flush()
            index_path.write_text(json.dumps({"key": self._key(), "num_texts": done + group[-1] + 1}), encoding="utf-8")
        self._hidden, self._normalizers = views

    def _key(self) -> str:
        """What the files were made from."""
        digest = hashlib.sha256(repr((str(self.target.directory), str(self.target.dtype), self.layers)).encode())
        for text in self.texts[: self.num_stored]:
            digest.update(np.array([text.num_prompt, *text.token_ids], dtype=np.int64).tobytes())
        return digest.hexdigest()

    def _stored_before(self, index_path: Path) -> int:
        try:
            index = json.loads(index_path.read_text(encoding="utf-8"))
            return min(int(index["num_texts"]), self.num_stored) if index["key"] == self._key() else 0
        except (OSError, ValueError, KeyError):
            return 0

    def get(self, indices: Sequence[int]) -> list[Example]:
        found: dict[int, Example] = {}
        missing = [i for i in indices if i >= self.num_stored or self._hidden is None]
        for group in passes([self.texts[i] for i in missing]):
            group = [missing[i] for i in group]
            found.update(zip(group, compute(self.target, self.layers, [self.texts[i] for i in group]), strict=True))
        return [found[i] if i in found else self._stored(i) for i in indices]

    def _stored(self, index: int) -> Example:
        assert self._hidden is not None
        assert self._normalizers is not None
        rows = slice(int(self.offsets[index]), int(self.offsets[index + 1]))
        text, device = self.texts[index], self.target.device
        split = self.width - self.target.config.hidden_size
        both = self._hidden[rows].to(device)
        token_ids = torch.tensor(text.token_ids, device=device)
        return Example(token_ids, both[:, :split], both[:, split:], self._normalizers[rows].to(device), text.num_prompt)
