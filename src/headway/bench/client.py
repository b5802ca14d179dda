"""A small HTTP client: it often shares the machine with the server it measures, so its own cost must not show.

One connection per request. Of a stream only the times are taken while it arrives; it is cut into its server-sent events at its end.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar, cast
from urllib.parse import urlsplit

from headway.errors import ConfigError

T = TypeVar("T")
OnEvent = Callable[[bytes, float], None]
"""(payload of a server-sent event, time.perf_counter() when its bytes arrived); called for all events once the response is complete"""

LAST_CHUNK = b"0\r\n\r\n"

CONNECT_TIMEOUT_S = 30.0
RESPONSE_TIMEOUT_S = 1800.0


class RequestFailed(Exception):
    """The connection broke, the status was not 200, or the response ended early."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A server, parsed once. `path` is what the base URL brings (without a trailing slash or /v1)."""

    host: str
    port: int
    path: str
    tls: bool
    api_key: str | None = None

    @classmethod
    def parse(cls, base_url: str, api_key: str | None = None) -> Endpoint:
        """Raises ConfigError for anything but http(s)://host[:port][/path]."""
        try:
            parts = urlsplit(base_url)
            port = parts.port
        except ValueError as error:
            raise ConfigError(f"base-url {base_url!r} is not a URL: {error}") from error
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise ConfigError(f"base-url must look like http://127.0.0.1:8000, got {base_url!r}")
        tls = parts.scheme == "https"
        return cls(parts.hostname, port or (443 if tls else 80), parts.path.rstrip("/").removesuffix("/v1"), tls, api_key)

    def head(self, method: str, path: str, num_body_bytes: int) -> bytes:
        lines = [f"{method} {self.path}{path} HTTP/1.1", f"Host: {self.host}:{self.port}", "Connection: close", "Accept-Encoding: identity"]
        if self.api_key:
            lines.append(f"Authorization: Bearer {self.api_key}")
        if method == "POST":
            lines += ["Content-Type: application/json", f"Content-Length: {num_body_bytes}"]
        return ("\r\n".join(lines) + "\r\n\r\n").encode("ascii")


class _Exchange(asyncio.Protocol):
    """One request and its response. `done` resolves to (status, body); with `on_event` a 200 body is not kept but cut into events."""

    def __init__(self, request: bytes, on_event: OnEvent | None) -> None:
        self.request = request
        self.on_event = on_event
        self.done: asyncio.Future[tuple[int, bytes]] = asyncio.get_running_loop().create_future()
        self.status = 0
        self.left: int | None = None     # bytes of the body (or of the chunk) still to come; None: until the end
        self.chunked = False
        self.raw = bytearray()           # received, framing not yet removed
        self.body = bytearray()          # framing removed, not yet handed on
        self.pieces: list[tuple[float, bytes]] = []   # of a stream, as they came and when

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        self.pieces.append((time.perf_counter(), data))
        if not (self.on_event and self.chunked and self.status == 200) or data.endswith(LAST_CHUNK):
            self._read_pieces()

    def _read_pieces(self) -> None:
        pieces, self.pieces = self.pieces, []
        for now, data in pieces:
            self.raw += data
            try:
                if self.status == 0 and not self._read_head():
                    continue
                complete = self._read_body()
            except (ValueError, IndexError) as error:
                self._fail(f"malformed response: {error}")
                return
            if self.on_event is not None and self.status == 200:
                self._cut_events(now)
            if complete:
                self._finish()

    def connection_lost(self, exc: Exception | None) -> None:
        self._read_pieces()
        if not self.done.done():
            if self.status and not self.chunked and self.left is None and exc is None:
                self._finish()
            else:
                self._fail(f"the connection was closed before the response was complete{f': {exc}' if exc else ''}")

    def _read_head(self) -> bool:
        end = self.raw.find(b"\r\n\r\n")
        if end < 0:
            return False
        lines = bytes(self.raw[:end]).decode("latin-1").split("\r\n")
        del self.raw[: end + 4]
        self.status = int(lines[0].split(" ", 2)[1])
        headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])}
        self.chunked = headers.get("transfer-encoding", "").lower() == "chunked"
        self.left = 0 if self.chunked else int(headers["content-length"]) if "content-length" in headers else None
        return True

    def _read_body(self) -> bool:
        """Moves bytes from `raw` to `body`; True when the body is complete."""
        if not self.chunked:
            self.body += self.raw
            if self.left is not None:
                self.left -= len(self.raw)
            self.raw.clear()
            return self.left is not None and self.left <= 0
        while True:
            assert self.left is not None
            if self.left == 0:
                end = self.raw.find(b"\r\n")
                if end < 0:
                    return False
                size = int(bytes(self.raw[:end]).partition(b";")[0], 16)
                if size == 0:
                    return True
                del self.raw[: end + 2]
                self.left = size + 2     # the chunk and the line break that ends it
            if len(self.raw) < self.left:
                return False
            self.body += self.raw[: self.left - 2]
            del self.raw[: self.left]
            self.left = 0

    def _cut_events(self, now: float) -> None:
        assert self.on_event is not None
        while (end := self.body.find(b"\n\n")) >= 0:
            event = bytes(self.body[:end])
            del self.body[: end + 2]
            if event.startswith(b"data:"):
                self.on_event(event[5:].strip(), now)

    def _finish(self) -> None:
        if not self.done.done():
            self.done.set_result((self.status, bytes(self.body)))
        self.transport.close()

    def _fail(self, message: str) -> None:
        if not self.done.done():
            self.done.set_exception(RequestFailed(message))
        self.transport.close()


def run(main: Coroutine[Any, Any, T]) -> T:
    """asyncio.run, on the event loop that costs less where it is installed."""
    try:
        import uvloop
    except ImportError:   # not made for this system
        return asyncio.run(main)
    result: T = uvloop.run(main)
    return result


async def exchange(
    target: Endpoint, method: str, path: str, body: bytes = b"", on_event: OnEvent | None = None, timeout_s: float = RESPONSE_TIMEOUT_S
) -> tuple[int, bytes]:
    """(status, body); with `on_event` the body of a 200 is empty and its events were handed on. Raises RequestFailed."""
    loop = asyncio.get_running_loop()
    tls = ssl.create_default_context() if target.tls else None
    request = target.head(method, path, len(body)) + body
    try:
        transport, protocol = await asyncio.wait_for(
            loop.create_connection(lambda: _Exchange(request, on_event), target.host, target.port, ssl=tls), CONNECT_TIMEOUT_S
        )
    except (OSError, asyncio.TimeoutError) as error:
        raise RequestFailed(f"cannot connect to {target.host}:{target.port}: {error or 'timed out'}") from error
    try:
        return await asyncio.wait_for(protocol.done, timeout_s)
    except asyncio.TimeoutError as error:
        raise RequestFailed(f"no complete response within {timeout_s:.0f} s") from error
    finally:
        transport.close()


async def get_json(target: Endpoint, path: str) -> Any:
    """Raises RequestFailed unless the answer is 200 and JSON."""
    status, body = await exchange(target, "GET", path, timeout_s=CONNECT_TIMEOUT_S)
    if status != 200:
        raise RequestFailed(f"GET {path} answered {status}: {excerpt(body)}")
    try:
        return json.loads(body)
    except ValueError as error:
        raise RequestFailed(f"GET {path} did not answer JSON: {excerpt(body)}") from error


def excerpt(body: bytes) -> str:
    return body[:300].decode("utf-8", "replace")
