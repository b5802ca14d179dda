"""Headway beside vLLM on this machine: all serve the same directory, and the same load is put on them in turns.

    python studies/against_vllm.py --vllm VENV/bin/vllm --output results/against-vllm/MACHINE.json
    python studies/against_vllm.py --vllm VENV/bin/vllm --configurations headway:off vllm:off \
        --prompt-tokens 1500 --cells 1 4 --output-len 32 --output results/against-vllm-long-prompts/MACHINE.json

A configuration is ENGINE:SPECULATION. Speculation: off; default (Headway's own); ngram-kN; table, a prudent one that anybody could write
(ngram, 8 drafts up to 4 requests, 4 up to 16, none beyond). vLLM as it comes leaves a core to its scheduler; with `+all` behind the
configuration it computes on that one, too. A cell is WORKLOAD@REQUESTS. `--prompt-tokens N` takes prompts of N tokens from the standard
library's sources instead of a workload, and cells are then numbers: what a first token costs.

Each server runs in a session of its own and is stopped (SIGSTOP) while another is measured, since an idle vLLM worker still polls. A round
of a cell puts the same prompts on every server, none of which any of them has seen before: an engine that remembers prompts or answers
would only repeat itself. Ratios are taken within a round; who begins rotates. Prints the median over rounds
(least to largest) of each Headway's speed over each vLLM's, and over the round's fastest vLLM. Needs a vLLM installation; only the
benchmarks that name vLLM do.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import statistics
import subprocess
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from record import origin, write
from servers import BIN, Server, vllm_env, vllm_version

from headway.bench.workloads import Prompt, Prompts
from headway.engine.tokenizer import Tokenizer
from headway.models import hub

NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4, "prompt_lookup_min": 2}
TABLE = {**NGRAM, "num_speculative_tokens": 8, "num_speculative_tokens_per_batch_size": [[1, 4, 8], [5, 16, 4], [17, 64, 0]]}
CONFIGURATIONS = ("headway:off", "headway:ngram-k4", "headway:default", "vllm:off", "vllm:off+all", "vllm:ngram-k4", "vllm:table")
CELLS = ("code-edit@1", "code-edit@4", "code-edit@16", "code-edit@32", "chat@1", "chat@8", "chat@32")
SEED = 0       # of the prompts
NAME = re.compile(r"(headway|vllm):(off|default|table|ngram-k([1-9]\d*))(\+all)?")
KEPT = ("output_tokens_per_s", "tpot_ms", "ttft_ms", "mean_acceptance_length", "num_output_tokens", "output_hash", "errors", "invalid")


def speculation(name: str) -> dict[str, Any] | None:
    """vLLM's `--speculative-config` of a configuration's name. SystemExit for a name that is none."""
    matched = NAME.fullmatch(name)
    if matched is None or (matched[4] if matched[1] == "headway" else matched[2] == "default"):
        raise SystemExit(f"{name!r} is no configuration; accepted: headway:off|default|table|ngram-kN, vllm:off|table|ngram-kN[+all]")
    if matched[2] == "table":
        return TABLE
    return NGRAM | {"num_speculative_tokens": int(matched[3])} if matched[3] else None


def start(name: str, port: int, options: argparse.Namespace, directory: str) -> Server:
    """The configuration's server, stopped."""
    config = speculation(name)
    model = directory if name.startswith("vllm") else options.model   # the same weights; the name brings Headway's default drafters
    common = ["serve", model, "--dtype", "bfloat16", "--max-model-len", "2048", "--max-num-seqs", "64", "--port", str(port)]
    common += ["--speculative-config", json.dumps(config)] if config else []
    if name.startswith("vllm"):
        env = vllm_env(options.vllm, options.kv_cache_gib, name.endswith("+all"))
        server = Server(name, [options.vllm, *common], port, env)
    else:
        own = ["--kv-cache-memory-bytes", str(options.kv_cache_gib << 30), *(["--spec", "off"] if name.endswith("off") else [])]
        server = Server(name, [str(BIN / "headway"), *common, *own], port, {})
    server.sleep()
    return server


def long_prompts(tokenizer: Tokenizer, num_tokens: int) -> Iterator[Prompt]:
    """Texts of `num_tokens` tokens (a token more or less), one after the other from the standard library's sources."""
    library = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(library.glob("*.py")):
        token_ids = tokenizer.encode(path.read_text(encoding="utf-8", errors="replace"))
        for begin in range(0, len(token_ids) - num_tokens, num_tokens):
            yield Prompt(text=tokenizer.decode(token_ids[begin : begin + num_tokens]))


class Cell:
    """One workload at one load, round after round."""

    def __init__(self, name: str, options: argparse.Namespace, prompts: Iterator[Prompt], scratch: Path) -> None:
        self.name, self.concurrency = name, int(name.rpartition("@")[2])
        self.options, self.prompts, self.scratch = options, prompts, scratch
        self.num_prompts = max(options.min_prompts, self.concurrency)
        self.rounds: list[dict[str, dict[str, Any]]] = []

    def run(self, servers: list[Server]) -> None:
        """One more round."""
        lines = [
            {"prompt": prompt.text} if prompt.text else {"messages": prompt.messages}
            for prompt in itertools.islice(self.prompts, self.num_prompts + 1)   # one more to warm up with
        ]
        self.scratch.write_text("".join(json.dumps(line) + "\n" for line in lines))
        turn = len(self.rounds) % len(servers)
        self.rounds.append({server.name: self._measure(server) for server in (*servers[turn:], *servers[:turn])})

    def _measure(self, server: Server) -> dict[str, Any]:
        command = [
            str(BIN / "headway"), "bench", "serve", "--base-url", server.url, "--workload", f"jsonl:{self.scratch}", "--warmup", "1",
            "--concurrency", str(self.concurrency), "--num-prompts", str(self.num_prompts), "--output-len", str(self.options.output_len),
        ]  # fmt: skip
        with server.awake(settle_s=0.5):
            done = subprocess.run(command, capture_output=True, text=True, check=True)
        document = json.loads(done.stdout.splitlines()[-1])
        return {key: document[key] for key in KEPT if document.get(key) is not None}

    def summary(self, names: list[str]) -> dict[str, Any]:
        """Ratios of Headway to vLLM within rounds, [median, least, largest]: tokens/s, and time to first token."""
        ours, theirs = ([name for name in names if name.startswith(engine)] for engine in ("headway", "vllm"))
        ratios: dict[str, Any] = {}
        for name in ours:
            speed, first = ({other: self._ratios(name, other, key) for other in theirs} for key in ("output_tokens_per_s", "ttft_ms"))
            best = [min(each) for each in zip(*speed.values(), strict=True)]
            ratios[name] = {
                "output_tokens_per_s": {other: _spread(each) for other, each in speed.items()} | {"best": _spread(best)},
                "ttft_ms": {other: _spread(each) for other, each in first.items()},
            }
        return {"cell": self.name, "ratios": ratios, "rounds": self.rounds}

    def _ratios(self, name: str, other: str, key: str) -> list[float]:
        def value(run: dict[str, Any]) -> float:
            return float(run[key]["p50"] if isinstance(run[key], dict) else run[key])

        return [value(found[name]) / value(found[other]) for found in self.rounds]


def _spread(values: list[float]) -> list[float]:
    return [round(value, 3) for value in (statistics.median(values), min(values), max(values))]


def unusable(cells: list[str], prompt_tokens: int | None) -> str:
    """What is wrong with --cells; "": nothing."""
    form = re.compile(r"@?[1-9]\d*" if prompt_tokens else r".+@[1-9]\d*")
    wrong = [name for name in cells if not form.fullmatch(name)]
    if not wrong:
        return ""
    if prompt_tokens:
        return f"--cells {' '.join(wrong)}: --prompt-tokens takes the place of a workload; accepted: numbers of requests, as in --cells 1 4"
    return f"--cells {' '.join(wrong)}; accepted: WORKLOAD@REQUESTS, as in --cells code-edit@4, or numbers of requests with --prompt-tokens"


def table(cells: list[dict[str, Any]], key: str) -> str:
    lines = [f"| {key}, Headway / vLLM | " + " | ".join(cell["cell"] for cell in cells) + " |", "|---" * (1 + len(cells)) + "|"]
    for name, found in cells[0]["ratios"].items():
        for other in found[key]:
            spreads = [cell["ratios"][name][key][other] for cell in cells]
            lines.append(f"| {name} / {other} | " + " | ".join("{:.2f}x ({:.2f}-{:.2f})".format(*each) for each in spreads) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", required=True, help="the vllm executable")
    parser.add_argument("--model", default="smollm2-135m", help="anything `headway serve` and vLLM take")
    parser.add_argument("--configurations", nargs="+", default=list(CONFIGURATIONS))
    parser.add_argument("--cells", nargs="+", default=list(CELLS))
    parser.add_argument("--prompt-tokens", type=int, help="prompts of so many tokens, instead of a workload")
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--min-prompts", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kv-cache-gib", type=int, default=1, help="the K/V pool of every server")
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    for name in options.configurations:
        speculation(name)
    if problem := unusable(options.cells, options.prompt_tokens):
        parser.error(problem)
    if len({name.partition(":")[0] for name in options.configurations}) < 2:
        parser.error("--configurations needs at least one of headway and one of vllm")
    directory = str(hub.resolve(options.model))
    dealer = Prompts(SEED)
    long = long_prompts(Tokenizer(Path(directory)), options.prompt_tokens) if options.prompt_tokens else None
    scratch = tempfile.TemporaryDirectory()
    cells = [
        Cell(name, options, long or dealer.stream(name.rpartition("@")[0]), Path(scratch.name) / "prompts.jsonl") for name in options.cells
    ]
    servers: list[Server] = []
    try:
        for port, name in enumerate(options.configurations, 8101):
            servers.append(start(name, port, options, directory))
        document: dict[str, Any] = {
            "benchmark": "against_vllm", "vllm": vllm_version(options.vllm), "prompt_tokens": options.prompt_tokens,
            "ready_s": {server.name: server.ready_s for server in servers}, **origin(),
        }  # fmt: skip
        for number in range(options.rounds):
            for cell in cells:
                cell.run(servers)
                print(f"round {number + 1}: {cell.name}", flush=True)
            document["cells"] = [cell.summary(options.configurations) for cell in cells]
            write(document, options.output)
    finally:
        for server in servers:
            server.stop()
        scratch.cleanup()
    for key in ("output_tokens_per_s", "ttft_ms"):
        print(table(document["cells"], key) + "\n")


if __name__ == "__main__":
    main()
