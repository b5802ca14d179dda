"""The bridge between the server's event loop and the engine, which runs on a thread of its own.

    loop                                  engine thread
    submit, abort, call  -- a queue -->   between two steps
    Stream.get          <-- one call per step, with all its deltas --   engine.step()

The two threads share the interpreter lock: whatever the loop does is time the engine may wait for, so a step crosses over once, and
nothing here is done per token. What a request costs before it is queued is paid on further threads (`aside`).
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

from headway.engine.admission import Prepared
from headway.engine.cores import CoreShare
from headway.errors import InvalidRequestError, QueueFullError
from headway.server.errors import DrainingError, EngineFailedError
from headway.server.stream import AnswerMemory, Stream
from headway.server.workers import Workers
from headway.types import OutputDelta, Request

logger = logging.getLogger("headway.server")
T = TypeVar("T")

NUM_WORKERS = 2      # a long prompt holds up another one, not everybody's
MAX_WAITING = 2**26  # characters of prompts that may wait to be tokenized: 16 bodies of 4 MB
MAX_TEXTS = 2**24    # of texts that are tokenized and not answered
LIGHT_TOKENS = 4096  # of prompts, which are looked through in a tenth of a millisecond
STALL_S = 10.0       # a round of the engine's thread, one step and what enters before it, that takes longer is not healthy
STOP_S = 2.0
IDLE_CHECK_S = 1.0   # an engine that had nothing to do for so long checks its invariants


class _Call(NamedTuple):
    """What the loop asks of the engine's thread, and how much it adds: known tokens of sequences."""

    function: Callable[[], None]
    num_tokens: int = 0


class EngineLike(Protocol):
    """The part of `Engine` that this file uses."""

    def prepare(self, requests: Sequence[Request]) -> list[Prepared]: ...
    def add(self, request: Prepared) -> None: ...
    def step(self) -> list[OutputDelta]: ...
    def abort(self, request_id: str) -> None: ...
    def has_work(self) -> bool: ...
    def check(self) -> None: ...


class AsyncEngine:
    """Runs an engine on its own thread. All methods belong to the loop's thread, except those that say otherwise."""

    def __init__(self, engine: EngineLike, *, max_open: int, max_added_tokens: int) -> None:
        """
        max_open          sequences that may be submitted and unfinished at a time: those that run, plus the queue
        max_added_tokens  known tokens after which no more requests enter before the next step: what a step takes in
        """
        self.engine = engine
        self.max_open = max_open
        self.max_added_tokens = max_added_tokens
        self.num_open = 0
        self.num_rejected = 0
        self.memory = AnswerMemory()
        self.draining = False
        self.failure: BaseException | None = None   # set once the engine is beyond repair
        self._report_failure: Callable[[], None] = lambda: None
        self._streams: dict[str, tuple[Stream, int]] = {}
        self._calls: queue.SimpleQueue[_Call] = queue.SimpleQueue()
        self._workers = Workers("headway-aside", NUM_WORKERS, MAX_WAITING)
        self.texts = Workers("headway-texts", 1, MAX_TEXTS)   # what is only tokenized: no prompt waits for it
        self._cores = CoreShare()
        self._stopping = self._stopped = False
        self._round_began: float | None = None   # engine thread: monotonic seconds; None while it waits for work
        self._added: dict[str, int] = {}   # engine thread: request id -> sequences not finished
        self._thread = threading.Thread(target=self._run, name="headway-engine", daemon=True)
        self.loop: asyncio.AbstractEventLoop | None = None
        self._nothing_open = asyncio.Event()
        self._nothing_open.set()

    def start(self) -> None:
        self.loop = asyncio.get_running_loop()
        self._thread.start()

    def on_failure(self, report: Callable[[], None]) -> None:
        """`report` is called once the engine's thread has ended with an error, on the loop's thread."""
        self._report_failure = report

    @property
    def stalled(self) -> bool:
        """Whether the engine's thread has work and has not come round for STALL_S."""
        began = self._round_began
        return began is not None and time.monotonic() - began > STALL_S

    @property
    def hangs(self) -> bool:
        """Whether the thread goes on although it was told to stop."""
        return self._stopped and self._thread.is_alive()

    async def stop(self) -> None:
        """Ends the thread after its current step, and returns after STOP_S whether or not it did. Streams that are still open fail."""
        self.draining = True
        self._fail_streams(list(self._streams), EngineFailedError("the server shut down before the request was finished"))
        self._calls.put(_Call(self._end))
        await asyncio.get_running_loop().run_in_executor(None, self._thread.join, STOP_S)
        self._stopped = True

    async def drain(self, timeout_s: float) -> None:
        """Takes nothing new and waits until everything open is finished, at most `timeout_s`."""
        self.draining = True
        try:
            await asyncio.wait_for(self._nothing_open.wait(), timeout_s)
        except asyncio.TimeoutError:   # the builtin's alias from Python 3.11 on
            logger.warning("%d sequences did not finish within %g s; aborting them", self.num_open, timeout_s)
            self._fail_streams(list(self._streams), EngineFailedError("the server shut down before the request was finished"))

    async def submit(self, requests: Sequence[Request]) -> Stream:
        """Queues the requests, all or none, and returns once the engine has accepted them.

        Raises InvalidRequestError, QueueFullError, DrainingError or EngineFailedError.
        """
        stream = Stream(requests, self.memory, self.release)
        if self.draining:
            raise DrainingError
        if stream.num_open > self.max_open:
            raise InvalidRequestError(
                f"the request asks for {stream.num_open} sequences (prompts times n); at most {self.max_open} fit the queue", param="n"
            )
        if self.num_open + stream.num_open > self.max_open:
            self.num_rejected += 1
            raise QueueFullError(f"the queue is full: {self.num_open} sequences are waiting or running; try again later")
        self.num_open += stream.num_open
        self._nothing_open.clear()
        for position, request in enumerate(requests):
            self._streams[request.request_id] = (stream, position)
        try:
            light = _are_light(requests)
            prepared = self.engine.prepare(requests) if light else await self.aside(_size_of(requests), self.engine.prepare, requests)
            await asyncio.gather(*[self.call(partial(self._add, each), _num_tokens(each)) for each in prepared])
        except BaseException:
            stream.close()
            raise
        return stream

    async def aside(self, size: int, function: Callable[..., T], *args: Any) -> T:
        """Runs what takes long and needs nothing of the engine's state on another thread, shortest text first (`Workers.run`)."""
        return await self._workers.run(size, function, *args)

    async def call(self, function: Callable[[], T], num_tokens: int = 0) -> T:
        """Runs `function` on the engine's thread between two steps and returns what it returns; not when the caller is cancelled before."""
        if self.failure is not None:
            raise EngineFailedError("the engine has stopped")
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def settle(result: Any, error: BaseException | None) -> None:
            if future.cancelled():
                return
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(result)

        def run() -> None:
            if future.cancelled():
                return
            try:
                if self.failure is not None:
                    raise EngineFailedError("the engine has stopped")
                result = function()
            except BaseException as error:
                loop.call_soon_threadsafe(settle, None, error)
            else:
                loop.call_soon_threadsafe(settle, result, None)

        self._calls.put(_Call(run, num_tokens))
        return await future

    def release(self, stream: Stream) -> None:
        """Forgets a stream, aborting its requests that are not finished (`Stream.close`)."""
        ids = [request.request_id for request in stream.requests if self._streams.pop(request.request_id, None)]
        if ids:
            self._calls.put(_Call(lambda: self._abort(ids)))
        self.memory.read(stream)
        self.num_open -= stream.take_open()
        if self.num_open == 0:
            self._nothing_open.set()

    def _deliver(self, deltas: list[OutputDelta]) -> None:
        streams = self._streams
        for delta in deltas:
            entry = streams.get(delta.request_id)
            if entry is None:   # closed while the step ran
                continue
            if delta.finish_reason == "error":
                self._fail_streams([delta.request_id], EngineFailedError("the output of this request could not be written"))
                continue
            stream, position = entry
            stream.push(position, delta)
            self.memory.add(stream, delta)
            if delta.finish_reason is not None:
                self.num_open -= 1
                if stream.num_open == 0:
                    for request in stream.requests:
                        del streams[request.request_id]
                if self.num_open == 0:
                    self._nothing_open.set()
        self.memory.drop_slowest()

    def _fail_streams(self, request_ids: Sequence[str], error: Exception) -> None:
        for request_id in request_ids:
            entry = self._streams.get(request_id)
            if entry is not None:
                entry[0].fail(error)
                entry[0].close()

    def _bury(self) -> None:
        """The engine's thread has ended with `failure`: everything open fails, and so does what is still in the queue."""
        self._fail_streams(list(self._streams), EngineFailedError("the engine has stopped"))
        while not self._calls.empty():
            self._calls.get_nowait().function()
        self._report_failure()

    # The engine's thread.

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._round_began = time.monotonic()
                self._take_calls()
                if self.engine.has_work():
                    self._step()
        except BaseException as error:
            logger.critical("the engine has stopped", exc_info=error)
            self.failure = error
            self._post(self._bury)

    def _take_calls(self) -> None:
        """Runs what the loop asked for, as far as one step's worth of tokens goes; without work, waits for it."""
        num_added = 0
        if not self.engine.has_work():
            self._round_began = None
            call = self._wait_for_call()
            self._round_began = time.monotonic()
            call.function()
            num_added = call.num_tokens
        while num_added < self.max_added_tokens and not self._calls.empty():
            call = self._calls.get_nowait()
            call.function()
            num_added += call.num_tokens

    def _wait_for_call(self) -> _Call:
        try:
            return self._calls.get(timeout=IDLE_CHECK_S)
        except queue.Empty:
            self.engine.check()
            return self._calls.get()

    def _step(self) -> None:
        try:
            with self._cores.watching():
                deltas = self.engine.step()
        except Exception:
            logger.exception("a step failed; the requests it held are answered with an error")
            failed = list(self._added)
            self._abort(failed)
            self.engine.check()
            self._post(self._fail_streams, failed, EngineFailedError("the engine failed while it worked on this request"))
            return
        for delta in deltas:
            if delta.finish_reason is not None:
                self._forget(delta.request_id)
        if deltas:
            self._post(self._deliver, deltas)

    def _end(self) -> None:
        self._stopping = True

    def _add(self, prepared: Prepared) -> None:
        self.engine.add(prepared)
        self._added[prepared.request.request_id] = prepared.request.params.n

    def _abort(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self._added.pop(request_id, None)
            self.engine.abort(request_id)

    def _forget(self, request_id: str) -> None:
        num_left = self._added.pop(request_id) - 1
        if num_left:
            self._added[request_id] = num_left

    def _post(self, function: Callable[..., None], *args: Any) -> None:
        assert self.loop is not None
        self.loop.call_soon_threadsafe(function, *args)


def _are_light(requests: Sequence[Request]) -> bool:
    """Whether to prepare them takes less than to hand them to another thread."""
    compiles = any(request.params.bad_words or request.params.structured_outputs for request in requests)
    return not compiles and sum(len(request.prompt_token_ids) for request in requests) <= LIGHT_TOKENS


def _size_of(requests: Sequence[Request]) -> int:
    """In characters or tokens, of what `prepare` looks through."""
    words = {id(request.params): sum(map(len, request.params.bad_words or ())) for request in requests}
    return sum(words.values()) + sum(len(request.prompt_token_ids) for request in requests)


def _num_tokens(prepared: Prepared) -> int:
    return len(prepared.request.prompt_token_ids) * prepared.request.params.n
