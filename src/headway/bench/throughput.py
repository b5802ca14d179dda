"""A load in process: no HTTP, no threads, only the engine's own steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from headway.bench import workloads
from headway.bench.arrivals import Arrivals
from headway.bench.load import LoadOptions
from headway.bench.records import Record, Run, TimeShares
from headway.engine.engine import Engine
from headway.errors import InvalidRequestError
from headway.sampling_params import SamplingParams
from headway.spec_decode_metrics import SpecDecodeMetrics
from headway.types import Request

Progress = Callable[[int], None]
"""Called with the number of requests that finished since the last call."""


def prepare(engine: Engine, options: LoadOptions, num_runs: int = 1) -> list[list[list[int]]]:
    """Token ids of the prompts of each run, after a warm-up with others; no prompt occurs twice."""
    size = options.num_prompts
    prompts, warmup = workloads.load_with_warmup(
        options.workload, size * num_runs, options.warmup, options.seed, engine.tokenizer.vocab_size
    )
    token_ids = [prompt.encode(engine.tokenizer) for prompt in prompts]
    run(engine, [prompt.encode(engine.tokenizer) for prompt in warmup], options, label="warm-up")
    return [token_ids[start : start + size] for start in range(0, size * num_runs, size)]


def run(
    engine: Engine,
    prompts: Sequence[list[int]],
    options: LoadOptions,
    progress: Progress | None = None,
    label: str = "bench",
    on_step: Callable[[], None] | None = None,
) -> Run:
    """Starts requests as `options.arrivals` says until all prompts are answered. `on_step` is called after every step.

    Raises InvalidRequestError when a prompt cannot be served (too long for the context): nothing of such a run counts.
    """
    before = engine.metrics.snapshot()
    records: list[Record] = []
    running: dict[str, Record] = {}
    stats = SpecDecodeMetrics()
    arrivals = Arrivals(options, len(prompts))
    waiting = list(enumerate(prompts))[::-1]
    start = time.perf_counter()
    while waiting or running:
        delay = 0.0
        while waiting and (delay := arrivals.wait(waiting[-1][0], len(running), time.perf_counter() - start)) == 0.0:
            index, token_ids = waiting.pop()
            due = arrivals.due(index)   # a request that came while a step ran has waited since then
            record = Record(len(token_ids), time.perf_counter() if due is None else start + due)
            running[f"{label}-{index}"] = record
            records.append(record)
            add(engine, f"{label}-{index}", token_ids, index, arrivals.output_len(index), options)
        if not running:
            time.sleep(delay)
            continue
        finished = 0
        for delta in engine.step():
            record = running[delta.request_id]
            record.observe(time.perf_counter(), delta.token_ids)
            if delta.finished:
                del running[delta.request_id]
                stats.add(delta.stats or SpecDecodeMetrics())
                finished += 1
        if finished and progress:
            progress(finished)
        if on_step:
            on_step()
    return measured(engine, before, records, stats)


def add(engine: Engine, request_id: str, token_ids: list[int], index: int, output_len: int, options: LoadOptions) -> None:
    """Queues prompt `index` of a load. Raises InvalidRequestError."""
    params = SamplingParams(
        temperature=options.temperature, max_tokens=output_len, ignore_eos=options.ignore_eos, seed=options.seed + index
    )
    try:
        engine.add(Request(request_id, token_ids, params))
    except InvalidRequestError as error:
        raise InvalidRequestError(f"prompt {index} of the workload cannot be served: {error}") from error


def measured(engine: Engine, before: dict[str, float], records: list[Record], stats: SpecDecodeMetrics) -> Run:
    """The run of these requests; `before` is a snapshot of the engine's metrics at its beginning."""
    spent = {name: value - before[name] for name, value in engine.metrics.snapshot().items()}
    step_ms = spent["step_ms"]
    shares = None
    if step_ms > 0:
        draft, verify = spent["draft_ms"] / step_ms, spent["verify_ms"] / step_ms
        shares = TimeShares(draft, verify, max(0.0, 1.0 - draft - verify))
    rows = spent["num_sampling_rows"]
    return Run(
        tuple(records), stats, shares, stats.num_draft_tokens / rows if rows else 0.0,
        {"num_steps": int(spent["num_steps"]), "step_s": step_ms / 1e3, "num_preemptions": int(spent["num_preemptions"])},
    )
