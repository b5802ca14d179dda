"""A sequential test of samples whose probabilities are known: plain decoding tells them as log probabilities.

At temperature 1, with nothing cut off, what a server reports for a token is the probability it draws it with. So only the speculating side
needs samples, and each says twice as much as a pair of two unknown sides (`strata.py`). Wagers and their odds are as in `evidence.py`, with
the null's probability given up to rounding. A control on plain samples tells whether the reported probabilities are those drawn from.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from headway.audit.evidence import DIFFERENCES, LEAST, FloatArray
from headway.audit.strata import NUM_RANKS, Ledger, Path, looked_up

LIKELY = 0.01     # what follows a less likely token is not kept: it hardly comes again
DISTINCT = 1e-3   # log probabilities that differ by more are of different tokens
ROUNDING = 1e-6   # of reported log probabilities, and of their sums


def log_factors(p: float, allowance: float) -> FloatArray:
    """What one outcome does to the logarithm of each wager's wealth: [wagers, 2], the columns for a miss and a hit.

    p          how likely the event is
    allowance  how far from p the probability may be
    """
    return _log_factors(float(f"{p:.6g}"), float(f"{allowance:.2g}"))


@lru_cache(maxsize=4096)
def _log_factors(p: float, allowance: float) -> FloatArray:
    size = np.array(DIFFERENCES)
    wagered = np.clip(np.concatenate([p + size, p - size]), LEAST, 1 - LEAST)
    null = np.clip(np.repeat([p + allowance, p - allowance], len(size)), LEAST, 1 - LEAST)
    factors = np.stack([np.log1p(-wagered) - np.log1p(-null), np.log(wagered) - np.log(null)], -1)
    upward = np.repeat([True, False], len(size))
    factors[np.where(upward, wagered <= null, wagered >= null)] = 0.0   # the null allows what the wager says
    return factors


class KnownSamples:
    """The test of one way to sample, over any number of prompts.

    noise  how far two plain runs' log probabilities of one token lie apart
    """

    def __init__(self, noise: float, num_prompts: int) -> None:
        self.noise = noise
        self._probabilities: dict[tuple[int, Path], dict[str, float]] = {}
        self.ledger, self.control = Ledger(num_prompts), Ledger(num_prompts)   # of the speculating side, and of plain samples
        self.num_samples = self.num_control = 0
        self._ambiguous: set[str] = set()   # strings that were told with different probabilities after one text

    def learn(self, prompt: int, text: str, paths: Sequence[Path], logprobs: Sequence[Sequence[float]]) -> None:
        """Takes in plain samples: what they tell is used from now on; what was known before is held against them."""
        self.num_control += len(paths)
        self._settle(self.control, prompt, text, paths)
        for path, values in zip(paths, logprobs, strict=True):
            for i, (token, value) in enumerate(zip(path, values, strict=False)):
                known = self._probabilities.setdefault((prompt, path[:i]), {})
                p = math.exp(value)
                if abs(math.log(known.setdefault(token, p)) - value) > 4 * self.noise + DISTINCT:
                    self._ambiguous.add(token)
                if self._is_ambiguous(token) or p < LIKELY:
                    break

    def _is_ambiguous(self, token: str) -> bool:
        """Whether several tokens are written like this, as parts of characters are."""
        return not token or "\ufffd" in token or token in self._ambiguous

    def add(self, prompt: int, text: str, paths: Sequence[Path]) -> None:
        """Takes in samples of the speculating side."""
        self.num_samples += len(paths)
        self._settle(self.ledger, prompt, text, paths)

    def _settle(self, ledger: Ledger, prompt: int, text: str, paths: Sequence[Path]) -> None:
        outcomes: defaultdict[Path, Counter[str]] = defaultdict(Counter)
        for path in paths:
            for i, token in enumerate(path):
                if (prompt, path[:i]) not in self._probabilities:
                    break
                outcomes[path[:i]][token] += 1
                if self._is_ambiguous(token):   # what follows is no longer one text
                    break
        for path, counts in outcomes.items():
            total = counts.total()
            for kind, (p, hits) in self._events(prompt, text, path, counts).items():
                allowance = 2 * self.noise * p * (1 - p) + ROUNDING
                for book in ledger.books(prompt, path, kind):
                    book.settle_known(log_factors(p, allowance), p, total - hits, hits)

    def _events(self, prompt: int, text: str, path: Path, counts: Counter[str]) -> dict[str, tuple[float, int]]:
        """Kind of event -> (its probability, how often it came)."""
        known = {token: p for token, p in self._probabilities[prompt, path].items() if not self._is_ambiguous(token)}
        ranked = sorted(known, key=lambda token: (-known[token], token))
        found = {f"rank {i}": (known[token], counts[token]) for i, token in enumerate(ranked[:NUM_RANKS], 1)}
        rest = 1.0 - sum(known.values())
        if rest > LEAST:
            found["unseen"] = rest, sum(count for token, count in counts.items() if token not in known)
        followed = looked_up(text, path)
        copied = max((token for token in known if token and followed.startswith(token)), key=len, default=None)
        if copied is not None:
            found["lookup"] = known[copied], counts[copied]
        return {kind: (p, hits) for kind, (p, hits) in found.items() if LEAST < p < 1 - LEAST}
