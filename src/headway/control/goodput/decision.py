"""What a policy that weighs by price decided and expected of one step, and whom it lets draft when cheap drafters were looked at first.

A drafter that copies costs next to nothing, says by itself how sure it is, and has often nothing to say. So wherever a dear one (a
network) is worth asking, the cheap ones are looked at first, and each step decides with their drafts in hand: what the best of them
promises net of verification, against what asking the dear one has brought lately where it was asked, net of its price. What a dear
one is worth is therefore learned on what the cheap ones leave to it; together they bring the larger of the two in every step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from headway.control.costs import CostModel
from headway.control.goodput.allocation import FEW
from headway.control.goodput.drafter_state import Candidate
from headway.control.goodput.stopping import Stopping
from headway.control.policy import DraftView, SequenceView
from headway.types import Choice

STEEP = 0.02        # drafting to max_k that costs this share of a plain step more than one draft: depth is worth a thought
_SHADOW_DEPTH = 2   # drafts of a shadow whose drafter takes time for each


@lru_cache(maxsize=1024)
def choice(name: str, k: int, lookups: tuple[Choice, ...] = ()) -> Choice:
    return Choice(name, k, lookups)


@dataclass(slots=True)
class Held:
    """What was decided before drafting, for the sequences `ids`, until the step `until`."""

    ids: list[int]
    until: int
    cheap: list[Candidate] = field(default_factory=list)
    plan: dict[int, Choice] = field(default_factory=dict)
    asked: dict[int, Candidate] = field(default_factory=dict)
    nets: dict[int, float] = field(default_factory=dict)
    prices: list[float] = field(default_factory=list)
    hurried: set[int] = field(default_factory=set)


@dataclass(slots=True)
class Step:
    """What was decided and expected, from `plan` until `observe`. Rates in tokens per millisecond."""

    number: int
    sequences: list[SequenceView]  # those that decode
    num_context: int
    num_prefill: int               # tokens expected in the same step
    predicted_ms: float            # of the decoding rows without drafts
    plain_ms: float                # the same, corrected by measured plain steps
    rate: float
    verify_ms: float               # of one more draft
    cheap: list[Candidate] = field(default_factory=list)   # are looked at wherever another one is to be asked
    plan: dict[int, Choice] = field(default_factory=dict)
    asked: dict[int, Candidate] = field(default_factory=dict)
    nets: dict[int, float] = field(default_factory=dict)   # where the cheap ones are looked at: tokens net that asking the dear one brings
    probed: set[int] = field(default_factory=set)
    hurried: set[int] = field(default_factory=set)         # asked because of their target although that does not pay
    wishes: dict[int, Choice] = field(default_factory=dict)       # shadow drafts
    stopping: dict[str, Stopping] = field(default_factory=dict)   # by drafter
    left: dict[int, tuple[Candidate, float]] = field(default_factory=dict)   # best look that was not taken, and what it promised

    def pass_ms(self, drafter: Candidate) -> float:
        """Milliseconds of one more token for everybody."""
        return len(self.sequences) * drafter.further_ms(len(self.sequences), 2)

    def watch(self, drafter: Candidate, seq: SequenceView) -> None:
        """A shadow draft, unless one is under way already."""
        if seq.seq_id not in self.wishes and seq.seq_id not in drafter.watched:
            k = min(drafter.depth, _SHADOW_DEPTH) if drafter.rise(1) > STEEP * self.plain_ms else drafter.max_k
            self.wishes[seq.seq_id] = choice(drafter.name, min(k, seq.max_k))
            drafter.watch(seq.seq_id, min(k, seq.max_k), len(self.sequences), self.rate, self.verify_ms)

    def stopping_of(self, drafter: Candidate, costs: CostModel) -> Stopping:
        found = self.stopping.get(drafter.name)
        if found is None:
            num_rows = len(self.sequences)
            tokens = num_rows + self.num_prefill + np.arange(num_rows * drafter.max_k + 1)
            step_ms = costs.predict(num_rows, tokens, self.num_context, self.num_prefill)
            found = self.stopping[drafter.name] = Stopping(drafter, step_ms, self.rate)
        return found

    def drafting_ms(self, drafters: Sequence[Candidate], drafts: Sequence[DraftView], costs: CostModel) -> float:
        """What drafting was to take; where it was decided on the way, what so many passes were."""
        asked, ms = list(self.asked.values()), 0.0
        for drafter in drafters:
            depth = drafter.depth
            if drafter.listens:
                depth = max([draft.length for draft in drafts if draft.drafter == drafter.name], default=1)
            ms += costs.predict_draft(drafter.name, asked.count(drafter), depth)
        if self.left:
            ms += sum([costs.predict_draft(drafter.name, len(self.left), drafter.depth) for drafter in self.cheap])
        return ms

    def take(self, drafts: Sequence[DraftView], by_name: Mapping[str, Candidate], prices: Sequence[float]) -> dict[int, str]:
        """seq_id -> the cheap drafter whose draft is taken, for those that are not left to the dear one; `asked` then says who was.

        prices  [1 + k] tokens that verifying so many drafts of one request costs
        """
        if not self.nets:
            return {}
        best: dict[int, tuple[float, str]] = {}
        for draft, promise in zip(drafts, promises(drafts, by_name, prices), strict=True):
            if promise > best.get(draft.seq_id, (0.0, ""))[0]:
                best[draft.seq_id] = promise, draft.drafter
        nothing = 0.0, self.cheap[0].name
        taken: dict[int, str] = {}
        going: dict[str, list[int]] = {}
        for seq_id, net in self.nets.items():
            promise, name = best.get(seq_id, nothing)
            if promise > 0.0 if seq_id in self.probed or seq_id in self.hurried else promise >= net:
                taken[seq_id] = name
            else:
                going.setdefault(self.asked[seq_id].name, []).append(seq_id)
        for dear, mine in going.items():
            more = sum([self.nets[seq_id] - best.get(seq_id, nothing)[0] for seq_id in mine])
            forced = self.hurried or not self.probed.isdisjoint(mine)
            # For so few of them it does not bring what it costs to ask it at all.
            if more <= self.rate * by_name[dear].prices(self.number)[0] and not forced:
                taken.update({seq_id: best.get(seq_id, nothing)[1] for seq_id in mine})
            else:
                self.left.update({seq_id: (by_name[best.get(seq_id, nothing)[1]], best.get(seq_id, nothing)[0]) for seq_id in mine})
        self._note(taken, by_name)
        return taken

    def _note(self, taken: Mapping[int, str], by_name: Mapping[str, Candidate]) -> None:
        num_planned: dict[str, int] = {}
        for seq_id in self.nets:
            num_planned[self.asked[seq_id].name] = num_planned.get(self.asked[seq_id].name, 0) + 1
        contexts = {seq.seq_id: seq.num_context for seq in self.sequences}
        self.asked = self.asked | {seq_id: by_name[name] for seq_id, name in taken.items()}
        num_left: dict[str, int] = {}
        for seq_id in self.left:
            dear = self.asked[seq_id]
            own = dear.worth.of(seq_id)
            own.asked_at, own.seen = self.number, contexts[seq_id]
            num_left[dear.name] = num_left.get(dear.name, 0) + 1
        for name, planned in num_planned.items():
            by_name[name].reached.observe(num_left.get(name, 0) / planned)


def promises(drafts: Sequence[DraftView], by_name: Mapping[str, Candidate], prices: Sequence[float]) -> list[float]:
    """[n] what `net_of` says of each draft; in arrays where there are many."""
    if sum([draft.length for draft in drafts]) <= FEW:
        return [net_of(by_name[draft.drafter].reach(draft), prices) for draft in drafts]
    found = [0.0] * len(drafts)
    for name in {draft.drafter for draft in drafts}:
        mine = [i for i, draft in enumerate(drafts) if draft.drafter == name]
        reached = np.cumsum(by_name[name].values([drafts[i] for i in mine]), axis=1)
        net = (reached - np.array(prices[1 : reached.shape[1] + 1])).max(axis=1).tolist()
        for i, promise in zip(mine, net, strict=True):
            found[i] = max(0.0, promise)
    return found


def net_of(values: Sequence[float], prices: Sequence[float]) -> float:
    """Tokens net of verification that the best beginning of a draft brings; 0 when none pays.

    values  P(accepted up to here)
    prices  as in `take`
    """
    best = reached = 0.0
    for value, price in zip(values, prices[1:], strict=False):
        reached += value
        best = max(best, reached - price)
    return best
