"""Trying drafters where they do not seem to pay, as far as their budgets allow."""

from __future__ import annotations

from collections.abc import Sequence

from headway.control.costs import CostModel
from headway.control.goodput.assignment import NOBODY
from headway.control.goodput.decision import Step
from headway.control.goodput.drafter_state import DrafterState
from headway.control.policy import SequenceView


def probe(
    step: Step, drafters: Sequence[DrafterState], able: Sequence[SequenceView], owner: list[int], costs: CostModel, deciding_ms: float
) -> None:
    """Adds probes and shadow drafts to `step`.

    A drafter is tried on all sequences for which it does not seem to pay at once: verifying pays for its fixed costs only when many have
    something to verify. Where another one drafts, or it is switched off, its draft is a shadow: compared, not verified. Where cheap
    drafters are looked up, an expensive one is tried on what they leave to it.

    owner   [n] index of the drafter that each sequence has, or NOBODY; probes take those that are free
    """
    cheap = [drafter in step.assignment.lookups for drafter in drafters]
    rest = [
        [i for i, who in enumerate(owner) if who != index and not (cheap[index] and who != NOBODY and not cheap[who])]
        for index in range(len(cheap))
    ]
    num_tried = len(rest) - rest.count([])
    for index, (drafter, others) in enumerate(zip(drafters, rest, strict=True)):
        budget, sequences = drafter.budget, [able[i] for i in others]
        if not drafter.is_new:
            budget.end_loan()
        budget.earn(step.prices.number, _price(drafter, step, sequences, deciding_ms), num_tried)
        if not (others and budget.can_probe) or drafter.account.waits(step.prices.number):
            continue
        budget.pay()
        free = [i for i in others if not drafter.account.off and (owner[i] == NOBODY or (cheap[owner[i]] and not cheap[index]))]
        step.try_on(drafter, [able[i] for i in free], costs)
        for i in free:
            owner[i] = index
        for i in others:
            if owner[i] != index and (able[i].greedy or drafter.deterministic):
                step.watch(drafter, able[i])
            drafter.gain.of(able[i].seq_id).note_ask(able[i].num_context)


def _price(drafter: DrafterState, step: Step, sequences: Sequence[SequenceView], deciding_ms: float) -> float:
    """Plain steps that trying it on these takes: drafting, catching up, and the policy's own time."""
    fixed, each, per_unseen = drafter.prices(step.prices.number)
    further = drafter.further_ms(len(sequences), drafter.depth) if sequences else 0.0
    unseen = sum([seq.num_context - 1 - drafter.gain.of(seq.seq_id).num_seen for seq in sequences])
    return (fixed + (each + further) * len(sequences) + per_unseen * unseen + deciding_ms) / step.prices.plain_ms
