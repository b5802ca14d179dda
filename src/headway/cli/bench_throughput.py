"""`headway bench throughput`."""

from __future__ import annotations

import argparse
import dataclasses
import shlex

from headway.bench.load import LoadOptions
from headway.cli.flags import add_fields, read_fields
from headway.cli.settings import Setting, add_engine_arguments, engine_config


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_load_arguments(parser)
    add_engine_arguments(parser, skip=("seed",))   # the load's seed is the engine's


def add_load_arguments(parser: argparse.ArgumentParser) -> None:
    add_fields(parser.add_argument_group("load"), LoadOptions)
    parser.add_argument("--output", default=None, metavar="FILE", help="write the JSON document there as well")


def command_line(args: argparse.Namespace) -> str:
    return shlex.join(["headway", *args.argv])


def config_json(settings: list[Setting]) -> dict[str, object]:
    return {setting.name: setting.value for setting in settings}


def main(args: argparse.Namespace) -> int:
    load = read_fields(args, LoadOptions)
    config, settings = engine_config(args)

    from headway.bench import environment, report, roofline, throughput
    from headway.engine.engine import Engine

    output = report.check_output(args.output)
    engine = Engine(config, progress=True)
    ready_s = environment.seconds_since_start()
    load_peak = environment.peak_memory_bytes()
    limits = roofline.measure(engine.model)
    environment.forget_peak_memory()   # of the measurement itself
    dtype = str(engine.model.dtype).removeprefix("torch.")
    ready = f", ready {ready_s:.1f} s after the start of the process" if ready_s is not None else ""
    print(f"{config.model}, {dtype} on {engine.model.device}{ready}")
    print("\n".join(limits.lines()), flush=True)
    [prompts] = throughput.prepare(engine, load)
    with report.progress_bar("requests", len(prompts)) as advance:
        run = throughput.run(engine, prompts, load, advance)
    report.print_table(str(load), {"": run})
    share = None
    if load.arrivals == "closed" and load.concurrency == 1 and config.speculative is None and run.mean_tpot_ms > 0:
        # The memory of a shared machine is not equally fast at all times: measured before and after, the better one is the ceiling.
        limits = roofline.measure(engine.model, limits.bandwidth)
        context = sum(record.num_prompt_tokens + record.num_output_tokens / 2 for record in run.records) / len(run.records)
        share = limits.share(run.mean_tpot_ms, context)
        print(f"decoding reached {share:.0%} of the ceiling of {limits.bandwidth / 1e9:.1f} GB/s at {context:.0f} tokens of context")
    result = report.document(
        "throughput", command_line(args), **run.summary(), roofline=limits.to_json(), ceiling_share=share, ready_s=ready_s,
        peak_memory_bytes=max(load_peak, environment.peak_memory_bytes()),
        kv_cache_bytes=engine.scheduler.pool.num_blocks * config.block_size * limits.kv_bytes_per_token, load=dataclasses.asdict(load),
        config=config_json(settings), dtype=dtype, device=str(engine.model.device),
    )
    return report.finish(result, output)
