"""One of the two sides of an audit: a server, and the fields that make it decode plainly or speculate."""

from __future__ import annotations

import asyncio
import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from headway.bench.client import Endpoint, RequestFailed, excerpt, exchange
from headway.bench.scrape import Scrape
from headway.errors import HeadwayError

TIMEOUT_S = 300.0
COUNTERS = ("vllm:spec_decode_num_draft_tokens", "vllm:spec_decode_num_draft_tokens_total")   # drafted tokens, as vLLM and Headway count


class Refused(HeadwayError):
    """The server does not take this request."""


@dataclass(frozen=True, slots=True)
class Continuation:
    """What a server wrote behind a prompt. Tokens are strings; logprobs and tops only where they were asked for."""

    text: str
    finish_reason: str | None
    tokens: tuple[str, ...] = ()
    logprobs: tuple[float, ...] = ()
    tops: tuple[Mapping[str, float], ...] = ()   # of each position, the most likely tokens
    num_cached: int | None = None                # of the prompt, where the server says so


class Asker(Protocol):
    """Who can be asked for continuations."""

    async def complete(self, prompt: str, **fields: Any) -> list[Continuation]:
        """`n` continuations (1 when not given). Raises Refused for a request the server does not take, RequestFailed when it breaks."""

    def curl(self, prompt: str, **fields: Any) -> str:
        """The same as a command."""


@dataclass(frozen=True)
class Side:
    """Implements Asker over HTTP.

    extra     fields of every request
    repeats   whether the server takes `n`; without it, n requests are sent
    """

    endpoint: Endpoint
    url: str
    model: str
    extra: Mapping[str, Any] = field(default_factory=dict)
    repeats: bool = True

    async def complete(self, prompt: str, **fields: Any) -> list[Continuation]:
        number = fields.get("n", 1)
        if number > 1 and not self.repeats:
            seed, single = fields.get("seed", 0), {name: value for name, value in fields.items() if name != "n"}
            parts = await asyncio.gather(*[self.complete(prompt, **{**single, "seed": seed + i}) for i in range(number)])
            return [part[0] for part in parts]
        answer = await self.post("/v1/completions", self._body(prompt, fields))
        try:
            choices = sorted(answer["choices"], key=lambda choice: choice["index"])
            cached = ((answer.get("usage") or {}).get("prompt_tokens_details") or {}).get("cached_tokens")
            return [_continuation(choice, cached) for choice in choices]
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise RequestFailed(f"{self.url} answered something that is no completion ({error!r}): {str(answer)[:200]}") from error

    async def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """The JSON that the server answers. Raises Refused and RequestFailed."""
        status, raw = await exchange(self.endpoint, "POST", path, json.dumps(body).encode(), timeout_s=TIMEOUT_S)
        if 400 <= status < 500 and status != 429:
            raise Refused(f"{self.url} answered {status}: {excerpt(raw)}")
        if status != 200:
            raise RequestFailed(f"{self.url} answered {status}: {excerpt(raw)}")
        try:
            return json.loads(raw)
        except ValueError as error:
            raise RequestFailed(f"{self.url} did not answer JSON: {excerpt(raw)}") from error

    def curl(self, prompt: str, **fields: Any) -> str:
        key = ' -H "Authorization: Bearer $API_KEY"' if self.endpoint.api_key else ""
        body = shlex.quote(json.dumps(self._body(prompt, fields)))
        return f"curl {self.url}/v1/completions -H 'Content-Type: application/json'{key} -d {body}"

    async def num_drafted(self) -> float | None:
        """Tokens the server has drafted since it started, by its metrics; None when it does not say."""
        try:
            status, body = await exchange(self.endpoint, "GET", "/metrics", timeout_s=TIMEOUT_S)
        except RequestFailed:
            return None
        return Scrape.parse(body.decode("utf-8", "replace")).total(*COUNTERS) if status == 200 else None

    def _body(self, prompt: str, fields: Mapping[str, Any]) -> dict[str, Any]:
        return {"model": self.model, "prompt": prompt, **self.extra, **fields}


def _continuation(choice: Mapping[str, Any], num_cached: int | None) -> Continuation:
    tokens: tuple[str, ...] = ()
    logprobs: tuple[float, ...] = ()
    tops: tuple[Mapping[str, float], ...] = ()
    found = choice.get("logprobs")
    if found and found.get("content") is not None:   # as in chat answers: llama.cpp
        content = found["content"]
        tokens = tuple(each["token"] for each in content)
        logprobs = tuple(float(each["logprob"]) for each in content)
        tops = tuple({top["token"]: float(top["logprob"]) for top in each.get("top_logprobs") or ()} for each in content)
    elif found and found.get("tokens"):
        tokens = tuple(found["tokens"])
        logprobs = tuple(float(each) for each in found["token_logprobs"])
        tops = tuple(each or {} for each in found.get("top_logprobs") or ())
    return Continuation(choice["text"], choice.get("finish_reason"), tokens, logprobs, tops, num_cached)
