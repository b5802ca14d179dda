"""What the engine wrote for a client and the client has not taken yet: one stream per HTTP request, and the memory they share."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from headway.errors import InvalidRequestError
from headway.server.errors import AnswerTooLargeError, SlowReaderError
from headway.types import OutputDelta, Request, TokenLogprobs

logger = logging.getLogger("headway.server")

MAX_UNREAD = 2**18   # tokens and log probabilities that may wait to be read, over all streams: at most 160 MB
MAX_HELD = 2**20     # the same of answers that are written when they are whole: at most 640 MB


class Stream:
    """The deltas of some requests that were submitted together, tagged with the request's position. Loop thread only."""

    def __init__(self, requests: Sequence[Request], memory: AnswerMemory, release: Callable[[Stream], None]) -> None:
        """release: called once, when the stream is closed."""
        self.requests = requests
        self._memory = memory
        self._release = release
        self.num_open = sum(request.params.n for request in requests)
        self.closed = False
        self._ready: list[tuple[int, OutputDelta]] = []
        self.num_unread = 0   # tokens and log probabilities in what nobody has asked for yet
        self.num_held = 0     # in what was asked for to be held
        self.dropped = asyncio.Event()   # what was unread or held is lost
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    async def get(self, *, hold: bool = False) -> list[tuple[int, OutputDelta]]:
        """Everything that came since the last call, waiting for at least one delta; [] once all is finished or the stream is closed.

        hold  it stays in memory until `let_go`, and counts towards what the server holds

        Raises EngineFailedError when the engine gave the requests up, SlowReaderError or AnswerTooLargeError when others needed the memory.
        """
        while not self._ready:
            if self._error is not None:
                raise self._error
            if self.num_open == 0 or self.closed:
                return []
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        ready, self._ready = self._ready, []
        self._memory.read(self)
        if hold:
            self._memory.hold(self, sum(size_of(delta) + num_logprobs(delta.prompt_logprobs) for _, delta in ready))
        return ready

    def close(self) -> None:
        """Aborts what is unfinished and frees what it holds; no further deltas. Harmless when all is finished."""
        if not self.closed:
            self.closed = True
            self._release(self)
            self._wake()

    def let_go(self) -> None:
        """What was held is written."""
        self._memory.let_go(self)

    def hold(self, count: int) -> None:
        self.num_held += count

    def take_open(self) -> int:
        """None is open any more; returns how many were."""
        count, self.num_open = self.num_open, 0
        return count

    def take_held(self) -> int:
        """Counts from 0 again; returns the count."""
        count, self.num_held = self.num_held, 0
        return count

    def take_unread(self) -> int:
        """Counts from 0 again; returns the count."""
        count, self.num_unread = self.num_unread, 0
        return count

    def push(self, position: int, delta: OutputDelta) -> None:
        self._ready.append((position, delta))
        self.num_unread += size_of(delta)
        if delta.finish_reason is not None:
            self.num_open -= 1
        self._wake()

    def fail(self, error: Exception, *, drop: bool = False) -> None:
        """The next `get` raises `error`; with `drop`, what is unread or held is lost, else it is read before."""
        self._error = error
        if drop:
            self._ready = []
            self.dropped.set()
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class AnswerMemory:
    """How much all streams keep, and who loses what is kept when it is too much: whoever keeps most. Loop thread only."""

    def __init__(self) -> None:
        self.num_unread = 0     # tokens and log probabilities that nobody has asked for
        self.num_held = 0       # that were asked for, to be written when the answer is whole
        self.num_dropped = 0    # clients that did not read what was written for them
        self._behind: set[Stream] = set()    # streams with something unread, finished ones among them
        self._holding: set[Stream] = set()

    def check_fits(self, count: int, param: str) -> None:
        """Raises InvalidRequestError for an answer that would have to hold more than all may, known before any of it is computed."""
        if count > MAX_HELD:
            raise InvalidRequestError(f"the answer would hold {count} log probabilities; at most {MAX_HELD} are possible", param=param)

    def add(self, stream: Stream, delta: OutputDelta) -> None:
        """`delta` waits to be read."""
        self.num_unread += size_of(delta)
        self._behind.add(stream)

    def read(self, stream: Stream) -> None:
        """Nothing of `stream` is unread any more."""
        self.num_unread -= stream.take_unread()
        self._behind.discard(stream)

    def hold(self, stream: Stream, count: int) -> None:
        """`count` more tokens and log probabilities stay until the answer is written."""
        stream.hold(count)
        self.num_held += count
        self._holding.add(stream)
        while self.num_held > MAX_HELD:
            self._drop_largest()

    def let_go(self, stream: Stream) -> None:
        """Nothing of `stream` is held any more."""
        self.num_held -= stream.take_held()
        self._holding.discard(stream)

    def drop_slowest(self) -> None:
        """While too much is unread: frees what the client that is furthest behind has not read; when it reads on it finds an error."""
        while self.num_unread > MAX_UNREAD:
            stream = max(self._behind, key=lambda stream: stream.num_unread)
            logger.warning("a client is %d tokens and log probabilities behind with reading: its answer is dropped", stream.num_unread)
            self.num_dropped += 1
            stream.fail(SlowReaderError("the answer was dropped: too much of it was waiting to be read"), drop=True)
            stream.close()
            self.read(stream)   # one that was closed before holds nothing

    def _drop_largest(self) -> None:
        stream = max(self._holding, key=lambda stream: stream.num_held)
        stream.fail(AnswerTooLargeError(
            f"the answer grew to {stream.num_held} tokens and log probabilities, more than the server can hold with what others ask for; "
            "stream it, or ask for fewer choices, tokens or log probabilities"
        ), drop=True)  # fmt: skip
        stream.close()
        self.let_go(stream)


def size_of(delta: OutputDelta) -> int:
    """Of what may wait to be read: the tokens, and the log probabilities of each. (Those of the prompt are never streamed.)"""
    return len(delta.token_ids) + num_logprobs(delta.logprobs)


def num_logprobs(found: Sequence[TokenLogprobs | None] | None) -> int:
    return sum(1 + len(each.top) for each in found or () if each is not None)
