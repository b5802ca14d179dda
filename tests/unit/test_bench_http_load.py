"""The load generator against a scripted server on a local socket: framing, counting, arrival, failure."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import pytest

from headway.bench import http_load
from headway.bench.client import Endpoint, RequestFailed, exchange, get_json
from headway.bench.http_load import ServeOptions, request_body, speculation_in, time_shares
from headway.bench.load import LoadOptions
from headway.bench.scrape import Growth, Scrape
from headway.bench.workloads import Prompt
from headway.errors import ConfigError

Handler = Callable[[str, dict[str, str], Any, asyncio.StreamWriter], Coroutine[Any, Any, None]]
"""(path, headers, JSON body or None, writer)"""


@contextlib.asynccontextmanager
async def scripted(handler: Handler) -> AsyncIterator[str]:
    """A server that answers each connection once; yields its URL."""

    async def serve_one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        lines = head.split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:] if line)}
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        try:
            await handler(lines[0].split(" ")[1], headers, json.loads(body) if body else None, writer)
        finally:
            writer.close()

    server = await asyncio.start_server(serve_one, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


def chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nContent-Type: text/event-stream\r\n\r\n"


def sse(event: Any) -> bytes:
    return b"data: " + (event if isinstance(event, bytes) else json.dumps(event).encode()) + b"\n\n"


def answer(text: str, num_tokens: int, *, usage: bool = True, finish: bool = True) -> list[bytes]:
    """Events of one streamed completion; several tokens per chunk, so that chunks do not count tokens."""
    events = [sse({"choices": [{"text": text}]})]
    if finish:
        events.append(sse({"choices": [{"text": "", "finish_reason": "length"}]}))
    if usage:
        events.append(sse({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": num_tokens}}))
    return [*events, sse(b"[DONE]")]


def plain(status: str, body: bytes) -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


# -- the client ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [1, 3, 7, 1000])
@pytest.mark.parametrize("framing", ["chunked", "length", "close"])
def test_framing_is_removed_wherever_the_bytes_are_cut(framing: str, step: int) -> None:
    events = [sse({"n": n, "text": "ü" * n}) for n in range(4)]
    payload = b"".join(events)
    data = {
        "chunked": CHUNKED + chunk(payload[:5]) + chunk(payload[5:40]) + chunk(payload[40:]) + b"0\r\n\r\n",
        "length": plain("200 OK", payload),
        "close": b"HTTP/1.0 200 OK\r\n\r\n" + payload,
    }[framing]

    async def handler(path: str, headers: dict[str, str], body: Any, writer: asyncio.StreamWriter) -> None:
        for start in range(0, len(data), step):
            writer.write(data[start : start + step])
            await writer.drain()

    async def main() -> list[Any]:
        seen: list[Any] = []
        async with scripted(handler) as url:
            status, rest = await exchange(Endpoint.parse(url), "POST", "/x", b"{}", lambda event, now: seen.append(json.loads(event)))
        assert (status, rest) == (200, b"")
        return seen

    assert [event["n"] for event in asyncio.run(main())] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "closed before"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nabc", "closed before"),
        (CHUNKED + b"5\r\nab", "closed before"),
        (CHUNKED + b"zz\r\nab\r\n", "malformed"),
        (b"hello there\r\n\r\n", "malformed"),
    ],
)
def test_broken_responses(data: bytes, message: str) -> None:
    async def handler(path: str, headers: dict[str, str], body: Any, writer: asyncio.StreamWriter) -> None:
        writer.write(data)
        await writer.drain()

    async def main() -> None:
        async with scripted(handler) as url:
            await exchange(Endpoint.parse(url), "GET", "/")

    with pytest.raises(RequestFailed, match=message):
        asyncio.run(main())


def test_nobody_listens() -> None:
    with pytest.raises(RequestFailed, match="cannot connect"):
        asyncio.run(exchange(Endpoint.parse("http://127.0.0.1:9"), "GET", "/"))


def test_a_server_that_never_answers() -> None:
    async def handler(path: str, headers: dict[str, str], body: Any, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(1.0)

    async def main() -> None:
        async with scripted(handler) as url:
            await exchange(Endpoint.parse(url), "GET", "/", timeout_s=0.05)

    with pytest.raises(RequestFailed, match="no complete response"):
        asyncio.run(main())


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://h:1", ("h", 1, "", False)),
        ("http://h", ("h", 80, "", False)),
        ("https://h/v1/", ("h", 443, "", True)),
        ("http://[::1]:8/base/v1", ("::1", 8, "/base", False)),
    ],
)
def test_base_urls(url: str, expected: tuple[str, int, str, bool]) -> None:
    target = Endpoint.parse(url)
    assert (target.host, target.port, target.path, target.tls) == expected


@pytest.mark.parametrize("url", ["", "h:1", "ftp://h", "http://", "http://h:x", "http://h?q=1"])
def test_bad_base_urls(url: str) -> None:
    with pytest.raises(ConfigError, match="base-url"):
        Endpoint.parse(url)


def test_get_json_sends_the_key_and_reports_the_status() -> None:
    async def handler(path: str, headers: dict[str, str], body: Any, writer: asyncio.StreamWriter) -> None:
        allowed = headers.get("authorization") == "Bearer k"
        writer.write(plain("200 OK", b'{"path": "%s"}' % path.encode()) if allowed else plain("401 No", b"who?"))

    async def main(key: str | None) -> Any:
        async with scripted(handler) as url:
            return await get_json(Endpoint.parse(url + "/base/v1", key), "/v1/models")

    assert asyncio.run(main("k")) == {"path": "/base/v1/models"}
    with pytest.raises(RequestFailed, match="401: who"):
        asyncio.run(main(None))


# -- requests -----------------------------------------------------------------------------------------------------

CHAT = Prompt(messages=({"role": "user", "content": "hi"},))


def test_request_bodies() -> None:
    load = LoadOptions(output_len=7, ignore_eos=True)
    body = json.loads(request_body([1, 2], "m", 0, load, "completions"))
    assert body == {
        "model": "m", "prompt": [1, 2], "max_tokens": 7, "temperature": 0.0, "ignore_eos": True, "stream": True,
        "stream_options": {"include_usage": True},
    }
    assert json.loads(request_body(CHAT, "m", 0, load, "chat"))["messages"] == [{"role": "user", "content": "hi"}]
    assert json.loads(request_body(Prompt(text="t"), "m", 0, load, "chat"))["messages"] == [{"role": "user", "content": "t"}]
    assert json.loads(request_body(Prompt(text="t"), "m", 0, load, "completions"))["prompt"] == "t"


def test_a_sampled_request_has_a_seed_of_its_own() -> None:
    load = LoadOptions(temperature=0.5, seed=10)
    assert [json.loads(request_body([1], "m", index, load, "completions"))["seed"] for index in range(3)] == [10, 11, 12]


def test_prompts_an_endpoint_cannot_take() -> None:
    with pytest.raises(ConfigError, match="--tokenizer"):
        request_body(CHAT, "m", 0, LoadOptions(), "completions")
    with pytest.raises(ConfigError, match="completions"):
        request_body(Prompt(token_ids=(1,)), "m", 0, LoadOptions(), "chat")


def test_serve_options_are_checked() -> None:
    with pytest.raises(ConfigError, match="endpoint"):
        ServeOptions(endpoint="embeddings")


# -- runs ---------------------------------------------------------------------------------------------------------


class Server:
    """Streams one completion per request and remembers how many were in flight and when they came."""

    def __init__(self, events: list[bytes] | None = None, status: str | None = None) -> None:
        self.events, self.status = events or answer("ab", 5), status
        self.now = self.most = 0
        self.arrivals: list[float] = []
        self.scrapes = 0

    async def __call__(self, path: str, headers: dict[str, str], body: Any, writer: asyncio.StreamWriter) -> None:
        if path == "/metrics":
            self.scrapes += 1
            writer.write(plain("200 OK", f'vllm:spec_decode_num_drafts_total{{a="b"}} {self.scrapes * 4}.0\n'.encode()))
            return
        self.arrivals.append(time.perf_counter())
        self.now += 1
        self.most = max(self.most, self.now)
        await asyncio.sleep(0.01)
        self.now -= 1
        if self.status:
            writer.write(plain(self.status, b'{"error": "busy"}'))
            return
        writer.write(CHUNKED)
        for event in self.events:
            writer.write(chunk(event))
            await writer.drain()
        writer.write(b"0\r\n\r\n")


def run(server: Server, num_prompts: int, load: LoadOptions) -> Any:
    async def main() -> Any:
        async with scripted(server) as url:
            return await http_load.run([[1]] * num_prompts, "m", load, ServeOptions(base_url=url))

    return asyncio.run(main())


def test_closed_loop_counts_the_servers_tokens() -> None:
    server = Server()
    result = run(server, 12, LoadOptions(concurrency=3))
    assert server.most == 3
    assert len(server.arrivals) == 12
    summary = result.summary()
    assert summary["invalid"] is False
    assert summary["num_output_tokens"] == 60
    assert summary["num_prompt_tokens"] == 36
    assert summary["output_hash_of"] == "text"
    assert summary["metrics_scraped"] is True
    assert result.speculation.num_spec_steps == 4
    for record in result.records:
        assert record.sent < record.first <= record.last
        assert record.output == "ab"


def test_open_loop_is_not_limited_by_the_concurrency() -> None:
    server = Server()
    result = run(server, 20, LoadOptions(concurrency=1, seed=3, request_rate=2000.0))
    assert not result.errors
    assert len(result.records) == 20
    assert server.most > 1


def test_a_rollout_starts_all_at_once_and_one_in_eight_is_long() -> None:
    lengths: list[int] = []

    class Noting(Server):
        async def __call__(self, path: str, headers: dict[str, str], body: Any, writer: asyncio.StreamWriter) -> None:
            if path != "/metrics":
                lengths.append(body["max_tokens"])
            await super().__call__(path, headers, body, writer)

    server = Noting()
    assert not run(server, 16, LoadOptions(concurrency=2, output_len=10, arrivals="rollout")).errors
    assert server.most > 2
    assert sorted(lengths) == [10] * 14 + [40] * 2


@pytest.mark.parametrize(
    ("server", "message"),
    [
        (Server(status="429 Too Many"), "status 429"),
        (Server(answer("a", 1, usage=False)), "no usage"),
        (Server(answer("", 1, finish=False)), "without a finish reason"),
        (Server([sse({"error": {"message": "boom"}})]), "boom"),
        (Server([sse(b"{")]), "not JSON"),
    ],
)
def test_any_failed_request_makes_the_run_invalid(server: Server, message: str) -> None:
    summary = run(server, 2, LoadOptions(concurrency=1)).summary()
    assert summary["invalid"] is True
    assert message in summary["errors"][0]


def test_a_failing_warm_up_ends_it() -> None:
    async def main() -> None:
        async with scripted(Server(status="500 No")) as url:
            await http_load.warm_up([[1]], "m", LoadOptions(), ServeOptions(base_url=url))

    with pytest.raises(ConfigError, match="a warm-up request failed: status 500"):
        asyncio.run(main())


# -- the server's counters ----------------------------------------------------------------------------------------

METRICS = """# HELP vllm:spec_decode_num_drafts_total Speculative steps.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="a b"} 10.0
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="a b"} 40.0
vllm:spec_decode_num_accepted_tokens_total{engine="0"} 13.0
vllm:spec_decode_num_accepted_tokens_total{engine="1"} 2.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0"} 9.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="1"} 6.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{position="10",engine="0"} 0.0
headway:step_seconds_total{engine="0",phase="draft"} 1.0
headway:step_seconds_total{engine="0",phase="verify"} 8.0
headway:step_seconds_total{engine="0",phase="overhead"} 1.0
python_info{version="3.11"} 1.0
some_histogram_bucket{le="+Inf"} NaN
broken line
"""


def test_metrics() -> None:
    stats = speculation_in(Growth(Scrape(), Scrape.parse(METRICS), 1.0))
    assert (stats.num_spec_steps, stats.num_draft_tokens, stats.num_accepted_tokens) == (10, 40, 15)
    assert stats.num_accepted_per_pos == [9, 6]
    assert stats.mean_acceptance_length == 2.5


def test_time_shares_from_metrics() -> None:
    shares = time_shares(Growth(Scrape(), Scrape.parse(METRICS), 1.0))
    assert shares is not None
    assert (shares.draft, shares.verify, shares.overhead) == (0.1, 0.8, 0.1)
    assert time_shares(Growth(Scrape(), Scrape(), 1.0)) is None
