"""No request adds more than one step's worth of work between two steps of the others, and nobody can hold the server up.

Counted in tokens, in logit rows and by who ran what on which thread; never in seconds.
"""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Callable
from typing import Any

import pytest

from headway.engine.tokenizer import Tokenizer
from headway.sampling_params import SamplingParams
from headway.server import app, async_engine, connection, stream, streaming
from headway.server.connection import Connection
from headway.server.errors import AnswerTooLargeError, SlowReaderError
from headway.types import OutputDelta, Request, TokenLogprobs
from tests.integration.conftest import LiveServer
from tests.integration.test_server_load import open_request

ENGINE = "headway-engine"
LONG = "word " * 900


class Spy:
    """Calls of a function that goes on as before: (thread, first argument)."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
        self.calls: list[tuple[str, Any]] = []
        function = getattr(owner, name)

        def spied(*args: Any, **kwargs: Any) -> Any:
            self.calls.append((threading.current_thread().name, args[1 if isinstance(owner, type) else 0]))
            return function(*args, **kwargs)

        monkeypatch.setattr(owner, name, spied)

    @property
    def threads(self) -> set[str]:
        return {thread for thread, _ in self.calls}


def tasks_of(server: LiveServer, name: str) -> int:
    """How many of the loop's tasks run a coroutine of this name."""

    async def count() -> int:
        return sum(name in getattr(task.get_coro(), "__qualname__", "") for task in asyncio.all_tasks())

    assert server.bridge.loop is not None
    return asyncio.run_coroutine_threadsafe(count(), server.bridge.loop).result(60)


def test_nothing_is_tokenized_on_the_thread_of_the_engine_and_bad_words_once(server: LiveServer, monkeypatch):
    encoded = Spy(monkeypatch, Tokenizer, "encode"), Spy(monkeypatch, Tokenizer, "encode_aside")
    compiled = Spy(monkeypatch, Tokenizer, "bad_words_ids")
    words = [f"word{number}" for number in range(1000)]
    answer = server.complete(prompt=["one", "two"], n=8, max_tokens=2, bad_words=words)
    assert len(answer["choices"]) == 16
    chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
    assert server.client.post("/v1/chat/completions", json=chat).status_code == 200
    assert len(compiled.calls) == 2   # of each HTTP request one
    assert sum(len(texts) for _, texts in encoded[1].calls) == 2 * len(words)   # at the start of a text and after a space
    assert not any(ENGINE in thread for spy in (*encoded, compiled) for thread in spy.threads)


def test_bad_words_and_long_texts_leave_the_thread_of_the_loop(server: LiveServer, monkeypatch):
    spies = [Spy(monkeypatch, Tokenizer, name) for name in ("encode", "encode_aside", "render", "bad_words_ids", "decode")]
    messages = [{"role": "user", "content": LONG}, *[{"role": "user", "content": ""}] * 1000]
    assert server.client.post("/tokenize", json={"prompt": LONG}).status_code == 200
    assert server.client.post("/tokenize", json={"messages": messages}).status_code == 200
    assert server.client.post("/detokenize", json={"tokens": [5] * 10_000}).status_code == 200
    server.complete(prompt=[5, 6], max_tokens=1, bad_words=["x"])
    prompts = {"headway-aside_0", "headway-aside_1"}
    assert spies[3].threads <= prompts   # bad words belong to a request that is answered
    assert spies[2].threads == {"headway-texts_0"}
    assert {thread for spy in spies for thread in spy.threads} <= {"headway-texts_0"} | prompts


def test_a_prompt_that_cannot_fit_is_refused_before_it_is_tokenized(server: LiveServer, monkeypatch):
    encoded = Spy(monkeypatch, Tokenizer, "encode_aside")
    for text in ("word " * 700_000, "x" * 3_500_000):
        response = server.client.post("/v1/completions", json={"prompt": text})
        assert response.status_code == 400
        assert response.json()["error"]["code"] == "context_length_exceeded"
        chat = {"messages": [{"role": "user", "content": text}]}
        assert server.client.post("/v1/chat/completions", json=chat).json()["error"]["param"] == "messages"
    assert not encoded.calls


def test_no_more_enters_between_two_steps_than_a_step_takes(make_server: Callable[..., LiveServer], monkeypatch):
    server = make_server(max_num_seqs=4, max_num_batched_tokens=200)
    entered = [0]
    add, step = server.engine.add, server.engine.step

    def count(prepared: Any) -> None:
        add(prepared)
        entered[-1] += len(prepared.request.prompt_token_ids) * prepared.request.params.n

    def next_step() -> Any:
        entered.append(0)
        return step()

    monkeypatch.setattr(server.engine, "add", count)
    monkeypatch.setattr(server.engine, "step", next_step)
    prompts = [[5 + number] * 150 for number in range(20)]
    answer = server.complete(prompt=prompts, max_tokens=3, n=2)
    assert len(answer["choices"]) == 40
    assert sum(entered) == 20 * 2 * 150
    assert max(entered) == 300   # the one that goes over the 200 is the last


def test_prompt_logprobs_come_in_pieces(make_server: Callable[..., LiveServer], monkeypatch):
    server = make_server(max_num_batched_tokens=256)
    whole = make_server(max_num_batched_tokens=8192)
    rows = [0]
    logits, step = server.engine.runner.logits, server.engine.step

    def count(hidden: Any) -> Any:
        rows[-1] += len(hidden)
        return logits(hidden)

    def next_step() -> Any:
        rows.append(0)
        return step()

    monkeypatch.setattr(server.engine.runner, "logits", count)
    monkeypatch.setattr(server.engine, "step", next_step)
    prompts = [[5 + number % (7 + which) for number in range(300)] for which in range(3)]
    body = {"prompt": prompts, "max_tokens": 2, "prompt_logprobs": 3, "n": 2}
    found = server.complete(**body, temperature=0)["choices"]
    assert sum(rows) == 3 * 299   # of each request, one of its two sequences
    assert max(rows) == 32        # an eighth of what a step takes in
    expected = whole.complete(**body, temperature=0)["choices"]
    assert [one["text"] for one in found] == [other["text"] for other in expected]
    for one, other in zip(found, expected, strict=True):
        here, there = one.get("prompt_logprobs", []), other.get("prompt_logprobs", [])
        assert len(here) == len(there) == (300 if one["index"] % 2 == 0 else 0)
        for mine, theirs in zip(here[1:], there[1:], strict=True):
            assert [entry["logprob"] for entry in mine.values()] == pytest.approx([entry["logprob"] for entry in theirs.values()], abs=1e-4)


def test_leaving_while_the_prompt_is_tokenized_drops_the_rest(server: LiveServer, monkeypatch):
    begun, resume = threading.Event(), threading.Event()
    encode, texts = Tokenizer.encode_aside, []

    def slow(self: Tokenizer, given: list[str], add_special_tokens: bool = True) -> Any:
        texts.extend(given)
        begun.set()
        assert resume.wait(60)
        return encode(self, given, add_special_tokens)

    # As for a tokenizer of which nothing is known.
    monkeypatch.setattr(Tokenizer, "min_num_tokens", lambda self, text: 0)
    monkeypatch.setattr(Tokenizer, "encode_aside", slow)
    added = Spy(monkeypatch, server.engine, "add")
    leaving = open_request(server, {"prompt": [LONG] * 3, "max_tokens": 5})
    assert begun.wait(60)
    assert tasks_of(server, "create_completion.<locals>.begin") == 1
    leaving.close()
    server.wait_until(lambda: tasks_of(server, "create_completion.<locals>.begin") == 0, "the server noticed")
    resume.set()
    server.assert_idle()
    assert len(texts) == 1
    assert not added.calls


def test_texts_that_are_only_tokenized_hold_up_no_prompt(server: LiveServer, monkeypatch):
    """Both of the prompts' threads are free however many of them wait, and the shortest is next."""
    begun, resume = threading.Event(), threading.Event()
    encode, order = Tokenizer.encode_aside, []

    def slow(self: Tokenizer, given: list[str], add_special_tokens: bool = True) -> Any:
        if threading.current_thread().name.startswith("headway-texts"):
            order.append(len(given[0]))
            begun.set()
            assert resume.wait(60)
        return encode(self, given, add_special_tokens)

    monkeypatch.setattr(Tokenizer, "encode_aside", slow)
    calls = [open_request(server, {"prompt": "word " * number}, path="/tokenize") for number in (1000,)]
    assert begun.wait(60)
    calls += [open_request(server, {"prompt": "word " * number}, path="/tokenize") for number in (1003, 1001, 1002)]
    server.wait_until(lambda: tasks_of(server, "_Api._tokenize") == 4, "all are there")
    assert len(server.complete(prompt=[5, 6], max_tokens=2, bad_words=["x"])["choices"]) == 1   # they are tokenized aside, too
    resume.set()
    server.wait_until(lambda: len(order) == 4, "they are tokenized")
    for call in calls:
        call.close()
    assert order == [5000, 5005, 5010, 5015]


def test_how_much_text_may_wait_is_bounded(server: LiveServer, monkeypatch):
    monkeypatch.setattr(app, "MAX_TEXT", 6000)
    answer = server.client.post("/tokenize", json={"prompt": "word " * 1500})
    assert answer.status_code == 400
    assert "at most 6000" in answer.json()["error"]["message"]
    begun, resume = threading.Event(), threading.Event()
    encode = Tokenizer.encode_aside

    def slow(*args: Any) -> Any:
        begun.set()
        assert resume.wait(60)
        return encode(*args)

    monkeypatch.setattr(Tokenizer, "encode_aside", slow)
    monkeypatch.setattr(server.bridge.texts, "max_waiting", 9000)
    first = open_request(server, {"prompt": LONG}, path="/tokenize")
    assert begun.wait(60)
    second = open_request(server, {"prompt": LONG}, path="/tokenize")
    server.wait_until(lambda: server.bridge.texts.num_waiting == 2 * len(LONG), "both wait")
    full = server.client.post("/tokenize", json={"prompt": LONG})
    resume.set()
    assert full.status_code == 429
    assert full.json()["error"]["code"] == "queue_full"
    first.close()
    second.close()
    assert server.client.post("/tokenize", json={"prompt": LONG}).json()["count"] > 0


def test_an_answer_that_is_not_streamed_is_bounded(make_server: Callable[..., LiveServer], monkeypatch):
    server = make_server()
    monkeypatch.setattr(stream, "MAX_HELD", 1000)
    body = {"prompt": "x", "max_tokens": 100, "ignore_eos": True, "logprobs": 5, "temperature": 0}
    answer = server.client.post("/v1/completions", json={**body, "n": 4})
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "answer_too_large"
    server.assert_idle()
    assert len(server.complete(**body)["choices"][0]["logprobs"]["tokens"]) == 100
    assert server.bridge.memory.num_held == 0
    events = server.client.post("/v1/completions", json={**body, "n": 4, "stream": True}).text   # as it says
    assert events.endswith("data: [DONE]\n\n")
    assert "error" not in events


def test_a_large_answer_is_written_in_parts(server: LiveServer, monkeypatch):
    """The same object as in one part, and no part is much larger than the next may be."""
    body = {"prompt": "x", "max_tokens": 300, "ignore_eos": True, "logprobs": 5, "temperature": 0, "prompt_logprobs": 2}
    whole = server.client.post("/v1/completions", json=body)
    assert whole.headers["content-length"] == str(len(whole.content))
    monkeypatch.setattr(streaming, "PART_SIZE", 1000)
    sizes = []
    parts = streaming._parts

    def seen(value: Any) -> Any:
        for part in parts(value):
            sizes.append(len(part))
            yield part

    monkeypatch.setattr(streaming, "_parts", seen)
    answer = server.client.post("/v1/completions", json=body)
    assert answer.json()["choices"] == whole.json()["choices"]
    assert "content-length" not in answer.headers
    assert len(sizes) > 5
    assert max(sizes) < 20_000
    ids = server.client.post("/tokenize", json={"prompt": LONG, "return_token_strs": True}).json()
    assert len(ids["tokens"]) == len(ids["token_strs"]) == ids["count"]


def test_many_short_prompts_are_tokenized_aside_like_a_long_one(server: LiveServer, monkeypatch):
    encoded = Spy(monkeypatch, Tokenizer, "encode"), Spy(monkeypatch, Tokenizer, "encode_aside")
    answer = server.complete(prompt=["word " * 20] * 50, max_tokens=1)
    assert len(answer["choices"]) == 50
    assert not encoded[0].calls
    assert encoded[1].threads <= {"headway-aside_0", "headway-aside_1"}
    assert len(encoded[1].calls) == 50


def test_texts_and_tokens_that_are_only_converted_are_bounded(server: LiveServer, monkeypatch):
    """In bytes, which is what a tokenizer works through, and before anything is done."""
    spies = [Spy(monkeypatch, Tokenizer, name) for name in ("encode_aside", "render", "decode")]
    monkeypatch.setattr(app, "MAX_TEXT", 8000)
    monkeypatch.setattr(app, "MAX_TOKENS", 100)
    text = "\U0001f600" * 4100
    for path, body, param in (
        ("/tokenize", {"prompt": text}, "prompt"),
        ("/tokenize", {"messages": [{"role": "user", "content": text}]}, "messages"),
        ("/detokenize", {"tokens": [5] * 101}, "tokens"),
    ):
        answer = server.client.post(path, json=body)
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"] == param
        assert "at most" in answer.json()["error"]["message"]
    assert not any(spy.calls for spy in spies)


def test_log_probabilities_of_prompts_are_held_and_bounded(make_server: Callable[..., LiveServer], monkeypatch):
    server = make_server()
    held: list[int] = []
    take_held = stream.Stream.take_held

    def spied(self: stream.Stream) -> int:
        held.append(self.num_held)
        return take_held(self)

    monkeypatch.setattr(stream.Stream, "take_held", spied)
    body = {"prompt": [5, 6] * 50, "max_tokens": 1, "prompt_logprobs": 4}
    server.complete(**body)
    assert max(held) >= 99 * 5
    monkeypatch.setattr(stream, "MAX_HELD", 499)
    added = Spy(monkeypatch, server.engine, "add")
    answer = server.client.post("/v1/completions", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "prompt_logprobs"
    assert not added.calls


def test_an_answer_that_is_dropped_while_it_is_written_breaks_off():
    """Else a client that reads slowly would keep it in memory, uncounted."""

    async def run() -> list[dict[str, Any]]:
        memory, sent, stuck = stream.AnswerMemory(), [], asyncio.Event()
        request = Request("slow", [5], SamplingParams())
        slow = stream.Stream([request], memory, lambda stream: None)
        slow.push(0, OutputDelta("slow", 0, [7], [False], "x", [TokenLogprobs(7, -1.0, 1)], finish_reason="length"))
        await slow.get(hold=True)

        async def send(message: Any) -> None:
            sent.append(message)
            if len(sent) == 3:   # the client reads no further
                stuck.set()
                await asyncio.Event().wait()

        async def receive() -> Any:
            await asyncio.Event().wait()

        answer = streaming.JsonInPieces({"a": [1] * 200_000}, slow)
        writing = asyncio.create_task(answer({"type": "http"}, receive, send))
        await stuck.wait()
        slow.fail(AnswerTooLargeError("others need the memory"), drop=True)
        await asyncio.wait_for(writing, 60)
        assert memory.num_held == 0
        return sent

    assert all(message.get("more_body", True) for message in asyncio.run(run()))   # the client sees that it is not whole


def test_leaving_before_the_engine_takes_the_request_in(server: LiveServer, monkeypatch):
    added = Spy(monkeypatch, server.engine, "add")
    with server.paused():
        leaving = open_request(server, {"prompt": ["one", "two"], "n": 4, "max_tokens": 5})
        server.wait_until(lambda: server.bridge.num_open == 8, "it is queued")
        leaving.close()
        server.wait_until(lambda: server.bridge.num_open == 0, "it is dropped while the engine's thread is busy")
    server.assert_idle()
    assert not added.calls


def test_unread_answers_are_bounded_and_the_slowest_reader_is_dropped(make_server: Callable[..., LiveServer], monkeypatch):
    server = make_server()
    monkeypatch.setattr(stream, "MAX_UNREAD", 100)

    def on_loop(coroutine: Any) -> Any:
        assert server.bridge.loop is not None
        return asyncio.run_coroutine_threadsafe(coroutine, server.bridge.loop).result(60)

    def request(name: str, max_tokens: int) -> Request:
        return Request(name, [5, 6, 7], SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=0.0))

    little = on_loop(server.bridge.submit([request("little", 20)]))
    server.wait_until(lambda: little.num_open == 0, "it is written")
    much = on_loop(server.bridge.submit([request("much", 400)]))
    server.wait_until(lambda: server.bridge.memory.num_dropped == 1, "it is dropped")
    server.assert_idle()
    with pytest.raises(SlowReaderError):
        on_loop(much.get())
    assert sum(len(delta.token_ids) for _, delta in on_loop(little.get())) == 20
    assert server.bridge.memory.num_unread == 0
    assert "headway:requests_dropped_total{" in server.client.get("/metrics").text
    assert len(server.complete(prompt="x", max_tokens=300, ignore_eos=True)["choices"]) == 1   # whoever reads is not dropped
    assert server.bridge.memory.num_dropped == 1


def test_a_connection_that_takes_nothing_is_closed(server: LiveServer, monkeypatch):
    monkeypatch.setattr(connection, "MAX_STALL_S", 0.05)
    lost = threading.Event()
    connection_lost = Connection.connection_lost

    def spied(self: Connection, exc: Exception | None) -> None:
        connection_lost(self, exc)
        lost.set()

    monkeypatch.setattr(Connection, "connection_lost", spied)
    host, port = server.url.removeprefix("http://").split(":")
    payload = json.dumps({"prompt": "x" * 3_000_000}).encode()
    with socket.create_connection((host, int(port)), timeout=60) as client:
        client.sendall(b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n")
        client.sendall(b"Content-Length: %d\r\n\r\n" % len(payload) + payload)
        assert lost.wait(60)


def test_health_tells_when_the_engine_does_not_come_round(server: LiveServer, monkeypatch):
    assert server.client.get("/health").status_code == 200
    monkeypatch.setattr(async_engine, "STALL_S", 0.05)
    with server.paused():
        server.wait_until(lambda: server.client.get("/health").status_code == 503, "health tells")
        assert server.client.get("/health").json()["error"]["code"] == "engine_stalled"
    server.wait_until(lambda: server.client.get("/health").status_code == 200, "it came round")


def test_stopping_does_not_wait_for_a_thread_that_hangs(make_server: Callable[..., LiveServer], monkeypatch):
    server = make_server()
    monkeypatch.setattr(async_engine, "STOP_S", 0.05)
    with server.paused():
        assert server.bridge.loop is not None
        asyncio.run_coroutine_threadsafe(server.bridge.stop(), server.bridge.loop).result(30)
        assert server.bridge.hangs
    server.wait_until(lambda: not server.bridge.hangs, "the thread ends after all")
