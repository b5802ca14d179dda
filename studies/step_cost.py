"""What a step of the target costs, by requests and tokens each, and where its time goes: with the compiled kernels and without.

    python studies/step_cost.py [--model smollm2-135m] [--dtype bfloat16] [--context 640] [--rounds 3] [--output FILE.json]

A step is one forward pass, the logits of every row and their argmax. `1 + 4 drafts` verifies four drafts a request. Each round starts one
process per path (HEADWAY_NATIVE=1, 0), which times every shape; figures are medians over rounds of each process's median.
The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from record import origin, publish

SHAPES = tuple((requests, tokens) for requests in (1, 4, 16, 32) for tokens in (1, 5))
PATHS = {"native": "1", "torch": "0"}
PARTS = ("matrix products", "attention", "norms", "argmax", "step")


def measure(model_name: str, dtype: str, context: int, seconds: float) -> dict[str, dict[str, float]]:
    """Milliseconds by shape and part, in this process."""
    import torch

    from headway.engine.logits import argmax
    from headway.models.attention import KVCache
    from headway.models.loader import load_model

    model = load_model(model_name, device="cpu", dtype=dtype)
    config = model.config
    per_request = -(-(context + 8) // 64)
    cache = KVCache(config, per_request * max(requests for requests, _ in SHAPES), 64, model.dtype, "cpu")
    for pages in cache.layers:
        pages.normal_()
    order = torch.randperm(cache.num_blocks, generator=torch.Generator().manual_seed(0)).tolist()
    found: dict[str, dict[str, float]] = {}
    for requests, tokens in SHAPES:
        n = requests * tokens
        rows = [(order[i * per_request : (i + 1) * per_request], context - tokens, tokens) for i in range(requests)]
        ids = torch.randint(0, config.vocab_size, (n,))
        positions = torch.arange(context - tokens, context).repeat(requests)
        hidden = torch.randn(n, config.hidden_size).to(model.dtype)
        wide = torch.randn(n, config.num_heads * config.head_dim).to(model.dtype)
        inner = torch.randn(n, config.intermediate_size).to(model.dtype)
        heads = config.num_heads + 2 * config.num_kv_heads
        logits = model.logits(hidden)

        def step(rows: Any = rows, ids: Any = ids, positions: Any = positions) -> None:
            states, _ = model.forward(ids, positions, cache.plan(rows), cache)
            argmax(model.logits(states))

        def products(hidden: Any = hidden, wide: Any = wide, inner: Any = inner) -> None:
            for layer in model.layers:
                layer.qkv(hidden), layer.o(wide), layer.mlp.gate_up(hidden), layer.mlp.down(inner)
            model.logits(hidden)

        def attention(rows: Any = rows, positions: Any = positions, n: int = n, heads: int = heads) -> None:
            plan = cache.plan(rows)
            plan.begin(positions, model.rope, model.dtype)
            for layer, pages in zip(model.layers, cache.layers, strict=True):
                qkv = torch.ones(n, heads, config.head_dim, dtype=model.dtype)
                plan.write(qkv, layer, pages)
                plan.attend(qkv, layer, pages)

        def norms(hidden: Any = hidden) -> None:
            for layer in model.layers:
                layer.input_norm(hidden), layer.post_norm(hidden)

        timed = (products, attention, norms, lambda logits=logits: argmax(logits), step)
        with torch.inference_mode():
            found[f"{requests}x{tokens}"] = dict(zip(PARTS, _medians(timed, seconds), strict=True))
    return found


def _medians(functions: tuple[Callable[[], object], ...], seconds: float) -> list[float]:
    """Milliseconds, median; the functions take turns."""
    times: list[list[float]] = [[] for _ in functions]
    end = time.perf_counter() + seconds * len(functions)
    while time.perf_counter() < end or len(times[0]) < 5:
        for function, mine in zip(functions, times, strict=True):
            begin = time.perf_counter()
            function()
            mine.append((time.perf_counter() - begin) * 1e3)
    return [statistics.median(mine[1:]) for mine in times]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--context", type=int, default=640)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=0.5, help="per shape and part")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(measure(args.model, args.dtype, args.context, args.seconds)))
        return
    runs: dict[str, list[dict[str, dict[str, float]]]] = {path: [] for path in PATHS}
    for _ in range(args.rounds):
        for path, value in PATHS.items():
            options = ["--model", args.model, "--dtype", args.dtype, "--context", str(args.context), "--seconds", str(args.seconds)]
            command = [sys.executable, __file__, "--child", *options]
            done = subprocess.run(command, env={**os.environ, "HEADWAY_NATIVE": value}, stdout=subprocess.PIPE, check=True, text=True)
            runs[path].append(json.loads(done.stdout))
    cells = {
        path: {shape: {part: statistics.median(run[shape][part] for run in of_path) for part in PARTS} for shape in of_path[0]}
        for path, of_path in runs.items()
    }
    print_table(cells)
    from headway import native
    
    publish({"dtype": args.dtype, "milliseconds": cells, "kernels": native.choose().reason, **origin()}, args.output)


def print_table(cells: dict[str, dict[str, dict[str, float]]]) -> None:
    print(f"{'requests x tokens':>18} {'path':>7} " + " ".join(f"{part:>16}" for part in PARTS) + "   verify / plain")
    for shape in cells["native"]:
        for path in PATHS:
            parts = cells[path][shape]
            plain = cells[path][shape.split("x")[0] + "x1"]["step"]
            print(f"{shape:>18} {path:>7} " + " ".join(f"{parts[part]:16.2f}" for part in PARTS) + f"   {parts['step'] / plain:6.2f}")


if __name__ == "__main__":
    main()
