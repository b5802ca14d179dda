"""How long one client's request can silence another client: a server on one core, a stream that somebody reads, and beside it a
request that asks for much.

    python studies/silence.py --server NAME=SOURCE_FOLDER ... [--rows ROW ...] [--output FILE.json]

A server is pinned to the first core, and started again after a row that it has not got over; the clients run on the other cores. The
silence is the longest time between two pieces of the stream from the moment at which the request is sent until `--settle-s` after it
is answered, and at most `--limit-s`; "over" tells whether it ended by then. Each server runs the code of a source folder, so that
commits can be compared. Prints a line per row; the last line is one JSON document.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from record import origin, publish
from servers import Server

Body = dict[str, Any]


@dataclass(frozen=True)
class Row:
    """What is asked, and after how many seconds the client leaves (None: never).

    times   how many send it at once
    victim  a completion of somebody else, a prompt of 5,500 characters, is sent behind it and timed
    """

    body: Body
    leaves_after_s: float | None = None
    path: str = "/v1/completions"
    times: int = 1
    victim: bool = False


def words(count: int) -> list[str]:
    return [f"w{number}" for number in range(count)]


LENGTH = 4_190_000   # of a prompt that, with the rest of its body, the server takes: 4 MiB
SHORT = {"prompt": "x", "max_tokens": 2}
ROWS = {
    "nothing": Row(SHORT),
    "300,000 bad words, n = 1": Row(SHORT | {"bad_words": words(300_000)}),
    "300,000 bad words, n = 8": Row(SHORT | {"bad_words": words(300_000), "n": 8}),
    "300,000 bad words, n = 128, gone after 3 s": Row(SHORT | {"bad_words": words(300_000), "n": 128}, 3.0),
    "1,000 bad words, n = 8": Row(SHORT | {"bad_words": words(1000), "n": 8}),
    "4 MB of words": Row({"prompt": "word " * (LENGTH // 5), "max_tokens": 2}),
    "a word of 4 MB": Row({"prompt": "x" * LENGTH, "max_tokens": 2}),
    "a prompt of 8,000 tokens": Row({"prompt": "word " * 8000, "max_tokens": 2}),
    "nothing, and a prompt of 5,500 characters": Row(SHORT, victim=True),
    "twelve texts of 1 MB to tokenize": Row({"prompt": "word " * 200_000}, path="/tokenize", times=12, victim=True),
    "800 prompts of 4,000 characters": Row({"prompt": ["word " * 800] * 800, "max_tokens": 1}, 10.0),
    "logprobs 20, n = 64, 128 tokens": Row({"prompt": "x", "max_tokens": 128, "ignore_eos": True, "logprobs": 20, "n": 64}),
    "prompt_logprobs 20 on 8,000 tokens": Row({"prompt": "word " * 8000, "max_tokens": 2, "prompt_logprobs": 20}),
}


@dataclass
class Listener:
    """Reads a stream and notes when its pieces come: monotonic seconds."""

    url: str
    times: list[float] = field(default_factory=list)
    stopped: bool = False

    def run(self) -> None:
        body = {"prompt": "Once upon a time", "max_tokens": 7000, "ignore_eos": True, "temperature": 0, "stream": True}
        try:
            with httpx.stream("POST", f"{self.url}/v1/completions", json=body, timeout=None) as response:
                for line in response.iter_lines():
                    if line.startswith("data: {"):
                        self.times.append(time.monotonic())
                    if self.stopped:
                        return
        except httpx.HTTPError:   # the server is killed at the end of the row
            pass

    def silence(self, start: float, end: float) -> float:
        marks = [max((at for at in self.times if at <= start), default=start), *(at for at in self.times if start < at <= end), end]
        return max(later - earlier for earlier, later in itertools.pairwise(marks))


def measure(server: Server, row: Row, limit_s: float, settle_s: float) -> dict[str, Any]:
    listener = Listener(server.url)
    threading.Thread(target=listener.run, daemon=True).start()
    while len(listener.times) < 50:
        time.sleep(0.1)
    start = time.monotonic()
    statuses: list[int | None] = []

    def ask() -> None:
        try:
            timeout = httpx.Timeout(row.leaves_after_s or limit_s)
            statuses.append(httpx.post(f"{server.url}{row.path}", json=row.body, timeout=timeout).status_code)
        except httpx.TimeoutException:
            statuses.append(None)

    clients = [threading.Thread(target=ask) for _ in range(row.times)]
    for client in clients:
        client.start()
    found = {"victim_s": victim(server, limit_s)} if row.victim else {}
    for client in clients:
        client.join()
    answered, status = time.monotonic(), statuses[0]
    over = row.leaves_after_s is not None or status is not None
    time.sleep(settle_s)
    while time.monotonic() - listener.times[-1] > settle_s and time.monotonic() - start < limit_s:
        time.sleep(0.1)   # what the client has left goes on
    end = time.monotonic()
    listener.stopped = True
    return {
        "silence_s": round(listener.silence(start, end), 2),
        "answered_s": round(answered - start, 2),
        "status": status,
        "over": over and end - listener.times[-1] <= settle_s,
        **found,
    }


def victim(server: Server, limit_s: float) -> float:
    """Seconds until a prompt that is long enough to be tokenized aside is answered, while others were there first."""
    time.sleep(0.3)
    start = time.monotonic()
    prompt = f"{start} " + "once upon a time " * 320
    httpx.post(f"{server.url}/v1/completions", json={"prompt": prompt[:5500], "max_tokens": 2}, timeout=limit_s).raise_for_status()
    return round(time.monotonic() - start, 2)


def start(source: str, args: argparse.Namespace) -> Server:
    command = ["taskset", "-c", str(args.core), sys.executable, "-m", "headway.cli.main", "serve", args.model]
    flags = ["--port", str(args.port), "--dtype", "bfloat16"]
    return Server("headway", [*command, *flags], args.port, {"PYTHONPATH": str(Path(source).absolute())})


def commit_of(source: str) -> str:
    command = ["git", "-C", source, "describe", "--always", "--dirty", "--exclude=*"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", action="append", required=True, metavar="NAME=FOLDER", help="a name, and the src folder that it runs")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--limit-s", type=float, default=60.0)
    parser.add_argument("--settle-s", type=float, default=2.0)
    parser.add_argument("--port", type=int, default=8107)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    args.core = cores[0]
    os.sched_setaffinity(0, set(cores[1:]) or {cores[0]})
    sources = dict(each.split("=", 1) for each in args.server)
    found: list[dict[str, Any]] = []
    for name, source in sources.items():
        server = start(source, args)
        try:
            for row in args.rows:
                found.append({"server": name, "row": row, **measure(server, ROWS[row], args.limit_s, args.settle_s)})
                print(json.dumps(found[-1]), flush=True)
                if not found[-1]["over"]:
                    server.stop()
                    server = start(source, args)
        finally:
            server.stop()
    servers = {name: {"commit": commit_of(source)} for name, source in sources.items()}
    document = {"benchmark": "silence", **origin(), "model": args.model, "limit_s": args.limit_s, "servers": servers, "rows": found}
    publish(document, args.output)


if __name__ == "__main__":
    main()
