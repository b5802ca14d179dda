"""How many cores may be used, and noticing that others use them."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from headway.engine import cores

V1, V2 = "4:memory:/\n3:cpu,cpuacct:{}\n1:name=systemd:/a\n", "0::{}\n"


@pytest.mark.parametrize(
    ("membership", "files", "expected"),
    [
        (V2.format("/"), {"cpu.max": "max 100000\n"}, None),
        (V2.format("/"), {"cpu.max": "150000 100000\n"}, 1.5),
        (V2.format("/host/path"), {"cpu.max": "150000 100000\n"}, 1.5),                                  # a container's mount is its group
        (V2.format("/a.slice/b"), {"a.slice/cpu.max": "300000 100000", "a.slice/b/cpu.max": "max 100000"}, 3.0),     # a parent's holds, too
        (V2.format("/a.slice/b"), {"a.slice/cpu.max": "300000 100000", "a.slice/b/cpu.max": "50000 100000"}, 0.5),
        (V2.format("/a"), {"b/cpu.max": "50000 100000"}, None),                                             # somebody else's
        (V1.format("/"), {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
        (V1.format("/host/path"), {"cpu/cpu.cfs_quota_us": "50000", "cpu/cpu.cfs_period_us": "100000"}, 0.5),
        (V1.format("/g"), {"cpu/g/cpu.cfs_quota_us": "50000", "cpu/g/cpu.cfs_period_us": "100000"}, 0.5),
        (V1.format("/g") + V2.format("/"), {"cpu/g/cpu.cfs_quota_us": "50000", "cpu/g/cpu.cfs_period_us": "100000"}, 0.5),
        (V2.format("/"), {"cpu.max": "nonsense"}, None),
        (V2.format("/"), {}, None),
        ("", {"cpu.max": "150000 100000\n"}, None),
    ],
)
def test_quota(tmp_path: Path, membership: str, files: dict[str, str], expected: float | None) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    (tmp_path / "membership").write_text(membership, encoding="utf-8")
    assert cores._quota(tmp_path, tmp_path / "membership") == expected


@pytest.mark.parametrize(("quota", "affinity", "expected"), [(None, 4, 4), (0.4, 4, 1), (1.5, 4, 2), (1.4, 4, 1), (8.0, 4, 4)])
def test_a_quota_below_the_cores_bounds_the_threads(
    monkeypatch: pytest.MonkeyPatch, quota: float | None, affinity: int, expected: int
) -> None:
    monkeypatch.setattr(cores, "_quota", lambda *_: quota)
    monkeypatch.setattr(cores.os, "sched_getaffinity", lambda _: set(range(affinity)), raising=False)
    assert cores.num_usable() == expected


def test_a_number_or_the_environment_goes_before(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()
    try:
        monkeypatch.setattr(cores, "num_usable", lambda: 1)
        monkeypatch.setenv("OMP_NUM_THREADS", "2")
        torch.set_num_threads(2)
        cores.set_threads(None)
        assert torch.get_num_threads() == 2
        monkeypatch.delenv("OMP_NUM_THREADS")
        cores.set_threads(None)
        assert torch.get_num_threads() == 1
        cores.set_threads(3)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_crowded_cores_are_said_once(caplog: pytest.LogCaptureFixture) -> None:
    share = cores.CoreShare()
    with caplog.at_level(logging.WARNING, logger="headway.engine"):
        for _ in range(6):
            share.observe(cores.WINDOW_S / 2, cores.WINDOW_S / 2)      # a core of its own
        assert not caplog.records
        for _ in range(8):
            share.observe(cores.WINDOW_S / 2, cores.WINDOW_S / 5)
    assert [record.getMessage() for record in caplog.records if "40 %" in record.getMessage()]
    assert len(caplog.records) == 1
