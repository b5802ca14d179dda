"""A server runs for months: after thousands of requests the plugin holds what it held after hundreds. Entries are counted, not bytes."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from types import ModuleType

import numpy as np

from headway.control.policies.goodput import Goodput
from headway.drafters.suffix import ResponseCache, Suffix
from headway.vllm.proposer import Proposer
from tests.unit.test_vllm_adapter import Engine, FakeRequest, request
from tests.unit.test_vllm_proposer import MAX_LEN, make

NUM_LIVE = 6
WARM, MORE = 300, 900        # requests
SLACK = 1.25                 # of the entries after WARM requests: what lives changes from step to step
CONTAINERS = (dict, list, set, frozenset, tuple, deque)


def entries(*roots: object) -> int:
    """Of all containers and arrays that can be reached from `roots`."""
    seen: set[int] = set()
    todo, total = list(roots), 0
    while todo:
        it = todo.pop()
        if id(it) in seen or isinstance(it, (str, bytes, int, float, type, ModuleType)):
            continue
        seen.add(id(it))
        if isinstance(it, np.ndarray):
            total += it.size
        elif isinstance(it, bytearray):
            total += len(it)
        else:
            if isinstance(it, CONTAINERS):
                total += len(it)
            todo += parts(it)
    return total


def parts(it: object) -> Iterator[object]:
    if isinstance(it, dict):
        yield from it.keys()
        yield from it.values()
    elif isinstance(it, CONTAINERS):
        yield from it
    yield from getattr(it, "__dict__", {}).values()
    for cls in type(it).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        yield from (getattr(it, name) for name in ([slots] if isinstance(slots, str) else slots) if hasattr(it, name))


class Traffic:
    """Requests that repeat themselves or do not, that end, or are aborted in the middle, or before their first token."""

    def __init__(self) -> None:
        self.rng = random.Random(0)
        self.num_made = 0

    def new(self) -> FakeRequest:
        cycle = [self.rng.randrange(50) for _ in range(self.rng.randrange(3, 30))]
        self.num_made += 1
        return request(f"r{self.num_made}", cycle * self.rng.randrange(1, 3), max_tokens=self.rng.randrange(1, 30))

    def written(self, it: FakeRequest, draft: list[int]) -> list[int]:
        accepted = 0
        while accepted < len(draft) and self.rng.random() < 0.7:
            accepted += 1
        return [*draft[:accepted], self.rng.randrange(50)][: it.max_tokens - it.num_output_tokens]


def run(num_requests: int, traffic: Traffic, engine: Engine, propose: Callable[[list[FakeRequest], dict[str, list[int]]], None]) -> None:
    until = traffic.num_made + num_requests
    while traffic.num_made < until:
        while len(engine.requests) < NUM_LIVE:
            engine.add(traffic.new())
        output = engine.schedule()
        rows = [engine.requests[name] for name in output.num_scheduled_tokens]
        written = {it.request_id: traffic.written(it, list(output.scheduled_spec_decode_tokens.get(it.request_id, ()))) for it in rows}
        engine.update(output, written, ms=20.0 + 0.3 * output.total_num_scheduled_tokens)
        propose(rows, written)
        for it in rows:
            if it.num_output_tokens >= it.max_tokens or traffic.rng.random() < 0.02:
                engine.finish(it.request_id)


def test_nothing_is_kept_of_requests_that_ended() -> None:
    """The scheduler's part and the proposer's, joined as vLLM joins them."""
    traffic, engine, proposer = Traffic(), Engine(Goodput()), make()
    small_cache(proposer)
    token_ids, lengths = np.zeros((NUM_LIVE, MAX_LEN), dtype=np.int32), np.zeros(NUM_LIVE, dtype=np.int32)

    def propose(rows: list[FakeRequest], written: dict[str, list[int]]) -> None:
        for i, it in enumerate(rows):
            token_ids[i, : it.num_tokens], lengths[i] = it.all_token_ids, it.num_tokens
        found = proposer.propose([written[it.request_id] for it in rows], lengths, token_ids)
        engine.draft({it.request_id: draft for it, draft in zip(rows, found, strict=True) if draft})

    run(WARM, traffic, engine, propose)
    ours, theirs = entries(engine.adapter, engine.counters), entries(proposer)
    run(MORE, traffic, engine, propose)
    assert engine.counters.num_verified_drafts > 100
    assert entries(engine.adapter, engine.counters) < SLACK * ours
    assert entries(proposer) < SLACK * theirs


def small_cache(proposer: Proposer) -> None:
    """So that it is full early: it is bounded, and the bound is what matters here."""
    suffix = proposer._drafters[0]
    assert isinstance(suffix, Suffix)
    suffix.cache = ResponseCache(16, 512)
