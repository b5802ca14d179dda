"""How many cores this process may use, and whether it gets them."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

logger = logging.getLogger("headway.engine")

CGROUP = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")
WINDOW_S = 10.0     # of steps, over which the share is taken: a neighbour of a second is nobody's news
CROWDED = 0.8       # share of a core: the engine's thread gets 0.95 and more on a machine of its own


def num_usable() -> int:
    """Cores by affinity, or the quota of the control groups rounded to whole cores where that is less; 1 at least.

    More threads than the quota has cores use it up early in each period, and all of them stand still for the rest of it.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _quota(CGROUP, MEMBERSHIP)
    return cores if quota is None else max(1, min(cores, int(quota + 0.5)))


def set_threads(num_threads: int | None) -> None:
    """Threads of the forward pass. Without a number: what the environment says (OMP_NUM_THREADS), else `num_usable`."""
    if num_threads is None and "OMP_NUM_THREADS" not in os.environ:
        num_threads = min(torch.get_num_threads(), num_usable())
    if num_threads is not None:
        torch.set_num_threads(num_threads)


def _quota(root: Path, membership: Path) -> float | None:
    """Cores that the control groups of this process grant, the least along its path; None: as many as there are."""
    try:
        lines = membership.read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    granted: list[float] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        mount = root / "cpu" if controllers else root
        group = mount / path.strip("/")     # a container's mount often is its group, and the path the host's: parents are read, too
        granted.extend(quota for each in (group, *group.parents) if each.is_relative_to(mount) and (quota := _granted(each)) is not None)
    return min(granted, default=None)


def _granted(group: Path) -> float | None:
    try:
        if (group / "cpu.max").exists():
            quota, period = (group / "cpu.max").read_text(encoding="utf-8").split()
        else:
            quota = (group / "cpu.cfs_quota_us").read_text(encoding="utf-8")
            period = (group / "cpu.cfs_period_us").read_text(encoding="utf-8")
        return None if quota == "max" or int(quota) <= 0 else int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return None


class CoreShare:
    """Watches which part of its steps' time the engine's thread was on a core, and says once when others take much of it."""

    def __init__(self) -> None:
        self.said = False
        self._wall_s = self._cpu_s = 0.0

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Around a step of an engine on a CPU: where the thread waits for a device it is off its core by itself."""
        wall_s, cpu_s = time.perf_counter(), time.thread_time()
        yield
        self.observe(time.perf_counter() - wall_s, time.thread_time() - cpu_s)

    def observe(self, wall_s: float, cpu_s: float) -> None:
        self._wall_s += wall_s
        self._cpu_s += cpu_s
        if self._wall_s < WINDOW_S:
            return
        share = self._cpu_s / self._wall_s
        self._wall_s = self._cpu_s = 0.0
        if share < CROWDED and not self.said:
            self.said = True
            logger.warning(
                "other programs use the same cores: the engine ran in %.0f %% of its steps' time; see docs/troubleshooting.md", 100 * share
            )
