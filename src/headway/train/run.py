"""`headway train`, from nothing to a speculator: texts, hidden states, steps, export, what it reaches. Each stage resumes."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch

from headway.config import EngineConfig
from headway.engine.engine import Engine
from headway.errors import ConfigError
from headway.train import card, data
from headway.train.batches import collate
from headway.train.data import Text, TextFile, read_texts
from headway.train.eagle3 import HeadShape, feature_layers
from headway.train.export import draft_vocabulary, write_speculator
from headway.train.hidden_state_file import HiddenStateFile
from headway.train.hidden_states import HiddenStates
from headway.train.initial import average, check_init, keep_init, new_head
from headway.train.live import NUM_DRAFTS, Live, accept_live
from headway.train.objective import mean_acceptance_length
from headway.train.options import TrainOptions
from headway.train.recording import recorded_states
from headway.train.run_record import RunRecord, check, interruptible, open_record
from headway.train.screen import Screen
from headway.train.trainer import Trainer

DATA_SHARE = 0.45       # of the time, for writing texts: a text that is learned more than about three times teaches no more
END_SHARE = 0.04        # for exporting and measuring what was reached
NUM_HELD_OUT = 24
MAX_TEXT = 1024         # tokens of one text, prompt included
SLACK = 1.15            # training may take this much longer than planned before it is cut short


def train(options: TrainOptions, command: str, screen: Screen) -> Live:
    """Raises ConfigError or ModelError for what cannot work, TrainingError for a loss that is not a number, KeyboardInterrupt after
    Ctrl-C; in the latter two cases the same command goes on where this one stopped."""
    began = time.monotonic()
    out = Path(options.out)
    run = out / "run"
    plan = open_record(run, options)
    budget = options.minutes * 60.0
    check_init(options.init)
    init = keep_init(options.init, run)
    engine = Engine(EngineConfig(
        model=options.target, dtype=options.dtype, device=options.device, seed=options.seed, num_threads=options.num_threads,
        enable_prefix_caching=False,   # or hidden states of shared prefixes would not be seen
    ), progress=True)  # fmt: skip
    with interruptible() as stopped, _Spent(plan, began) as spent:
        if "num_texts" not in plan.values:
            _write_texts(engine, options, run, spent.deadline(DATA_SHARE * budget), screen, stopped)
        texts, held_out = read_texts(run / "texts.jsonl"), read_texts(run / "held_out.jsonl")
        if not texts:
            raise ConfigError("no text was written in the time: give more --minutes")
        texts = texts[: plan.number("num_texts", lambda: len(texts))]   # more time later must not change what is learned
        target = engine.model
        ids = draft_vocabulary(_counts(texts, target.config.vocab_size), options.draft_vocab_size).to(target.device)
        shape = HeadShape.of(target.config, len(ids))
        features = HiddenStates(target, shape.layers, texts, run, options.cache_bytes)
        with screen.bar("hidden states (tokens)", int(features.offsets[features.num_stored])) as advance:
            features.store(advance)
        head = new_head(shape, target, ids, options.seed, init)
        batches = [collate(HiddenStates(target, shape.layers, held_out, run, 0).get([i]), options.ttt_steps) for i in range(len(held_out))]
        trainer = Trainer(head, target, texts, features, batches, options, run)
        trainer.load()
        check(stopped)
        left = budget * (1.0 - END_SHARE) - spent.seconds
        num_steps = plan.number("num_steps", lambda: options.num_steps or max(1, int(left / trainer.measure())))
        screen.say(f"{len(texts)} texts, {sum(t.num_answer for t in texts)} answer tokens, {num_steps} steps")
        deadline = time.monotonic() + SLACK * max(left, 1.0) if options.num_steps is None else float("inf")
        with screen.steps(num_steps, run / "log.jsonl") as report:
            trainer.run(num_steps, report, deadline, stopped)
        check(stopped)
    if init is not None:
        average(head, init)
    rates = trainer.evaluate()
    write_speculator(out, head.eval(), target, name=options.target, num_speculative_tokens=NUM_DRAFTS)
    live = accept_live(engine, out, [text.token_ids[: text.num_prompt] for text in held_out], options, screen)
    card.write(out, options, command, texts, trainer, rates, live, run / "log.jsonl")
    screen.say(f"acceptance on texts never trained on: {', '.join(f'{r:.2f}' for r in rates)}; length {mean_acceptance_length(rates):.2f}")
    return live


def _write_texts(
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


def _counts(texts: list[Text], vocab_size: int) -> torch.Tensor:
    answers = torch.tensor([token for text in texts for token in text.token_ids[text.num_prompt :]])
    return torch.bincount(answers, minlength=vocab_size)


class _Spent:
    """Seconds used by all runs so far; written down however this one ends."""

    def __init__(self, plan: RunRecord, began: float) -> None:
        self.plan, self.began = plan, began
        self.before = float(plan.values.get("seconds", 0.0))

    @property
    def seconds(self) -> float:
        return self.before + time.monotonic() - self.began

    def deadline(self, budget: float) -> float:
        return time.monotonic() + budget - self.seconds

    def __enter__(self) -> _Spent:
        return self

    def __exit__(self, *_: object) -> None:
        self.plan.set("seconds", self.seconds)
