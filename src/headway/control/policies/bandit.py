"""Lengths as arms of a bandit: UCB over the tokens per second that each k brought, per range of batch sizes.

    every `interval` steps: the arm with the largest   mean_k / best + exploration * sqrt(ln n / n_k)

mean_k is the mean of tokens per millisecond of the intervals played with k, divided by the largest mean so that the rewards lie in
[0, 1]; n_k how often k was played (decayed, so that a change of workload is noticed), n their sum. Every arm is played once
first. Batch sizes are distinguished by powers of two, since the best length depends on the load. The first drafter of the list drafts.

Source: Hou et al., "BanditSpec" (arXiv 2505.15141), whose UCBSpec takes lengths or methods as arms and sqrt(6 ln t / n) as the bonus for
one request at a time; the decay is discounted UCB (Garivier and Moulines 2011). It explores at full price: each arm that loses
is still played ever again, and 0 is one of the arms.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from headway.config import option
from headway.control.policies.static import same_for_all
from headway.control.policy import BatchView, Policy
from headway.errors import ConfigError
from headway.types import Choice, Feedback


class Bandit(Policy):
    @dataclass(frozen=True)
    class Options:
        arms: tuple[int, ...] = option((0, 1, 2, 3, 4, 6, 8), "lengths to choose from; those above num_speculative_tokens count as that")
        exploration: float = option(0.1, "weight of the bonus for arms that were played little, >= 0")
        interval: int = option(4, "steps that an arm is played for, >= 1")
        memory: float = option(200.0, "plays that are remembered, > 1")

        def __post_init__(self) -> None:
            if not self.arms or min(self.arms) < 0 or len(set(self.arms)) != len(self.arms):
                raise ConfigError(f"arms must be different numbers >= 0, got {list(self.arms)}")
            if not 0.0 <= self.exploration < math.inf:
                raise ConfigError(f"exploration must be >= 0 and finite, got {self.exploration}")
            if self.interval < 1 or not self.memory > 1.0:
                raise ConfigError(f"interval must be >= 1 and memory > 1, got {self.interval} and {self.memory}")

    def __init__(self, options: Options | None = None) -> None:
        self.options = options or self.Options()
        self._arms: dict[int, list[_Arm]] = {}   # range of batch sizes -> its arms
        self._range = -1
        self._arm: _Arm | None = None
        self._left = 0                           # steps of the present play
        self._tokens, self._ms = 0, 0.0

    def plan(self, view: BatchView) -> Mapping[int, Choice]:
        batch_size = view.num_decoding
        if batch_size == 0:
            return {}
        range_ = batch_size.bit_length()
        if range_ != self._range or self._left <= 0 or self._arm is None:
            self._credit()
            self._range, self._left = range_, self.options.interval
            arms = self._arms.setdefault(range_, [_Arm(k) for k in self.options.arms])
            previous, self._arm = self._arm, self._choose(arms)
            if previous is None or previous.k != self._arm.k:
                self.reason = f"k = {self._arm.k}: {self._arm.mean:.3f} tokens/ms in {self._arm.num_plays:.0f} plays"
        self._left -= 1
        return same_for_all(view, min(self._arm.k, view.max_k))

    def observe(self, feedback: Feedback) -> None:
        # A step with prefill says nothing about the length.
        if feedback.num_prefill_tokens == 0 and 0.0 < feedback.step_ms < math.inf:
            self._tokens += len(feedback.sequences) + sum(seq.num_accepted for seq in feedback.sequences)
            self._ms += feedback.step_ms

    def _credit(self) -> None:
        """Ends a play: its reward goes to its arm, and the others of the range fade."""
        if self._arm is not None and self._ms > 0.0:
            for arm in self._arms[self._range]:
                arm.fade(1.0 - 1.0 / self.options.memory)
            self._arm.learn(self._tokens / self._ms)
        self._tokens, self._ms = 0, 0.0

    def _choose(self, arms: list[_Arm]) -> _Arm:
        fresh = next((arm for arm in arms if arm.num_plays == 0.0), None)
        if fresh is not None:
            return fresh
        best, total = max(arm.mean for arm in arms), sum(arm.num_plays for arm in arms)
        return max(arms, key=lambda arm: arm.mean / best + self.options.exploration * math.sqrt(math.log(1.0 + total) / arm.num_plays))


@dataclass(slots=True)
class _Arm:
    k: int
    mean: float = 0.0         # tokens per millisecond
    num_plays: float = 0.0

    def fade(self, factor: float) -> None:
        self.num_plays *= factor

    def learn(self, reward: float) -> None:
        self.num_plays += 1.0
        self.mean += (reward - self.mean) / self.num_plays
