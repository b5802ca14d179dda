"""What steps cost on this machine: measured on the real model when the engine starts, kept on disk for the next start.

Passes of different sizes run through the runner and the verifier, over blocks that belong to nobody. What they do not include (scheduling,
text) and what changes later, the cost model learns from live steps. A profile that was kept is checked against a few passes first:
another kernel, another machine behind the same name, and it is measured anew.
"""

from __future__ import annotations

import hashlib
import json
import statistics
import time
from collections.abc import Sequence as SequenceOf
from dataclasses import asdict
from itertools import islice, product
from pathlib import Path

import torch

from headway import native
from headway.control.costs import FORMAT, CostModel, Work
from headway.engine.parts import EngineParts
from headway.models import hub
from headway.sampling_params import SamplingParams
from headway.types import Draft, Request, Row, Sequence
from headway.version import __version__

BUDGET_S = 3.0            # of measuring; one pass of the smallest size is always made
MAX_CONTEXT = 8192        # tokens of K/V that a pass touches, so that profiling does not make the whole pool resident
MAX_REPEATS = 7
SIZES = (1, 4, 16, 64)    # sequences
DRAFTS = (0, 1, 2, 4, 8)  # for each of them
ALONE = range(9)          # for a single one with little context: where its next draft begins another tile decides how long drafts pay
FEW = (1, 4)              # for all of them together: what comes right behind a full tile
CONTEXTS = (32, 512)      # tokens of each sequence
CHECKED = ((1, 0, 32), (4, 16, 32), (16, 16, 32))
_GOLDEN = 0.618033988749895   # multiples of it, without their whole parts, lie evenly in [0, 1)
TOLERANCE = 0.25          # by which the checked sizes may differ from a kept profile, after one common factor



def measured(engine: EngineParts) -> CostModel:
    """A new profile."""
    costs = CostModel()
    costs.learn(_measure(engine, _grid(engine), BUDGET_S))
    return costs


def holds(engine: EngineParts, costs: CostModel) -> bool:
    """Whether a few passes take what was kept says, but for one common factor: by that `costs` is corrected."""
    factor = _factor(costs, _measure(engine, CHECKED, 0.1 * BUDGET_S))
    if factor is not None:
        costs.rescale(factor)
    return factor is not None


def path_of(engine: EngineParts) -> Path:
    """Where the profile of this model on this machine is kept."""
    model = engine.model
    device = torch.cuda.get_device_name(model.device) if model.device.type == "cuda" else _cpu_name()
    threads = torch.get_num_threads() if model.device.type == "cpu" else 0
    library = native.library() if model.device.type == "cpu" else None
    kernels = (library.variant, native.INTERFACE) if library is not None else None
    shape = {key: value for key, value in asdict(model.config).items() if "token" not in key}
    machine = [device, threads, kernels]
    measured = [SIZES, DRAFTS, list(ALONE), FEW, CONTEXTS]
    what = [shape, str(model.dtype), model.int8, *machine, engine.runner.block_size, __version__, torch.__version__, FORMAT, measured]
    digest = hashlib.sha256(json.dumps(what, default=str, sort_keys=True).encode()).hexdigest()
    return hub.home() / "profiles" / f"{digest[:20]}.json"


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8", errors="replace").splitlines() if info.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "cpu")


def _grid(engine: EngineParts) -> list[tuple[int, int, int]]:
    """(sequences, drafts of all, context of each), the smallest first."""
    limits = engine.scheduler
    found = {
        (size, drafts, context)
        for size, context in product(SIZES, CONTEXTS)
        for drafts in (*FEW, *(size * each for each in DRAFTS))
        if size <= limits.max_num_seqs and size + drafts <= limits.token_budget
    }
    found |= {(1, drafts, CONTEXTS[0]) for drafts in ALONE if 1 + drafts <= limits.token_budget}
    return sorted(found, key=lambda shape: (shape[0] + shape[1], shape))


def _measure(engine: EngineParts, shapes: SequenceOf[tuple[int, int, int]], budget_s: float) -> list[tuple[Work, float]]:
    """Rounds over all shapes until the time is over; the median of a shape's times, the first of several not counted."""
    _pass(engine, *shapes[0])   # weights that were never read yet take their time
    deadline = time.perf_counter() + budget_s
    seen: dict[int, tuple[Work, list[float]]] = {}
    for _ in range(MAX_REPEATS):
        for index, (size, drafts, context) in enumerate(shapes):
            expected = seen[index][1][-1] * 1e-3 if index in seen else _expected(seen, size + drafts)
            if seen and time.perf_counter() + expected > deadline:
                continue
            if (measured := _pass(engine, size, drafts, context)) is not None:
                seen.setdefault(index, (measured[0], []))[1].append(measured[1])
    return [(work, statistics.median(times[1:] or times)) for work, times in seen.values()]


def _expected(seen: dict[int, tuple[Work, list[float]]], num_tokens: int) -> float:
    """Seconds of a pass nobody has made: in proportion to the largest one that was made."""
    if not seen:
        return 0.0
    work, times = max(seen.values(), key=lambda entry: entry[0].num_tokens)
    return times[-1] * 1e-3 * max(1.0, num_tokens / work.num_tokens)


def _pass(engine: EngineParts, size: int, drafts: int, context: int) -> tuple[Work, float] | None:
    """One pass of `size` sequences that share `drafts` drafts; None when it does not fit into the pool."""
    pool, block_size = engine.scheduler.pool, engine.runner.block_size
    longest = -(-drafts // size)
    context = min(context, engine.max_model_len - longest, MAX_CONTEXT // size)
    per_sequence = -(-(context + longest) // block_size)
    if context < 1 or per_sequence * size > pool.num_free:
        return None
    token_ids = _spread(engine.model.config.vocab_size, size + drafts)
    blocks = pool.allocate(per_sequence * size)
    try:
        shares = [drafts // size + (i < drafts % size) for i in range(size)]
        rows = [
            Row(_sequence(i, [token_ids[i]] * context, blocks[i * per_sequence : (i + 1) * per_sequence]), context - 1, 1, share)
            for i, share in enumerate(shares)
        ]
        left = iter(token_ids[size:])
        proposals = [Draft(list(islice(left, share))) if share else None for share in shares]
        began = time.perf_counter()
        out = engine.runner.forward(rows, proposals)
        engine.verifier.verify(out.logits, rows, proposals)
        if engine.model.device.type == "cuda":
            torch.cuda.synchronize(engine.model.device)
        return Work(size, size + drafts, size * context), (time.perf_counter() - began) * 1e3
    finally:
        pool.release(blocks)


def _spread(vocab_size: int, count: int) -> list[int]:
    """Tokens all over the vocabulary: equal ones would all go to the same experts of a mixture, and look cheaper than text is."""
    return [int(vocab_size * (i * _GOLDEN % 1.0)) for i in range(count)]


def _sequence(index: int, token_ids: list[int], blocks: list[int]) -> Sequence:
    request = Request("profile", token_ids, SamplingParams(temperature=0.0))
    return Sequence(
        index, request, 0, 0, frozenset(), frozenset(), (), 1 << 30, token_ids, len(token_ids), len(token_ids) - 1, block_table=blocks
    )


def _factor(kept: CostModel, measured: list[tuple[Work, float]]) -> float | None:
    """The one factor by which the measured passes differ from the kept profile; None when no single factor explains them."""
    ratios = [ms / float(kept.predict(work.num_rows, work.num_tokens, work.num_context_tokens)) for work, ms in measured]
    middle = statistics.median(ratios)
    return middle if all(abs(ratio / middle - 1.0) <= TOLERANCE for ratio in ratios) else None
