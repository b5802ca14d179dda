"""Getting deltas out over HTTP: as server-sent events while they come, or collected. A client that goes away aborts its request."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
from collections.abc import AsyncIterator, Coroutine, Iterator
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from headway.server.errors import EngineFailedError, SlowReaderError, as_api_error
from headway.server.replies import Reply
from headway.server.stream import Stream
from headway.server.writing import pieces
from headway.types import OutputDelta

logger = logging.getLogger("headway.server")
T = TypeVar("T")

PART_SIZE = 2**16   # characters of an answer that leave together, a millisecond of writing


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T | None:
    """What `work` returns; None as soon as the client disconnects, with `work` cancelled."""
    return await _unless(_disconnected(receive), work)


async def _unless(end: Coroutine[Any, Any, Any], work: Coroutine[Any, Any, T]) -> T | None:
    task, ended = asyncio.create_task(work), asyncio.create_task(end)
    try:
        await asyncio.wait((task, ended), return_when=asyncio.FIRST_COMPLETED)
        return await task if task.done() else None
    finally:
        task.cancel()
        ended.cancel()


@contextlib.asynccontextmanager
async def closing(stream: Stream, receive: Receive) -> AsyncIterator[None]:
    """Closes the stream at the end of the block, and as soon as the client disconnects."""

    async def watch() -> None:
        await _disconnected(receive)
        stream.close()

    watcher = asyncio.create_task(watch())
    try:
        yield
    finally:
        watcher.cancel()
        stream.close()


async def collect(stream: Stream, reply: Reply) -> list[list[OutputDelta]] | None:
    """All deltas, per choice, held until `stream.let_go`; None when the client went away first. Raises what `Stream.get` does."""
    deltas: list[list[OutputDelta]] = [[] for _ in range(reply.num_choices)]
    complete = False
    try:
        while ready := await stream.get(hold=True):
            for position, delta in ready:
                deltas[reply.count(position, delta)].append(delta)
        complete = not stream.closed
    finally:
        if not complete:
            stream.let_go()
    return deltas if complete else None


class JsonInPieces(Response):
    """A response that writes a value's JSON; a large one part by part, and others run in between."""

    media_type = "application/json"

    def __init__(self, value: Any, held: Stream | None = None) -> None:
        """held: the stream whose memory `value` is. It is let go at the end; once it is dropped, the answer breaks off."""
        self.value = value
        self.held = held
        self.status_code = 200
        self.background = None
        self.init_headers()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            parts = _parts(self.value)
            first, second = next(parts), next(parts, None)
            if second is None:
                self.headers["Content-Length"] = str(len(first))
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": first, "more_body": second is not None})
            if second is not None:
                rest = self._write(send, itertools.chain((second,), parts))
                await unless_gone(receive, rest if self.held is None else _unless(self.held.dropped.wait(), rest))
        finally:
            if self.held is not None:
                self.held.let_go()

    async def _write(self, send: Send, parts: Iterator[bytes]) -> None:
        for part in parts:
            await send({"type": "http.response.body", "body": part, "more_body": True})
            await asyncio.sleep(0)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _parts(value: Any) -> Iterator[bytes]:
    """The JSON of `value`, PART_SIZE characters or little more at a time."""
    parts: list[str] = []
    size = 0
    for piece in pieces(value):
        parts.append(piece)
        size += len(piece)
        if size > PART_SIZE:
            yield "".join(parts).encode()
            parts, size = [], 0
    yield "".join(parts).encode()


class EventStream(Response):
    """A response that writes each step's deltas in one piece, as server-sent events."""

    media_type = "text/event-stream"

    def __init__(self, stream: Stream, reply: Reply) -> None:
        self.stream = stream
        self.reply = reply
        self.status_code = 200
        self.background = None
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with closing(self.stream, receive):
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            # A task of its own: what waits inside the framework is resumed through every one of its layers, each step.
            await asyncio.create_task(self._write(send))

    async def _write(self, send: Send) -> None:
        stream, chunk = self.stream, self.reply.chunk
        try:
            while ready := await stream.get():
                text = "".join([chunk(position, delta) for position, delta in ready])
                if text:
                    await send({"type": "http.response.body", "body": text.encode(), "more_body": True})
            text = self.reply.last_chunks()
        except Exception as error:   # the answer has begun: an event is all that is left to say it with
            if not isinstance(error, (EngineFailedError, SlowReaderError)):
                logger.exception("the answer %s could not be written", self.reply.id)
            text = f"data: {json.dumps(as_api_error(error).body())}\n\ndata: [DONE]\n\n"
        await send({"type": "http.response.body", "body": text.encode(), "more_body": False})
