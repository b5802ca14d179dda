"""Texts to learn from: the model's own, or a file's.

The model answers what users ask (prompts.py), so this is text that it would itself write, which is what a drafter has to predict.
Half-written texts are not kept; a second run goes on where the file ends.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway.engine.engine import Engine
from headway.errors import ConfigError, InvalidRequestError
from headway.sampling_params import SamplingParams
from headway.train.prompts import UserTurns
from headway.types import Request

_USER_TOKENS = 96
_USER_TEMPERATURE = 0.8
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
    num_tokens: int | None, num_texts: int | None = None, aside: bool = False, advance: Advance = lambda _: None,
    stopped: Callable[[], bool] = lambda: False, keep: Callable[[Text], None] = lambda _: None,
) -> None:
    """Answers `prompts` (None: prompts of its own) until the tokens, the texts, the prompts or the time (`time.monotonic`; not before
    there is a text) run out, or `stopped()`. With `aside`, texts to be set aside: greedy answers to what is asked nowhere else. `keep`
    is called with each text that was added to the file.

    Deterministic for a seed, but for which texts are finished when the time is up.
    """
    turns = None if prompts is not None else UserTurns(engine, seed, aside)
    index = file.num_texts * 2
    in_flight: dict[str, tuple[list[int], bool, list[int]]] = {}   # id -> (prompt, is an answer, written so far)

    def done() -> bool:
        enough = (num_tokens is not None and file.num_tokens >= num_tokens) or (num_texts is not None and file.num_texts >= num_texts)
        return enough or stopped() or (file.num_texts > 0 and time.monotonic() >= deadline)

    def send(prompt: list[int], answer: bool) -> None:
        nonlocal index
        if answer:
            file.reserve(prompt)
        temperature = _USER_TEMPERATURE if not answer else 0.0 if aside else _TEMPERATURES[index % len(_TEMPERATURES)]
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
            if turns is not None:
                started, complete, index = turns.begin_new(index, file.is_new)
                send(started, complete)
            elif (given := next(prompts or iter(()), None)) is not None:
                send(given, True)
            else:
                break
        if not in_flight:
            return
        for delta in engine.step():
            prompt, answer, written = in_flight[delta.request_id]
            written += delta.token_ids
            if not delta.finished:
                continue
            del in_flight[delta.request_id]
            if answer and delta.finish_reason in ("stop", "length") and len(written) > 1 and not done():
                file.add(text := Text(prompt + written, len(prompt)))
                keep(text)
                advance(len(written))
            elif turns is not None and not answer and delta.finish_reason == "stop" and file.is_new(asked := turns.end(prompt + written)):
                send(asked, True)
    for request_id in in_flight:
        engine.abort(request_id)


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
