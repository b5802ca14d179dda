"""Hidden states on disk, text after text: files that only grow, so whoever writes them can stop at any time."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from headway.models.decoder import Decoder
from headway.train.data import Text


class HiddenStateFile:
    """features.bin: rows of hidden states as they are in memory; normalizers.bin: a float32 a row; features.txt: a line that names the
    target and its layers, then one for each text whose rows are there."""

    def __init__(self, directory: Path, target: Decoder, layers: Sequence[int], max_bytes: int) -> None:
        self.width = (len(layers) + 1) * target.config.hidden_size
        self.num_texts = self.num_rows = 0
        self._dtype, self._row_bytes = target.dtype, self.width * target.dtype.itemsize
        self._max_rows = max_bytes // (self._row_bytes + 4)
        self._states, self._normalizers, self._index = (directory / name for name in ("features.bin", "normalizers.bin", "features.txt"))
        self._key = _digest((str(target.directory), str(target.dtype), tuple(layers)))

    def fits(self, num_rows: int) -> bool:
        """Whether so many rows in all are within the limit."""
        return num_rows <= self._max_rows

    def begin(self, texts: Sequence[Text]) -> None:
        """Keeps what is there of the first of these texts and drops everything else; `num_texts` says how many they are."""
        lines = self._index.read_text(encoding="utf-8").splitlines() if self._index.exists() else []
        sizes = [path.stat().st_size if path.exists() else 0 for path in (self._states, self._normalizers)]
        num_rows = min(sizes[0] // self._row_bytes, sizes[1] // 4)
        self.num_texts = self.num_rows = 0
        for line, text in zip(lines[1:] if lines[:1] == [self._key] else [], texts, strict=False):
            if line != _digest(text) or self.num_rows + len(text.token_ids) > num_rows:
                break
            self.num_texts, self.num_rows = self.num_texts + 1, self.num_rows + len(text.token_ids)
        self._index.write_text("".join(f"{line}\n" for line in [self._key, *lines[1 : 1 + self.num_texts]]), encoding="utf-8")
        for path, row_bytes in ((self._states, self._row_bytes), (self._normalizers, 4)):
            path.touch()
            os.truncate(path, self.num_rows * row_bytes)

    def append(self, text: Text, states: Tensor, normalizers: Tensor) -> None:
        """states [length, width], normalizers float32 [length]: of the text that follows those that are there."""
        for path, rows in ((self._states, states.cpu().contiguous().view(torch.uint8)), (self._normalizers, normalizers.cpu())):
            with path.open("ab") as file:
                file.write(rows.numpy().tobytes())
        with self._index.open("a", encoding="utf-8") as lines:   # last: rows without a line are dropped, a line without rows would lie
            lines.write(_digest(text) + "\n")
        self.num_texts, self.num_rows = self.num_texts + 1, self.num_rows + len(text.token_ids)

    def read(self) -> tuple[Tensor, Tensor]:
        """(states [num_rows, width], normalizers [num_rows]), from disk as they are looked at."""
        if self.num_rows == 0:
            return torch.empty(0, self.width, dtype=self._dtype), torch.empty(0)
        raw = np.memmap(self._states, np.dtype(f"uint{8 * self._dtype.itemsize}"), "c", shape=(self.num_rows, self.width))
        normalizers = np.memmap(self._normalizers, np.dtype("float32"), "c", shape=(self.num_rows,))
        return torch.from_numpy(raw).view(self._dtype), torch.from_numpy(normalizers)


def _digest(what: object) -> str:
    value = (what.num_prompt, *what.token_ids) if isinstance(what, Text) else what
    return hashlib.sha256(repr(value).encode()).hexdigest()[:16]
