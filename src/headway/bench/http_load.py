"""Load on a running OpenAI-compatible server, streaming; requests start as `bench/arrivals.py` says.

Tokens are the server's own count (`usage`), since one streamed chunk may carry several. Acceptance comes from the counters
vLLM publishes on /metrics and Headway publishes too, read before and after.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from headway.bench.arrivals import Arrivals
from headway.bench.client import Endpoint, RequestFailed, excerpt, exchange, get_json
from headway.bench.load import LoadOptions
from headway.bench.records import Record, Run, TimeShares
from headway.bench.scrape import Growth, Scrape
from headway.bench.workloads import Prompt
from headway.config import option
from headway.errors import ConfigError
from headway.spec_decode_metrics import SpecDecodeMetrics

ENDPOINTS = ("completions", "chat")
PREFIX = "vllm:spec_decode_num_"


@dataclass(frozen=True)
class ServeOptions:
    """What is special to a server; the command-line flags are made from these fields."""

    base_url: str = option("http://127.0.0.1:8000", "the server to measure")
    endpoint: str = option("completions", "completions: prompts as token ids (text without a tokenizer); chat: messages", choices=ENDPOINTS)
    api_key: str | None = option(None, "sent as a bearer token")

    def __post_init__(self) -> None:
        if self.endpoint not in ENDPOINTS:
            raise ConfigError(f"endpoint must be one of {', '.join(ENDPOINTS)}, got {self.endpoint!r}")

    def target(self) -> Endpoint:
        return Endpoint.parse(self.base_url, self.api_key)


async def served_model(target: Endpoint) -> str:
    """The first model the server lists. Raises ConfigError when it cannot be asked."""
    try:
        listed = await get_json(target, "/v1/models")
        return str(listed["data"][0]["id"])
    except RequestFailed as error:
        raise ConfigError(f"the server does not answer: {error}") from error
    except (KeyError, IndexError, TypeError) as error:
        raise ConfigError(f"the server lists no model: {listed!r}") from error


def request_body(prompt: Prompt | list[int], model: str, index: int, load: LoadOptions, endpoint: str) -> bytes:
    """The JSON body of one request. Raises ConfigError when this prompt has no form the endpoint takes."""
    body: dict[str, Any] = {
        "model": model,
        "max_tokens": load.output_len,
        "temperature": load.temperature,
        "ignore_eos": load.ignore_eos,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if load.temperature > 0:
        body["seed"] = load.seed + index
    if isinstance(prompt, list):
        body["prompt"] = prompt
    elif endpoint == "chat" and prompt.messages is not None:
        body["messages"] = list(prompt.messages)
    elif endpoint == "chat" and prompt.text is not None:
        body["messages"] = [{"role": "user", "content": prompt.text}]
    elif endpoint == "completions" and prompt.text is not None:
        body["prompt"] = prompt.text
    elif endpoint == "completions" and prompt.token_ids is not None:
        body["prompt"] = list(prompt.token_ids)
    elif endpoint == "completions":
        raise ConfigError("completions need the model's tokenizer for chat prompts: name it with --tokenizer, or use --endpoint chat")
    else:
        raise ConfigError("the workload random is token ids; use --endpoint completions")
    return json.dumps(body).encode()


class _Answer:
    """One streamed response on its way. Its JSON is read by `record`, when nothing is measured any more."""

    def __init__(self) -> None:
        self.sent = time.perf_counter()
        self.events: list[tuple[bytes, float]] = []
        self.parts: list[str] = []
        self.first = self.last = 0.0
        self.usage: dict[str, int] | None = None
        self.error: str | None = None

    def fail(self, error: str) -> None:
        """What went wrong first is kept."""
        self.error = self.error or error

    def on_event(self, payload: bytes, now: float) -> None:
        self.events.append((payload, now))

    def _read(self, payload: bytes, now: float) -> None:
        if payload == b"[DONE]":
            return
        try:
            event = json.loads(payload)
        except ValueError:
            self.fail(f"an event is not JSON: {excerpt(payload)}")
            return
        if "error" in event:
            self.fail(f"error in the stream: {excerpt(payload)}")
        for choice in event.get("choices") or ():
            text = choice.get("text") or (choice.get("delta") or {}).get("content")
            if text:
                self.parts.append(text)
                self.first = self.first or now
            if text or choice.get("finish_reason"):
                self.last = now
        self.usage = event.get("usage") or self.usage

    def record(self) -> Record:
        for payload, now in self.events:
            self._read(payload, now)
        if self.usage is None:
            self.fail("the stream carried no usage, so its tokens cannot be counted")
        if not self.last:
            self.fail("the stream ended without a finish reason")
        usage = self.usage or {}
        return Record(
            usage.get("prompt_tokens", 0),
            self.sent,
            # Tokens may all decode to nothing (special tokens): then the end is the only time there is.
            self.first or self.last,
            self.last,
            usage.get("completion_tokens", 0),
            "".join(self.parts),
            self.error,
        )


async def _one(target: Endpoint, path: str, body: bytes, progress: Any) -> _Answer:
    answer = _Answer()
    try:
        status, text = await exchange(target, "POST", path, body, answer.on_event)
        if status != 200:
            answer.fail(f"status {status}: {excerpt(text)}")
    except RequestFailed as error:
        answer.fail(str(error))
    if progress:
        progress(1)
    return answer


async def run(
    prompts: Sequence[Prompt | list[int]], model: str, load: LoadOptions, serve: ServeOptions, progress: Any = None
) -> Run:
    """Sends every prompt and waits for every answer. Failed requests are in the records; the caller decides what they mean."""
    target = serve.target()
    path = "/v1/chat/completions" if serve.endpoint == "chat" else "/v1/completions"
    arrivals = Arrivals(load, len(prompts))
    bodies = [
        request_body(prompt, model, index, replace(load, output_len=arrivals.output_len(index)), serve.endpoint)
        for index, prompt in enumerate(prompts)
    ]
    before = await scrape(target)
    cpu = time.process_time()
    answers = await _send(target, path, bodies, arrivals, progress)
    cpu = time.process_time() - cpu
    records = [answer.record() for answer in answers]
    return _measured(records, before, await scrape(target), cpu)


async def warm_up(prompts: Sequence[Prompt | list[int]], model: str, load: LoadOptions, serve: ServeOptions) -> None:
    """Raises ConfigError when a warm-up request fails: measuring would be pointless."""
    result = await run(prompts, model, replace(load, arrivals="closed", request_rate=None), serve)
    if result.errors:
        raise ConfigError(f"a warm-up request failed: {result.errors[0]}")


async def _send(target: Endpoint, path: str, bodies: Sequence[bytes], arrivals: Arrivals, progress: Any) -> list[_Answer]:
    """One request per body, started when it is due; their answers in the order of the bodies."""
    ended = asyncio.Event()
    num_ended = 0

    def on_end(task: asyncio.Task[_Answer]) -> None:
        nonlocal num_ended
        num_ended += 1
        ended.set()

    tasks: list[asyncio.Task[_Answer]] = []
    start = time.perf_counter()
    for index, body in enumerate(bodies):
        while (delay := arrivals.wait(index, index - num_ended, time.perf_counter() - start)) > 0.0:
            if delay < float("inf"):
                await asyncio.sleep(delay)
            else:
                ended.clear()
                await ended.wait()
        tasks.append(asyncio.create_task(_one(target, path, body, progress)))
        tasks[-1].add_done_callback(on_end)
    return list(await asyncio.gather(*tasks))


async def scrape(target: Endpoint) -> Scrape | None:
    """The server's counters; None where there is no /metrics."""
    try:
        status, body = await exchange(target, "GET", "/metrics", timeout_s=30.0)
    except RequestFailed:
        return None
    return Scrape.parse(body.decode("utf-8", "replace")) if status == 200 else None


def speculation_in(grown: Growth) -> SpecDecodeMetrics:
    by_position = {int(at): round(count) for at, count in grown.by(f"{PREFIX}accepted_tokens_per_pos_total", "position").items()}
    counts = [by_position[at] for at in sorted(by_position)]
    while counts and counts[-1] == 0:
        counts.pop()
    return SpecDecodeMetrics(
        num_spec_steps=round(grown.total(f"{PREFIX}drafts_total") or 0.0),
        num_draft_tokens=round(grown.total(f"{PREFIX}draft_tokens_total") or 0.0),
        num_accepted_tokens=round(grown.total(f"{PREFIX}accepted_tokens_total") or 0.0),
        num_accepted_per_pos=counts,
    )


def _measured(records: list[Record], before: Scrape | None, after: Scrape | None, cpu_s: float) -> Run:
    grown = Growth(before or Scrape(), after or Scrape(), 0.0)
    speculation = speculation_in(grown)
    rows = grown.total("headway:sampling_rows_total")
    result = Run(tuple(records), speculation, time_shares(grown), speculation.num_draft_tokens / rows if rows else None)
    # What the client itself took, as a share of one core: it competes with the server when both are on one machine.
    share = cpu_s / result.duration_s if result.duration_s > 0 else 0.0
    extra: dict[str, Any] = {"client_cpu_share": share, "metrics_scraped": before is not None and after is not None}
    if (num_steps := grown.total("headway:steps_total")) is not None:
        extra |= {"num_steps": round(num_steps), "step_s": sum(grown.by("headway:step_seconds_total", "phase").values())}
    return replace(result, extra=extra)


def time_shares(grown: Growth) -> TimeShares | None:
    """From Headway's own counters of step time; None on other servers."""
    seconds = grown.by("headway:step_seconds_total", "phase")
    parts = [seconds.get(phase, 0.0) for phase in ("draft", "verify", "overhead")]
    total = sum(parts)
    return TimeShares(*(part / total for part in parts)) if total > 0.0 else None
