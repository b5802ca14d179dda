"""Who gets in: keys, host names, web pages, and how much may be said before that is known."""

from __future__ import annotations

import json
import socket

import openai
import pytest

from headway.errors import ConfigError
from headway.server import errors
from headway.server.connection import MAX_HEAD_BYTES
from headway.server.options import ServerOptions
from tests.integration.conftest import MODEL, LiveServer
from tests.integration.test_server_limits import refused

BODY = {"prompt": "x", "max_tokens": 1}


def options(**given: object) -> ServerOptions:
    return ServerOptions(served_model_name=MODEL, **given)   # type: ignore[arg-type]


def post(server: LiveServer, **headers: str) -> int:
    named = {name.replace("_", "-"): text for name, text in headers.items()}
    return server.client.post("/v1/completions", json=BODY, headers=named).status_code


# -- keys ---------------------------------------------------------------------------------------------------------


def test_any_of_several_keys(make_server):
    server = make_server(options(api_key=("one", "two")))
    assert [post(server, authorization=f"Bearer {key}") for key in ("one", "two")] == [200, 200]
    assert [post(server, authorization=f"Bearer {key}") for key in ("three", "onetwo", "one,two")] == [401] * 3
    assert [post(server, authorization=text) for text in ("Bearer", "one", "Basic one")] == [401] * 3
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="two", max_retries=0) as client:
        assert client.completions.create(model=MODEL, prompt="x", max_tokens=1).usage


@pytest.mark.parametrize(
    ("given", "keys"),
    [(("a", "b", "a"), ("a", "b")), ("a, b\tc", ("a", "b", "c")), ('["a", "b"]', ("a", "b")), (["a,b", '["c"]'], ("a", "b", "c")),
     ((), ())],
)  # fmt: skip
def test_ways_to_give_a_list(given, keys):
    assert options(api_key=given).api_key == keys


@pytest.mark.parametrize("wrong", ["", " ", ",", ("a", ""), "[]", '["secret"', '["secret", 1]', '[""]'])
def test_a_list_that_is_none_is_an_error_that_does_not_show_it(wrong):
    for name in ("api_key", "allowed_hosts", "allowed_origins", "allowed_methods", "allowed_headers"):
        with pytest.raises(ConfigError, match=name) as found:
            options(**{name: wrong})
        assert "secret" not in str(found.value)


def test_options_do_not_show_their_keys():
    assert "sesame" not in repr(options(api_key=("sesame",)))


# -- before the key is known ----------------------------------------------------------------------------------------

ENDLESS = {
    "lines": (b"GET / HTTP/1.1\r\nHost: x\r\n", b"".join(b"x-%d: y\r\n" % number for number in range(5000))),
    "one value": (b"GET / HTTP/1.1\r\nHost: x\r\nx: ", b"y" * 50_000),
    "one name": (b"GET / HTTP/1.1\r\nHost: x\r\n", b"y" * 50_000),
    "path": (b"GET /", b"y" * 50_000),
    "trailers": (
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n1\r\n{\r\n0\r\n", b"x: y\r\n" * 8000
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", ENDLESS)
def test_headers_that_do_not_end_end_the_connection(server: LiveServer, kind: str):
    """The bytes that go into a connection nobody reads are those of the socket buffers: megabytes, not the 256 offered."""
    start, more = ENDLESS[kind]
    host, port = server.url.removeprefix("http://").split(":")
    sent = 0
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        try:
            connection.sendall(start)
            while sent < 256 * 2**20:
                connection.sendall(more)
                sent += len(more)
        except OSError:
            pass
    assert sent < 64 * 2**20
    assert server.complete(**BODY)["usage"]["completion_tokens"] == 1


def answer(server: LiveServer, *pieces: bytes) -> bytes:
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        for piece in pieces:
            connection.sendall(piece)
        return b"".join(iter(lambda: connection.recv(65536), b""))


def test_what_is_too_large_is_a_431(server: LiveServer):
    head, body = answer(server, b"GET /health HTTP/1.1\r\nx: ", b"y" * (MAX_HEAD_BYTES + 1)).split(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 431 ")
    assert json.loads(body)["error"]["code"] == "headers_too_large"


def test_large_headers_that_end_and_large_bodies_are_fine(server: LiveServer):
    assert server.client.get("/health", headers={f"x-{number}": "y" * 1000 for number in range(40)}).status_code == 200
    body = json.dumps({**BODY, "user": "u" * 1_000_000}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n"
    pieces = [body[at : at + 10_000] for at in range(0, len(body), 10_000)]
    chunks = [b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces]
    assert b" 200 OK" in answer(server, head + b"Content-Length: %d\r\n\r\n" % len(body), *pieces)
    assert b" 200 OK" in answer(server, head + b"Transfer-Encoding: chunked\r\n\r\n", *chunks, b"0\r\n\r\n")


# -- what an error repeats ------------------------------------------------------------------------------------------

LONG = "y" * 4_000_000


@pytest.mark.parametrize(
    ("path", "body", "headers"),
    [
        ("/v1/completions", {"prompt": "x", LONG: 1}, {}),
        ("/v1/completions", {"prompt": "x", "speculative": {LONG: 1}}, {}),
        ("/v1/completions", {"prompt": "x", "logit_bias": {LONG: 1}}, {}),
        ("/v1/completions", {"prompt": "x", "model": LONG}, {}),
        ("/v1/completions", {"prompt": "x", "stop": LONG, "n": -1}, {}),
        ("/v1/completions", {"prompt": "x", "temperature": LONG}, {}),
        ("/v1/chat/completions", {"messages": [{"role": LONG, "content": "x"}]}, {}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x", LONG: 1}]}, {}),
        ("/tokenize", {"prompt": "x", LONG: 1}, {}),
        ("/" + "y" * 30_000, {}, {}),
        ("/v1/completions", {}, {"content-type": "y" * 30_000}),
        ("/v1/completions", {}, {"host": "y." * 15_000}),
        ("/v1/completions", {}, {"origin": "y" * 30_000}),
    ],
    ids=range(13),
)
def test_an_error_repeats_little_of_what_was_sent(server: LiveServer, path, body, headers):
    response = server.client.post(path, content=json.dumps(body), headers={"content-type": "application/json", **headers})
    assert 400 <= response.status_code < 500
    error = refused(response, response.status_code)
    assert len(error.message) < errors.MAX_MESSAGE
    assert "y" * 200 not in response.text
    assert len(response.content) < 3000


def test_an_unknown_field_is_named_even_where_it_is_long(server: LiveServer):
    error = refused(server.client.post("/v1/completions", json={"prompt": "x", "prompt_" * 100: 1}), 400)
    assert error.code == "unknown_field"
    assert "prompt_prompt_" in error.message
    assert "Accepted: " in error.message
    assert error.message.endswith("user")


def test_no_message_is_long():
    assert len(errors.ApiError(400, LONG, param=LONG).response().body) < 3000


# -- browsers -------------------------------------------------------------------------------------------------------


def test_a_body_that_does_not_say_that_it_is_json_is_not_read(server: LiveServer):
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
    body = json.dumps(BODY).encode()
    found = answer(server, head % len(body) + body)
    assert b" 415 " in found
    assert b"got none" in found


NAMES = {
    "localhost": 200, "localhost:8000": 200, "LOCALHOST": 200, "api.localhost": 200, "127.0.0.1": 200, "127.9.9.9:80": 200, "[::1]": 200,
    "[::1]:8000": 200, "192.168.1.5:8000": 200, "upstream": 200, "upstream:80": 200,
    "evil.example": 403, "evil.example:8000": 403, "localhost.evil.example": 403, "127.0.0.1.evil.example": 403, "localhost.": 403,
}  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_a_name_that_somebody_else_can_have_is_refused(server: LiveServer, name: str):
    for path in ("/health", "/v1/models", "/metrics", "/openapi.json", "/nothing"):
        status = server.client.get(path, headers={"Host": name}).status_code
        assert status == (404 if path == "/nothing" and NAMES[name] == 200 else NAMES[name])
    assert post(server, host=name) == NAMES[name]
    if NAMES[name] == 403:
        assert refused(server.client.get("/health", headers={"Host": name}), 403).code == "host_not_allowed"


ORIGINS = {
    "http://localhost:3000": 200, "https://localhost": 200, "http://127.0.0.1:5173": 200, "http://[::1]:1": 200,
    "http://evil.example": 403, "https://localhost.evil.example": 403, "null": 403, "file://": 403, "": 403, "http://[": 403,
    "chrome-extension://abc": 403, "http://192.168.1.5": 403,
}  # fmt: skip


@pytest.mark.parametrize("origin", ORIGINS)
def test_a_page_from_elsewhere_is_refused(server: LiveServer, origin: str):
    assert post(server, origin=origin) == ORIGINS[origin]
    response = server.client.options("/v1/completions", headers={"Origin": origin, "Access-Control-Request-Method": "POST"})
    assert response.status_code == (405 if ORIGINS[origin] == 200 else 403)
    assert "access-control-allow-origin" not in response.headers


def test_a_page_that_the_server_is_asked_by_its_own_name_for(server: LiveServer):
    assert post(server, host="upstream:81", origin="http://upstream:81") == 200
    assert post(server, host="upstream:81", origin="http://upstream") == 403
    assert post(server, host="evil.example", origin="http://evil.example") == 403   # a rebound name


@pytest.fixture
def behind_a_proxy() -> dict[str, str]:
    """What a reverse proxy that keeps the outer name sends on."""
    return {"host": "llm.example.com", "origin": "https://llm.example.com", "x_forwarded_for": "203.0.113.7"}


def test_with_a_key_any_name_and_page_will_do(make_server, behind_a_proxy):
    server = make_server(options(api_key=("k",)))
    assert post(server, **behind_a_proxy, authorization="Bearer k") == 200
    assert post(server, **behind_a_proxy) == 401
    assert post(server, host="a.b", origin="http://c.d", authorization="Bearer k") == 200


def test_on_a_network_address_any_name_will_do(make_server, behind_a_proxy):
    server = make_server(options(host="0.0.0.0"))
    assert post(server, **behind_a_proxy) == 200
    assert post(server, host="box.lan") == 200


def test_allowed_hosts(make_server, behind_a_proxy):
    server = make_server(options(allowed_hosts=("llm.example.com", "*.corp.example")))
    assert post(server, **behind_a_proxy) == 200
    assert [post(server, host=name) for name in ("LLM.example.com:443", "a.corp.example")] == [200, 200]
    assert [post(server, host=name) for name in ("corp.example", "xcorp.example", "example.com")] == [403, 403, 403]
    strict = make_server(options(host="0.0.0.0", api_key=("k",), allowed_hosts=("llm.example.com",)))
    assert post(strict, authorization="Bearer k", host="llm.example.com") == 200
    assert post(strict, authorization="Bearer k", host="other.example.com") == 403
    assert post(make_server(options(allowed_hosts=("*",))), host="evil.example") == 200


def test_cors_as_asked_for(make_server):
    page = "https://app.example"
    server = make_server(options(allowed_origins=(page,), allowed_methods=("GET", "POST"), allowed_headers=("content-type",)))
    ask = {"Origin": page, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "content-type"}
    preflight = server.client.options("/v1/completions", headers=ask)
    assert preflight.status_code == 200
    assert preflight.headers["access-control-allow-origin"] == page
    assert "POST" in preflight.headers["access-control-allow-methods"]
    assert "access-control-allow-credentials" not in preflight.headers
    for stream in (False, True):
        response = server.client.post("/v1/completions", json={**BODY, "stream": stream}, headers={"Origin": page})
        assert response.status_code == 200
        assert response.headers["access-control-allow-origin"] == page
    wrong = server.client.post("/v1/completions", json={}, headers={"Origin": page})   # a page may read what was wrong, too
    assert (wrong.status_code, wrong.headers["access-control-allow-origin"]) == (400, page)
    assert server.client.options("/v1/completions", headers={**ask, "Access-Control-Request-Method": "DELETE"}).status_code == 400
    assert post(server, origin="https://other.example") == 403


def test_cors_for_everybody_with_a_key_and_cookies(make_server):
    server = make_server(options(allowed_origins=("*",), allow_credentials=True, api_key=("k",)))
    page = {"Origin": "https://app.example"}
    ask = {**page, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,x-any"}
    preflight = server.client.options("/v1/chat/completions", headers=ask)   # asked without the key
    assert preflight.status_code == 200
    assert preflight.headers["access-control-allow-credentials"] == "true"
    assert "x-any" in preflight.headers["access-control-allow-headers"]
    assert server.client.post("/v1/completions", json=BODY, headers=page).status_code == 401
    assert server.client.post("/v1/completions", json=BODY, headers={**page, "Authorization": "Bearer k"}).status_code == 200


def test_clients_that_are_no_browsers(server: LiveServer):
    with openai.OpenAI(base_url=server.url.replace("127.0.0.1", "localhost") + "/v1", api_key="x", max_retries=0) as client:
        assert client.completions.create(model=MODEL, prompt="x", max_tokens=1).usage
    assert b" 200 OK" in answer(server, b"GET /v1/models HTTP/1.0\r\n\r\n")   # HTTP/1.0 has no Host
