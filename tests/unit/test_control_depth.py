"""How deep to draft: as found by trying everything."""

from __future__ import annotations

from itertools import product

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.control.goodput.draft_length import best_depth

RATES = st.lists(st.floats(0.05, 0.95), min_size=3, max_size=3)


@settings(max_examples=60, deadline=None)
@given(rates=st.lists(RATES, min_size=1, max_size=3), slope=st.floats(0.01, 2.0), draft=st.floats(0.0, 1.0), rate=st.floats(0.05, 2.0))
def test_it_is_the_best_of_all(rates: list[list[float]], slope: float, draft: float, rate: float) -> None:
    reached = np.cumprod(np.array(rates), axis=1)
    step_ms = 5.0 + slope * np.arange(reached.size + 1)
    depths = (1, 2, 3)

    def net(depth: int, lengths: tuple[int, ...]) -> float:
        tokens = sum(float(line[:length].sum()) for line, length in zip(reached, lengths, strict=True))
        return tokens - rate * (float(step_ms[sum(lengths)]) + draft * depth)

    best = max(net(depth, lengths) for depth in depths for lengths in product(range(depth + 1), repeat=len(reached)))
    depth, lengths = best_depth(reached, step_ms, [draft * depth for depth in depths], rate)
    assert np.isclose(net(depth, tuple(lengths)), best, rtol=1e-9, atol=1e-9)
