"""What a step teaches: the drafters' accounts against plain decoding, and what asking them brought or would have brought."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from headway.control.costs import CostModel
from headway.control.goodput.decision import Step
from headway.control.goodput.drafter_state import DrafterState, some
from headway.control.goodput.prices import Pricing
from headway.types import Feedback, SequenceFeedback, ShadowFeedback

Verified = Mapping[str, Sequence[SequenceFeedback]]   # by drafter


def compare(step: Step, feedback: Feedback, verified: Verified, drafters: Sequence[DrafterState], pricing: Pricing) -> list[DrafterState]:
    """The step against a plain one, and each drafter's part in the difference, in plain steps. Those that are switched off by that."""
    plain_ms, num_rows = step.prices.plain_ms, len(feedback.sequences)
    drafts = {name: sum([seq.num_drafts for seq in mine]) for name, mine in verified.items()}
    accepted = {name: sum([seq.num_accepted for seq in mine]) for name, mine in verified.items()}
    num_drafts = sum(drafts.values())
    pricing.observe(step.prices, feedback, 1.0 + sum(accepted.values()) / num_rows, verified=num_drafts > 0)
    verify_ms = max(1e-3, feedback.step_ms - sum([part.draft_ms for part in feedback.drafters]))
    beyond = min(4.0, max(-0.5, verify_ms / plain_ms - 1.0))
    busy = {part.drafter for part in feedback.drafters} | drafts.keys()
    probing = {step.asked[seq_id].name for seq_id in step.probed if seq_id in step.asked}
    switched_off: list[DrafterState] = []
    for drafter in drafters:
        name = drafter.name
        # What a target asks for is no loss of the drafter's, and probes are paid for.
        if drafter.account.off or step.assignment.behind_slo or name in probing or name not in busy:
            continue
        draft_ms = sum([part.draft_ms for part in feedback.drafters if part.drafter == name])
        spent = draft_ms / plain_ms + beyond * drafts.get(name, 0) / max(1, num_drafts)
        if drafter.account.observe(accepted.get(name, 0) / num_rows, spent, num_rows, feedback.step):
            drafter.gain.restart(0.0)
            switched_off.append(drafter)
    return switched_off


def learn_shadows(drafter: DrafterState, shadows: Sequence[ShadowFeedback]) -> None:
    """What shadow drafts would have brought."""
    for shadow in shadows:
        if (gain := drafter.gain_of(shadow)) is not None:
            drafter.gain.learn(shadow.seq_id, gain)


def learn_gains(step: Step, feedback: Feedback, costs: CostModel) -> bool:
    """What asking brought: tokens accepted, less verifying and drafting beyond the first draft. Whether a probe found something."""
    for seq_id, (drafter, gain) in some(list(step.left.items()), feedback.step):
        drafter.gain.learn(seq_id, gain)
    if not step.asked or not costs.is_known:   # nobody knows the price
        return False
    prices, found = step.prices, False
    num_asked = Counter([drafter.name for drafter in step.asked.values()])
    for seq in some(feedback.sequences, feedback.step):
        asked = step.asked.get(seq.seq_id)
        unverified = asked is not None and seq.num_proposed > seq.num_drafts == 0 and seq.seq_id in asked.shadows
        if asked is None or unverified or seq.seq_id in step.assignment.behind_slo:
            continue
        brought = seq.num_accepted - prices.rate * step.verify_ms * seq.num_drafts
        gain = brought - prices.rate * asked.further_ms(num_asked[asked.name], seq.num_proposed)
        probed = seq.seq_id in step.probed
        asked.gain.learn(seq.seq_id, gain)
        found = found or (probed and gain > 0.0)
        if probed and not asked.is_new:   # drafting is paid for; of a new one `book_new` has counted it
            asked.budget.book(brought / prices.rate / prices.plain_ms)
    return found


def book_new(drafter: DrafterState, step: Step, feedback: Feedback, verified: Sequence[SequenceFeedback]) -> None:
    """What verifying the drafts of a new drafter has brought and cost. What drafting took is no part of it: it is paid whether they are
    verified or not, and leaving them out for that would lose them, too."""
    spent = step.verify_ms * sum([seq.num_drafts for seq in verified]) / step.prices.plain_ms
    drafter.budget.book(sum([seq.num_accepted for seq in verified]) / max(1, len(feedback.sequences)) - spent)
