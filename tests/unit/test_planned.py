"""What a draft promises, in numbers and in arrays."""

from __future__ import annotations

import pytest

from headway.control.goodput.decision import net_gain


def test_the_best_beginning_counts() -> None:
    prices = [0.0, 0.5, 0.7, 0.9, 1.1]
    assert net_gain([0.9, 0.8, 0.1, 0.05], prices) == pytest.approx(1.0)   # two of four
    assert net_gain([0.4, 0.25], prices) == 0.0                             # none pays
    assert net_gain([], prices) == 0.0
