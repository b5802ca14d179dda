"""What a draft promises, in numbers and in arrays."""

from __future__ import annotations

import numpy as np
import pytest

from headway.control.costs import CostModel
from headway.control.goodput.decision import net_gain, net_gains_of
from headway.control.goodput.drafter_state import DrafterState
from headway.control.policy import DrafterView, DraftView


def test_the_best_beginning_counts() -> None:
    prices = [0.0, 0.5, 0.7, 0.9, 1.1]
    assert net_gain([0.9, 0.8, 0.1, 0.05], prices) == pytest.approx(1.0)   # two of four
    assert net_gain([0.4, 0.25], prices) == 0.0                             # none pays
    assert net_gain([], prices) == 0.0


def test_many_drafts_promise_what_few_do() -> None:
    random = np.random.default_rng(1)
    drafter = DrafterState(DrafterView("suffix", True), 8, CostModel())
    drafts = [
        DraftView(i, "suffix", length, True, tuple(random.random(length).tolist()))
        for i, length in enumerate(random.integers(1, 9, 40).tolist())
    ]
    prices = [0.2 * n for n in range(9)]
    many = net_gains_of(drafts, {"suffix": drafter}, prices)
    assert many == pytest.approx([net_gains_of([draft], {"suffix": drafter}, prices)[0] for draft in drafts], abs=1e-9)
    assert min(many) == 0.0 < max(many)
