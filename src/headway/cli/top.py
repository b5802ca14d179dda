"""`headway top URL`: what a server does right now, from its /metrics."""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections import deque
from typing import TYPE_CHECKING, NoReturn

from headway.bench.client import Endpoint, RequestFailed, exchange
from headway.bench.scrape import Scrape
from headway.errors import ConfigError

if TYPE_CHECKING:
    from rich.text import Text

EPILOG = """examples:
  headway top
  headway top http://127.0.0.1:8000 --interval 5
  headway top --once --interval 10

Reads Headway's and vLLM's metrics. A terminal gets a live view (Ctrl-C ends it), anything else plain text, one frame per interval.
"""
TIMEOUT_S = 10.0
HISTORY = 60


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("url", nargs="?", metavar="URL", default="http://127.0.0.1:8000", help="the server (default: http://127.0.0.1:8000)")
    parser.add_argument("--interval", type=_seconds, default=2.0, metavar="S", help="seconds between two looks (default: 2)")
    parser.add_argument("--once", action="store_true", help="print one frame, of one interval, and end")


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.05 <= value <= 3600.0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds from 0.05 to 3600")
    return value


def main(args: argparse.Namespace) -> int:
    target = Endpoint.parse(args.url.rstrip("/").removesuffix("/metrics"))
    watch = _Watch(target, args.url, args.interval)
    if args.once:
        print(watch.next().plain)
        return 0
    try:
        if sys.stdout.isatty():
            _live(watch)
        while True:
            print(f"{watch.next().plain}\n", flush=True)
    except KeyboardInterrupt:
        return 0   # the way it ends


class _Watch:
    """Looks at the server, waits, looks again. Raises ConfigError when there is nothing to see at first; later it keeps trying."""

    def __init__(self, target: Endpoint, title: str, interval: float) -> None:
        self.target, self.title, self.interval = target, title, interval
        self.history: deque[float] = deque(maxlen=HISTORY)
        self.last = self._look()
        self.at = time.monotonic()

    def next(self) -> Text:
        """The frame of the interval that ends now."""
        from rich.text import Text

        from headway.cli import top_view

        time.sleep(max(0.0, self.at + self.interval - time.monotonic()))
        try:
            seen = self._look()
        except ConfigError as error:
            self.at = time.monotonic()
            return Text.assemble(("headway top", "bold"), f"  {self.title}\n\n", (f"{error}; trying again", "red"))
        now = time.monotonic()
        numbers = top_view.read(self.last, seen, now - self.at, time.time())
        self.last, self.at = seen, now
        self.history.append(numbers.output_rate or 0.0)
        rows = top_view.lines(numbers, self.title, list(self.history))
        frame = Text("\n").join(Text.assemble(*row) for row in rows)
        frame.rstrip()
        return frame

    def _look(self) -> Scrape:
        try:
            status, body = asyncio.run(exchange(self.target, "GET", "/metrics", timeout_s=TIMEOUT_S))
        except RequestFailed as error:
            raise ConfigError(f"no answer from {self.title}: {error}") from error
        if status != 200:
            raise ConfigError(f"{self.title} answers {status} to /metrics: is it a Headway or vLLM server?")
        scrape = Scrape.parse(body.decode("utf-8", "replace"))
        if not any(name.startswith(("vllm:", "headway:")) for name in scrape.samples):
            raise ConfigError(f"{self.title} has metrics, but neither Headway's nor vLLM's")
        return scrape


def _live(watch: _Watch) -> NoReturn:
    from rich.live import Live
    from rich.panel import Panel

    with Live(screen=True, auto_refresh=False) as live:
        while True:
            live.update(Panel(watch.next(), subtitle=f"every {watch.interval:g} s, Ctrl-C ends", subtitle_align="right"), refresh=True)
