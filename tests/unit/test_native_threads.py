"""The kernels' threads: the same numbers whatever their count, from several callers at once, and in a forked child."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Iterator

import pytest
import torch

from headway import native
from headway.native import ops

library = native.library()
if library is None:
    pytest.skip(f"no compiled kernels: {native.choose().reason}", allow_module_level=True)
WIDTH, OUT = 512, 4096
DTYPE = torch.float32


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def packed() -> ops.PackedLinear:
    assert library is not None
    return ops.PackedLinear(library, torch.randn(OUT, WIDTH, generator=torch.Generator().manual_seed(0)).to(DTYPE))


@pytest.fixture(scope="module")
def linear() -> ops.PackedLinear:
    return packed()


@pytest.fixture(scope="module")
def x() -> torch.Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(1)).to(DTYPE)


def test_the_number_of_threads_changes_no_bit(linear: ops.PackedLinear, x: torch.Tensor) -> None:
    found = []
    for num in (1, 2, 3, 7, 2, 1, 2):   # threads leave the team and come back
        torch.set_num_threads(num)
        found.append(linear(x))
    assert all(torch.equal(found[0], each) for each in found)


def test_several_callers_at_once(linear: ops.PackedLinear, x: torch.Tensor) -> None:
    """One has the threads, the others compute alone meanwhile; jobs follow each other too fast for a thread to see all of them."""
    torch.set_num_threads(1)
    expected = linear(x)
    wrong: list[int] = []

    def call(caller: int) -> None:
        torch.set_num_threads(3)
        linear = packed()   # one is for one caller
        wrong.extend(caller for _ in range(300) if not torch.equal(linear(x), expected))

    callers = [threading.Thread(target=call, args=(i,)) for i in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not wrong


def _in_child(linear: ops.PackedLinear, x: torch.Tensor, expected: torch.Tensor) -> None:
    torch.set_num_threads(2)
    raise SystemExit(0 if all(torch.equal(linear(x), expected) for _ in range(20)) else 3)


def test_a_forked_child_has_threads_of_its_own(linear: ops.PackedLinear, x: torch.Tensor) -> None:
    torch.set_num_threads(2)
    expected = linear(x)   # the parent's threads are there
    child = multiprocessing.get_context("fork").Process(target=_in_child, args=(linear, x, expected))
    child.start()
    child.join(60)
    assert child.exitcode == 0


def _on_one_core(linear: ops.PackedLinear, x: torch.Tensor, expected: torch.Tensor) -> None:
    torch.set_num_threads(3)
    cores = os.sched_getaffinity(0)
    right = True
    for usable in ({min(cores)}, cores) * 3:
        for task in os.listdir("/proc/self/task"):
            os.sched_setaffinity(int(task), usable)
        right &= all(torch.equal(linear(x), expected) for _ in range(50))
    raise SystemExit(0 if right else 3)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system pins no threads")
def test_threads_on_the_core_of_the_caller_stand_aside(linear: ops.PackedLinear, x: torch.Tensor) -> None:
    """All of them on one core, where only the caller takes items, then on all cores again: no bit differs and every call returns."""
    torch.set_num_threads(1)
    expected = linear(x)
    child = multiprocessing.get_context("fork").Process(target=_on_one_core, args=(linear, x, expected))
    child.start()
    child.join(60)
    assert child.exitcode == 0
