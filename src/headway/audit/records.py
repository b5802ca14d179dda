"""What an audit knows and what it found."""

from __future__ import annotations

import random
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from headway.audit.side import Asker, Continuation

SOUND, FAULT, SKIPPED = "sound", "fault", "skipped"


@dataclass(frozen=True)
class CheckResult:
    """What one check found.

    status    SOUND, FAULT or SKIPPED
    summary   in a sentence: what was tested and what came out
    figures   the numbers behind it
    examples  commands that show it
    """

    name: str
    status: str
    summary: str
    figures: Mapping[str, Any] = field(default_factory=dict)
    examples: tuple[str, ...] = ()


@dataclass(frozen=True)
class GreedyPair:
    """What both sides wrote behind one prompt at temperature 0; `length` tokens were asked for."""

    prompt: str
    plain: Continuation
    speculated: Continuation
    length: int


@dataclass
class Session:
    """One audit on its way.

    noise        how far the log probabilities of one token lie apart in two plain runs: the largest difference seen
    neutral      fields that keep a server's own defaults out of sampling
    salted       whether both sides are one server that keeps K/V prefixes apart by `cache_salt`
    """

    plain: Asker
    speculative: Asker
    random: random.Random
    ends: float                    # time.monotonic()
    noise: float = 0.0
    salted: bool = False
    neutral: Mapping[str, Any] = field(default_factory=dict)
    pairs: list[GreedyPair] = field(default_factory=list)
    num_seeds: int = 0

    def __post_init__(self) -> None:
        self.first_seed = self.random.randrange(2**30)

    def observe_noise(self, difference: float) -> None:
        """Takes in how far apart two plain runs were."""
        self.noise = max(self.noise, difference)

    def keep_pairs(self, pairs: Sequence[GreedyPair]) -> None:
        """Greedy texts that later checks go on from."""
        self.pairs = [*pairs]

    @property
    def tolerance(self) -> float:
        """Log probabilities that differ by no more are the same: four times the noise, and what another order of sums may cost."""
        return 4 * self.noise + 1e-3

    def seconds_left(self) -> float:
        return self.ends - time.monotonic()

    def fresh_seed(self) -> int:
        """A seed whose next thousand nothing else of this audit uses."""
        self.num_seeds += 1
        return (self.first_seed + 1024 * self.num_seeds) % 2**31

    def fresh_salt(self) -> dict[str, str]:
        """The field that lets a request find nothing in the prefix cache, where both sides share one, of earlier audits either."""
        return {"cache_salt": f"audit-{secrets.token_hex(16)}"} if self.salted else {}
