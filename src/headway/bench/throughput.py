"""A closed loop in process: no HTTP, no threads, only the engine's own steps."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable, Sequence

from headway.bench import workloads
from headway.bench.records import LoadOptions, Record, Run, TimeShares
from headway.config import EngineConfig
from headway.engine.engine import Engine
from headway.errors import InvalidRequestError
from headway.types import Request, SamplingParams, SpecDecodeMetrics

Progress = Callable[[int], None]
"""Called with the number of requests that finished since the last call."""

# Warm-up prompts come from a seed of their own: nothing measured later is in a cache because of them.
WARMUP_SEED_OFFSET = 7919


def build_engine(config: EngineConfig) -> tuple[Engine, float]:
    """The engine and the seconds it took until it could serve."""
    start = time.perf_counter()
    engine = Engine(config, progress=True)
    return engine, time.perf_counter() - start


def prepare(engine: Engine, options: LoadOptions, num_runs: int = 1) -> list[list[list[int]]]:
    """Token ids of the prompts of each run; no prompt occurs twice."""
    prompts = workloads.load(options.workload, options.num_prompts * num_runs, options.seed, engine.tokenizer.vocab_size)
    token_ids = [prompt.encode(engine.tokenizer) for prompt in prompts]
    return [token_ids[run * options.num_prompts : (run + 1) * options.num_prompts] for run in range(num_runs)]


def warm_up(engine: Engine, options: LoadOptions) -> None:
    """Touches the code paths and shapes of the real load, with prompts of its own (code-edit, whatever the workload)."""
    prompts = workloads.load("code-edit", options.warmup, options.seed + WARMUP_SEED_OFFSET)
    run(engine, [prompt.encode(engine.tokenizer) for prompt in prompts], options, label="warm-up")


def run(
    engine: Engine, prompts: Sequence[list[int]], options: LoadOptions, progress: Progress | None = None, label: str = "bench"
) -> Run:
    """Keeps `options.concurrency` requests in flight until all prompts are answered.

    Raises InvalidRequestError when a prompt cannot be served (too long for the context): nothing of such a run counts.
    """
    before = engine.metrics.snapshot()
    records: list[Record] = []
    running: dict[str, Record] = {}
    stats = SpecDecodeMetrics()
    waiting = list(enumerate(prompts))[::-1]
    while waiting or running:
        while waiting and len(running) < options.concurrency:
            index, token_ids = waiting.pop()
            record = Record(len(token_ids), time.perf_counter())
            running[f"{label}-{index}"] = record
            records.append(record)
            _add(engine, f"{label}-{index}", token_ids, index, options)
        finished = 0
        for delta in engine.step():
            record = running[delta.request_id]
            record.last = time.perf_counter()
            record.first = record.first or record.last
            record.num_output_tokens += len(delta.token_ids)
            assert isinstance(record.output, list)
            record.output += delta.token_ids
            if delta.finished:
                del running[delta.request_id]
                stats.add(delta.stats or SpecDecodeMetrics())
                finished += 1
        if finished and progress:
            progress(finished)
    return _measured(engine, before, records, stats)


def _add(engine: Engine, request_id: str, token_ids: list[int], index: int, options: LoadOptions) -> None:
    params = SamplingParams(
        temperature=options.temperature, max_tokens=options.output_len, ignore_eos=options.ignore_eos, seed=options.seed + index
    )
    try:
        engine.add(Request(request_id, token_ids, params))
    except InvalidRequestError as error:
        raise InvalidRequestError(f"prompt {index} of the workload cannot be served: {error}") from error


def _measured(engine: Engine, before: dict[str, float], records: list[Record], stats: SpecDecodeMetrics) -> Run:
    spent = {name: value - before[name] for name, value in engine.metrics.snapshot().items()}
    step_ms = spent["step_ms"]
    shares = None
    if step_ms > 0:
        draft, verify = spent["draft_ms"] / step_ms, spent["verify_ms"] / step_ms
        shares = TimeShares(draft, verify, max(0.0, 1.0 - draft - verify))
    rows = spent["num_sampling_rows"]
    return Run(
        tuple(records), stats, shares, stats.num_draft_tokens / rows if rows else 0.0,
        {"num_steps": int(spent["num_steps"]), "num_preemptions": int(spent["num_preemptions"]), "peak_memory_bytes": peak_memory_bytes()},
    )


def peak_memory_bytes() -> int:
    """The most memory this process has held so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
