"""Structured output over HTTP: every way to ask for it, in both endpoints, and what is refused."""

from __future__ import annotations

import json
import re
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from tests.integration.conftest import MODEL, LiveServer

SCHEMA = {
    "type": "object", "required": ["colour", "size"], "additionalProperties": False,
    "properties": {"colour": {"enum": ["red", "blue"]}, "size": {"type": "integer", "minimum": 0, "maximum": 9}},
}   # fmt: skip
NAMED = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA}}
# The tiny model would write spaces for ever.
FEW_SPACES = {str(3 + ord(space)): -100 for space in " \n\t\r"}
ENDPOINTS = {
    "/v1/completions": {"prompt": "a thing: "}, "/v1/chat/completions": {"messages": [{"role": "user", "content": "a thing"}]},
}   # fmt: skip
WAYS = {
    "json_schema": {"response_format": NAMED},
    "strict": {"response_format": {"type": "json_schema", "json_schema": {**NAMED["json_schema"], "strict": True, "description": "d"}}},
    "structured_outputs": {"structured_outputs": {"json": SCHEMA}},
    "as text": {"structured_outputs": {"json": json.dumps(SCHEMA), "disable_any_whitespace": True}},
    "guided_json": {"guided_json": SCHEMA},
    "guided_json as text": {"guided_json": json.dumps(SCHEMA)},
}
FORMS = {
    "regex": ({"structured_outputs": {"regex": "[ab]{3}"}}, "[ab]{3}"),
    "choice": ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes|no"),
    "grammar": ({"structured_outputs": {"grammar": 'root ::= "a" [xy]'}}, "a[xy]"),
    "guided_regex": ({"guided_regex": "[ab]{3}"}, "[ab]{3}"),
    "guided_choice": ({"guided_choice": ["yes", "no"]}, "yes|no"),
    "guided_grammar": ({"guided_grammar": 'start: "a" /[xy]/'}, "a[xy]"),
    "beside text": ({"response_format": {"type": "text"}, "guided_regex": "[ab]"}, "[ab]"),
}
REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "two fields": ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice", "one form"),
    "format and field": ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex", "one form"),
    "two kinds": ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "exactly one of"),
    "no kind": ({"structured_outputs": {}}, "structured_outputs", "exactly one of"),
    "unknown kind": ({"structured_outputs": {"xml": "a"}}, "structured_outputs", "structured_outputs.xml"),
    "structural tag": ({"structured_outputs": {"structural_tag": {}}}, "structured_outputs", "structural_tag is not supported"),
    "unknown type": ({"response_format": {"type": "structural_tag"}}, "response_format", "json_schema"),
    "no schema": ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema goes with type"),
    "schema beside": ({"response_format": {**NAMED, "type": "json_object"}}, "response_format", "json_schema goes with type"),
    "no name": ({"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}}, "response_format", "name"),
    "keyword": ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"uniqueItems": True}}}},
                "response_format", "uniqueItems"),
    "guided keyword": ({"guided_json": {"not": {}}}, "guided_json", "not"),
    "guided type": ({"guided_json": 5}, "guided_json", "a JSON schema"),
    "regex": ({"guided_regex": "(a"}, "guided_regex", "unclosed"),
    "empty choice": ({"guided_choice": []}, "guided_choice", "one string or more"),
    "grammar": ({"guided_grammar": "start: foo"}, "guided_grammar", "foo"),
    "no object": ({"structured_outputs": {"json_object": False}}, "structured_outputs", "json_object must be true"),
    "long": ({"guided_regex": "a" * 70_000}, "guided_regex", "70000 characters"),
    "slow": ({"guided_json": {"allOf": [{"type": "string", "pattern": f"^.*a.{{{i}}}$"} for i in range(1, 25)]}}, "guided_json",
             "longer than"),
}   # fmt: skip


def ask(server: LiveServer, path: str, **body: Any) -> tuple[str, str]:
    """(text, finish reason)"""
    answer = server.client.post(path, json={**ENDPOINTS[path], "max_tokens": 100, "temperature": 0.5, "seed": 1, **body})
    assert answer.status_code == 200, answer.text
    choice = answer.json()["choices"][0]
    return choice["text"] if "text" in choice else choice["message"]["content"], choice["finish_reason"]


@pytest.mark.parametrize("path", ENDPOINTS)
@pytest.mark.parametrize("way", WAYS)
def test_json_by_a_schema(server: LiveServer, path: str, way: str) -> None:
    text, reason = ask(server, path, logit_bias=FEW_SPACES, **WAYS[way])
    assert reason == "stop"
    found = json.loads(text)
    assert list(found) == ["colour", "size"]
    assert found["colour"] in ("red", "blue")
    assert 0 <= found["size"] <= 9


@pytest.mark.parametrize("path", ENDPOINTS)
@pytest.mark.parametrize("which", FORMS)
def test_other_forms(server: LiveServer, path: str, which: str) -> None:
    asked, expected = FORMS[which]
    text, reason = ask(server, path, **asked)
    assert re.fullmatch(expected, text)
    assert reason == "stop"


@pytest.mark.parametrize("asked", [{"response_format": {"type": "json_object"}}, {"structured_outputs": {"json_object": True}}])
def test_any_object(server: LiveServer, asked: dict[str, Any]) -> None:
    close = {str(3 + ord("}")): 100, **FEW_SPACES}
    assert ask(server, "/v1/completions", logit_bias=close, **asked) == ("{}", "stop")


@pytest.mark.parametrize("path", ENDPOINTS)
@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_says_why(server: LiveServer, path: str, case: str) -> None:
    asked, field, reason = REFUSED[case]
    answer = server.client.post(path, json={**ENDPOINTS[path], "max_tokens": 5, **asked})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["param"] == field
    assert reason in error["message"]
    assert len(error["message"]) < 1000


def test_others_go_on_while_one_is_refused(server: LiveServer) -> None:
    """A request that runs takes no notice of one whose schema is being given up."""
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as client:
        stream = client.completions.create(
            model=MODEL, prompt="x", max_tokens=200, temperature=0, stream=True, extra_body={"ignore_eos": True}
        )   # fmt: skip
        next(iter(stream))
        slow = {"allOf": [{"type": "string", "pattern": f"^.*b.{{{i}}}$"} for i in range(1, 25)]}
        with pytest.raises(openai.BadRequestError, match="longer than"):
            client.completions.create(model=MODEL, prompt="x", extra_body={"guided_json": slow})
        assert [chunk.choices[0].finish_reason for chunk in stream][-1] == "length"


def test_streamed_it_is_the_same(server: LiveServer) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused") as client:
        asked: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "a thing"}], "response_format": NAMED, "seed": 3}
        whole = client.chat.completions.create(logit_bias=FEW_SPACES, **asked)
        parts = list(client.chat.completions.create(logit_bias=FEW_SPACES, stream=True, **asked))
        assert "".join(part.choices[0].delta.content or "" for part in parts) == whole.choices[0].message.content
        assert parts[-1].choices[0].finish_reason == whole.choices[0].finish_reason == "stop"


class Thing(BaseModel):
    colour: str
    size: int


def test_the_client_s_own_models(server: LiveServer) -> None:
    """`parse` sends a strict schema made of a class, and reads the answer back."""
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused") as client:
        bias = {**FEW_SPACES, str(3 + ord('"')): 8}
        answer = client.chat.completions.parse(
            model=MODEL, messages=[{"role": "user", "content": "a thing"}], response_format=Thing, logit_bias=bias, max_tokens=100, seed=1
        )   # fmt: skip
        if answer.choices[0].finish_reason == "stop":
            assert isinstance(answer.choices[0].message.parsed, Thing)
        else:
            pytest.fail("it did not end")
