"""What the server refuses, and that every refusal is OpenAI's error body."""

from __future__ import annotations

import http.client
import json
import threading
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

from headway.errors import ConfigError, InvalidRequestError
from headway.sampling_params import SamplingParams
from headway.server import protocol
from headway.server.options import ServerOptions
from tests.integration.conftest import MODEL, LiveServer


def refused(response, status: int) -> protocol.ErrorInfo:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    return protocol.ErrorResponse.model_validate(response.json()).error


DEEP = "[" * 100_000
MALFORMED = [
    b"",
    b"{",
    b"null",
    b"[]",
    b'"prompt"',
    b"{'prompt': 'x'}",
    b'{"prompt": "x"} trailing',
    b'{"prompt": "\xff\xfe"}',
    b'{"prompt": "\\ud800"}',
    b'{"prompt": "x", "temperature": NaN}',
    b'{"prompt": "x", "temperature": Infinity}',
    b'{"prompt": "x", "temperature": 1e999}',
    b'{"prompt": "x", "temperature": "1"}',
    b'{"prompt": "x", "repetition_penalty": 1e300}',
    b'{"prompt": "x", "max_tokens": true}',
    b'{"prompt": "x", "max_tokens": 0}',
    b'{"prompt": "x", "max_tokens": 99999999999999999999999999}',
    b'{"prompt": "x", "max_tokens": ' + b"9" * 10_000 + b"}",
    b'{"prompt": "x", "seed": 9223372036854775808}',
    b'{"prompt": "x", "n": 0}',
    b'{"prompt": "x", "n": 1000000}',
    b'{"prompt": "x", "top_k": 2147483648}',
    b'{"prompt": "x", "logit_bias": {"five": 1}}',
    b'{"prompt": "x", "logit_bias": {"5": 101}}',
    b'{"prompt": "x", "stop": [""]}',
    b'{"prompt": "x", "stop": [null]}',
    b'{"prompt": "x", "stop_token_ids": [-1]}',
    b'{"prompt": "x", "bad_words": [""]}',
    b'{"prompt": "x", "stream_options": {"include_usage": true}}',
    b'{"prompt": "x", "stream": true, "prompt_logprobs": 1}',
    b'{"prompt": "x", "speculative": {"enabled": 1}}',
    b'{"prompt": "x", "speculative": {"num_speculative_tokens": 1}}',
    b'{"prompt": null}',
    b'{"prompt": []}',
    b'{"prompt": ""}',
    b'{"prompt": [[]]}',
    b'{"prompt": ["x", 1]}',
    b'{"prompt": [1.5]}',
    b'{"prompt": [-1]}',
    b'{"prompt": [99999999999]}',
    f'{{"prompt": {DEEP}'.encode(),
    f'{{"prompt": "x", "logit_bias": {{{",".join(f"{chr(34)}k{i}{chr(34)}: 1" for i in range(50_000))}}}}}'.encode(),
    f'{{{",".join(f"{chr(34)}k{i}{chr(34)}: 1" for i in range(50_000))}}}'.encode(),
]


@pytest.mark.parametrize("body", MALFORMED, ids=range(len(MALFORMED)))
def test_a_malformed_completion_is_a_400(server: LiveServer, body: bytes):
    error = refused(server.client.post("/v1/completions", content=body, headers={"Content-Type": "application/json"}), 400)
    assert len(error.message) < 2000


TOO_MUCH = {
    "bad_words": ["x"] * 1025,
    "stop": ["x"] * 65,
    "stop_token_ids": [5] * 1025,
    "logit_bias": {str(token): 1 for token in range(1025)},
    "cache_salt": "x" * 257,
}


@pytest.mark.parametrize("wrong", [{name: value} for name, value in TOO_MUCH.items()] + [{"bad_words": ["x" * 257]}, {"stop": "x" * 257}])
def test_lists_and_strings_are_bounded(server: LiveServer, wrong):
    error = refused(server.client.post("/v1/completions", json={"prompt": "x", "max_tokens": 1, **wrong}), 400)
    assert error.param == next(iter(wrong))
    assert any(bound in error.message for bound in ("1024", "256", "64"))
    if "cache_salt" not in wrong:
        given = {"logit_bias": dict.fromkeys(range(1025), 1.0)} if "logit_bias" in wrong else wrong
        with pytest.raises(InvalidRequestError, match="at most"):
            SamplingParams(**given)


def test_messages_are_bounded(server: LiveServer):
    error = refused(server.client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": ""}] * 2049}), 400)
    assert error.param == "messages"
    assert "2048" in error.message


@pytest.mark.parametrize(
    "wrong",
    [
        {"messages": []},
        {"messages": [{"role": "tool", "content": "x"}]},
        {"messages": [{"role": "user"}]},
        {"messages": [{"role": "user", "content": None}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        {"messages": [{"role": "assistant", "content": "x", "tool_calls": []}]},
        {"response_format": {"type": "xml"}},
        {"tools": []},
        {"tool_choice": "auto"},
        {"top_logprobs": 2},
        {"logprobs": True, "top_logprobs": 21},
        {"max_tokens": 3, "max_completion_tokens": 4},
        {"reasoning_effort": "low"},
        {"messages": [{"role": "user", "content": "x" * 600}]},
    ],
)
def test_a_chat_request_that_cannot_be_honoured_is_a_400(server: LiveServer, wrong):
    body = {"messages": [{"role": "user", "content": "x"}], **wrong}
    error = refused(server.client.post("/v1/chat/completions", json=body), 400)
    assert error.param in set(wrong)


def test_an_unknown_field_names_its_neighbour(server: LiveServer):
    error = refused(server.client.post("/v1/completions", json={"promt": "x"}), 400)
    assert "'prompt'" in error.message
    assert error.param == "promt"


def test_refused_values_are_not_echoed_at_length(server: LiveServer):
    error = refused(server.client.post("/v1/completions", json={"prompt": [1.5] * 100_000}), 400)
    assert error.message == "prompt must be a string, an array of strings, an array of token ids, or an array of arrays of token ids"


def test_routes_and_methods(server: LiveServer):
    assert "/v1/completions" in refused(server.client.post("/v1/completion", json={}), 404).message
    response = server.client.get("/v1/completions")
    assert refused(response, 405).code == "method_not_allowed"
    assert response.headers["allow"] == "POST"


def test_content_type(server: LiveServer):
    refused(server.client.post("/v1/completions", content="x", headers={"Content-Type": "text/plain"}), 415)
    refused(server.client.post("/v1/completions", data={"prompt": "x"}), 415)
    body = json.dumps({"prompt": "x", "max_tokens": 1}).encode()
    for kind in ("application/json; charset=utf-8", "Application/JSON"):
        assert server.client.post("/v1/completions", content=body, headers={"Content-Type": kind}).status_code == 200


def test_an_unpaired_surrogate_in_a_tokenized_text_does_no_harm(server: LiveServer):
    refused(server.client.post("/tokenize", content=b'{"prompt": "\\udfff"}', headers={"Content-Type": "application/json"}), 400)


def test_body_limit(make_server):
    server = make_server(ServerOptions(served_model_name=MODEL, max_body_bytes=1000))
    fits = json.dumps({"prompt": "x", "max_tokens": 1, "user": "u" * 900}).encode()
    assert len(fits) < 1000
    headers = {"Content-Type": "application/json"}
    assert server.client.post("/v1/completions", content=fits, headers=headers).status_code == 200
    assert server.client.post("/v1/completions", content=iter([fits]), headers=headers).status_code == 200
    large = b" " * (1001 - len(fits)) + fits
    for content in (large, iter([large[:500], large[500:]]), large * 5, iter([large] * 5)):
        assert refused(server.client.post("/v1/completions", content=content, headers=headers), 413).code == "body_too_large"
    host, port = server.url.removeprefix("http://").split(":")
    waiting = http.client.HTTPConnection(host, int(port), timeout=30)
    waiting.putrequest("POST", "/v1/completions")
    for name, value in (("Content-Type", "application/json"), ("Content-Length", "100000000"), ("Expect", "100-continue")):
        waiting.putheader(name, value)
    waiting.endheaders()
    assert waiting.getresponse().status == 413   # answered before a byte of the body was sent
    waiting.close()


def test_api_key(make_server):
    server = make_server(ServerOptions(served_model_name=MODEL, api_key=("sésame",)))
    body = {"prompt": "x", "max_tokens": 1}
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic sesame"}, {"Authorization": b"Bearer \xff"}):
        for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
            response = server.client.post(path, json=body, headers=headers)
            assert refused(response, 401).code == "invalid_api_key"
            assert response.headers["www-authenticate"] == "Bearer"
        refused(server.client.get("/v1/models", headers=headers), 401)
    good = {"Authorization": "Bearer sésame".encode()}
    assert server.client.post("/v1/completions", json=body, headers=good).status_code == 200
    for path in ("/health", "/metrics", "/version"):
        assert server.client.get(path).status_code == 200
    with pytest.raises(openai.AuthenticationError), openai.OpenAI(base_url=f"{server.url}/v1", api_key="wrong") as client:
        client.models.list()


def test_queue_overflow_is_429_and_hurts_nobody(make_server):
    server = make_server(ServerOptions(served_model_name=MODEL, max_queue=2), max_num_seqs=2)
    body = {"prompt": "one two", "max_tokens": 30, "temperature": 0}
    expected = server.complete(**body)["choices"]
    with ThreadPoolExecutor(4) as threads:
        with server.paused():
            waiting = [threads.submit(server.client.post, "/v1/completions", json=body) for _ in range(4)]
            server.wait_until(lambda: server.bridge.num_open == 4, "four requests wait")
            for extra in (body, body | {"stream": True}, body | {"n": 2}):
                response = server.client.post("/v1/completions", json=extra)
                assert refused(response, 429).type == "rate_limit_error"
                assert int(response.headers["retry-after"]) >= 1
            with pytest.raises(openai.RateLimitError), openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as client:
                client.completions.create(model=MODEL, prompt="x")
        for future in waiting:
            assert future.result().json()["choices"] == expected
    assert "headway:requests_rejected_total" in server.client.get("/metrics").text
    assert server.bridge.num_rejected == 4
    server.assert_idle()
    # What can never fit is the request's fault.
    refused(server.client.post("/v1/completions", json=body | {"n": 5}), 400)
    refused(server.client.post("/v1/completions", json={"prompt": ["x"] * 5}), 400)


def test_one_bad_prompt_refuses_the_whole_list(server: LiveServer):
    before = server.engine.metrics.num_generation_tokens
    refused(server.client.post("/v1/completions", json={"prompt": ["fine", "x" * 600], "max_tokens": 4}), 400)
    server.assert_idle()
    assert server.engine.metrics.num_generation_tokens == before


def test_bad_requests_do_not_disturb_a_running_one(server: LiveServer):
    body = {"prompt": "one two three", "max_tokens": 150, "temperature": 0, "ignore_eos": True}
    expected = server.complete(**body)["choices"]
    found = []
    running = threading.Thread(target=lambda: found.append(server.complete(**body)["choices"]))
    running.start()
    for bad in MALFORMED[:30]:
        refused(server.client.post("/v1/completions", content=bad, headers={"Content-Type": "application/json"}), 400)
    running.join()
    assert found == [expected]


@pytest.mark.parametrize(
    "wrong",
    [{"port": 65536}, {"port": -1}, {"max_queue": -1}, {"max_body_bytes": 0}, {"drain_timeout_s": -1.0}, {"drain_timeout_s": float("nan")},
     {"api_key": ""}, {"served_model_name": ""}],
)  # fmt: skip
def test_options_that_cannot_work(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        ServerOptions(**wrong)
