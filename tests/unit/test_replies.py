"""Chunks are put together from strings: they must be the JSON they would be otherwise, first and later ones alike."""

from __future__ import annotations

import json
from typing import Any

import pytest

from headway.server.replies import ChatReply, CompletionReply, Reply, TokenNames
from headway.types import OutputDelta

TEXTS = ("plain", 'a "quote"', "back\\slash \n\t\x00", "ünïcode 漢字 \U0001f600", "\ud800 alone", "</script>")


def make(kind: type[Reply], n: int = 1, usage: tuple[bool, bool] = (False, False)) -> Reply:
    return kind("model", TokenNames(str, lambda token: b""), [[1, 2]], n, None, usage)


def event(text: str) -> Any:
    assert text.startswith("data: ")
    assert text.endswith("\n\n")
    return json.loads(text[6:])


def delta(text: str, index: int = 0, finish_reason: str | None = None) -> OutputDelta:
    return OutputDelta("r", index, [7], [False], text, None, finish_reason=finish_reason)


@pytest.mark.parametrize("usage", [(False, False), (True, False), (True, True)])
def test_completion_chunks(usage: tuple[bool, bool]) -> None:
    reply = make(CompletionReply, n=2, usage=usage)
    for count, text in enumerate(TEXTS, start=1):
        for index in (0, 1):
            got = event(reply.chunk(0, delta(text, index)))
            assert got["choices"] == [{"index": index, "text": text, "logprobs": None, "finish_reason": None, "stop_reason": None}]
            assert (got["id"], got["object"], got["model"]) == (reply.id, "text_completion", "model")
            assert ("usage" in got) == usage[0]
            assert not usage[1] or got["usage"]["completion_tokens"] == 2 * count - 1 + index
    last = event(reply.chunk(0, delta("", finish_reason="length")))
    assert last["choices"] == [{"index": 0, "text": "", "logprobs": None, "finish_reason": "length", "stop_reason": None}]


@pytest.mark.parametrize("usage", [(False, False), (True, False), (True, True)])
def test_chat_chunks(usage: tuple[bool, bool]) -> None:
    reply = make(ChatReply, usage=usage)
    for count, text in enumerate(TEXTS):
        role = {"role": "assistant"} if count == 0 else {}
        got = event(reply.chunk(0, delta(text)))
        assert got["choices"] == [{"index": 0, "delta": {**role, "content": text}, "logprobs": None, "finish_reason": None}]
        assert ("usage" in got) == usage[0]


def test_half_a_character_is_no_chunk_but_counts() -> None:
    reply = make(CompletionReply)
    assert reply.chunk(0, delta("")) == ""
    assert reply.usage()["completion_tokens"] == 1
