"""How deep to draft: lists and arrays agree, and both with trying everything."""

from __future__ import annotations

from itertools import product

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.control.goodput.draft_length import best_depth, best_depth_few

RATES = st.lists(st.floats(0.05, 0.95), min_size=3, max_size=3)


@settings(max_examples=60, deadline=None)
@given(rates=st.lists(RATES, min_size=1, max_size=3), slope=st.floats(0.01, 2.0), draft=st.floats(0.0, 1.0), rate=st.floats(0.05, 2.0))
def test_lists_arrays_and_brute_force_agree(rates: list[list[float]], slope: float, draft: float, rate: float) -> None:
    reached = np.cumprod(np.array(rates), axis=1)
    step_ms = 5.0 + slope * np.arange(reached.size + 1)
    depths = (1, 2, 3)

    def worth(depth: int, lengths: tuple[int, ...]) -> float:
        tokens = sum(float(line[:length].sum()) for line, length in zip(reached, lengths, strict=True))
        return tokens - rate * (float(step_ms[sum(lengths)]) + draft * depth)

    best = max(worth(depth, lengths) for depth in depths for lengths in product(range(depth + 1), repeat=len(reached)))
    for found in (
        best_depth(reached, step_ms, lambda depth: draft * depth, rate, depths),
        best_depth_few(reached.tolist(), step_ms.tolist(), lambda depth: draft * depth, rate, depths),
    ):
        assert np.isclose(worth(found[0], tuple(found[1])), best, rtol=1e-9, atol=1e-9)
