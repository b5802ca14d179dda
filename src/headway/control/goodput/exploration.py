"""Trying drafters where they do not seem worth asking, as far as their budgets pay for it."""

from __future__ import annotations

from collections.abc import Sequence

from headway.control.costs import CostModel
from headway.control.goodput.assignment import NOBODY
from headway.control.goodput.decision import Step
from headway.control.goodput.drafter_state import DrafterState
from headway.control.policy import SequenceView


def probe(
    step: Step, drafters: Sequence[DrafterState], able: Sequence[SequenceView], owner: list[int], costs: CostModel, deciding_ms: float
) -> bool:
    """Adds probes and shadow drafts to `step`; whether another probe is paid for already.

    Where cheap drafters are looked up, or could be, an expensive one is tried on what they leave to it.

    owner   [n] index of the drafter that each sequence has, or NOBODY; probes take those that are free
    """
    prices, again = step.prices, False
    cheap = [drafter in step.assignment.lookups for drafter in drafters]
    rest = [
        [i for i, who in enumerate(owner) if who != index and not (cheap[index] and who != NOBODY and not cheap[who])]
        for index in range(len(cheap))
    ]
    plain_ms = prices.plain_ms / max(1, len(rest) - rest.count([]))
    for index, (drafter, others) in enumerate(zip(drafters, rest, strict=True)):
        known = [drafter.gain.of(able[i].seq_id) for i in others]
        unseen = sum([able[i].num_context - 1 - own.num_seen for i, own in zip(others, known, strict=True)])
        if not drafter.affords_probe(prices.number, plain_ms, len(others), unseen, deciding_ms):
            continue
        free = [i for i in others if not drafter.account.off and (owner[i] == NOBODY or (cheap[owner[i]] and not cheap[index]))]
        step.try_on(drafter, [able[i] for i in free], costs)
        for i in free:
            owner[i] = index
        for i, own in zip(others, known, strict=True):
            if owner[i] != index and (able[i].greedy or drafter.deterministic):
                step.watch(drafter, able[i])
            own.note_ask(prices.number, able[i].num_context)
        again = again or drafter.budget.can_probe
    return again
