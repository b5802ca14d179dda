"""One k for the whole batch from the average accepted length, candidates by batch size: SGLang's adaptive rule.

    slot        the entry with the largest smallest-batch-size that the batch reaches; each has its own candidates, k and average
    average     m <- (1 - ema_alpha) m + ema_alpha * (accepted drafts per request of a step), from k - 1 at the start
    every update_interval steps, after warmup_batches:
        down    over the candidates, while m <= the one below - 0.5 + down_hysteresis   (0.5 + down_hysteresis when that is 0)
        up      else, while m > k - 0.5 + up_hysteresis
        k = 0   one candidate up, to see: with a candidate 0 every second interval at most is plain

so k settles at about round(m) + 1 among the candidates. The first drafter of the list drafts. Parameters and defaults are those of
--speculative-adaptive-config, strategy "ema" (SGLang, python/sglang/srt/speculative/adaptive_spec_params.py). It has no cost model: the
candidates by batch size are the user's guess of one.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from headway.config import option
from headway.control.policies.static import same_for_all
from headway.control.policy import BatchView, Policy
from headway.errors import ConfigError
from headway.types import Choice, Feedback

SLOTS = ((1, (1, 3, 5, 7), 0.0, -0.25), (8, (0, 1, 3), 0.0, 0.0), (32, (0, 1), 0.0, 0.0), (64, (0,), 0.0, 0.0))


class EmaSlots(Policy):
    @dataclass(frozen=True)
    class Options:
        slots: tuple[tuple[int, tuple[int, ...], float, float], ...] = option(
            SLOTS, "list of [smallest batch size, [candidate k, ...], up_hysteresis, down_hysteresis]"
        )
        ema_alpha: float = option(0.2, "weight of one more step in the average, in (0, 1]")
        warmup_batches: int = option(10, "steps before the first change in a slot")
        update_interval: int = option(5, "steps between two changes, >= 1")

        def __post_init__(self) -> None:
            bounds = [slot[0] for slot in self.slots]
            if not bounds or bounds[0] != 1 or bounds != sorted(set(bounds)):
                raise ConfigError(f"slots must start at batch size 1 and rise, got bounds {bounds}")
            for bound, candidates, _, _ in self.slots:
                if not candidates or min(candidates) < 0 or list(candidates) != sorted(set(candidates)):
                    raise ConfigError(f"slots: the candidates of batch size {bound} must rise from >= 0, got {list(candidates)}")
            if not 0.0 < self.ema_alpha <= 1.0:
                raise ConfigError(f"ema_alpha must be in (0, 1], got {self.ema_alpha}")
            if self.update_interval < 1 or self.warmup_batches < 0:
                raise ConfigError(f"needs update_interval >= 1, warmup_batches >= 0, got {self.update_interval} and {self.warmup_batches}")

    def __init__(self, options: Options | None = None) -> None:
        self.options = options or self.Options()
        self._bounds = [slot[0] for slot in self.options.slots]
        self._slots = [_Slot(*slot[1:]) for slot in self.options.slots]
        self._slot = self._slots[0]

    def plan(self, view: BatchView) -> Mapping[int, Choice]:
        batch_size = view.num_decoding
        if batch_size == 0:
            return {}
        self._slot = self._slots[bisect_right(self._bounds, batch_size) - 1]
        return same_for_all(view, min(self._slot.k, view.max_k))

    def observe(self, feedback: Feedback) -> None:
        asked = [seq for seq in feedback.sequences if seq.k > 0]
        slot, options = self._slot, self.options
        if not feedback.sequences or (slot.k > 0 and not asked):
            return   # a step of prefill chunks
        slot.learn([seq.num_accepted for seq in asked], options.ema_alpha)
        late = slot.num_steps - options.warmup_batches
        if late > 0 and late % options.update_interval == 0:
            before = slot.k
            slot.move()
            if slot.k != before:
                self.reason = f"k {before} -> {slot.k}: {slot.average:.2f} drafts accepted per request"


class _Slot:
    def __init__(self, candidates: tuple[int, ...], up: float, down: float) -> None:
        self._candidates = candidates
        self._up, self._down = up, down
        self._at = len(candidates) // 2
        self.average = self.k - 1.0
        self.num_steps = 0

    @property
    def k(self) -> int:
        return self._candidates[self._at]

    def learn(self, num_accepted: Sequence[int], share: float) -> None:
        """One step, by request that was drafted for."""
        self.num_steps += 1
        if num_accepted:
            self.average += share * (sum(num_accepted) / len(num_accepted) - self.average)

    def move(self) -> None:
        before, last = self._at, len(self._candidates) - 1
        if self.k == 0:
            self._at = min(1, last)
            self.average = max(self.average, 0.0)
            return
        while self._at > 0 and self.average <= max(0.5, self._candidates[self._at - 1] - 0.5) + self._down:
            self._at -= 1
        while before == self._at < last and self.average > self.k - 0.5 + self._up:
            self._at = before = self._at + 1
