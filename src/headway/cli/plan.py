"""`headway plan MODEL`: what fits on which devices, what speculation costs and gains there, and files for the servers."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from headway.cli.flags import add_fields, read_fields
from headway.errors import ConfigError
from headway.plan.device import THIS_MACHINE, Device, find
from headway.plan.planner import PlanOptions, make

if TYPE_CHECKING:
    from headway.plan.planner import ServingPlan
    from headway.tune.files import File

EPILOG = """examples:
  headway plan meta-llama/Llama-3.1-70B-Instruct --draft meta-llama/Llama-3.2-1B-Instruct --gpu H100 --tp 4 --draft-tp 1
  headway plan path/to/config.json --method eagle3 --method ngram --gpu H200 --concurrency 64
  headway plan smollm2-135m --method ngram --gpu this-machine --trace steps.jsonl --emit-dir planned

Only config.json is read: no weights are downloaded, and no device is needed. Weights and K/V are exact, activations are
estimated, and times are a roofline's: the answer says how far they can be trusted.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    text = "directory, config.json, built-in model or hub id: only its config.json is read"
    parser.add_argument("model_name", metavar="MODEL", help=text)
    add_fields(parser, PlanOptions)
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of words")
    text = "write settings for vLLM, SGLang, TensorRT-LLM and llama.cpp into this directory"
    parser.add_argument("--emit-dir", metavar="DIR", default=None, help=text)


def main(args: argparse.Namespace) -> int:
    from headway.cli import plan_view
    from headway.telemetry.trace import read_trace

    options = read_fields(args, PlanOptions)
    if options.gpu == THIS_MACHINE and ((options.tp or 1) > 1 or options.pp > 1):
        raise ConfigError(f"{THIS_MACHINE} is one device: leave --tp and --pp out")
    device = _this_machine() if options.gpu == THIS_MACHINE else find(options.gpu)
    planned = make(args.model_name, options, device, [read_trace(path) for path in options.trace or ()])
    files, left_out = _emit(planned, args.emit_dir)
    if args.json:
        print(json.dumps(plan_view.document(planned), indent=2))
        return 0
    plan_view.show(planned)
    for file in files:
        print(f"{Path(args.emit_dir) / file.name}\n    {file.usage}")
        for note in file.notes:
            print(f"    note: {note}")
    for reason in left_out:
        print(f"not written: {reason}")
    return 0


def _emit(planned: ServingPlan, folder: str | None) -> tuple[list[File], list[str]]:
    """Writes the files. Raises ConfigError where there is nothing to write, or nowhere."""
    if folder is None:
        return [], []
    from headway.tune import emit
    from headway.tune.files import Serving
    from headway.tune.plan import Point, plan
    from headway.tune.source import of_headway, of_vllm

    chosen = planned.chosen
    method, model = chosen.drafting.method, chosen.drafting.model
    if not chosen.by_load:
        raise ConfigError(f"--emit-dir: how often {method} is right decides what to write: give --acceptance or --trace")
    if chosen.drafting.network is not None and model is None and method != "mtp":
        raise ConfigError(f"--emit-dir: the files name the {method} network: give it by --draft")
    options = {} if model is None else {"model": model}
    source = of_headway(method, options) if method in ("ngram", "suffix", "draft_model", "medusa") else of_vllm(method, options)
    schedule = plan(method, [Point(size, found) for size, found in chosen.by_load.items()], planned.asked.num_requests)
    deployment = planned.deployment
    serving = Serving(
        model=planned.model, tp=deployment.tp, pp=deployment.pp, draft_tp=deployment.draft_tp if chosen.drafting.network else deployment.tp,
        max_num_seqs=max(1, min(planned.asked.num_requests, chosen.capacity.num_requests)), max_model_len=deployment.max_model_len,
        kv_dtype=deployment.kv_dtype, utilization=deployment.utilization,
        quantization=planned.quantization.name if planned.quantization is not None and planned.target.quantization is None else None,
        least_accepted=chosen.least_accepted,
    )  # fmt: skip
    files, left_out = emit.emit(schedule, source, serving)
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot make the directory {folder}: {error.strerror}") from error
    for file in files:
        (Path(folder) / file.name).write_text(file.text, encoding="utf-8")
    return files, left_out


def _this_machine() -> Device:
    """Measured now: a second or two."""
    from headway.bench import roofline

    found = roofline.measure_device()
    # There is one: what a link would do is not asked.
    return Device(THIS_MACHINE, found.memory_bytes, found.bandwidth, {"bf16": found.flops}, 0.0, 0.0, "measured", found.is_cpu)
