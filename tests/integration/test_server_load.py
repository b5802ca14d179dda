"""Many clients, clients that go away, and an engine that fails: nobody else notices, and no block is lost."""

from __future__ import annotations

import asyncio
import json
import socket
import threading

import httpx
import pytest

from headway.sampling_params import SamplingParams
from headway.types import Request
from tests.integration.conftest import LiveServer

BODY = {"max_tokens": 24, "temperature": 0, "ignore_eos": True}


def open_request(server: LiveServer, body: dict, *, path: str = "/v1/completions") -> socket.socket:
    """A raw connection that has sent a request."""
    host, port = server.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), timeout=60)
    payload = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(payload)}\r\n\r\n"
    connection.sendall(head.encode() + payload)
    return connection


def test_two_hundred_clients(server: LiveServer):
    prompts = [f"client {number % 20} says one two three one two" for number in range(200)]
    expected = {prompt: server.complete(prompt=prompt, **BODY)["choices"][0]["text"] for prompt in sorted(set(prompts))}

    async def ask(client: httpx.AsyncClient, number: int) -> str:
        body = {"prompt": prompts[number], "stream": number % 2 == 0, **BODY}
        response = await client.post("/v1/completions", json=body)
        assert response.status_code == 200
        if not body["stream"]:
            return response.json()["choices"][0]["text"]
        events = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
        assert events[-1] == "[DONE]"
        return "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1])

    async def everybody() -> list[str]:
        limits = httpx.Limits(max_connections=200)
        async with httpx.AsyncClient(base_url=server.url, timeout=300, limits=limits) as client:
            return await asyncio.gather(*[ask(client, number) for number in range(200)])

    assert asyncio.run(everybody()) == [expected[prompt] for prompt in prompts]


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_frees_its_blocks(server: LiveServer, stream: bool):
    steady = {"prompt": "the one that stays", "max_tokens": 200, "temperature": 0, "ignore_eos": True}
    expected = server.complete(**steady)["choices"]
    aborted = server.engine.metrics.finished["abort"]
    endless = {"max_tokens": None, "ignore_eos": True, "stream": stream}
    leaving = [open_request(server, {"prompt": f"leaves {at}", **endless}) for at in range(5)]
    server.wait_until(lambda: server.bridge.num_open == 5, "five requests run")
    if stream:
        for connection in leaving:
            assert b"200 OK" in connection.recv(65536)
    with server.client.stream("POST", "/v1/completions", json=steady | {"stream": True}) as response:
        text = ""
        for number, line in enumerate(line for line in response.iter_lines() if line.startswith("data: {")):
            text += json.loads(line[6:])["choices"][0]["text"]
            if number == 3:
                for connection in leaving:
                    connection.close()
    assert text == expected[0]["text"]
    server.wait_until(lambda: server.bridge.num_open == 0, "the left requests are dropped")
    server.assert_idle()
    assert server.engine.metrics.finished["abort"] == aborted + 5


def test_leaving_in_the_middle_of_a_body(server: LiveServer, caplog):
    host, port = server.url.removeprefix("http://").split(":")
    for sent in (b"", b'{"prompt": '):
        with socket.create_connection((host, int(port)), timeout=60) as connection:
            head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n"
            connection.sendall(head + sent)
    assert server.client.get("/health").status_code == 200
    assert not caplog.records


def test_leaving_while_waiting_in_the_queue(make_server):
    server = make_server(max_num_seqs=1)
    long = {"prompt": "first", "max_tokens": 200, "temperature": 0, "ignore_eos": True}
    expected = server.complete(**long)["choices"]
    first = open_request(server, long)
    server.wait_until(lambda: server.engine.metrics.num_running == 1, "the first runs")
    waiting = [open_request(server, long | {"stream": True}) for _ in range(3)]
    server.wait_until(lambda: server.engine.metrics.num_waiting == 3, "three wait")
    for connection in waiting:
        connection.close()
    server.wait_until(lambda: server.bridge.num_open <= 1, "the waiting ones are dropped")
    answer = b""
    while b"}}}" not in answer:
        answer += first.recv(65536)
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["choices"] == expected
    first.close()
    server.assert_idle()


def test_a_slow_reader_loses_nothing_and_delays_nobody(server: LiveServer):
    body = {"prompt": "slow", "max_tokens": 300, "temperature": 0, "ignore_eos": True}
    expected = server.complete(**body)["choices"][0]["text"]
    slow = open_request(server, body | {"stream": True})
    assert server.complete(**body)["choices"][0]["text"] == expected
    server.wait_until(lambda: server.bridge.num_open == 0, "the engine is done although nobody reads")
    data = b""
    while b"[DONE]" not in data:
        data += slow.recv(1024)
    events = [line[6:] for line in data.decode().splitlines() if line.startswith("data: {")]
    assert "".join(json.loads(event)["choices"][0]["text"] for event in events) == expected
    slow.close()


def test_a_failed_step_fails_its_requests_and_nothing_else(server: LiveServer, monkeypatch):
    body = {"prompt": "one two", "max_tokens": 100, "temperature": 0, "ignore_eos": True}
    expected = server.complete(**body)["choices"]
    step, steps = server.engine.step, 0

    def fails_once():
        nonlocal steps
        steps += 1
        if steps == 5:
            raise RuntimeError("no memory left")
        return step()

    monkeypatch.setattr(server.engine, "step", fails_once)
    with server.client.stream("POST", "/v1/completions", json=body | {"stream": True}) as response:
        assert response.status_code == 200
        lines = [line for line in response.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    error = json.loads(lines[-2][6:])["error"]
    assert error["type"] == "server_error"
    assert "no memory left" not in error["message"]
    server.assert_idle()
    steps = 0
    response = server.client.post("/v1/completions", json=body)
    assert response.status_code == 500
    assert response.json()["error"]["code"] == "engine_error"
    server.assert_idle()
    assert server.client.get("/health").status_code == 200
    assert server.complete(**body)["choices"] == expected


def test_an_engine_beyond_repair_is_unhealthy_and_answers_errors(make_server, monkeypatch):
    server = make_server()

    def broken():
        raise AssertionError("a block is owned twice")

    monkeypatch.setattr(server.engine, "step", broken)
    monkeypatch.setattr(server.engine, "check", broken)
    for _ in range(2):
        response = server.client.post("/v1/completions", json={"prompt": "x"})
        assert response.status_code == 500
        assert response.json()["error"]["type"] == "server_error"
    health = server.client.get("/health")
    assert health.status_code == 503
    assert health.json()["error"]["code"] == "engine_stopped"
    assert server.client.get("/metrics").status_code == 200


def test_broken_invariants_are_found_while_idle(make_server, monkeypatch):
    server = make_server()

    def broken():
        raise AssertionError("a block leaked")

    monkeypatch.setattr(server.engine, "check", broken)
    assert server.complete(prompt="x", max_tokens=2)
    server.wait_until(lambda: server.client.get("/health").status_code == 503, "the idle check finds it")


def test_draining_finishes_what_runs_and_refuses_the_rest(make_server):
    server = make_server()
    body = {"prompt": "one two", "max_tokens": 200, "temperature": 0, "ignore_eos": True}
    expected = server.complete(**body)["choices"]
    running = open_request(server, body)
    server.wait_until(lambda: server.engine.metrics.num_running == 1, "it runs")
    drained = asyncio.run_coroutine_threadsafe(server.bridge.drain(60), server.bridge.loop)
    server.wait_until(lambda: server.bridge.draining, "the server drains")
    response = server.client.post("/v1/completions", json=body)
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "shutting_down"
    assert server.client.get("/health").status_code == 503
    drained.result(60)
    answer = b""
    while b"}}}" not in answer:
        answer += running.recv(65536)
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["choices"] == expected
    running.close()


def test_a_drain_that_takes_too_long_aborts_with_an_error(make_server):
    server = make_server()
    with server.client.stream("POST", "/v1/completions", json={"prompt": "x", "max_tokens": None, "ignore_eos": True, "stream": True}) as r:
        lines = r.iter_lines()
        next(lines)
        asyncio.run_coroutine_threadsafe(server.bridge.drain(0.0), server.bridge.loop).result(60)
        rest = [line for line in lines if line]
    assert "shut down" in json.loads(rest[-2][6:])["error"]["message"]
    server.wait_until(lambda: not server.engine.has_work(), "the engine let it go")


def test_priority_runs_first(make_server):
    server = make_server(max_num_seqs=1)
    finished: list[str] = []
    return_to_work = threading.Event()

    async def everybody() -> None:
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:

            async def ask(name: str, priority: int) -> None:
                await client.post("/v1/completions", json={"prompt": name, "max_tokens": 20, "priority": priority, "ignore_eos": True})
                finished.append(name)

            tasks = [asyncio.create_task(ask(name, priority)) for name, priority in (("late", 5), ("early", -5), ("middle", 0))]
            while server.bridge.num_open < 3:
                await asyncio.sleep(0.005)
            return_to_work.set()
            await asyncio.gather(*tasks)

    held = asyncio.run_coroutine_threadsafe(server.bridge.call(lambda: return_to_work.wait(60)), server.bridge.loop)
    asyncio.run(everybody())
    held.result(60)
    assert finished == ["early", "middle", "late"]


def test_the_loop_stays_responsive_while_the_engine_works(server: LiveServer):
    """With the engine's thread held up, everything that needs no step is answered."""
    with server.paused():
        assert server.client.get("/health").status_code == 200
        assert server.client.get("/metrics").status_code == 200
        assert server.client.post("/tokenize", json={"prompt": "word " * 20_000}).json()["count"] == 100_000


def test_in_process_and_http_agree(server: LiveServer):
    params = SamplingParams(temperature=1.0, seed=5, max_tokens=30, logprobs=1)
    def in_process() -> list[int]:
        server.engine.add(Request("direct", server.engine.tokenizer.encode("hello"), params))
        tokens: list[int] = []
        while server.engine.has_work():
            tokens += [token for delta in server.engine.step() for token in delta.token_ids]
        return tokens

    tokens = server.on_engine(in_process)
    answer = server.complete(prompt="hello", temperature=1.0, seed=5, max_tokens=30, logprobs=1)
    assert answer["choices"][0]["logprobs"]["tokens"] == [server.engine.tokenizer.token_text(token) for token in tokens]
