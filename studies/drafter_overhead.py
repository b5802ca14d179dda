"""What drafting costs on the CPU: propose + commit for N requests of L tokens, and the share of a step that is. No model needed.

    python studies/drafter_overhead.py [--requests 64] [--context 2000] [--step-ms 150]

The texts are standard-library sources, split into words and hashed to token ids. `edit` writes the source in the prompt again with
one token in 20 changed (long matches, long drafts), `write` goes on with the source. What is accepted of a draft is what
the text says. Each drafter has finished 200 responses before, so that suffix has a cache to search. Drafting has one thread, and times
are that thread's CPU time: what else runs on the machine does not count.
The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import re
import statistics
import sysconfig
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from headway.config import SpeculativeConfig
from headway.drafters.drafter import Committed, Drafter, DraftRequest, never_stop

DRAFTERS: dict[str, dict[str, Any]] = {
    "ngram": {"method": "ngram", "num_speculative_tokens": 4},
    "ngram 2..5": {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 2, "prompt_lookup_max": 5},
    "suffix": {"method": "suffix"},
}
NUM_CACHED, CACHED_LEN = 200, 300
VOCAB = 49_152


def source_tokens(needed: int) -> list[int]:
    tokens: list[int] = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        words = re.findall(r" ?[A-Za-z]{1,7}|[0-9]|\n\s*| +|[^\w\s]|_", path.read_text(encoding="utf-8", errors="replace"))
        tokens += [zlib.crc32(word.encode()) % VOCAB for word in words]
        if len(tokens) >= needed:
            return tokens[:needed]
    raise SystemExit(f"the standard library has {len(tokens)} tokens, {needed} are needed: fewer --requests or a shorter --context")


def make_texts(workload: str, num: int, context: int, output: int) -> tuple[list[tuple[list[int], list[int]]], list[list[int]]]:
    """((prompt, what will be written) per request, responses finished before)."""
    rng = random.Random(0)
    tokens = source_tokens(num * (context + output) + NUM_CACHED * CACHED_LEN)
    pieces: Iterator[list[int]] = (tokens[i * (context + output) :][: context + output] for i in range(num))
    pairs = [(piece[:context], piece[context:]) for piece in pieces]
    if workload == "edit":
        pairs = [(prompt, [t if rng.random() > 0.05 else rng.randrange(VOCAB) for t in prompt[:output]]) for prompt, _ in pairs]
    rest = tokens[num * (context + output) :]
    return pairs, [rest[i * CACHED_LEN : (i + 1) * CACHED_LEN] for i in range(NUM_CACHED)]


def measure(drafter: Drafter, k: int, workload: str, num: int, context: int, steps: int) -> dict[str, float]:
    texts, finished = make_texts(workload, num, context, output=min(context, steps * (k + 1) + 1))
    for number, response in enumerate(finished, num):
        drafter.commit([Committed(number, response, 0, len(response), 0)])
        drafter.stop(number)
    live = [[*prompt, written[0]] for prompt, written in texts]
    times: list[float] = []
    num_drafted = num_accepted = 0
    for _ in range(steps + 1):
        requests = [DraftRequest(i, history, context, k, True) for i, history in enumerate(live)]
        begin = time.thread_time()
        drafts = drafter.propose(requests, never_stop)
        spent = time.thread_time() - begin
        committed = []
        for i, (history, draft) in enumerate(zip(live, drafts, strict=True)):
            ahead = texts[i][1][len(history) - context :]
            accepted = next((j for j, token in enumerate(draft.tokens) if ahead[j : j + 1] != [token]), len(draft))
            history += ahead[: accepted + 1]
            num_drafted, num_accepted = num_drafted + len(draft), num_accepted + accepted
            committed.append(Committed(i, history, context, accepted + 1, accepted))
        begin = time.thread_time()
        drafter.commit(committed)
        times.append((spent + time.thread_time() - begin) * 1e3)
    return {
        "first_ms": times[0],   # reads the prompts
        "median_ms": statistics.median(times[1:]),
        "min_ms": min(times[1:]),
        "mean_drafted": num_drafted / (steps + 1) / num,
        "mean_accepted": num_accepted / (steps + 1) / num,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--context", type=int, default=2000, help="tokens of each prompt")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--step-ms", type=float, default=150.0, help="duration of one engine step at this load, for the share")
    args = parser.parse_args()
    print(f"{args.requests} requests of {args.context} tokens; share of a step of {args.step_ms:g} ms")
    print(f"{'drafter':<11} {'text':<6} {'k':>3} {'first':>9} {'median':>9} {'min':>9} {'share':>7} {'drafted':>8} {'accepted':>9}")
    rows = []
    for name, config in DRAFTERS.items():
        for workload in ("edit", "write"):
            parsed = SpeculativeConfig.parse(config)
            assert parsed is not None
            k = parsed.num_speculative_tokens
            row = measure(parsed.build_drafter(), k, workload, args.requests, args.context, args.steps)
            share = row["median_ms"] / args.step_ms
            print(
                f"{name:<11} {workload:<6} {k:>3} {row['first_ms']:>6.1f} ms {row['median_ms']:>6.2f} ms {row['min_ms']:>6.2f} ms"
                f" {share:>7.1%} {row['mean_drafted']:>8.2f} {row['mean_accepted']:>9.2f}"
            )
            row["share"] = share
            rows.append({"drafter": name, "text": workload, "k": k, **{key: round(value, 4) for key, value in row.items()}})
    print(json.dumps({"benchmark": "drafter_overhead", **vars(args), "python": platform.python_version(), "rows": rows}))


if __name__ == "__main__":
    main()
