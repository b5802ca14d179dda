"""One request at a time beside llama.cpp: bf16 and int8, plain and with a drafter, against the Q4_1 file it was made from.

    python studies/against_llamacpp.py --python VENV/bin/python --gguf SmolLM2-135M-Instruct.Q4_1.gguf --output FILE.json

VENV has llama-cpp-python. Every process runs the same `code-edit` prompts, greedy, in turns; milliseconds per token after the first.
Prints the median ratio of each way to decode over llama.cpp's plain decoding, prompt by prompt. The last line is one JSON document.
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

from record import origin, publish

WAYS: dict[str, str] = {
    "plain": "off",
    "ngram k=4": '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4, "prompt_lookup_min": 2, "policy": "static"}',
    "int8, plain": "off",
    "suffix k=16": '{"method": "suffix", "num_speculative_tokens": 16, "policy": "static"}',
    "default": "default",
}

LLAMA = """
import json, sys, time
from llama_cpp import Llama
model = Llama(sys.argv[1], n_ctx=2048, n_threads=int(sys.argv[3]), n_threads_batch=int(sys.argv[3]), verbose=False)
times = []
for prompt in json.load(open(sys.argv[2])):
    model.reset()
    model.eval(prompt)
    token = model.sample(temp=0.0)
    begin = time.perf_counter()
    for _ in range(int(sys.argv[4]) - 1):
        model.eval([token])
        token = model.sample(temp=0.0)
    times.append((time.perf_counter() - begin) * 1e3 / (int(sys.argv[4]) - 1))
print(json.dumps(times))
"""


def run_headway(speculation: str, prompts: list[list[int]], output_len: int, quantization: str | None) -> list[float]:
    """Milliseconds per token after the first, per prompt; a new engine."""
    from headway.config import EngineConfig, SpeculativeConfig
    from headway.engine.engine import Engine
    from headway.sampling_params import SamplingParams
    from headway.types import Request

    engine = Engine(EngineConfig(
        dtype="bfloat16", quantization=quantization, device="cpu", max_model_len=2048, speculative=SpeculativeConfig.parse(speculation)
    ))
    times = []
    for number, prompt in enumerate(prompts):
        engine.add(Request(str(number), prompt, SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True)))
        begin, first, written = 0.0, 0, 0
        while engine.has_work():
            written += sum(len(delta.token_ids) for delta in engine.step())
            if written and not first:
                begin, first = time.perf_counter(), written
        times.append((time.perf_counter() - begin) * 1e3 / (written - first))
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", required=True, help="an interpreter that has llama_cpp")
    parser.add_argument("--gguf", required=True)
    parser.add_argument("--num-prompts", type=int, default=4)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--quantization", help=argparse.SUPPRESS)
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        prompts = json.loads(Path(args.child[1]).read_text())
        print(json.dumps(run_headway(args.child[0], prompts, args.output_len, args.quantization)))
        return
    from headway.bench import workloads
    from headway.engine.tokenizer import Tokenizer
    from headway.models import hub

    tokenizer = Tokenizer(hub.resolve("smollm2-135m"))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "prompts.json"
        path.write_text(json.dumps([p.encode(tokenizer) for p in workloads.load("code-edit", args.num_prompts, seed=1)]))
        commands = {"llama.cpp": [args.python, "-c", LLAMA, args.gguf, str(path), str(os.cpu_count()), str(args.output_len)]}
        common = ["--python", args.python, "--gguf", args.gguf, "--output-len", str(args.output_len)]
        for way, speculation in WAYS.items():
            quantized = ["--quantization", "int8"] if way.startswith("int8") else []
            commands[way] = [sys.executable, __file__, *common, *quantized, "--child", speculation, str(path)]
        times: dict[str, list[float]] = {way: [] for way in commands}
        for _ in range(args.rounds):
            for way, command in commands.items():
                done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True, text=True)
                times[way] += json.loads(done.stdout.splitlines()[-1])
    ratios = {
        way: statistics.median(theirs / ours for theirs, ours in zip(times["llama.cpp"], mine, strict=True)) for way, mine in times.items()
    }
    for way, mine in times.items():
        print(f"{way:>12}  {statistics.median(mine):7.2f} ms per token   {ratios[way]:5.2f}x llama.cpp")
    publish({"tpot_ms": times, "ratio": ratios, **origin()}, args.output)


if __name__ == "__main__":
    main()
