"""Where `goodput` loses against the best fixed k of a trace, in four parts that add up: each replay is told one thing more.

    nothing told        it starts cold: costs and acceptance unknown
    costs told          the machine's cost model from the start                    the difference: cost-model error
    acceptance told     also how many tokens of each draft are right               acceptance error
    no exploration      also that nothing has to be tried or measured              exploration
    best fixed k        what is left: the choice itself. Negative where deciding per request and step is worth more than any fixed k.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from headway.control.costs import CostModel
from headway.control.goodput.budget import Budget
from headway.control.goodput.decision import Step
from headway.control.goodput.drafter_state import DrafterState
from headway.control.goodput.gain import RequestGain
from headway.control.policies.goodput import Goodput
from headway.control.policy import BatchView, DrafterView, DraftView, SequenceView, Setup
from headway.types import Choice

if TYPE_CHECKING:
    from headway.tune.replay import World

CERTAIN = 0.999


class Told(Goodput):
    """`goodput` that is told some of what it would have to learn. `world` is None where it has to learn acceptance."""

    def __init__(self, world: World | None, *, explores: bool) -> None:
        super().__init__()
        self._records = {} if world is None else {record.seq_id: record for record in world.evidence.sequences}
        self.told = world is not None
        self.explores = explores
        self._positions: dict[int, int] = {}

    def plan(self, view: BatchView) -> Mapping[int, Choice]:
        if self.told:
            self._positions = {seq.seq_id: seq.num_output for seq in view.sequences}
            self._holds_until = 0   # what is known now may be another thing in the next step
        return super().plan(view)

    def right(self, drafter: str, seq_id: int, k: int) -> tuple[int, int]:
        """(length of the draft, how many of its tokens are right)"""
        return self._records[seq_id].drafts[drafter].draft(self._positions[seq_id], k)

    def _new_drafter(self, view: DrafterView, setup: Setup) -> DrafterState:
        return ToldDrafter(view, setup, self)

    def _is_measured_plain(self, step: Step) -> bool:
        return self.explores and super()._is_measured_plain(step)

    def _expected(self, drafter: DrafterState, seq: SequenceView, own: RequestGain) -> float:
        if not self.told:
            return super()._expected(drafter, seq, own)
        assert self._step is not None
        _, right = self.right(drafter.name, seq.seq_id, min(drafter.max_k, seq.max_k))
        return right * (1.0 - self._step.prices.rate * self._step.verify_ms)


class ToldDrafter(DrafterState):
    """One of its drafters."""

    def __init__(self, view: DrafterView, setup: Setup, policy: Told) -> None:
        super().__init__(view, setup.max_k, setup.costs)
        self._policy = policy
        self.budget = self.budget if policy.explores else NoBudget()

    @property
    def is_new(self) -> bool:
        return self._policy.explores and super().is_new

    def reach(self, draft: DraftView) -> list[float]:
        if not self._policy.told:
            return super().reach(draft)
        _, right = self._policy.right(draft.drafter, draft.seq_id, draft.length)
        return [CERTAIN ** (j + 1) if j < right else 1e-9 / (j + 1) for j in range(draft.length)]

    def values(self, drafts: list[DraftView]) -> NDArray[np.float64]:
        if not self._policy.told:
            return super().values(drafts)
        values = np.zeros((len(drafts), max(draft.length for draft in drafts)))
        for row, draft in enumerate(drafts):
            values[row, : draft.length] = self.reach(draft)
        return values


class NoBudget(Budget):
    """Nothing is tried out."""

    @property
    def can_probe(self) -> bool:
        return False


def split(world: World, best: float) -> dict[str, float]:
    """Shares of the best fixed k's goodput `best` (tokens per second). `total` is the sum of the others."""
    from headway.tune.replay import run

    cold = run(Told(None, explores=True), world, costs=CostModel()).goodput
    costs = run(Told(None, explores=True), world).goodput
    acceptance = run(Told(world, explores=True), world).goodput
    free = run(Told(world, explores=False), world).goodput
    parts = {
        "cost-model error": costs - cold, "acceptance error": acceptance - costs, "exploration": free - acceptance, "choice": best - free
    }
    return {name: part / best for name, part in parts.items()} | {"total": (best - cold) / best}
