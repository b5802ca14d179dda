"""One connection: uvicorn's, with a bound on what a client may send before its request is known, and on how long it may not read."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from headway.server.errors import ApiError

MAX_HEAD_BYTES = 64 * 1024   # uvicorn's own bound with its other parser, h11
MAX_STALL_S = 60.0           # without a byte read by the client while the buffers are full: nginx's `send_timeout`


class Connection(HttpToolsProtocol):
    """Refuses a request line with headers, or trailers, that go on for more than MAX_HEAD_BYTES: the parser would keep all of them. One
    read of the socket may bring more than that, which is let through as h11 does where it is whole."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._num_kept = 0   # bytes since the parser last had a whole head, or a part of a body, to give
        self._stall: asyncio.TimerHandle | None = None

    def data_received(self, data: bytes) -> None:
        self._num_kept += len(data)
        super().data_received(data)
        if self._num_kept > MAX_HEAD_BYTES and not self.transport.is_closing():
            self._refuse()

    def on_headers_complete(self) -> None:
        self._num_kept = 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._num_kept = 0
        super().on_body(body)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch()

    def resume_writing(self) -> None:
        self._unwatch()
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._unwatch()
        super().connection_lost(exc)

    def _watch(self) -> None:
        self._stall = self.loop.call_later(MAX_STALL_S, self._check_progress, self.transport.get_write_buffer_size())

    def _unwatch(self) -> None:
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None

    def _check_progress(self, num_unread: int) -> None:
        if self.transport.get_write_buffer_size() >= num_unread:
            self.transport.abort()
        else:
            self._watch()

    def _refuse(self) -> None:
        answer = ApiError(431, f"the request line and headers are larger than {MAX_HEAD_BYTES} bytes", code="headers_too_large").response()
        head = b"".join(b"%s: %s\r\n" % pair for pair in (*answer.raw_headers, (b"connection", b"close")))
        self.transport.write(b"HTTP/1.1 431 Request Header Fields Too Large\r\n" + head + b"\r\n" + bytes(answer.body))
        self.transport.close()
