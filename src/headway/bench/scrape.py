"""Prometheus text, read back: what `headway top` and the benchmarks know about a server they did not start."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

_SAMPLE = re.compile(r"([a-zA-Z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)(?:\s+-?\d+)?")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_ESCAPED = re.compile(r"\\(.)")

Labels = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Scrape:
    """The samples of one scrape: name -> [(labels, value)]. Series that differ in other labels (model, engine) are summed."""

    samples: dict[str, list[tuple[dict[str, str], float]]] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> Scrape:
        """Lines that are not samples are skipped; a text without any gives an empty scrape."""
        found: dict[str, list[tuple[dict[str, str], float]]] = {}
        for line in text.splitlines():
            match = _SAMPLE.fullmatch(line.strip())
            if match is None:
                continue
            name, labels, value = match.groups()
            try:
                number = float(value)
            except ValueError:
                continue
            parsed = {key: _ESCAPED.sub(_unescaped, text) for key, text in _LABEL.findall(labels or "")}
            found.setdefault(name, []).append((parsed, number))
        return cls(found)

    def __contains__(self, name: str) -> bool:
        return name in self.samples

    def total(self, *names: str, **labels: str) -> float | None:
        """The sum over the series of the first of `names` that is there, of those with these labels; None when none is."""
        for name in names:
            values = [value for have, value in self.samples.get(name, ()) if labels.items() <= have.items() and math.isfinite(value)]
            if values:
                return sum(values)
        return None

    def by(self, name: str, label: str, **labels: str) -> dict[str, float]:
        """Value of `label` -> sum over the series that have it and these labels."""
        found: dict[str, float] = {}
        for have, value in self.samples.get(name, ()):
            if label in have and labels.items() <= have.items():
                found[have[label]] = found.get(have[label], 0.0) + value
        return found


@dataclass(frozen=True, slots=True)
class Growth:
    """What counters grew by between two scrapes `seconds` apart; a server that restarted in between counts from zero."""

    before: Scrape
    after: Scrape
    seconds: float

    def total(self, *names: str, **labels: str) -> float | None:
        after = self.after.total(*names, **labels)
        if after is None:
            return None
        before = self.before.total(*names, **labels) or 0.0
        return after - before if after >= before else after

    def rate(self, *names: str, **labels: str) -> float | None:
        grown = self.total(*names, **labels)
        return None if grown is None or self.seconds <= 0.0 else grown / self.seconds

    def by(self, name: str, label: str, **labels: str) -> dict[str, float]:
        before = self.before.by(name, label, **labels)
        return {
            key: value - before.get(key, 0.0) if value >= before.get(key, 0.0) else value
            for key, value in self.after.by(name, label, **labels).items()
        }

    def ratio(self, above: str, below: str, **labels: str) -> float | None:
        """Growth of one counter over that of another (the mean of a histogram: its _sum over its _count)."""
        top, bottom = self.total(above, **labels), self.total(below, **labels)
        return None if top is None or not bottom else top / bottom


def _unescaped(match: re.Match[str]) -> str:
    return "\n" if match[1] == "n" else match[1]
