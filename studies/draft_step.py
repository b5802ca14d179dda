"""What a draft token costs against a step of the target, by requests in flight and drafts per step.

    python studies/draft_step.py [--method eagle] [--draft DIR] [--output FILE.json]

Inside the engine, all included: a draft token is the whole of drafting in one step (reading what was committed since, every pass, choosing
tokens, asking the policy, keeping hidden states) divided by the drafts it made for each request. A step of the target is a step without
speculation, over the same prompts. Rounds take turns; figures are medians over all steps in which every request decodes.
The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

from record import origin, publish, timed

from headway.bench import workloads
from headway.config import EngineConfig, SpeculativeConfig
from headway.engine.engine import Engine
from headway.sampling_params import SamplingParams
from headway.types import Request

OFF = 0


def run(engine: Engine, prompts: Sequence[list[int]], num_steps: int, temperature: float) -> tuple[list[float], list[float]]:
    """(milliseconds of each step in which all requests decode, those of its drafting)."""
    drafting = [0.0]
    for drafter in engine.drafters.values():
        for name in ("propose", "commit"):
            setattr(drafter, name, timed(getattr(drafter, name), drafting))
    # The first requests write while the last ones' prompts are still read.
    length = (num_steps + len(prompts)) * (1 + engine.scheduler.max_k) + 1
    params = SamplingParams(temperature=temperature, seed=0, max_tokens=length, ignore_eos=True)
    for i, prompt in enumerate(prompts):
        engine.add(Request(f"{i}", prompt, params))
    steps, drafts = [], []
    while engine.has_work():
        ready = [seq.is_decoding for seq in engine.scheduler.running]
        drafting[0], began = 0.0, time.perf_counter()
        engine.step()
        if len(ready) == len(prompts) and all(ready):
            steps.append((time.perf_counter() - began) * 1e3)
            drafts.append(drafting[0] * 1e3)
        if len(steps) == num_steps:
            for i in range(len(prompts)):
                engine.abort(f"{i}")
    return steps, drafts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--method", default="eagle")
    parser.add_argument("--draft", default="speculators/smollm2-135m-eagle3", help="the drafter's network; empty: it has none of its own")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--drafts", type=int, nargs="+", default=[1, 2, 4], help="draft tokens per step")
    parser.add_argument("--workload", default="chat")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--steps", type=int, default=40, help="per round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    engine = Engine(EngineConfig(model=args.model, profile=False, max_num_seqs=max(args.requests)))
    prompts = workloads.load(args.workload, sum(args.requests) * args.rounds * (1 + len(args.drafts)), seed=0)
    feed = iter([prompt.encode(engine.tokenizer) for prompt in prompts])
    times: dict[tuple[int, int], tuple[list[float], list[float]]] = {}
    for _ in range(args.rounds):
        for k in (OFF, *args.drafts):
            given = {"method": args.method, "num_speculative_tokens": k, "policy": "static", "model": args.draft or None}
            engine.speculate(SpeculativeConfig.parse(given) if k else None)
            for num in args.requests:
                found = run(engine, [next(feed) for _ in range(num)], args.steps, args.temperature)
                for kept, more in zip(times.setdefault((num, k), ([], [])), found, strict=True):
                    kept += more
    rows = []
    print(f"{'requests':>8} {'k':>2} {'target step':>12} {'a draft token':>14} {'share':>7} {'step with drafts':>17}")
    for num in args.requests:
        target = statistics.median(times[num, OFF][0])
        for k in args.drafts:
            step, draft = (statistics.median(values) for values in times[num, k])
            rows.append({"requests": num, "k": k, "target_step_ms": target, "draft_token_ms": draft / k, "step_ms": step})
            print(f"{num:8} {k:2} {target:9.2f} ms {draft / k:11.3f} ms {draft / k / target:7.1%} {step:14.2f} ms")
    publish({"rows": rows, **origin()}, args.output)


if __name__ == "__main__":
    main()
