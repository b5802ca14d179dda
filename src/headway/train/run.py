"""`headway train`, from nothing to a speculator: texts, hidden states, steps, export, what it reaches. Each stage resumes."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import torch

from headway.config import EngineConfig
from headway.engine.engine import Engine
from headway.errors import ConfigError
from headway.models.decoder import Decoder
from headway.train import card
from headway.train.batches import collate
from headway.train.data import Text, read_texts
from headway.train.eagle3 import Eagle3Head, HeadShape
from headway.train.export import draft_vocabulary, write_speculator
from headway.train.hidden_states import HiddenStates
from headway.train.initial import average, check_init, keep_init, new_head
from headway.train.live import NUM_DRAFTS, Live, accept_live
from headway.train.objective import mean_acceptance_length
from headway.train.options import TrainOptions
from headway.train.run_record import RunRecord, check, interruptible, open_record
from headway.train.screen import Screen
from headway.train.texts import write_texts
from headway.train.trainer import Trainer

DATA_SHARE = 0.45       # of the time, for writing texts: a text that is learned more than about three times teaches no more
END_SHARE = 0.04        # for exporting and measuring what was reached
SLACK = 1.15            # training may take this much longer than planned before it is cut short


def train(options: TrainOptions, command: str, screen: Screen) -> Live:
    """Raises ConfigError or ModelError for what cannot work, TrainingError for a loss that is not a number, KeyboardInterrupt after
    Ctrl-C; in the latter two cases the same command goes on where this one stopped."""
    began = time.monotonic()
    out = Path(options.out)
    run = out / "run"
    plan = open_record(run, options)
    check_init(options.init)
    init = keep_init(options.init, run)
    engine = Engine(EngineConfig(
        model=options.target, dtype=options.dtype, device=options.device, seed=options.seed, num_threads=options.num_threads,
        enable_prefix_caching=False,   # or hidden states of shared prefixes would not be seen
    ), progress=True)  # fmt: skip
    with interruptible() as stopped, _Spent(plan, began) as spent:
        if "num_texts" not in plan.values:
            write_texts(engine, options, run, spent.deadline(DATA_SHARE * options.minutes * 60.0), screen, stopped)
        texts, held_out = _read_texts(run, plan)
        head = _new_head(options, engine.model, texts, init)
        trainer = _prepare(head, engine.model, texts, held_out, options, run, screen)
        check(stopped)
        _take_steps(trainer, plan, options, spent, screen, stopped)
        check(stopped)
    if init is not None:
        average(head, init)
    rates = trainer.evaluate()
    write_speculator(out, head.eval(), engine.model, name=options.target, num_speculative_tokens=NUM_DRAFTS)
    live = accept_live(engine, out, [text.token_ids[: text.num_prompt] for text in held_out], options, screen)
    card.write(out, options, command, texts, trainer, rates, live, run / "log.jsonl")
    screen.say(f"acceptance on texts never trained on: {', '.join(f'{r:.2f}' for r in rates)}; length {mean_acceptance_length(rates):.2f}")
    return live


def _read_texts(run: Path, plan: RunRecord) -> tuple[list[Text], list[Text]]:
    """To learn from, and held out."""
    texts = read_texts(run / "texts.jsonl")
    if not texts:
        raise ConfigError("no text was written in the time: give more --minutes")
    texts = texts[: plan.number("num_texts", lambda: len(texts))]   # more time later must not change what is learned
    return texts, read_texts(run / "held_out.jsonl")


def _new_head(options: TrainOptions, target: Decoder, texts: list[Text], init: str | None) -> Eagle3Head:
    ids = draft_vocabulary(_counts(texts, target.config.vocab_size), options.draft_vocab_size).to(target.device)
    return new_head(HeadShape.of(target.config, len(ids)), target, ids, options.seed, init)


def _prepare(
    head: Eagle3Head, target: Decoder, texts: list[Text], held_out: list[Text], options: TrainOptions, run: Path, screen: Screen
) -> Trainer:
    """A trainer with the hidden states of all texts, where it stopped."""
    features = HiddenStates(target, head.shape.layers, texts, run, options.cache_bytes)
    with screen.bar("hidden states (tokens)", int(features.offsets[features.num_stored])) as advance:
        features.store(advance)
    aside = HiddenStates(target, head.shape.layers, held_out, run, 0)
    batches = [collate(aside.get([i]), options.ttt_steps) for i in range(len(held_out))]
    trainer = Trainer(head, target, texts, features, batches, options, run)
    trainer.load()
    return trainer


def _take_steps(
    trainer: Trainer, plan: RunRecord, options: TrainOptions, spent: _Spent, screen: Screen, stopped: Callable[[], bool]
) -> None:
    """As many as the time that is left allows, measured by a few."""
    left = options.minutes * 60.0 * (1.0 - END_SHARE) - spent.seconds
    num_steps = plan.number("num_steps", lambda: options.num_steps or max(1, int(left / trainer.measure())))
    texts = trainer.texts
    screen.say(f"{len(texts)} texts, {sum(t.num_answer for t in texts)} answer tokens, {num_steps} steps")
    deadline = time.monotonic() + SLACK * max(left, 1.0) if options.num_steps is None else float("inf")
    with screen.steps(num_steps, trainer.directory / "log.jsonl") as report:
        trainer.run(num_steps, report, deadline, stopped)


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
