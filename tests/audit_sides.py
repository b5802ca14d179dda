"""Both sides of an audit without a server: text drawn from exact distributions, with the noise and the faults one asks for."""

from __future__ import annotations

import random
import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.audit.records import Session
from headway.audit.side import Continuation

WORDS = tuple(f" w{i}" for i in range(24))
END_TOKEN = 0   # its word is the end of a text


class Simulated:
    """Implements Asker: the next word depends on the last one, and of the first one on the prompt.

    noise      every call perturbs all logits by normal numbers of this scale, as bf16 does batch by batch
    too_often  after the first word, the likely draft comes so much too often (total variation)
    sharper    after the first word, logits are multiplied by this
    seeds      False: the same seed does not write the same text
    """

    def __init__(
        self, seed: int = 0, *, noise: float = 0.0, too_often: float = 0.0, sharper: float = 1.0, wrong_logprobs: float = 0.0,
        seeds: bool = True,
    ) -> None:
        rng = np.random.default_rng(seed)
        self.logits = rng.normal(size=(len(WORDS), len(WORDS))) * 1.6
        self.noise, self.too_often, self.sharper, self.wrong_logprobs, self.seeds = noise, too_often, sharper, wrong_logprobs, seeds
        self.calls = 0

    async def complete(self, prompt: str, **fields: Any) -> list[Continuation]:
        self.calls += 1
        n, length = fields.get("n", 1), fields.get("max_tokens", 16)
        entropy = [self.calls, fields.get("seed", self.calls)]
        noise = np.random.default_rng(entropy)
        rng = np.random.default_rng(fields.get("seed", self.calls) if self.seeds else entropy)
        logits = self.logits + self.noise * noise.normal(size=self.logits.shape)
        last = np.full(n, sum(map(ord, prompt)) % len(WORDS))
        tokens, told, tops = [], [], []
        for position in range(length):
            raw = np.log(softmax(logits))
            tables = self._tables(logits, fields, position)
            cumulative = tables[last].cumsum(-1)
            chosen = np.minimum((cumulative <= rng.random((n, 1))).sum(-1), len(WORDS) - 1)
            tokens.append(chosen)
            told.append(raw[last, chosen] + (self.wrong_logprobs if position else 0.0))
            tops.append(raw[last])
            last = chosen
        return [
            continuation([t[i] for t in tokens], [float(v[i]) for v in told], [v[i] for v in tops], fields.get("stop") or [])
            for i in range(n)
        ]

    def curl(self, prompt: str, **fields: Any) -> str:
        return f"curl {prompt!r} {fields}"

    def _tables(self, logits: NDArray[np.float64], fields: dict[str, Any], position: int) -> NDArray[np.float64]:
        temperature = fields.get("temperature", 1.0)
        if position:
            logits = logits * self.sharper
        if temperature == 0:
            return np.eye(len(WORDS))[logits.argmax(-1)]
        p = softmax(logits / temperature)
        order = np.sort(p, -1)[:, ::-1]
        before = order.cumsum(-1) - order
        floors = np.where(before < fields.get("top_p", 1.0), order, 1.0).min(-1, keepdims=True)
        floors = np.maximum(floors, p.max(-1, keepdims=True) * fields.get("min_p", 0.0))
        if 0 < fields.get("top_k", 0) < len(WORDS):
            floors = np.maximum(floors, order[:, fields["top_k"] - 1 : fields["top_k"]])
        p = np.where(p >= floors, p, 0.0)
        p /= p.sum(-1, keepdims=True)
        if position and self.too_often:
            draft = np.eye(len(WORDS))[p.argmax(-1)]
            rate = self.too_often / np.maximum(self.too_often, 1 - p.max(-1, keepdims=True))
            p = (1 - rate) * p + rate * draft
        return p


def softmax(x: NDArray[np.float64]) -> NDArray[np.float64]:
    e = np.exp(x - x.max(-1, keepdims=True))
    return np.asarray(e / e.sum(-1, keepdims=True))


def continuation(tokens: list[Any], logprobs: list[float], tops: list[Any], stop: list[str]) -> Continuation:
    """Up to the end of text or the first stop string, whichever comes first."""
    reason = "length"
    if END_TOKEN in tokens:
        reason, tokens = "stop", tokens[: tokens.index(END_TOKEN) + 1]
    words = [WORDS[token] for token in tokens]
    for count in range(1, len(words) + 1):
        text = "".join(words[:count])
        found = [text.find(each) for each in stop if each in text]
        if found:
            return _told(text[: min(found)], "stop", words[:count], logprobs, tops)
    return _told("".join(words), reason, words, logprobs, tops)


def _told(text: str, reason: str, words: list[str], logprobs: list[float], tops: list[Any]) -> Continuation:
    best = tuple({WORDS[i]: float(row[i]) for i in np.argsort(-row)[:5]} for row in tops[: len(words)])
    return Continuation(text, reason, tuple(words), tuple(logprobs[: len(words)]), best)


def simulated_session(seed: int, seconds: float, plain: Simulated, speculative: Simulated) -> Session:
    return Session(
        plain, speculative, random.Random(seed), time.monotonic() + seconds,
        neutral={"top_p": 1.0, "top_k": 0, "min_p": 0.0},
    )  # fmt: skip
