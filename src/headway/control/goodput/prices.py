"""The price of time: `rate`, the tokens that a millisecond brings now, and what the step to come takes without drafts.

The rate is the plain one, B / T(B), times the speed-up that speculation reached lately. Every decision compares tokens gained with
milliseconds spent at that price. A price and not the ratio tokens / T of the step: a request has a fixed number of tokens to write, so what
counts is the time of all its steps together.
"""

from __future__ import annotations

from dataclasses import dataclass

from headway.control import constants as const
from headway.control.costs import CostModel
from headway.control.goodput.drafter_state import DrafterState
from headway.control.goodput.guard import Mean, PlainSteps
from headway.control.policy import BatchView, SequenceView
from headway.types import Feedback


@dataclass(frozen=True, slots=True)
class StepPrices:
    """The step to come. `rate` in tokens per millisecond."""

    number: int
    sequences: list[SequenceView]  # those that decode
    num_context: int
    num_prefill: int               # tokens expected in the same step
    plain_ms: float                # of the decoding rows without drafts
    rate: float
    verify_ms: float               # of one more draft

    def pass_ms(self, drafter: DrafterState) -> float:
        """Milliseconds of one more token for everybody."""
        return len(self.sequences) * drafter.further_ms(len(self.sequences), 2)


class Pricing:
    """Follows the speed-up, when plain steps came, and the policy's own time."""

    def __init__(self, costs: CostModel) -> None:
        self._costs = costs
        self._plain = PlainSteps()
        self._speedup = Mean(const.MEAN_MEMORY, 1.0, 1.0)
        self._deciding = Mean(const.MEAN_MEMORY)
        self._latest = 0                       # step that was priced

    @property
    def deciding_ms(self) -> float:
        """Of the policy's own time in a step with drafts."""
        return self._deciding.value

    @property
    def wants_plain(self) -> bool:
        """The next step should be a plain one, to measure what that takes."""
        return self._plain.is_due(self._costs.speed)

    def skip_to(self, step: int) -> None:
        """Steps in between were not planned: plain ones."""
        self._speedup.observe(1.0, min(float(step - self._latest - 1), const.MEAN_MEMORY))
        self._latest = step

    def of(self, view: BatchView, decoding: list[SequenceView]) -> StepPrices:
        num_rows, prefill = len(decoding), 0
        num_context = sum([seq.num_context for seq in decoding])
        if num_rows < len(view.sequences):
            prefill = min(sum(seq.num_pending for seq in view.sequences if not seq.decoding), max(0, view.token_budget - num_rows))
        plain_ms = max(1e-3, self._costs.curve(num_rows, num_rows, 0, num_context)[0])
        more_ms = self._costs.curve(num_rows, 2 * num_rows, 0, num_context)[0]
        return StepPrices(
            number=view.step, sequences=decoding, num_context=num_context, num_prefill=prefill, plain_ms=plain_ms,
            rate=max(1.0, self._speedup.value) * num_rows / plain_ms, verify_ms=max(0.0, more_ms - plain_ms) / num_rows,
        )  # fmt: skip

    def observe_unplanned(self) -> None:
        """A step without a decision: a plain one."""
        self._speedup.observe(1.0, 1.0)

    def observe(self, prices: StepPrices, feedback: Feedback, tokens_per_row: float, *, verified: bool) -> None:
        """A step without prefill; `verified`: some drafts were."""
        self._plain.observe(self._costs.speed, plain=not verified)
        plain_steps = min(20.0, feedback.step_ms / prices.plain_ms)
        self._speedup.observe(tokens_per_row / plain_steps, plain_steps)
        if verified or feedback.drafters:
            self._deciding.observe(min(feedback.policy_ms, 0.1 * prices.plain_ms))
