"""The bridge between the server's event loop and the engine, which runs on a thread of its own.

    loop                                  engine thread
    submit, abort, call  -- a queue -->   between two steps
    Stream.get          <-- one call per step, with all its deltas --   engine.step()

The two threads share the interpreter lock: whatever the loop does is time the engine may wait for, so a step crosses over once, and
nothing here is done per token. What a request costs before it is queued is paid on a third thread (`aside`).
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

from headway.engine.admission import Prepared
from headway.engine.cores import CoreShare
from headway.errors import InvalidRequestError, QueueFullError
from headway.server.errors import DrainingError, EngineFailedError, SlowReaderError
from headway.types import OutputDelta, Request

logger = logging.getLogger("headway.server")
T = TypeVar("T")

NUM_WORKERS = 2      # a long prompt holds up another one, not everybody's
LIGHT_TOKENS = 4096  # of prompts, which are looked through in a tenth of a millisecond
STALL_S = 10.0       # a round of the engine's thread, one step and what enters before it, that takes longer is not healthy
STOP_S = 2.0
MAX_UNREAD = 2**18   # tokens and log probabilities that may wait to be read, over all streams: at most 160 MB
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


class Stream:
    """The deltas of some requests that were submitted together, tagged with the request's position. Loop thread only."""

    def __init__(self, bridge: AsyncEngine, requests: Sequence[Request]) -> None:
        self._bridge = bridge
        self.requests = requests
        self.num_open = sum(request.params.n for request in requests)
        self.closed = False
        self._ready: list[tuple[int, OutputDelta]] = []
        self.num_unread = 0   # tokens and log probabilities in what nobody has asked for yet
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    async def get(self) -> list[tuple[int, OutputDelta]]:
        """Everything that came since the last call, waiting for at least one delta; [] once all is finished or the stream is closed.

        Raises EngineFailedError when the engine gave the requests up.
        """
        while not self._ready:
            if self._error is not None:
                raise self._error
            if self.num_open == 0 or self.closed:
                return []
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        ready, self._ready = self._ready, []
        self._bridge.read(self)
        return ready

    def close(self) -> None:
        """Aborts what is unfinished and frees what it holds; no further deltas. Harmless when all is finished."""
        if not self.closed:
            self.closed = True
            self._bridge.release(self)
            self._wake()

    def take_unread(self) -> int:
        """Counts from 0 again; returns the count."""
        count, self.num_unread = self.num_unread, 0
        return count

    def push(self, position: int, delta: OutputDelta) -> None:
        self._ready.append((position, delta))
        self.num_unread += _size(delta)
        if delta.finish_reason is not None:
            self.num_open -= 1
        self._wake()

    def fail(self, error: Exception, *, drop: bool = False) -> None:
        """The next `get` raises `error`; with `drop`, what is unread is lost, else it is read before."""
        self._error = error
        if drop:
            self._ready = []
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


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
        self.num_dropped = 0   # clients that did not read what was written for them
        self.num_unread = 0    # over all streams
        self.draining = False
        self.failure: BaseException | None = None   # set once the engine is beyond repair
        self.on_failure: Callable[[], None] = lambda: None
        self._streams: dict[str, tuple[Stream, int]] = {}
        self._behind: set[Stream] = set()   # streams with something unread, finished ones among them
        self._calls: queue.SimpleQueue[_Call] = queue.SimpleQueue()
        self._workers = ThreadPoolExecutor(NUM_WORKERS, thread_name_prefix="headway-aside")
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
        self._workers.shutdown(wait=False, cancel_futures=True)
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
        stream = Stream(self, requests)
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
            prepared = self.engine.prepare(requests) if _are_light(requests) else await self.aside(self.engine.prepare, requests)
            await asyncio.gather(*[self.call(partial(self._add, each), _num_tokens(each)) for each in prepared])
        except BaseException:
            stream.close()
            raise
        return stream

    async def aside(self, function: Callable[..., T], *args: Any) -> T:
        """Runs what takes long and needs nothing of the engine's state on another thread; not when the caller is cancelled before."""
        return await asyncio.get_running_loop().run_in_executor(self._workers, function, *args)

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
        self.read(stream)
        self.num_open -= stream.num_open
        stream.num_open = 0
        if self.num_open == 0:
            self._nothing_open.set()

    def read(self, stream: Stream) -> None:
        """Nothing of `stream` is unread any more (`Stream.get`)."""
        self.num_unread -= stream.take_unread()
        self._behind.discard(stream)

    def _drop_slowest(self) -> None:
        """Frees what the client that is furthest behind has not read; when it reads on it finds an error."""
        stream = max(self._behind, key=lambda stream: stream.num_unread)
        logger.warning("a client is %d tokens and log probabilities behind with reading: its answer is dropped", stream.num_unread)
        self.num_dropped += 1
        stream.fail(SlowReaderError("the answer was dropped: too much of it was waiting to be read"), drop=True)
        stream.close()
        self.read(stream)   # one that was closed before holds nothing

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
            self.num_unread += _size(delta)
            self._behind.add(stream)
            if delta.finish_reason is not None:
                self.num_open -= 1
                if stream.num_open == 0:
                    for request in stream.requests:
                        del streams[request.request_id]
                if self.num_open == 0:
                    self._nothing_open.set()
        while self.num_unread > MAX_UNREAD:
            self._drop_slowest()

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
        self.on_failure()

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


def _size(delta: OutputDelta) -> int:
    """Of what a stream may hold: the tokens, and the log probabilities of each. (Those of the prompt are never streamed.)"""
    return len(delta.token_ids) + sum(1 + len(each.top) for each in delta.logprobs or ())


def _are_light(requests: Sequence[Request]) -> bool:
    """Whether to prepare them takes less than to hand them to another thread."""
    num_words = sum(len(request.params.bad_words or ()) for request in requests)
    return num_words == 0 and sum(len(request.prompt_token_ids) for request in requests) <= LIGHT_TOKENS


def _num_tokens(prepared: Prepared) -> int:
    return len(prepared.request.prompt_token_ids) * prepared.request.params.n
