"""The ceiling, and how much of it a run reached."""

from __future__ import annotations

import pytest

from headway.bench.records import Record, Run
from headway.bench.roofline import Roofline
from headway.spec_decode_metrics import SpecDecodeMetrics


def test_share_of_the_ceiling() -> None:
    limits = Roofline(300_000_000, 270_000_000, 23_040, 40e9, 148.0, 136.0)
    assert limits.share(270_000_000 / 40e9 * 1e3, 0) == pytest.approx(1.0)
    assert limits.share(10.0, 1000) == pytest.approx((270e6 + 23.04e6) / 0.010 / 40e9)


def test_mean_time_per_token_counts_each_token_once() -> None:
    records = (Record(5, 0.0, 1.0, 2.0, 11), Record(5, 0.0, 2.0, 2.0, 1), Record(5, 0.0, 3.0, 3.5, 6), Record(5, 0.0))
    assert Run(records, SpecDecodeMetrics(), None, None).mean_tpot_ms == pytest.approx(1500 / 15)
    assert Run((), SpecDecodeMetrics(), None, None).mean_tpot_ms == 0.0
