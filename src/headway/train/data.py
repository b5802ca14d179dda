"""Texts to learn from: the model's own, or a file's.

Self-instruction: a chat model asked to continue an opened user turn writes what its users would; answering that gives text it would
itself write, which is what a drafter has to predict. Left alone, a small model asks about little, so most turns begin with an opening
and a topic of openings.json. Half-written texts are not kept; a second run goes on where the file ends.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from headway.engine.engine import Engine
from headway.errors import ConfigError, InvalidRequestError
from headway.types import Request, SamplingParams

_MARK = "@@headway@@"
_USER_TOKENS = 96
_MIN_USER_TOKENS = 4
_USER_TEMPERATURE = 0.8
_OPENED = 0.75   # of the user turns begin as openings.json says
# Most requests of a server are greedy or close to it, and a drafter should know what follows an unlikely token too.
_TEMPERATURES = (0.0, 0.7, 0.0, 0.0, 1.0, 0.0)

Advance = Callable[[int], None]


@dataclass(frozen=True)
class Text:
    """A prompt of `num_prompt` tokens and what followed: only the latter is learned."""

    token_ids: list[int]
    num_prompt: int

    @property
    def num_answer(self) -> int:
        return len(self.token_ids) - self.num_prompt


def read_texts(path: Path) -> list[Text]:
    """What `TextFile` wrote; a last line cut short by a crash is left out."""
    texts = []
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                value = json.loads(line)
            except json.JSONDecodeError:
                break
            texts.append(Text(value["token_ids"], value["num_prompt"]))
    return texts


class TextFile:
    """Appends texts to a file, each prompt once."""

    def __init__(self, path: Path, known: list[Text]) -> None:
        texts = read_texts(path)
        path.write_text("".join(_line(text) for text in texts), encoding="utf-8")
        self.path = path
        self.num_texts = len(texts)
        self.num_tokens = sum(text.num_answer for text in texts)
        self._prompts = {tuple(text.token_ids[: text.num_prompt]) for text in (*texts, *known)}

    def is_new(self, prompt: list[int]) -> bool:
        return bool(prompt) and tuple(prompt) not in self._prompts

    def reserve(self, prompt: list[int]) -> None:
        self._prompts.add(tuple(prompt))

    def add(self, text: Text) -> None:
        self.reserve(text.token_ids[: text.num_prompt])
        with self.path.open("a", encoding="utf-8") as file:
            file.write(_line(text))
        self.num_texts += 1
        self.num_tokens += text.num_answer


def _line(text: Text) -> str:
    return json.dumps({"num_prompt": text.num_prompt, "token_ids": text.token_ids}) + "\n"


def write_texts(
    engine: Engine, file: TextFile, prompts: Iterator[list[int]] | None, *, max_tokens: int, seed: int, deadline: float,
    num_tokens: int | None, num_texts: int | None = None, greedy: bool = False, advance: Advance = lambda _: None,
    stopped: Callable[[], bool] = lambda: False,
) -> None:
    """Answers `prompts` (None: prompts of its own) until the tokens, the texts, the prompts or the time (`time.monotonic`; not before
    there is a text) run out, or `stopped()`.

    Deterministic for a seed, but for which texts are finished when the time is up.
    """
    turns = None if prompts is not None else UserTurns(engine, seed)
    index = file.num_texts * 2
    in_flight: dict[str, tuple[list[int], bool, list[int]]] = {}   # id -> (prompt, is an answer, written so far)

    def done() -> bool:
        enough = (num_tokens is not None and file.num_tokens >= num_tokens) or (num_texts is not None and file.num_texts >= num_texts)
        return enough or stopped() or (file.num_texts > 0 and time.monotonic() >= deadline)

    def send(prompt: list[int], answer: bool) -> None:
        nonlocal index
        temperature = _USER_TEMPERATURE if not answer else 0.0 if greedy else _TEMPERATURES[index % len(_TEMPERATURES)]
        room = engine.max_model_len - len(prompt)
        params = SamplingParams(
            temperature=temperature, seed=seed * 1_000_003 + index, max_tokens=min(max_tokens if answer else _USER_TOKENS, room)
        )
        in_flight[str(index)] = (prompt, answer, [])
        engine.add(Request(str(index), prompt, params))
        index += 1

    while not done():
        # No more than are wanted: of those begun too many, the longest would be dropped.
        wanted = engine.config.max_num_seqs if num_texts is None else num_texts - file.num_texts
        while len(in_flight) < min(wanted, engine.config.max_num_seqs):
            prompt = turns.begin(index) if turns is not None else next(prompts, None) if prompts is not None else None
            if prompt is None:
                break
            send(prompt, prompts is not None)
        if not in_flight:
            return
        for delta in engine.step():
            prompt, answer, written = in_flight[delta.request_id]
            written += delta.token_ids
            if not delta.finished:
                continue
            del in_flight[delta.request_id]
            if answer and delta.finish_reason in ("stop", "length") and len(written) > 1 and not done():
                file.add(Text(prompt + written, len(prompt)))
                advance(len(written))
            elif turns is not None and not answer and delta.finish_reason == "stop" and file.is_new(asked := turns.end(prompt + written)):
                file.reserve(asked)
                send(asked, True)
    for request_id in in_flight:
        engine.abort(request_id)


class UserTurns:
    """Prompts for a chat model to continue into what a user would ask. Raises ConfigError without a chat template that can be opened."""

    def __init__(self, engine: Engine, seed: int) -> None:
        self.engine, self.seed = engine, seed
        self.opened = _opened_user_turn(engine)
        words = json.loads(Path(__file__).with_name("openings.json").read_text(encoding="utf-8"))
        self.openings, self.topics = words["openings"], words["topics"]

    def begin(self, index: int) -> list[int]:
        """The template up to the user's words, or a few words into them; a function of seed and index."""
        random = np.random.default_rng([self.seed, index])
        if random.random() >= _OPENED:
            return self.opened
        opening = self.openings[random.integers(len(self.openings))].replace("{}", self.topics[random.integers(len(self.topics))])
        return self.opened + self.engine.tokenizer.encode(opening, add_special_tokens=False)

    def end(self, token_ids: list[int]) -> list[int]:
        """The prompt that a finished user turn makes; empty when it is not usable."""
        asked = token_ids[len(self.opened) :]
        text = self.engine.tokenizer.decode(asked).strip()
        if len(asked) < _MIN_USER_TOKENS or not text:
            return []
        try:
            prompt = self.engine.tokenizer.apply_chat_template([{"role": "user", "content": text}])
        except InvalidRequestError:
            return []
        return prompt if len(prompt) < self.engine.max_model_len - 1 else []


def _opened_user_turn(engine: Engine) -> list[int]:
    tokenizer = engine.tokenizer
    if not tokenizer.has_chat_template:
        raise ConfigError("this model has no chat template, so it cannot write its own prompts; give texts with --data FILE.jsonl")
    text = tokenizer.decode(tokenizer.apply_chat_template([{"role": "user", "content": _MARK}]), skip_special_tokens=False)
    before, mark, _ = text.partition(_MARK)
    if not mark:
        raise ConfigError("the chat template of this model changes the user's words; give texts with --data FILE.jsonl")
    return tokenizer.encode(before, add_special_tokens=False)


def read_user_file(path: Path, engine: Engine, max_len: int) -> tuple[list[list[int]], list[Text]]:
    """(prompts to answer, texts that are complete). ConfigError naming the line for what cannot be read."""
    prompts, texts = [], []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read --data {path}: {error}") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
            token_ids, num_prompt = _from_user(value, engine)
        except (json.JSONDecodeError, InvalidRequestError, ConfigError) as error:
            raise ConfigError(f"--data {path}, line {number}: {error}") from error
        if num_prompt is None and len(token_ids) < max_len:
            prompts.append(token_ids)
        elif num_prompt is not None and len(token_ids[:max_len]) - num_prompt >= 2:
            texts.append(Text(token_ids[:max_len], num_prompt))
    if not prompts and not texts:
        raise ConfigError(f"--data {path} has no text that fits {max_len} tokens")
    return prompts, texts


def _from_user(value: Any, engine: Engine) -> tuple[list[int], int | None]:
    """(token ids, how many of them are the prompt; None: it wants an answer)."""
    tokenizer = engine.tokenizer
    if isinstance(value, dict) and isinstance(value.get("messages"), list) and value["messages"]:
        messages = value["messages"]
        if not all(isinstance(m, dict) and isinstance(m.get("content"), str) and "role" in m for m in messages):
            raise ConfigError("every message needs a role and a content that is a string")
        if messages[-1]["role"] != "assistant":
            return tokenizer.apply_chat_template(messages), None
        prompt = tokenizer.apply_chat_template(messages[:-1])
        return tokenizer.apply_chat_template(messages, add_generation_prompt=False), len(prompt)
    if isinstance(value, dict) and isinstance(value.get("prompt"), str):
        return tokenizer.encode(value["prompt"]), None
    if isinstance(value, dict) and isinstance(value.get("text"), str):
        return tokenizer.encode(value["text"]), 1
    raise ConfigError('expected an object with "messages", "prompt" or "text"')
