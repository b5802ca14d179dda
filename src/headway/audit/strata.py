"""From sampled continuations to pairs of outcomes: which tokens two sides chose after the same text.

Every text that both sides wrote is a stratum: the prompt, the prompt and a first token, and so on, so positions inside a draft are
tested given what was accepted before them. Nothing is known of a stratum but what was paired before: how likely each token is, and which
tokens are the likeliest, the rare and the unseen ones.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from headway.audit.evidence import WagerBook, log_average

NUM_RANKS = 3        # the likeliest tokens, each an event of its own
RARE_SHARE = 0.02    # a token chosen less often is rare
WARM_UP = 16         # outcomes known of a stratum before anything is wagered on it
PRIOR = 1.0          # outcomes' worth of doubt about a probability
BRANCH = 4           # a text becomes a stratum when its last token was chosen so often there
LOOKUP_CHARACTERS = 32
END = "\0end"        # the outcome of a text that ends here

Path = tuple[str, ...]


@dataclass(slots=True)
class Stratum:
    """What two sides chose after one text."""

    waiting: tuple[deque[str], deque[str]] = field(default_factory=lambda: (deque(), deque()))
    seen: Counter[str] = field(default_factory=Counter)   # of both sides, paired
    rare_hits: float = 0.0     # how often tokens were rare, or new, when they came
    new_hits: float = 0.0

    def take_pairs(self) -> list[tuple[str, str]]:
        count = min(map(len, self.waiting))
        return [(self.waiting[0].popleft(), self.waiting[1].popleft()) for _ in range(count)]

    def events(self, lookup: str) -> dict[str, tuple[float, frozenset[str] | None]]:
        """Kind of event -> (about how likely, the tokens it consists of; None: those not in `seen`). Empty before WARM_UP outcomes.

        lookup  text that a prompt lookup would draft
        """
        total = self.seen.total()
        if total < WARM_UP:
            return {}
        ranked = self.seen.most_common(NUM_RANKS)
        found: dict[str, tuple[float, frozenset[str] | None]] = {
            f"rank {i}": (self._share(count, total), frozenset({token})) for i, (token, count) in enumerate(ranked, 1)
        }
        rare = frozenset(token for token, count in self.seen.items() if count < RARE_SHARE * total)
        found["rare"] = self._share(self.rare_hits, total), rare
        found["unseen"] = self._share(self.new_hits, total), None
        copied = max((token for token in self.seen if token and lookup.startswith(token)), key=len, default=None)
        if copied is not None:
            found["lookup"] = self._share(self.seen[copied], total), frozenset({copied})
        return found

    def learn(self, pairs: Sequence[tuple[str, str]]) -> None:
        total = self.seen.total()
        for outcome in [each for pair in pairs for each in pair]:
            count = self.seen[outcome]
            self.rare_hits += count < RARE_SHARE * total
            self.new_hits += count == 0
            total += 1
            self.seen[outcome] = count + 1

    @staticmethod
    def _share(count: float, total: int) -> float:
        return (count + PRIOR / 2) / (total + PRIOR)


KINDS = (*(f"rank {i}" for i in range(1, NUM_RANKS + 1)), "rare", "unseen", "lookup")


class Ledger:
    """The wagers of one test. A token after the prompt is the prompt's own; what follows is drafted. Drafts gone wrong show after all
    prompts, or after one."""

    def __init__(self, num_prompts: int) -> None:
        self.first = {kind: WagerBook() for kind in KINDS}
        self.later = {kind: WagerBook() for kind in KINDS}
        self.by_prompt = {(i, kind): WagerBook() for i in range(num_prompts) for kind in KINDS}

    def books(self, prompt: int, path: Path, kind: str) -> tuple[WagerBook, ...]:
        """Those that an outcome after this text is entered in."""
        return (self.later[kind], self.by_prompt[prompt, kind]) if path else (self.first[kind],)

    def log_evidence(self) -> float:
        """The logarithm of the e-value: its expectation is at most 1 under the null hypothesis."""
        shares = {f"later {kind}": (0.5 / len(KINDS), book) for kind, book in self.later.items()}
        shares |= {f"first {kind}": (0.1 / len(KINDS), book) for kind, book in self.first.items()}
        shares |= {f"{i} {kind}": (0.4 / len(self.by_prompt), book) for (i, kind), book in self.by_prompt.items()}
        return log_average(shares)

    def of_prompt(self, prompt: int) -> float:
        """The logarithm of the wealth of the wager that has won most there."""
        return max(self.by_prompt[prompt, kind].best()[0] for kind in KINDS)

    def all_books(self) -> dict[str, WagerBook]:
        """By what they wager on, in words."""
        named = {f"{kind}, after the first token": book for kind, book in self.later.items()}
        named |= {f"{kind}, the first token": book for kind, book in self.first.items()}
        return named | {f"{kind}, prompt {i + 1}": book for (i, kind), book in self.by_prompt.items()}


class TwoSamples:
    """The test of one way to sample, over any number of prompts. Side 0 decodes plainly, side 1 speculates.

    noise   how far two plain runs' log probabilities of one token lie apart
    prompts how many there will be
    """

    def __init__(self, noise: float, num_prompts: int) -> None:
        self.noise = noise
        self._strata: dict[tuple[int, Path], Stratum] = {}
        self.ledger = Ledger(num_prompts)
        self.num_samples = [0, 0]

    def add(self, prompt: int, text: str, sides: tuple[Sequence[Path], Sequence[Path]]) -> None:
        """Takes in continuations of one prompt as tokens; one that ended has END last."""
        reached: set[Path] = set()
        for side, paths in enumerate(sides):
            self.num_samples[side] += len(paths)
            for path in paths:
                for i, token in enumerate(path):
                    if not self._is_stratum(prompt, path[:i]):
                        break
                    self._strata[prompt, path[:i]].waiting[side].append(token)
                    reached.add(path[:i])
        for path in sorted(reached, key=lambda each: (len(each), each)):
            self._settle(prompt, text, path)

    def _is_stratum(self, prompt: int, path: Path) -> bool:
        """Whether outcomes after this text are kept. What was paired before decides: rare texts would fill the memory for nothing."""
        if (prompt, path) in self._strata:
            return True
        parent = self._strata.get((prompt, path[:-1])) if path else None
        if path and (parent is None or parent.seen[path[-1]] < BRANCH):
            return False
        self._strata[prompt, path] = Stratum()
        return True

    def _settle(self, prompt: int, text: str, path: Path) -> None:
        stratum = self._strata[prompt, path]
        pairs = stratum.take_pairs()
        if not pairs:
            return
        events = stratum.events(looked_up(text, path))
        for kind, (p, tokens) in events.items():
            hits = [[token not in stratum.seen if tokens is None else token in tokens for token in pair] for pair in pairs]
            if kind == "rare":   # a token nobody has seen is rare, too
                hits = [[hit or token not in stratum.seen for hit, token in zip(row, pair, strict=True)]
                        for row, pair in zip(hits, pairs, strict=True)]  # fmt: skip
            counts = np.bincount([2 * a + b for a, b in hits], minlength=4)
            # log p moves by at most `noise` on either side, so p by about p (1 - p) times that: twice, for p is an estimate
            allowance = 2 * self.noise * max(p * (1 - p), 1e-3)
            for book in self.ledger.books(prompt, path, kind):
                book.settle(p, allowance, counts)
        stratum.learn(pairs)

    @property
    def num_strata(self) -> int:
        return len(self._strata)


def looked_up(text: str, path: Path) -> str:
    """What a prompt lookup would draft: the text that followed the last token where it stood before; "" where it did not."""
    last = path[-1] if path else ""
    if not last or last == END:
        return ""
    written = text + "".join(path)
    at = written.rfind(last, 0, len(written) - 1)
    return written[at + len(last) : at + len(last) + LOOKUP_CHARACTERS] if at >= 0 else ""
