"""Work on threads of its own: in which order, how much may wait, and what is kept of a caller that left."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from headway.errors import QueueFullError
from headway.server.workers import Workers


class Text:
    """Something that can be weakly referred to."""


@asynccontextmanager
async def busy(workers: Workers) -> AsyncIterator[None]:
    """The one thread is at work, with a text of one character, inside the block."""
    begun, resume = threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        assert resume.wait(60)

    running = asyncio.create_task(workers.run(1, work))
    await asyncio.to_thread(begun.wait, 60)
    try:
        yield
    finally:
        resume.set()
        await running


def test_the_shortest_text_goes_first_and_equal_ones_in_their_order() -> None:
    order: list[str] = []

    async def run() -> None:
        workers = Workers("test", 1, 100)
        async with busy(workers):
            waiting = [asyncio.create_task(workers.run(int(name[0]), order.append, name)) for name in ("3", "2a", "9", "2b")]
            await asyncio.sleep(0)
        await asyncio.gather(*waiting)

    asyncio.run(run())
    assert order == ["2a", "2b", "3", "9"]


def test_how_much_may_wait_is_bounded_but_a_single_text_always_fits() -> None:
    async def run() -> None:
        workers = Workers("test", 1, 10)
        assert await workers.run(50, str, 7) == "7"
        async with busy(workers):
            waiting = asyncio.create_task(workers.run(9, str, 8))
            await asyncio.sleep(0)
            with pytest.raises(QueueFullError):
                await workers.run(1, str, 9)
        assert await waiting == "8"
        assert workers.num_waiting == 0

    asyncio.run(run())


def test_nothing_is_kept_of_a_text_whose_caller_left() -> None:
    async def run() -> None:
        workers = Workers("test", 1, 100)
        text = Text()
        found = weakref.ref(text)
        async with busy(workers):
            leaving = asyncio.create_task(workers.run(5, lambda text: None, text))
            del text
            await asyncio.sleep(0)
            leaving.cancel()
            await asyncio.wait([leaving])
            del leaving
            gc.collect()
            assert workers.num_waiting == 1
            assert found() is None, "it is still in the queue"

    asyncio.run(run())
