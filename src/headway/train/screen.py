"""Progress that people can read: bars with rates and the time left."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from headway.train.trainer import Progress, append_log


class Screen:
    """To the terminal, or nowhere (`quiet`)."""

    def __init__(self, quiet: bool = False) -> None:
        from rich.console import Console

        self.console = Console(quiet=quiet, stderr=True)

    def say(self, text: str) -> None:
        self.console.print(text, highlight=False)

    @contextmanager
    def bar(self, label: str, total: int | None) -> Iterator[Callable[[int], None]]:
        from rich import progress

        columns = (
            progress.TextColumn("{task.description}"), progress.BarColumn(), progress.MofNCompleteColumn(),
            progress.TextColumn("{task.fields[rate]}"), progress.TimeElapsedColumn(), progress.TimeRemainingColumn(),
        )
        with progress.Progress(*columns, console=self.console) as bars:
            task = bars.add_task(label, total=total, rate="")

            def advance(count: int) -> None:
                bars.advance(task, count)
                speed = bars.tasks[0].speed
                bars.update(task, rate=f"{speed:.0f}/s" if speed else "")

            yield advance

    @contextmanager
    def steps(self, num_steps: int, log: Path) -> Iterator[Callable[[Progress], None]]:
        """A bar of optimizer steps; each evaluation is a line of its own. Every step is a line of JSON in `log`."""
        from rich import progress

        columns = (
            progress.TextColumn("step"), progress.MofNCompleteColumn(), progress.BarColumn(), progress.TextColumn("{task.fields[state]}"),
            progress.TimeElapsedColumn(), progress.TimeRemainingColumn(),
        )
        with progress.Progress(*columns, console=self.console) as bars:
            task = bars.add_task("", total=num_steps, state="")

            def report(p: Progress) -> None:
                append_log(log, p)
                bars.update(task, completed=p.step, state=f"loss {p.loss:.3f}, {p.tokens_per_s:.0f} tokens/s")
                if p.acceptance is not None:
                    rates = "  ".join(f"{rate:.2f}" for rate in p.acceptance)
                    self.say(f"step {p.step}: loss {p.loss:.3f}, acceptance by position {rates}")

            yield report
