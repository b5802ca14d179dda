"""Optimizer steps that can be stopped anywhere and go on to the bit; a loss that is not a number stops with the last good state kept."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headway.errors import HeadwayError
from headway.models.decoder import Decoder
from headway.models.loader import multiplies_bf16
from headway.train import losses, objective
from headway.train.batches import Batch, collate, epoch_order
from headway.train.data import Text
from headway.train.eagle3 import Eagle3Head
from headway.train.hidden_states import HiddenStates, compute
from headway.train.muon import Muon
from headway.train.objective import Targets
from headway.train.options import TrainOptions

WARMUP = 0.04          # of all steps
FINAL_RATE = 0.05      # of the peak
MAX_GRADIENT = 1.0
REPLACED = 0.15        # of an on-policy text's answer tokens
CHECKPOINT_SECONDS = 60.0
NUM_EVALUATIONS = 12


class TrainingError(HeadwayError):
    """Training cannot go on; what was good is in the checkpoint."""


@dataclass(frozen=True)
class Progress:
    """After a step: mean weighted distance per position; acceptance by position at an evaluation, else None."""

    step: int
    num_steps: int
    loss: float
    learning_rate: float
    tokens_per_s: float
    acceptance: list[float] | None


class Trainer:
    """`run` until `num_steps`. State: weights, optimizer, place in the data; all of it is in the checkpoint."""

    def __init__(
        self, head: Eagle3Head, target: Decoder, texts: Sequence[Text], features: HiddenStates, held_out: Sequence[Batch],
        options: TrainOptions, directory: Path,
    ) -> None:
        self.head, self.target, self.texts, self.features = head, target, texts, features
        self.held_out, self.options, self.directory = held_out, options, directory
        self.targets = Targets.of(target, head.target_ids)
        self.loss = losses.LOSSES[options.loss]
        # bf16 where the target's products are and the device has instructions for them: without, PyTorch's take a hundred times as long.
        self.dtype = torch.bfloat16 if target.dtype == torch.bfloat16 and multiplies_bf16(target.device) else torch.float32
        self.optimizers = _optimizers(head, options.learning_rate, self.dtype)
        self.step = self.epoch = self.cursor = 0
        self.seconds = 0.0
        self._order: list[list[list[int]]] = []

    @property
    def checkpoint(self) -> Path:
        return self.directory / "checkpoint.pt"

    # -- state ----------------------------------------------------------------------------------------------------

    def save(self) -> None:
        state = {
            "step": self.step, "epoch": self.epoch, "cursor": self.cursor, "seconds": self.seconds,
            "head": self.head.state_dict(), "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
        }
        part = self.checkpoint.with_suffix(".part")
        torch.save(state, part)
        part.replace(self.checkpoint)

    def load(self) -> bool:
        """False when there is nothing to go on from. Raises TrainingError for a checkpoint of another head."""
        if not self.checkpoint.exists():
            return False
        try:
            state: dict[str, Any] = torch.load(self.checkpoint, map_location=self.target.device, weights_only=True)
            self.head.load_state_dict(state["head"])
            for optimizer, values in zip(self.optimizers, state["optimizers"], strict=True):
                optimizer.load_state_dict(values)
        except Exception as error:   # torch raises many kinds for a damaged file
            raise TrainingError(f"{self.checkpoint} cannot be resumed from: {error}; delete it to start again") from error
        self.step, self.epoch, self.cursor, self.seconds = state["step"], state["epoch"], state["cursor"], state["seconds"]
        self._order = []
        return True

    # -- steps ----------------------------------------------------------------------------------------------------

    def run(
        self, num_steps: int, report: Callable[[Progress], None], deadline: float = math.inf, stop: Callable[[], bool] = lambda: False
    ) -> None:
        """Steps up to `num_steps` in all, until `deadline` (of `time.monotonic`) or until `stop()`. Saves now and then, and at the end."""
        began = saved = time.monotonic()
        before = self.seconds
        every = max(1, num_steps // NUM_EVALUATIONS)
        count = 0
        while self.step < num_steps and time.monotonic() < deadline and not stop():
            loss, tokens = self.train_step(num_steps)
            count += tokens
            self.seconds = before + time.monotonic() - began
            evaluated = self.evaluate() if self.step % every == 0 or self.step == num_steps else None
            rate = count / max(1e-9, time.monotonic() - began)
            report(Progress(self.step, num_steps, loss, self.rate(self.step, num_steps), rate, evaluated))
            if time.monotonic() - saved > CHECKPOINT_SECONDS:
                self.save()
                saved = time.monotonic()
        self.save()

    def train_step(self, num_steps: int) -> tuple[float, int]:
        """One optimizer step: (mean weighted distance per learned position, how many of them)."""
        micro_batches = self._next()
        learned = sum(max(1, self.texts[i].num_answer) for indices in micro_batches for i in indices)
        total = torch.zeros((), device=self.target.device)
        for indices in micro_batches:
            distance = self._distance(indices) / learned
            distance.backward()   # type: ignore[no-untyped-call]
            total += distance.detach()
        norm = torch.nn.utils.clip_grad_norm_(self.head.parameters(), MAX_GRADIENT)
        if not math.isfinite(float(total)) or not math.isfinite(float(norm)):
            self.head.zero_grad()
            raise TrainingError(
                f"the loss is not a number at step {self.step + 1}; {self.checkpoint} holds the last good state. "
                "A smaller --learning-rate, or --dtype float32, usually helps"
            )
        self._update(self.rate(self.step, num_steps))
        self.step += 1
        self.cursor += 1
        return float(total), learned

    def measure(self, num_steps: int = 2) -> float:
        """Seconds per optimizer step, from steps of no length."""
        order = epoch_order([len(text.token_ids) for text in self.texts], self.options.batch_tokens, self.options.seed, 0)
        times = []
        for micro_batches in (order * num_steps)[:num_steps]:
            began = time.monotonic()
            for indices in micro_batches:
                self._distance(indices).backward()   # type: ignore[no-untyped-call]
            self._update(0.0)
            times.append(time.monotonic() - began)
        self.optimizers = _optimizers(self.head, self.options.learning_rate, self.dtype)   # their averages have seen gradients
        return min(times)

    def evaluate(self) -> list[float]:
        """Acceptance by position on the held-out texts."""
        with self._mixed():
            return objective.acceptance(self.head, self.held_out, self.targets, self.options.ttt_steps)

    def rate(self, step: int, num_steps: int) -> float:
        """Linear warm-up, then half a cosine down to FINAL_RATE of the peak."""
        warm = min(1.0, (step + 1) / max(1, round(WARMUP * num_steps)))
        cosine = 0.5 * (1.0 + math.cos(math.pi * min(1.0, step / num_steps)))
        return self.options.learning_rate * warm * (FINAL_RATE + (1.0 - FINAL_RATE) * cosine)

    # -- inside ---------------------------------------------------------------------------------------------------

    def _update(self, rate: float) -> None:
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
            optimizer.zero_grad()

    def _next(self) -> list[list[int]]:
        lengths = [len(text.token_ids) for text in self.texts]
        if not self._order:
            self._order = epoch_order(lengths, self.options.batch_tokens, self.options.seed, self.epoch)
        if self.cursor >= len(self._order):
            self.epoch, self.cursor = self.epoch + 1, 0
            self._order = epoch_order(lengths, self.options.batch_tokens, self.options.seed, self.epoch)
        return self._order[self.cursor]

    def _distance(self, indices: list[int]) -> Tensor:
        batch = collate(self.features.get(indices), self.options.ttt_steps)
        random = np.random.default_rng([self.options.seed, self.epoch, indices[0]])
        with self._mixed():
            if self.options.on_policy > 0 and random.random() < self.options.on_policy:
                batch = self._on_policy(batch, indices, random)
            offset = int(random.integers(1 << 16))
            return objective.distances(self.head, batch, self.targets, self.loss, self.options.ttt_steps, offset)[0]

    def _on_policy(self, batch: Batch, indices: list[int], random: np.random.Generator) -> Batch:
        """Some tokens replaced by what the drafter would write there, and what the target then says: it learns behind its own mistakes
        (Online Speculative Decoding, arXiv:2310.07177)."""
        with torch.no_grad():
            x = self.head.steps(batch.token_ids, batch.hidden, batch.lengths, self.targets.embedding, 1)[0]
            drafted = self.head.target_ids[self.head.lm_head(x).argmax(-1)].cpu().numpy()
        texts = []
        for row, index in enumerate(indices):
            text = self.texts[index]
            token_ids = np.array(text.token_ids)
            own = np.flatnonzero(random.random(len(token_ids)) < REPLACED)
            own = own[(own > text.num_prompt) & (own < len(token_ids) - 1)]
            token_ids[own] = drafted[row, own - 2]
            texts.append(Text(token_ids.tolist(), text.num_prompt))
        return collate(compute(self.target, self.features.layers, texts), self.options.ttt_steps)

    def _mixed(self) -> AbstractContextManager[Any]:
        """Matrix products in `dtype`; weights, norms, softmax and losses stay float32."""
        return torch.autocast(self.target.device.type, self.dtype) if self.dtype == torch.bfloat16 else nullcontext()


def _optimizers(head: Eagle3Head, rate: float, dtype: torch.dtype) -> list[torch.optim.Optimizer]:
    """Muon for the matrices between hidden states, AdamW for norms and output rows, which are not such matrices. docs/log.md has both
    side by side. `dtype`: of matrix products."""
    def between(name: str, parameter: Tensor) -> bool:
        return parameter.ndim == 2 and name != "lm_head.weight"

    named = list(head.named_parameters())
    return [
        Muon([p for name, p in named if between(name, p)], rate, dtype=dtype),
        torch.optim.AdamW([p for name, p in named if not between(name, p)], lr=rate, betas=(0.9, 0.95), weight_decay=0.01),
    ]


def append_log(path: Path, progress: Progress) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(progress.__dict__) + "\n")
