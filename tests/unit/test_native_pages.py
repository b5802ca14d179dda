"""Page tables of any content: what they allow is read and nothing else, what they do not allow is an error.

`make fuzz` tries thousands of them under the sanitizers.
"""

from __future__ import annotations

import math
import os
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headway import native
from headway.models.attention_native import NativePlan
from headway.models.layers import Layer, Scores
from headway.models.rope import Rope

BUILT = [variant for variant in native.supported_variants() if native.library_path(variant).exists()]
if os.environ.get("HEADWAY_NATIVE") == "0" or not BUILT:
    pytest.skip(f"no compiled kernels: {native.choose().reason}", allow_module_level=True)

NUM_BLOCKS, BLOCK_SIZE, HEAD_DIM, KV_HEADS = 6, 16, 16, 2
FUZZ = settings(
    max_examples=int(os.environ.get("HEADWAY_FUZZ", "60")), deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)  # fmt: skip
ROPE = Rope(1e4 ** (-torch.arange(0, HEAD_DIM, 2).float() / HEAD_DIM), 1.0)

good_tables = st.lists(st.integers(0, NUM_BLOCKS - 1), min_size=1, max_size=8)
any_tables = st.lists(st.integers(-2, NUM_BLOCKS + 2), max_size=8)
rows = st.tuples(good_tables, st.integers(0, 100), st.integers(1, 60)) | st.tuples(any_tables, st.integers(-1, 100), st.integers(0, 60))


@pytest.fixture(scope="module", params=BUILT)
def library(request: pytest.FixtureRequest) -> native.Library:
    return native.Library(native.library_path(request.param), request.param)


@FUZZ
@given(
    rows=st.lists(rows, min_size=1, max_size=4), group=st.integers(1, 9), window=st.none() | st.integers(1, 150),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_pages_outside_a_table_are_neither_read_nor_written(
    library: native.Library, rows: list[tuple[list[int], int, int]], group: int, window: int | None, dtype: torch.dtype
) -> None:
    used = [table[: -(-(start + length) // BLOCK_SIZE)] for table, start, length in rows]
    allowed = all(
        start >= 0 and length >= 1 and len(table) * BLOCK_SIZE >= start + length and all(0 <= block < NUM_BLOCKS for block in mine)
        for (table, start, length), mine in zip(rows, used, strict=True)
    )
    if not allowed:
        with pytest.raises(ValueError, match=r"row \d+ needs|rows need|blocks up to"):
            step(library, rows, torch.zeros(NUM_BLOCKS, KV_HEADS, 2, BLOCK_SIZE * HEAD_DIM, dtype=dtype), group, window)
        return
    pages = torch.full((NUM_BLOCKS, KV_HEADS, 2, BLOCK_SIZE * HEAD_DIM), math.nan, dtype=dtype)
    mine = sorted({block for table in used for block in table})
    pages[mine] = 1.0
    assert step(library, rows, pages, group, window).isfinite().all()
    assert pages[mine].isfinite().all()
    assert pages[[block for block in range(NUM_BLOCKS) if block not in mine]].isnan().all()


def step(
    library: native.Library, rows: list[tuple[list[int], int, int]], pages: torch.Tensor, group: int, window: int | None
) -> torch.Tensor:
    """Writes and attends as a layer does."""
    plan = NativePlan(rows, BLOCK_SIZE, library)
    plan.begin(torch.cat([torch.arange(start, start + length) for _, start, length in rows]), ROPE, pages.dtype)
    qkv = torch.ones(plan.num_tokens, (group + 2) * KV_HEADS, HEAD_DIM, dtype=pages.dtype)
    layer: Any = Layer(*[None] * 7)  # type: ignore[arg-type]
    layer.scores, layer.rotation = Scores(window), 0
    plan.write(qkv, layer, pages)
    return plan.attend(qkv, layer, pages)
