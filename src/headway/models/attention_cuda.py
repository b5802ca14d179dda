"""Attention on a CUDA device by a kernel that reads the pages in place, where one is installed and proves itself.

    varlen       torch.nn.attention.varlen with a block table (FlashAttention inside PyTorch)
    flashinfer   FlashInfer's paged prefill, which takes rows of any length

Which versions of these accept which page sizes and strides changes from release to release, so a kernel is not chosen by version:
it computes a small ragged batch first, and is used when its answer equals the one of the tiles in attention.py.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

WORKSPACE_BYTES = 128 << 20


@dataclass(slots=True)
class Ragged:
    """The rows of a pass as paged kernels take them.

    q_ends      int32 [num_rows + 1]: row i is query tokens [q_ends[i], q_ends[i + 1])
    contexts    int32 [num_rows]: tokens each row sees, its own included
    table       int32 [num_rows, most blocks of a row]
    prepared    what FlashInfer plans once per pass, by window
    """

    q_ends: Tensor
    contexts: Tensor
    table: Tensor
    max_length: int
    max_context: int
    prepared: dict[int | None, Any] = field(default_factory=dict)

    @classmethod
    def make(cls, rows: Sequence[tuple[list[int], int, int]], block_size: int, device: torch.device | str) -> Ragged:
        lengths = np.array([length for _, _, length in rows])
        contexts = np.array([start + length for _, start, length in rows])
        table = np.zeros((len(rows), -(-int(contexts.max()) // block_size)), dtype=np.int32)
        for row, (blocks, _, _) in enumerate(rows):
            count = -(-int(contexts[row]) // block_size)
            table[row, :count] = blocks[:count]

        def send(values: np.ndarray) -> Tensor:
            return torch.from_numpy(values.astype(np.int32)).to(device)

        ends = np.concatenate([[0], np.cumsum(lengths)])
        return cls(send(ends), send(contexts), send(table), int(lengths.max()), int(contexts.max()))


Kernel = Callable[[Tensor, Tensor, Tensor, Ragged, "int | None", float], Tensor]
"""(q [tokens, heads, head_dim], keys, values [blocks, block_size, kv_heads, head_dim], rows, window, scale) -> shaped like q"""


Reference = Callable[[Tensor, Tensor, Sequence[tuple[list[int], int, int]], "int | None", float], Tensor]
"""(q, pages, rows, window, scale) -> [tokens, heads * head_dim]: the judge of the kernels"""


def attend(q: Tensor, pages: Tensor, rows: Ragged, window: int | None, scale: float, reference: Reference) -> Tensor | None:
    """As `attention.attend`; None when there is no kernel for this device and shape."""
    head_dim = q.shape[2]
    kernel = _kernel(q.device, q.dtype, q.shape[1], pages.shape[0] // 2, head_dim, pages.shape[2] // head_dim, window, scale, reference)
    return None if kernel is None else run(kernel, q, pages, rows, window, scale)


def run(kernel: Kernel, q: Tensor, pages: Tensor, rows: Ragged, window: int | None, scale: float) -> Tensor:
    keys, values = pages.view(2, -1, pages.shape[1], pages.shape[2] // q.shape[2], q.shape[2]).permute(0, 2, 3, 1, 4)
    return kernel(q, keys, values, rows, window, scale).reshape(q.shape[0], -1)


@lru_cache
def _kernel(
    device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int, block_size: int, window: int | None,
    scale: float, reference: Reference,
) -> Kernel | None:
    """The first installed kernel that computes this kind of problem correctly on this device."""
    if dtype == torch.float32:
        return None
    random = torch.Generator(device).manual_seed(0)
    blocks = list(range(-(-300 // block_size)))
    listed = [(blocks[::-1], 280, 1), (blocks, 250, 7), (blocks, 0, 90)]
    q = torch.randn(98, heads, head_dim, generator=random, device=device).to(dtype)
    pages = torch.randn(2 * kv_heads, len(blocks), block_size * head_dim, generator=random, device=device).to(dtype)
    expected = reference(q, pages, listed, window, scale)
    for kernel in (_varlen, _flashinfer):
        try:
            found = run(kernel, q, pages, Ragged.make(listed, block_size, device), window, scale)
        except (ImportError, AttributeError, TypeError, ValueError, RuntimeError, NotImplementedError):
            continue
        if torch.allclose(found.float(), expected.float(), rtol=0.02, atol=0.02):
            return kernel
    return None


def _varlen(q: Tensor, keys: Tensor, values: Tensor, rows: Ragged, window: int | None, scale: float) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    out = varlen_attn(
        q, keys, values, rows.q_ends, None, rows.max_length, rows.max_context, scale=scale,
        window_size=(-1 if window is None else window - 1, 0), enable_gqa=True, seqused_k=rows.contexts, block_table=rows.table,
    )
    assert isinstance(out, Tensor)
    return out


def _flashinfer(q: Tensor, keys: Tensor, values: Tensor, rows: Ragged, window: int | None, scale: float) -> Tensor:
    wrapper = rows.prepared.get(window)
    if wrapper is None:
        wrapper = rows.prepared[window] = _flashinfer_plan(q, keys, rows, window, scale)
    return wrapper.run(q, (keys, values))  # type: ignore[no-any-return]


def _flashinfer_plan(q: Tensor, keys: Tensor, rows: Ragged, window: int | None, scale: float) -> Any:
    if importlib.util.find_spec("flashinfer") is None:
        raise ImportError("flashinfer")
    import flashinfer

    block_size = keys.shape[1]
    counts = (rows.contexts + block_size - 1) // block_size
    used = torch.arange(rows.table.shape[1], device=q.device) < counts[:, None]
    ends = torch.zeros_like(rows.q_ends)
    ends[1:] = counts.cumsum(0)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(_workspace(q.device), "NHD")
    wrapper.plan(
        rows.q_ends, ends, rows.table[used], (rows.contexts - 1) % block_size + 1, q.shape[1], keys.shape[2], q.shape[2], block_size,
        causal=True, window_left=-1 if window is None else window - 1, sm_scale=scale, q_data_type=q.dtype,
    )
    return wrapper


@lru_cache
def _workspace(device: torch.device) -> Tensor:
    return torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
