"""What Headway's own hooks cost inside vLLM: their share of a step in which so many requests decode.

    python studies/vllm_cost.py --vllm VENV/bin/vllm --output results/vllm-cost/MACHINE.json

vLLM (a process per drafter, started here) decodes --requests prompts of each workload together. Of each step in which all of them write and
no prompt is computed: the time in all hooks of the plugin (behind `headway:plugin_seconds_total`), the policy's part of it, what the
proposer took to draft (nothing of that is the plugin's: any drafter drafts) and the whole step, from its beginning to the next one's.
Means over these steps but the first, and the share of the sums.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from against_vllm import NGRAM
from record import origin, write
from servers import vllm_env, vllm_version

import headway
from headway.bench import workloads
from headway.models import hub

SOURCE = Path(headway.__file__).resolve().parents[1]
SEED = 7100
PROPOSER = {"method": "custom_class", "model": "headway.vllm.Proposer"}
DRAFTERS: dict[str, dict[str, Any]] = {"ngram": NGRAM, "headway": PROPOSER}
SKIPPED = 8    # first steps: the policy and the caches are cold


def inside(directory: str, options: argparse.Namespace) -> None:
    """Runs in vLLM's environment: prints a line ROW with JSON for each workload and number of requests."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        directory, dtype=options.dtype, max_model_len=2048, max_num_seqs=max(options.requests), scheduler_cls="headway.vllm.Scheduler",
        speculative_config={**DRAFTERS[options.inside], "num_speculative_tokens": options.max_k}, additional_config={
            "headway": {"costs": "off"}},
    )  # fmt: skip
    engine = llm.llm_engine
    counters = engine.engine_core.engine_core.scheduler._parts.counters
    params = SamplingParams(temperature=0.0, max_tokens=options.output_len, ignore_eos=True)
    for workload in options.workloads.split(","):
        for number in options.requests:
            prompts = [list(prompt.messages or ()) for prompt in workloads.load(workload, number, SEED + number)]
            asked = llm.get_tokenizer().apply_chat_template(prompts, tokenize=False, add_generation_prompt=True)
            for at, prompt in enumerate(asked):
                engine.add_request(f"{workload}-{number}-{at}", prompt, params)
            row = {"drafter": options.inside, "workload": workload, "requests": number, **steps(engine, counters, number)}
            print("ROW " + json.dumps(row), flush=True)


def steps(engine: Any, counters: Any, number: int) -> dict[str, Any]:
    """Steps all requests to their end; figures of the steps that count, in milliseconds."""
    names = ("plugin_ms", "policy_ms", "draft_ms", "num_sampling_rows", "num_step_tokens", "num_verified_drafts")
    found: list[dict[str, float]] = []
    while engine.has_unfinished_requests():
        before = counters.snapshot()
        began = time.perf_counter()
        engine.step()
        step_ms = (time.perf_counter() - began) * 1e3
        after = counters.snapshot()
        grown = {name: after[name] - before[name] for name in names}
        if grown["num_sampling_rows"] == number and grown["num_step_tokens"] == number + grown["num_verified_drafts"]:
            found.append(grown | {"step_ms": step_ms})
    found = found[SKIPPED:]
    if counters.off or not found:
        raise SystemExit(f"nothing was measured: {counters.off or 'no step in which all requests wrote'}")
    sums = {name: sum(step[name] for step in found) for name in found[0]}
    return {
        "num_steps": len(found),
        **{name: round(sums[name] / len(found), 4) for name in ("plugin_ms", "policy_ms", "draft_ms", "step_ms")},
        "median_plugin_ms": round(statistics.median(step["plugin_ms"] for step in found), 4),
        "plugin_share": round(sums["plugin_ms"] / sums["step_ms"], 5),
        "drafts_per_step": round(sums["num_verified_drafts"] / len(found), 2),
    }


def measure(drafter: str, options: argparse.Namespace, home: str) -> list[dict[str, Any]]:
    """In a process of vLLM's environment."""
    python = str(Path(options.vllm).with_name("python"))
    environment = os.environ | vllm_env(options.vllm, 2, options.vllm_all_cores) | {
        "PYTHONPATH": str(SOURCE), "HEADWAY_HOME": home, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR",
    }  # fmt: skip
    words = [python, str(Path(__file__)), *sys.argv[1:], "--inside", drafter, "--directory", str(hub.resolve(options.model))]
    done = subprocess.run(words, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{drafter}: {done.stderr[-4000:]}")
    return [json.loads(line.removeprefix("ROW ")) for line in done.stdout.splitlines() if line.startswith("ROW ")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", required=True, help="the vllm executable")
    parser.add_argument("--model", default="smollm2-135m", help="anything `headway serve` takes")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--drafters", default="ngram,headway", help="ngram: vLLM's; headway: Headway's proposer")
    parser.add_argument("--workloads", default="code-edit,chat")
    parser.add_argument("--requests", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--output-len", type=int, default=96)
    parser.add_argument("--max-k", type=int, default=8)
    parser.add_argument("--vllm-all-cores", action="store_true", help="compute on the core that vLLM leaves to its scheduler, too")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    parser.add_argument("--directory", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        inside(options.directory, options)
        return
    rows = []
    with tempfile.TemporaryDirectory() as home:
        for drafter in options.drafters.split(","):
            rows += measure(drafter, options, home)
    document = {"benchmark": "vllm_cost", **origin(), "vllm": vllm_version(options.vllm), "rows": rows}
    for row in rows:
        print(json.dumps(row))
    if options.output:
        write(document, options.output)


if __name__ == "__main__":
    main()
