"""One step's decision, from `plan` until `observe`, and who drafts once cheap drafters were looked up.

A drafter that copies costs next to nothing, states how confident it is, and often finds nothing. So wherever an expensive one (a network)
pays, the cheap ones are looked up first, and each step decides with their drafts in hand: what the best of them brings net of
verification, against what the expensive one has brought lately where it was asked, net of its price. What an expensive one gains is
therefore learned on what the cheap ones leave to it; together they bring the larger of the two in every step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from headway.control.costs import CostModel
from headway.control.goodput.assignment import Assignment, choice
from headway.control.goodput.draft_length import Stopping
from headway.control.goodput.drafter_state import DrafterState
from headway.control.goodput.prices import StepPrices
from headway.control.policy import DraftView, SequenceView
from headway.types import Choice


class Step:
    """What was decided and expected of one step."""

    def __init__(self, prices: StepPrices) -> None:
        self.prices = prices
        self.verify_ms = prices.verify_ms                      # of one more draft
        self.assignment = Assignment([])
        self.asked: dict[int, DrafterState] = {}               # the same as the assignment's until drafters were looked up
        self.probed: set[int] = set()
        self.shadow_plan: dict[int, Choice] = {}
        self.left: dict[int, tuple[DrafterState, float]] = {}  # best lookup that was not taken, and the tokens it was to bring
        self._stopping: dict[str, Stopping] = {}               # by drafter

    def adopt(self, assignment: Assignment) -> None:
        self.assignment, self.asked = assignment, assignment.asked

    def try_on(self, drafter: DrafterState, sequences: Sequence[SequenceView], costs: CostModel) -> None:
        """A probe: `drafter` drafts for these in this step only."""
        if not self.probed:
            self.adopt(self.assignment.copy())
        self.assignment.ask(drafter, sequences, self.prices, costs)
        self.probed.update([seq.seq_id for seq in sequences])
        if self.assignment.lookups and drafter not in self.assignment.lookups:
            self.assignment.net_gains.update(dict.fromkeys([seq.seq_id for seq in sequences], 0.0))

    def verified(self, verify_ms: float) -> None:
        """What each draft that is verified costs, now that their number is known."""
        self.verify_ms = verify_ms

    def watch(self, drafter: DrafterState, seq: SequenceView) -> None:
        """A shadow draft, unless one is under way already."""
        if seq.seq_id not in self.shadow_plan and seq.seq_id not in drafter.shadows:
            k = min(drafter.depth, seq.max_k)
            self.shadow_plan[seq.seq_id] = choice(drafter.name, k)
            drafter.watch(seq.seq_id, k, len(self.prices.sequences), self.prices.rate, self.verify_ms)

    def stopping_of(self, drafter: DrafterState, costs: CostModel) -> Stopping:
        found = self._stopping.get(drafter.name)
        if found is None:
            prices, num_rows = self.prices, len(self.prices.sequences)
            tokens = num_rows + prices.num_prefill + np.arange(num_rows * drafter.max_k + 1)
            step_ms = costs.predict(num_rows, tokens, prices.num_context, prices.num_prefill)
            found = self._stopping[drafter.name] = Stopping(drafter, step_ms, prices.rate)
        return found

    def drafting_ms(self, drafters: Sequence[DrafterState], drafts: Sequence[DraftView], costs: CostModel) -> float:
        """What drafting was to take; where it was decided on the way, what so many passes were."""
        asked, ms = list(self.asked.values()), 0.0
        for drafter in drafters:
            depth = drafter.depth
            if drafter.stops_early:
                depth = max([draft.length for draft in drafts if draft.drafter == drafter.name], default=1)
            ms += costs.predict_draft(drafter.name, asked.count(drafter), depth)
        if self.left:
            ms += sum([costs.predict_draft(drafter.name, len(self.left), drafter.depth) for drafter in self.assignment.lookups])
        return ms

    def take(self, drafts: Sequence[DraftView], by_name: Mapping[str, DrafterState]) -> dict[int, str]:
        """seq_id -> the cheap drafter whose draft is taken, for those that are not left to the expensive one; `asked` then says who was."""
        net_gains = self.assignment.net_gains
        if not net_gains:
            return {}
        gains = [net_gain(by_name[draft.drafter].reach(draft), self.assignment.lookup_prices) for draft in drafts]
        best: dict[int, tuple[float, str]] = {}
        for draft, gain in zip(drafts, gains, strict=True):
            if gain > best.get(draft.seq_id, (0.0, ""))[0]:
                best[draft.seq_id] = gain, draft.drafter
        nothing = 0.0, self.assignment.lookups[0].name
        taken: dict[int, str] = {}
        for seq_id, net in net_gains.items():
            gain, name = best.get(seq_id, nothing)
            if gain > 0.0 if seq_id in self.probed or seq_id in self.assignment.behind_slo else gain >= net:
                taken[seq_id] = name
            else:
                self.left[seq_id] = by_name[name], gain
        self._note(taken, by_name)
        return taken

    def _note(self, taken: Mapping[int, str], by_name: Mapping[str, DrafterState]) -> None:
        contexts = {seq.seq_id: seq.num_context for seq in self.prices.sequences}
        self.asked = self.asked | {seq_id: by_name[name] for seq_id, name in taken.items()}
        for seq_id in self.left:
            self.asked[seq_id].gain.of(seq_id).note_ask(contexts[seq_id])


def net_gain(values: Sequence[float], prices: Sequence[float]) -> float:
    """Tokens net of verification that the best beginning of a draft brings; 0 when none pays.

    values  P(accepted up to here)
    prices  [1 + k] tokens that verifying so many drafts of one request costs
    """
    best = reached = 0.0
    for value, price in zip(values, prices[1:], strict=False):
        reached += value
        best = max(best, reached - price)
    return best
