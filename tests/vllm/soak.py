"""Minutes of mixed traffic against a vLLM with Headway's scheduler: does it leak, stall, or miscount?

    python tests/vllm/soak.py --minutes 10 [--concurrency 12] [--method headway|ngram] [--output soak.json]

Prompts that repeat and prompts that do not, greedy and sampled, stop strings, structured output, logprobs, speculation off and capped per
request, streams that are cut off in the middle, and a K/V cache small enough to preempt. Exit code 1: something was wrong.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[2] / "studies"))

from conftest import MODEL, NGRAM, Server, flags_of, start_server
from record import origin, write

from headway.models import hub
from headway.vllm.server_flags import serve_flags

STALL_S = 60.0           # without a single token, while requests wait for some
SETTLE_S = 30.0
LEAK_SHARE = 0.10        # growth of a process' memory in the second half of the run
LEAK_MB = 64
GRAMMAR_ERRORS = 0.25    # of requests with structured output, and the run is wrong
WORDS = ("river", "stone", "amber", "cloud", "lantern", "harbor", "velvet", "meadow", "copper", "signal", "garden", "winter", "thread")
SCHEMA = {"type": "object", "properties": {"name": {"type": "string"}, "size": {"type": "integer"}}, "required": ["name", "size"]}


@dataclass
class Tally:
    """What the clients saw. `last_token`: when anyone last got one."""

    counts: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    last_token: float = field(default_factory=time.monotonic)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, **counts: int) -> None:
        with self.lock:
            self.counts.update(counts)

    def problem(self, text: str) -> None:
        with self.lock:
            self.problems.append(text)


def request(rng: random.Random) -> dict[str, Any]:
    """One request of the mix."""
    words = [rng.choice(WORDS) for _ in range(rng.randrange(3, 40))]
    prompt = " ".join(words * rng.randrange(2, 16) if rng.random() < 0.5 else words)
    body: dict[str, Any] = {"model": MODEL, "prompt": prompt, "max_tokens": rng.randrange(1, 160)}
    body["temperature"] = rng.choice([0.0, 0.0, 0.8])
    kind = rng.randrange(8)
    if kind == 0:
        body["stop"] = [rng.choice(WORDS)]
    elif kind == 1:
        body["structured_outputs"] = {"json": SCHEMA}
    elif kind == 2:
        body["logprobs"] = 2
    elif kind == 3:
        body["vllm_xargs"] = {"headway_enabled": 0}
    elif kind == 4:
        body["vllm_xargs"] = {"headway_max_tokens": rng.randrange(5)}
    elif kind == 5:
        body |= {"presence_penalty": 0.5, "top_p": 0.9}
    return body


def client(server: Server, tally: Tally, seed: int, until: float) -> None:
    rng = random.Random(seed)
    with httpx.Client(base_url=server.url, timeout=httpx.Timeout(10.0, read=STALL_S + 30.0)) as http:
        while time.monotonic() < until:
            body = request(rng)
            cut_after = rng.randrange(1, 30) if rng.random() < 0.2 else None
            try:
                stream(http, body, cut_after, tally)
            except Exception as error:
                tally.problem(f"{type(error).__name__}: {error} for {body}")
                time.sleep(0.5)


def stream(http: httpx.Client, body: dict[str, Any], cut_after: int | None, tally: Tally) -> None:
    num_chunks, usage, text = 0, None, ""
    with http.stream("POST", "/v1/completions", json=body | {"stream": True, "stream_options": {"include_usage": True}}) as reply:
        if reply.status_code != 200:
            raise RuntimeError(f"HTTP {reply.status_code} {reply.read()!r}")
        for line in reply.iter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            chunk = json.loads(line.removeprefix("data: "))
            if "error" in chunk and "structured_outputs" in body:
                # vLLM 0.32 ends a few of a hundred such requests itself ("grammar rejected tokens"), also without Headway.
                tally.add(grammar_errors=1)
                return
            if "error" in chunk:
                raise RuntimeError(chunk["error"])
            usage = chunk.get("usage") or usage
            text += "".join(choice["text"] for choice in chunk["choices"])
            num_chunks += 1
            tally.last_token = time.monotonic()
            if cut_after is not None and num_chunks >= cut_after:
                tally.add(cut=1)
                return
    tally.add(grammars="structured_outputs" in body)
    assert usage is not None, "a stream ended without its usage"
    tally.add(done=1, tokens=usage["completion_tokens"])
    if usage["completion_tokens"] > body["max_tokens"]:
        tally.problem(f"{usage['completion_tokens']} tokens for {body}")
    if body.get("stop") and any(stop in text for stop in body["stop"]):
        tally.problem(f"a stop string in {text!r}")


def memory_mb(server: Server) -> dict[str, float]:
    """Resident memory of the server's processes, by their names, in MB."""
    found: Counter[str] = Counter()
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, rest = status.read_text().split("(", 1)[1].rsplit(")", 1)
            if int(rest.split()[2]) == server.process.pid:
                pages = int((status.parent / "statm").read_text().split()[1])
                found[name] += pages * 4096 // 2**20
        except (OSError, IndexError, ValueError):
            continue
    return dict(found)


def check_counters(server: Server, tally: Tally) -> dict[str, float]:
    """Headway's counts against vLLM's own and the clients'. Everything came to rest."""
    seen = server.settled()
    drafted, accepted = (sum(seen.by(f"headway:{kind}_per_pos_total", "drafter").values()) for kind in ("drafted", "accepted"))
    pairs = {
        "accepted": (accepted, seen.total("vllm:spec_decode_num_accepted_tokens_total")),
        "running": (seen.total("vllm:num_requests_running"), 0.0),
        "waiting": (seen.total("vllm:num_requests_waiting"), 0.0),
        "errors": (seen.total("headway:errors_total"), 0.0),
        "fallback steps": (seen.total("headway:fallback_steps_total"), 0.0),
    }
    for name, (ours, theirs) in pairs.items():
        if ours != theirs:
            tally.problem(f"{name}: {ours} where {theirs} was expected")
    if tally.counts["grammar_errors"] > 3 + GRAMMAR_ERRORS * tally.counts["grammars"]:
        tally.problem(f"{tally.counts['grammar_errors']} requests with structured output failed, {tally.counts['grammars']} did not")
    written = seen.total("vllm:generation_tokens_total") or 0.0
    if written < tally.counts["tokens"]:
        tally.problem(f"vLLM wrote {written} tokens, clients got {tally.counts['tokens']}")
    if seen.total("vllm:kv_cache_usage_perc"):
        tally.problem(f"K/V blocks are still held: {seen.total('vllm:kv_cache_usage_perc')}")
    return {"drafted": drafted, "accepted": accepted, "written": written, "preemptions": seen.total("vllm:num_preemptions_total") or 0.0}


def watch(server: Server, tally: Tally, until: float) -> list[dict[str, float]]:
    """Memory every few seconds; ends early when nothing moves."""
    samples = [memory_mb(server)]
    while time.monotonic() < until:
        time.sleep(5.0)
        samples.append(memory_mb(server))
        if server.process.poll() is not None:
            tally.problem("the server ended")
            break
        if time.monotonic() - tally.last_token > STALL_S:
            tally.problem(f"no token for {STALL_S:.0f} s")
            break
    return samples


def check_memory(samples: list[dict[str, float]], tally: Tally) -> None:
    """The second half of the run must not grow."""
    middle, last = samples[len(samples) // 2], samples[-1]
    for name, before in middle.items():
        after = last.get(name, 0.0)
        if after - before > max(LEAK_MB, LEAK_SHARE * before):
            tally.problem(f"memory of {name} grew from {before:.0f} to {after:.0f} MB in the second half")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--concurrency", type=int, default=12)
    parser.add_argument("--method", default="ngram", choices=("ngram", "headway"))
    parser.add_argument("--kv-blocks", type=int, default=20, help="of 128 tokens; small enough to preempt")
    parser.add_argument("--output", type=Path, help="write what was seen as JSON")
    args = parser.parse_args()
    made_by = {"soak": "vllm", **origin(), "vllm": importlib.metadata.version("vllm")}
    spec = NGRAM if args.method == "ngram" else serve_flags(method="headway")["--speculative-config"]
    tally = Tally()
    with tempfile.TemporaryDirectory() as folder:
        server = start_server(
            str(hub.resolve(MODEL)), Path(folder), *flags_of(spec, {"costs": "off"}), "--num-gpu-blocks-override", str(args.kv_blocks)
        )
        try:
            tally.last_token = time.monotonic()
            until = time.monotonic() + 60.0 * args.minutes
            clients = [
                threading.Thread(target=client, args=(server, tally, seed, until), daemon=True) for seed in range(1, args.concurrency + 1)
            ]
            for thread in clients:
                thread.start()
            samples = watch(server, tally, until)
            for thread in clients:
                thread.join(SETTLE_S + STALL_S)
            if any(thread.is_alive() for thread in clients):
                tally.problem("a client still waits")
            seen = check_counters(server, tally) if server.process.poll() is None else {}
            check_memory(samples, tally)
            if "Traceback" in server.log.read_text(errors="replace"):
                tally.problem(f"the server's log has a traceback:\n{server.tail()}")
        finally:
            server.stop()
    found = {
        "minutes": args.minutes, "concurrency": args.concurrency, "method": args.method, "clients": dict(tally.counts), "server": seen,
        "memory_mb": {"first": samples[0], "middle": samples[len(samples) // 2], "last": samples[-1]}, "problems": tally.problems,
    }  # fmt: skip
    print(json.dumps(found, indent=2))
    if args.output:
        write(made_by | found, args.output)
    return 1 if tally.problems else 0


if __name__ == "__main__":
    sys.exit(main())
