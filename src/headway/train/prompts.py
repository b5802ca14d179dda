"""What users would ask: prompts to write answers to, where nobody gives any.

Three sources, since what follows a prompt is only as varied as the prompts. Complete requests of asks.json, the way people word them,
with a topic, a name or a number put in. Openings of openings.json, a few words that the chat model continues (self-instruction: asked
to continue an opened user turn it writes what its users would). And turns that are all the model's own; left alone, a small model asks
about little.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np

from headway.engine.engine import Engine
from headway.errors import ConfigError, InvalidRequestError

_MARK = "@@headway@@"
_MIN_USER_TOKENS = 4
_ASKED = 0.6        # of the user turns are requests of asks.json,
_OPENED = 0.3       # these begin as openings.json says, and the model writes the others alone
_MANNERED = 0.3     # of the requests say how to answer
_ASIDE = 12         # every so many-th request is for texts to be set aside only
_NUMBERS = {"{n}": (3, 30), "{m}": (30, 240)}


class UserTurns:
    """Prompts of one seed; with `aside`, for texts that are set aside: requests that the others have not.

    Raises ConfigError without a chat template that can be opened.
    """

    def __init__(self, engine: Engine, seed: int, aside: bool = False) -> None:
        self.engine, self.seed = engine, seed
        self.opened = _opened_user_turn(engine)
        openings, asks = _read("openings.json"), _read("asks.json")
        self.openings = openings["openings"]
        self.asks = [ask for i, ask in enumerate(asks["asks"]) if (i % _ASIDE == 0) == aside]
        self.manners = asks["manners"]
        self.words = {"{}": openings["topics"], "{name}": asks["names"], "{place}": asks["places"]}

    def begin(self, index: int) -> tuple[list[int], bool]:
        """(token ids, whether they are a complete prompt; if not, the model has to go on with them); a function of seed and index."""
        random = np.random.default_rng([self.seed, index])
        source = random.random()
        if source < _ASKED:
            ask = self._filled(_any(random, self.asks), random)
            return self._prompt(f"{ask} {_any(random, self.manners)}" if random.random() < _MANNERED else ask), True
        if source >= _ASKED + _OPENED:
            return self.opened, False
        opening = self._filled(_any(random, self.openings), random)
        return self.opened + self.engine.tokenizer.encode(opening, add_special_tokens=False), False

    def begin_new(self, index: int, is_new: Callable[[list[int]], bool]) -> tuple[list[int], bool, int]:
        """`begin` for the first index from `index` on that is no known prompt, and that index."""
        while True:
            token_ids, complete = self.begin(index)
            if not complete or is_new(token_ids):
                return token_ids, complete, index
            index += 1

    def end(self, token_ids: list[int]) -> list[int]:
        """The prompt that a finished user turn makes; empty when it is not usable."""
        asked = token_ids[len(self.opened) :]
        text = self.engine.tokenizer.decode(asked).strip()
        return self._prompt(text) if len(asked) >= _MIN_USER_TOKENS and text else []

    def _filled(self, text: str, random: np.random.Generator) -> str:
        for mark, words in self.words.items():
            while mark in text:
                text = text.replace(mark, _any(random, words), 1)
        for mark, (least, most) in _NUMBERS.items():
            text = text.replace(mark, str(random.integers(least, most)))
        return text

    def _prompt(self, text: str) -> list[int]:
        try:
            prompt = self.engine.tokenizer.apply_chat_template([{"role": "user", "content": text}])
        except InvalidRequestError:
            return []
        return prompt if len(prompt) < self.engine.max_model_len - 1 else []


def _read(name: str) -> dict[str, list[str]]:
    value: dict[str, list[str]] = json.loads(Path(__file__).with_name(name).read_text(encoding="utf-8"))
    return value


def _any(random: np.random.Generator, items: list[str]) -> str:
    return items[random.integers(len(items))]


def _opened_user_turn(engine: Engine) -> list[int]:
    tokenizer = engine.tokenizer
    if not tokenizer.has_chat_template:
        raise ConfigError("this model has no chat template, so it cannot write its own prompts; give texts with --data FILE.jsonl")
    text = tokenizer.decode(tokenizer.apply_chat_template([{"role": "user", "content": _MARK}]), skip_special_tokens=False)
    before, mark, _ = text.partition(_MARK)
    if not mark:
        raise ConfigError("the chat template of this model changes the user's words; give texts with --data FILE.jsonl")
    return tokenizer.encode(before, add_special_tokens=False)
