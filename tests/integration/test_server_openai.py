"""The official client against a real server: what it asks for is what it gets."""

from __future__ import annotations

import asyncio
import json
import math

import httpx
import openai
import pytest

from headway.server import protocol
from tests.integration.conftest import MODEL, LiveServer

PROMPT = "one two three one two three one two"
GREEDY = {"model": MODEL, "temperature": 0.0}


@pytest.fixture
def client(server: LiveServer):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as client:
        yield client


def chat(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def test_completion(client, server):
    answer = client.completions.create(prompt=PROMPT, max_tokens=12, **GREEDY)
    assert answer.object == "text_completion"
    assert answer.model == MODEL
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.prompt_tokens == len(PROMPT)   # the tiny tokenizer writes one token per byte
    assert answer.usage.completion_tokens == 12
    assert answer.usage.total_tokens == len(PROMPT) + 12
    assert answer.choices[0].text == server.complete(prompt=list(server.engine.tokenizer.encode(PROMPT)), max_tokens=12, temperature=0)[
        "choices"
    ][0]["text"]


def test_default_max_tokens_is_openais(client):
    assert client.completions.create(prompt=PROMPT, extra_body={"ignore_eos": True}, **GREEDY).usage.completion_tokens == 16


def test_null_max_tokens_and_chat_go_to_the_context_limit(server):
    longest = server.engine.max_model_len
    whole = server.complete(prompt="x", max_tokens=None, temperature=0, ignore_eos=True)
    assert whole["usage"]["total_tokens"] == longest
    body = {"messages": chat("x"), "temperature": 0, "ignore_eos": True}
    assert server.client.post("/v1/chat/completions", json=body).json()["usage"]["total_tokens"] == longest


def test_streamed_text_equals_the_whole(client):
    whole = client.completions.create(prompt=PROMPT, max_tokens=40, n=3, seed=7, model=MODEL, temperature=1.0)
    texts = ["", "", ""]
    reasons = {}
    for chunk in client.completions.create(prompt=PROMPT, max_tokens=40, n=3, seed=7, model=MODEL, temperature=1.0, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            reasons[choice.index] = choice.finish_reason
    assert texts == [choice.text for choice in whole.choices]
    assert len(set(texts)) == 3
    assert reasons == {choice.index: choice.finish_reason for choice in whole.choices}


def test_streamed_chat_equals_the_whole(client):
    whole = client.chat.completions.create(messages=chat("hello"), max_completion_tokens=30, **GREEDY)
    chunks = list(client.chat.completions.create(messages=chat("hello"), max_tokens=30, stream=True, **GREEDY))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert all(chunk.choices[0].delta.role is None for chunk in chunks[1:])
    assert "".join(chunk.choices[0].delta.content for chunk in chunks) == whole.choices[0].message.content
    assert whole.choices[0].message.role == "assistant"
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert len({chunk.id for chunk in chunks}) == 1


def test_chat_takes_text_parts_and_developer(client):
    plain = client.chat.completions.create(messages=[{"role": "system", "content": "be kind"}, *chat("hello")], max_tokens=8, **GREEDY)
    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    messages = [{"role": "developer", "content": "be kind"}, {"role": "user", "content": parts}]
    assert client.chat.completions.create(messages=messages, max_tokens=8, **GREEDY).choices[0].message == plain.choices[0].message


def test_an_answer_can_be_sent_back(client):
    first = client.chat.completions.create(messages=chat("hello"), max_tokens=4, **GREEDY)
    messages = [*chat("hello"), first.choices[0].message, *chat("go on")]
    assert client.chat.completions.create(messages=messages, max_tokens=4, **GREEDY).usage.completion_tokens <= 4


def test_stream_options(client):
    stream = client.completions.create(prompt=PROMPT, max_tokens=9, stream=True, stream_options={"include_usage": True}, **GREEDY)
    *chunks, last = list(stream)
    assert all(chunk.usage is None for chunk in chunks)
    assert last.choices == []
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (len(PROMPT), 9)
    options = {"continuous_usage_stats": True}
    counts = [
        chunk.usage.completion_tokens
        for chunk in client.completions.create(prompt=PROMPT, max_tokens=9, stream=True, stream_options=options, **GREEDY)
    ]
    assert counts == sorted(counts)
    assert counts[-1] == 9


def test_several_prompts(client):
    answer = client.completions.create(prompt=["abc", "xyz"], n=2, max_tokens=6, seed=1, model=MODEL, extra_body={"ignore_eos": True})
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert answer.usage.prompt_tokens == 6
    assert answer.usage.completion_tokens == 24
    alone = client.completions.create(prompt="xyz", n=2, max_tokens=6, seed=1, model=MODEL, extra_body={"ignore_eos": True})
    assert [choice.text for choice in answer.choices[2:]] == [choice.text for choice in alone.choices]


def test_chat_logprobs(client, server):
    answer = client.chat.completions.create(messages=chat("hello"), max_tokens=6, logprobs=True, top_logprobs=3, **GREEDY)
    content = answer.choices[0].logprobs.content
    assert len(content) == answer.usage.completion_tokens
    for at in content:
        assert len(at.top_logprobs) == 3
        assert at.logprob == pytest.approx(at.top_logprobs[0].logprob)   # greedy: the most likely one was taken
        assert [top.logprob for top in at.top_logprobs] == sorted((top.logprob for top in at.top_logprobs), reverse=True)
        assert sum(math.exp(top.logprob) for top in at.top_logprobs) <= 1.0 + 1e-6
    assert bytes(byte for at in content for byte in at.bytes).decode(errors="replace").startswith(answer.choices[0].message.content)
    streamed = client.chat.completions.create(messages=chat("hello"), max_tokens=6, logprobs=True, top_logprobs=3, stream=True, **GREEDY)
    again = [at for chunk in streamed for at in chunk.choices[0].logprobs.content]
    assert [at.token for at in again] == [at.token for at in content]
    assert [at.logprob for at in again] == pytest.approx([at.logprob for at in content])


def test_completion_logprobs(client):
    answer = client.completions.create(prompt=PROMPT, max_tokens=6, logprobs=2, **GREEDY)
    logprobs = answer.choices[0].logprobs
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.top_logprobs) == len(logprobs.text_offset) == 6
    lengths = [len(token) for token in logprobs.tokens]
    assert logprobs.text_offset == [sum(lengths[:at]) for at in range(6)]
    for token, logprob, top in zip(logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True):
        assert top[token] == logprob
    streamed = client.completions.create(prompt=PROMPT, max_tokens=6, logprobs=2, stream=True, **GREEDY)
    assert [at for chunk in streamed for at in chunk.choices[0].logprobs.text_offset] == logprobs.text_offset


def test_prompt_logprobs(server):
    found = server.complete(prompt="abcd", max_tokens=1, prompt_logprobs=2, temperature=0)["choices"][0]["prompt_logprobs"]
    assert found[0] is None
    for token, at in zip(server.engine.tokenizer.encode("abcd")[1:], found[1:], strict=True):
        assert 2 <= len(at) <= 3
        assert at[str(token)]["decoded_token"] == server.engine.tokenizer.token_text(token)


def test_stop(client):
    text = client.completions.create(prompt=PROMPT, max_tokens=60, seed=3, model=MODEL).choices[0].text
    stop = text[10:13]
    answer = client.completions.create(prompt=PROMPT, max_tokens=60, seed=3, model=MODEL, stop=[stop])
    assert answer.choices[0].text == text[: text.index(stop)]
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].stop_reason == stop
    stream = client.completions.create(prompt=PROMPT, max_tokens=60, seed=3, model=MODEL, stop=stop, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == answer.choices[0].text
    extra = {"include_stop_str_in_output": True}
    kept = client.completions.create(prompt=PROMPT, max_tokens=60, seed=3, model=MODEL, stop=stop, extra_body=extra)
    assert kept.choices[0].text == answer.choices[0].text + stop


def test_speculation_is_counted_and_can_be_switched_off(server):
    prompt = "abcabcabcabcabcabcabcabc" * 4
    body = {"prompt": prompt, "max_tokens": 40, "temperature": 0, "ignore_eos": True}
    on, off, capped = (
        server.complete(**body, speculative=choice)
        for choice in ({"enabled": True}, {"enabled": False}, {"max_tokens": 1, "tpot_slo_ms": 250.5})
    )
    assert on["choices"][0]["text"] == off["choices"][0]["text"] == capped["choices"][0]["text"]
    stats = on["metrics"]["speculative_decoding"]
    assert stats["num_draft_tokens"] > 0
    assert stats["compared_ms"] == stats["plain_equivalent_ms"] == 0.0   # a static policy forecasts nothing
    details = on["usage"]["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] == stats["num_accepted_tokens"]
    assert details["accepted_prediction_tokens"] + details["rejected_prediction_tokens"] == stats["num_draft_tokens"]
    assert off["metrics"]["speculative_decoding"]["num_draft_tokens"] == 0
    capped_stats = capped["metrics"]["speculative_decoding"]
    assert capped_stats["num_draft_tokens"] == capped_stats["num_spec_steps"] > 0


def test_cached_tokens(server):
    prompt = "a prompt that fills several blocks of the cache, twice over: " * 2
    for _ in range(2):
        usage = server.complete(prompt=prompt, max_tokens=2)["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == (len(prompt) - 1) // 64 * 64 > 0


def test_models(client):
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError) as error:
        client.models.retrieve("other/model")
    assert error.value.code == "model_not_found"


def test_tokenize_and_back(server):
    post = server.client.post
    found = post("/tokenize", json={"prompt": "naïve ☃", "return_token_strs": True}).json()
    assert found["count"] == len(found["tokens"]) == len(found["token_strs"]) == len("naïve ☃".encode())
    assert found["max_model_len"] == server.engine.max_model_len
    assert post("/detokenize", json={"tokens": found["tokens"]}).json() == {"prompt": "naïve ☃"}
    with_prompt = post("/tokenize", json={"messages": chat("hi")}).json()["tokens"]
    without = post("/tokenize", json={"messages": chat("hi"), "add_generation_prompt": False}).json()["tokens"]
    assert with_prompt[: len(without)] == without
    assert len(with_prompt) > len(without)


@pytest.mark.parametrize(
    ("wrong", "kind", "param"),
    [
        ({"model": "other"}, openai.NotFoundError, "model"),
        ({"temperature": -1}, openai.BadRequestError, "temperature"),
        ({"max_tokens": 10_000}, openai.BadRequestError, "max_tokens"),
        ({"prompt": "x" * 600}, openai.BadRequestError, "prompt"),
        ({"prompt": [5, 300]}, openai.BadRequestError, "prompt"),
        ({"logit_bias": {"300": 1}}, openai.BadRequestError, "logit_bias"),
        ({"echo": True}, openai.BadRequestError, "echo"),
        ({"suffix": "x"}, openai.BadRequestError, "suffix"),
        ({"best_of": 2}, openai.BadRequestError, "best_of"),
        ({"extra_body": {"min_tokens": 9, "max_tokens": 5}}, openai.BadRequestError, "min_tokens"),
        ({"extra_body": {"guided_json": 5}}, openai.BadRequestError, "guided_json"),
    ],
)
def test_error_classes(client, wrong, kind, param):
    with pytest.raises(kind) as error:
        client.completions.create(**{"prompt": "x", "model": MODEL, **wrong})
    assert error.value.param == param
    assert param in error.value.body["message"]


def test_sync_and_async_clients_agree(server):
    async def ask() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="unused") as client:
            first, second = await asyncio.gather(
                client.completions.create(prompt="abc", max_tokens=20, **GREEDY),
                client.completions.create(prompt="abc", max_tokens=20, stream=True, **GREEDY),
            )
            return [first.choices[0].text, "".join([chunk.choices[0].text async for chunk in second])]

    text = server.complete(prompt="abc", max_tokens=20, temperature=0)["choices"][0]["text"]
    assert asyncio.run(ask()) == [text, text]


def events(response: httpx.Response) -> list[dict]:
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


@pytest.mark.parametrize("extra", [{}, {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}])
def test_answers_keep_to_their_documented_shape(server, extra):
    chat_body = {"messages": chat("hi"), "max_tokens": 8, "n": 2, "logprobs": True, "top_logprobs": 2}
    text_body = {"prompt": ["ab", "cd"], "max_tokens": 8, "n": 2, "logprobs": 2}
    for path, body, whole, chunk in (
        ("/v1/chat/completions", chat_body, protocol.ChatCompletionResponse, protocol.ChatCompletionChunk),
        ("/v1/completions", text_body, protocol.CompletionResponse, protocol.CompletionResponse),
    ):
        whole.model_validate(server.client.post(path, json=body | {"prompt_logprobs": 1}).json())
        streamed = server.client.post(path, json=body | extra | {"stream": True})
        assert streamed.headers["content-type"].startswith("text/event-stream")
        for event in events(streamed):
            chunk.model_validate(event)
