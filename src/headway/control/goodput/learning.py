"""What a step teaches: the drafters' accounts against plain decoding, their acceptance, and what asking them brought."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from headway.control.costs import CostModel
from headway.control.goodput.decision import Step
from headway.control.goodput.drafter_state import DrafterState, some
from headway.control.goodput.prices import Pricing
from headway.types import Feedback, SequenceFeedback, ShadowFeedback

Verified = Mapping[str, Sequence[SequenceFeedback]]


def compare(step: Step, feedback: Feedback, verified: Verified, drafters: Sequence[DrafterState], pricing: Pricing) -> list[DrafterState]:
    """The step against a plain one, and each drafter's part in the difference, in plain steps. Those that are switched off by that."""
    prices = step.prices
    if not (verified or feedback.drafters):
        pricing.observe_plain(prices, feedback.step_ms)
        return []
    drafting, num_rows = {part.drafter for part in feedback.drafters}, len(feedback.sequences)
    rest = max(1e-3, feedback.step_ms - sum([part.draft_ms for part in feedback.drafters]))
    drafts = {name: sum([seq.num_drafts for seq in mine]) for name, mine in verified.items()}
    accepted = {name: sum([seq.num_accepted for seq in mine]) for name, mine in verified.items()}
    num_drafts = sum(drafts.values())
    tokens_per_row = 1.0 + sum(accepted.values()) / num_rows
    pricing.observe(prices, feedback.step_ms, rest, feedback.policy_ms, tokens_per_row, verified=num_drafts > 0)
    beyond = min(4.0, max(-0.5, rest / prices.plain_ms - 1.0))
    probing = {step.asked[seq_id].name for seq_id in step.probed if seq_id in step.asked}
    switched_off: list[DrafterState] = []
    for drafter in drafters:
        name = drafter.name
        # What a target asks for is no loss of the drafter's, and probes are paid for.
        if drafter.account.off or step.assignment.behind_slo or name in probing or not (name in drafts or name in drafting):
            continue
        share = drafts.get(name, 0) / max(1, num_drafts)
        spent = drafter.drafting_ms(feedback) / prices.plain_ms + beyond * share
        if drafter.account.observe(accepted.get(name, 0) / num_rows, spent, num_rows, feedback.step):
            drafter.gain.restart(0.0)
            switched_off.append(drafter)
    return switched_off


def learn_shadows(drafter: DrafterState, shadows: Sequence[ShadowFeedback], asked: Mapping[int, DrafterState]) -> tuple[bool, bool]:
    """(whether to decide anew, whether to probe again at once), by what shadow drafts would have brought.

    asked  by seq_id, who was asked since the last decision
    """
    decide, again = False, False
    for shadow in shadows:
        gain = drafter.gain_of(shadow)
        if gain is None:
            continue
        if drafter.account.off and gain > 0.0:
            drafter.budget.grant_another()
            again = True
        own = drafter.gain.of(shadow.seq_id)
        another = shadow.seq_id in asked and asked[shadow.seq_id] is not drafter
        drafter.gain.learn(shadow.seq_id, gain, probed=not another)
        if another and own.raise_to(gain):
            decide = True
    return decide or again, again


def learn_gains(step: Step, feedback: Feedback, costs: CostModel, deciding_ms: float) -> bool:
    """What asking brought: tokens accepted, less verifying and drafting beyond the first draft. Whether a probe found something."""
    for seq_id, (drafter, gain) in some(list(step.left.items()), feedback.step):
        drafter.gain.learn(seq_id, gain)
    if not step.asked or not costs.is_known:   # nobody knows the price
        return False
    prices, found = step.prices, False
    num_asked = Counter([drafter.name for drafter in step.asked.values()])
    for seq in some(feedback.sequences, feedback.step):
        asked = step.asked.get(seq.seq_id)
        if (
            asked is None or seq.seq_id in step.assignment.behind_slo
            or (seq.num_proposed > seq.num_drafts == 0 and seq.seq_id in asked.shadows)
        ):  # fmt: skip
            continue
        brought = seq.num_accepted - prices.rate * step.verify_ms * seq.num_drafts
        gain = brought - prices.rate * asked.further_ms(num_asked[asked.name], seq.num_proposed)
        probed = seq.seq_id in step.probed
        asked.gain.learn(seq.seq_id, gain, probed=probed)
        if probed and gain > 0.0:
            asked.budget.found(seq.seq_id)
            found = True
        if probed:   # drafting is paid for
            asked.budget.refund(brought / prices.rate, prices.plain_ms)
        elif asked.budget.follows(seq.seq_id):
            price_ms = asked.prices(prices.number)[1] + deciding_ms / len(step.asked)
            asked.budget.refund(gain / prices.rate - price_ms, prices.plain_ms)
    return found
