"""A server whose models write what is no text: whoever provokes it, the other clients' answers and the server go on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from headway.engine import engine as engine_module
from headway.engine.outputs import TextOutput
from headway.engine.tokenizer import Tokenizer
from headway.server.replies import CompletionReply
from headway.types import Sequence
from tests.integration.conftest import LiveServer, live_server
from tests.tiny import MIN_VOCAB, PIECES, tiny_model_dir

LEAD, CONTINUATION, X = 3 + 0xE2, 3 + 0x82, MIN_VOCAB + PIECES.index("x")
NEWLINE, SPACE = 3 + ord("\n"), MIN_VOCAB
ATTACK = {"prompt": "x", "temperature": 2, "max_tokens": 60, "ignore_eos": True, "logit_bias": {NEWLINE: 100, LEAD: 100, X: 100}}
STEADY = {"prompt": "the sea", "temperature": 0, "max_tokens": 200, "ignore_eos": True}


@pytest.fixture(scope="module")
def _server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with live_server(tiny_model_dir(tmp_path_factory.mktemp("text"), vocab_size=300, byte_fallback=True)) as live:
        yield live


@pytest.fixture
def server(_server: LiveServer) -> Iterator[LiveServer]:
    yield _server
    _server.assert_idle()
    assert _server.client.get("/health").status_code == 200


def streamed(server: LiveServer, **body: Any) -> tuple[str, list[dict[str, Any]]]:
    """The text of a streamed answer, and the errors in it."""
    text, errors = "", []
    with server.client.stream("POST", "/v1/completions", json=body | {"stream": True}) as response:
        assert response.status_code == 200
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    for event in map(json.loads, lines[:-1]):
        if "error" in event:
            errors.append(event["error"])
        else:
            text += "".join(choice["text"] for choice in event["choices"])
    return text, errors


def test_broken_characters_are_text(server: LiveServer) -> None:
    steady = server.complete(**STEADY)["choices"][0]["text"]
    with ThreadPoolExecutor(14) as pool:
        others = [pool.submit(streamed, server, **STEADY) for _ in range(2)]
        attacks = [pool.submit(server.complete, **ATTACK, seed=seed, logprobs=3) for seed in range(11)]
        stream = pool.submit(streamed, server, **ATTACK, seed=0)
        answers = [attack.result()["choices"][0] for attack in attacks]
        assert [other.result() for other in others] == [(steady, [])] * 2
        assert stream.result() == (answers[0]["text"], [])
    for answer in answers:
        assert set(answer["text"]) == {"\n", "\ufffd", "x"}
        assert len(answer["logprobs"]["tokens"]) == ATTACK["max_tokens"]
        assert len(answer["text"]) == ATTACK["max_tokens"]


def test_stop_strings_among_broken_characters(server: LiveServer) -> None:
    answer = server.complete(**ATTACK | {"stop": ["\ufffdx"], "seed": 1})["choices"][0]
    assert answer["finish_reason"] == "stop"
    assert set(answer["text"]) <= {"\n", "\ufffd", "x"}


def test_the_prompt_is_not_answered_back(server: LiveServer) -> None:
    only = {"temperature": 0, "max_tokens": 5, "ignore_eos": True}
    xs = {"logit_bias": {X: 100}}
    for prompt in ("the sea \ufffd", "\ufffd", [X, SPACE, 3 + 0xF0, 3 + 0x9F], [X, LEAD], [LEAD]):
        answer = server.complete(prompt=prompt, stop=["sea", "the"], **only, **xs)["choices"][0]
        assert (answer["text"], answer["finish_reason"]) == ("xxxxx", "length")
        assert streamed(server, prompt=prompt, **only, **xs) == ("xxxxx", [])
    answer = server.complete(prompt=[X, LEAD], logit_bias={CONTINUATION: 100}, **only | {"max_tokens": 2})["choices"][0]
    assert answer["text"] == b"\xe2\x82\x82".decode()


def fails(*args: Any) -> Any:
    raise RuntimeError("a detail of the inside")


class BreaksOff(TextOutput):
    """Fails at the tenth token of the request that names itself "broken"."""

    def __init__(self, tokenizer: Tokenizer, seq: Sequence) -> None:
        super().__init__(tokenizer, seq)
        self.breaks_off = seq.params.stop_strings == ("broken",)

    def push(self, token_ids: list[int]) -> tuple[str, int]:
        if self.breaks_off and self._num_tokens >= 10:
            fails()
        return super().push(token_ids)


@pytest.mark.parametrize("n", [1, 3])
def test_an_answer_that_cannot_be_written_is_one_clients_error(server: LiveServer, n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    steady = server.complete(**STEADY)["choices"][0]["text"]
    monkeypatch.setattr(engine_module, "TextOutput", BreaksOff)
    body = {"prompt": "x", "stop": ["broken"], "max_tokens": 400, "ignore_eos": True, "n": n}
    with ThreadPoolExecutor(3) as pool:
        with server.paused():
            other = pool.submit(streamed, server, **STEADY)
            whole = pool.submit(server.client.post, "/v1/completions", json=body)
            stream = pool.submit(streamed, server, **body)
            server.wait_until(lambda: server.bridge.num_open == 1 + 2 * n, "all are sent")
        assert whole.result().status_code == 500
        errors = [whole.result().json()["error"], *stream.result()[1]]
        assert len(errors) == 2
        for error in errors:
            assert error == {
                "message": "the output of this request could not be written", "type": "server_error", "param": None, "code": "engine_error",
            }
        assert other.result() == (steady, [])


def test_an_answer_that_cannot_be_rendered_is_one_clients_error(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CompletionReply, "_logprobs", fails)
    body = {"prompt": "x", "max_tokens": 20, "ignore_eos": True, "logprobs": 1}
    response = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)   # the server closes this connection
    assert (response.status_code, response.json()["error"]["code"]) == (500, "internal_error")
    _, [error] = streamed(server, **body)
    assert error["code"] == "internal_error"
    assert "detail" not in error["message"]
