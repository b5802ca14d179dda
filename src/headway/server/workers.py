"""Threads for what takes long and needs nothing of the engine's state: tokenizing, rendering conversations, compiling parameters.

The shortest text goes first, so a client waits for those who ask for less, and for what is under way; how much may wait is bounded.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from headway.errors import QueueFullError

T = TypeVar("T")


@dataclass(order=True, slots=True)
class _Job:
    size: int
    number: int
    run: Callable[[], None] | None = field(compare=False)   # None: nobody waits for it any more


class Workers:
    """Methods belong to the loop's thread. The threads start with the first job."""

    def __init__(self, name: str, num_threads: int, max_waiting: int) -> None:
        """max_waiting: characters of text that may wait or be worked on, beyond the first job's."""
        self.name = name
        self.max_waiting = max_waiting
        self.num_waiting = 0
        self._jobs: queue.PriorityQueue[_Job] = queue.PriorityQueue()
        self._numbers = itertools.count()
        self._threads = [threading.Thread(target=self._run, name=f"{name}_{index}", daemon=True) for index in range(num_threads)]

    async def run(self, size: int, function: Callable[..., T], *args: Any) -> T:
        """What `function(*args)` returns, for a text of `size` characters; it does not run once the caller is cancelled.

        Raises QueueFullError when too much is waiting.
        """
        if self.num_waiting and self.num_waiting + size > self.max_waiting:
            raise QueueFullError(f"{self.num_waiting} characters are waiting to be tokenized; try again later")
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def settle(result: Any, error: BaseException | None) -> None:
            if not future.done():
                if error is not None:
                    future.set_exception(error)
                else:
                    future.set_result(result)

        def work() -> None:
            try:
                found, error = function(*args), None
            except BaseException as raised:
                found, error = None, raised
            with contextlib.suppress(RuntimeError):   # the loop has ended meanwhile
                loop.call_soon_threadsafe(settle, found, error)

        for thread in self._threads:
            if thread.ident is None:
                thread.start()
        self.num_waiting += size
        job = _Job(size, next(self._numbers), work)
        try:
            self._jobs.put(job)
            return await future
        finally:
            self.num_waiting -= size
            job.run = None   # it may stay in the queue behind shorter ones: without its text

    def _run(self) -> None:
        while True:
            run = self._jobs.get().run
            if run is not None:
                run()
            del run   # its text is not kept until the next one comes
