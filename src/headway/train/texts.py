"""What a head learns from: texts that the target writes, and hidden states that are kept meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from headway.engine.engine import Engine
from headway.train import data
from headway.train.data import Text, TextFile, read_texts
from headway.train.eagle3 import feature_layers
from headway.train.hidden_state_file import HiddenStateFile
from headway.train.options import TrainOptions
from headway.train.recording import recorded_states
from headway.train.run_record import check
from headway.train.screen import Screen

NUM_HELD_OUT = 24
MAX_TEXT = 1024         # tokens of one text, prompt included


def write_texts(
    engine: Engine, options: TrainOptions, run: Path, deadline: float, screen: Screen, stopped: Callable[[], bool]
) -> None:
    """run/texts.jsonl, to learn from, and run/held_out.jsonl, written greedily by the target and never learned."""
    longest = min(MAX_TEXT, engine.max_model_len)
    prompts: list[list[int]] | None = None
    ready: list[Text] = []
    if options.data is not None:
        prompts, ready = data.read_user_file(Path(options.data), engine, longest - options.max_tokens)
    aside = _held_out_prompts(prompts, ready)
    held_out_file = TextFile(run / "held_out.jsonl", [])
    wanted = len(aside) if aside is not None else NUM_HELD_OUT
    common: dict[str, Any] = {"max_tokens": options.max_tokens, "stopped": stopped}
    with screen.bar("held-out texts (tokens)", None) as advance:
        todo = None if aside is None else iter(aside[held_out_file.num_texts :])
        data.write_texts(engine, held_out_file, todo, seed=options.seed + 1, deadline=float("inf"), num_tokens=None, num_texts=wanted,
                         aside=True, advance=advance, **common)  # fmt: skip
    check(stopped)
    file = TextFile(run / "texts.jsonl", read_texts(held_out_file.path))
    for text in ready:
        if file.is_new(text.token_ids[: text.num_prompt]):
            file.add(text)
    if prompts is not None or not ready:
        with screen.bar("texts (answer tokens)", options.num_tokens) as advance, _keeping(engine, options, file) as keep:
            advance(file.num_tokens)
            todo = None if prompts is None else (prompt for prompt in prompts if file.is_new(prompt))
            data.write_texts(engine, file, todo, seed=options.seed, deadline=deadline, num_tokens=options.num_tokens, advance=advance,
                             keep=keep, **common)  # fmt: skip
    check(stopped)


def _keeping(engine: Engine, options: TrainOptions, file: TextFile) -> AbstractContextManager[Callable[[Text], None]]:
    """Keeps hidden states of the texts to come where computing them again would take longer than fetching them row by row: on a CPU."""
    target = engine.model
    if target.device.type != "cpu":
        return nullcontext(lambda _: None)
    store = HiddenStateFile(file.path.parent, target, feature_layers(target.config), options.cache_bytes)
    store.begin(read_texts(file.path))
    return recorded_states(engine, file, store)


def _held_out_prompts(prompts: list[list[int]] | None, ready: list[Text]) -> list[list[int]] | None:
    """Taken from the user's data, where there is any: every tenth at most, and never learned."""
    if prompts:
        count = min(NUM_HELD_OUT, max(1, len(prompts) // 10))
        aside, prompts[:] = prompts[:count], prompts[count:]
        return aside
    if ready:
        count = min(NUM_HELD_OUT, max(1, len(ready) // 10))
        aside, ready[:] = [text.token_ids[: text.num_prompt] for text in ready[:count]], ready[count:]
        return aside
    return None
