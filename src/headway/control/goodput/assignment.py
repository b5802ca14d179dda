"""Who drafts for whom: what asking each drafter brings each request, against what it costs.

The best drafter of a request wins; a group that does not pay for its drafter's fixed cost is not asked.
Drafters that copy for next to nothing are looked up before an expensive one is asked, wherever that one pays:
control/goodput/decision.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np

from headway.control import constants as const
from headway.control.costs import CostModel
from headway.control.goodput.draft_length import best_depth
from headway.control.goodput.drafter_state import DrafterState
from headway.control.goodput.gain import RequestGain
from headway.control.goodput.prices import StepPrices
from headway.control.policy import SequenceView
from headway.types import Choice

NOBODY = -1   # no drafter, where one is an index


@lru_cache(maxsize=1024)
def choice(name: str, k: int, lookups: tuple[Choice, ...] = ()) -> Choice:
    return Choice(name, k, lookups)


@dataclass(slots=True)
class Assignment:
    """Who is asked for how many drafts, for the sequences `ids`."""

    ids: list[int]
    lookups: list[DrafterState] = field(default_factory=list)         # are looked up wherever another one is to be asked
    plan: dict[int, Choice] = field(default_factory=dict)
    asked: dict[int, DrafterState] = field(default_factory=dict)
    net_gains: dict[int, float] = field(default_factory=dict)         # where drafters are looked up: tokens that the expensive one brings
    lookup_prices: list[float] = field(default_factory=list)          # [1 + k] tokens that verifying so many drafts of one request costs
    behind_slo: set[int] = field(default_factory=set)                 # asked because of their target although that does not pay
    shares: dict[str, float] = field(default_factory=dict)            # by drafter: of the decoding sequences, how many it is asked for

    def copy(self) -> Assignment:
        """One that probes are added to."""
        return replace(self, plan=dict(self.plan), asked=dict(self.asked), net_gains=dict(self.net_gains))

    def ask(self, drafter: DrafterState, sequences: Sequence[SequenceView], prices: StepPrices, costs: CostModel) -> None:
        """`drafter` drafts for these, where no lookup has found something better."""
        if not sequences:
            return
        first = () if drafter in self.lookups else tuple([choice(each.name, each.max_k) for each in self.lookups])
        for seq, k in zip(sequences, _depths(drafter, prices, sequences, costs), strict=True):
            self.plan[seq.seq_id] = choice(drafter.name, min(k, seq.max_k), first)
            self.asked[seq.seq_id] = drafter
            if not first:
                drafter.gain.of(seq.seq_id).note_ask(seq.num_context)


@dataclass(frozen=True, slots=True)
class Assigner:
    """Decides for one step. `expected`: tokens that an ask brings; `is_behind`: whether plain steps take longer than its target."""

    drafters: Sequence[DrafterState]
    prices: StepPrices
    costs: CostModel
    expected: Callable[[DrafterState, SequenceView, RequestGain], float]
    is_behind: Callable[[SequenceView], bool]
    deciding_ms: float       # of the policy's own time in a step with drafts

    def assign(self, able: list[SequenceView]) -> tuple[Assignment, list[int]]:
        """(who is asked, [n] index of each sequence's drafter or NOBODY)"""
        prices = self.prices
        lookups = self._lookups()
        found = Assignment([seq.seq_id for seq in able], lookups, lookup_prices=self._lookup_prices(lookups))
        owner, nets = self._owners(able, found)
        for index, drafter in enumerate(self.drafters):
            mine = [i for i, who in enumerate(owner) if who == index]
            found.ask(drafter, [able[i] for i in mine], prices, self.costs)
            found.shares[drafter.name] = len(mine) / len(prices.sequences)
            if found.lookups and drafter not in found.lookups:
                found.net_gains.update({found.ids[i]: nets[i] for i in mine})
        for drafter in found.lookups:
            found.shares[drafter.name] += len(found.net_gains) / len(prices.sequences)
        return found, owner

    def _lookups(self) -> list[DrafterState]:
        """Drafters whose draft is a function of the prefix, costs next to nothing, and gains that."""
        if len(self.drafters) == 1:
            return []
        number = self.prices.number
        asking = [self.prices.rate * sum(drafter.prices(number)[:2]) for drafter in self.drafters]
        return [
            drafter for drafter, price in zip(self.drafters, asking, strict=True)
            if drafter.deterministic and not drafter.account.off and drafter.is_priced
            and price <= const.LOOKUP_PRICE and (drafter.is_new or drafter.gain.pool > price)
        ]  # fmt: skip

    def _lookup_prices(self, lookups: Sequence[DrafterState]) -> list[float]:
        prices, num_rows, k = self.prices, len(self.prices.sequences), max([drafter.max_k for drafter in lookups], default=0)
        curve = self.costs.curve(num_rows, num_rows, num_rows * k, prices.num_context)
        return [prices.rate * (ms - curve[0]) / num_rows for ms in curve[::num_rows]]

    def _owners(self, able: list[SequenceView], found: Assignment) -> tuple[list[int], list[float]]:
        """[n] index of the drafter that brings most, or NOBODY, and the tokens net that it brings. An expensive one goes before those
        that are looked up before it is asked."""
        step = self.prices
        best, owner, nets = [0.0] * len(able), [NOBODY] * len(able), [0.0] * len(able)
        copied, copier = list(best), list(owner)   # the same of those that are looked up
        for index, drafter in enumerate(self.drafters):
            if drafter.account.off:
                continue
            most, who = (copied, copier) if drafter in found.lookups else (best, owner)
            fixed, each, _ = drafter.prices(step.number)
            price = step.rate * (each + fixed / len(able))
            for i in range(min(len(able), drafter.sample_size) if drafter.is_new else len(able)):
                seq = able[i]
                own = drafter.gain.of(seq.seq_id)
                gain = self.expected(drafter, seq, own)
                net = gain - price
                if net <= 0.0 and self.is_behind(seq):
                    net = 1e-6
                    found.behind_slo.add(seq.seq_id)
                if net > most[i]:
                    most[i], who[i] = net, index
                    if who is owner:
                        nets[i] = net
        value = sum([max(asked, looked_up) for asked, looked_up in zip(best, copied, strict=True)])
        if value <= step.rate * self.deciding_ms and not found.behind_slo and not any(drafter.is_new for drafter in self.drafters):
            return [NOBODY] * len(owner), nets
        return [looked_up if asked == NOBODY else asked for asked, looked_up in zip(owner, copier, strict=True)], nets


def _depths(drafter: DrafterState, prices: StepPrices, sequences: Sequence[SequenceView], costs: CostModel) -> list[int]:
    """How many drafts to ask for, per sequence."""
    longest, num_rows = drafter.max_k, len(sequences)
    draft_ms = [costs.predict_draft(drafter.name, num_rows, depth) for depth in range(1, longest + 1)]
    steep = draft_ms[-1] - draft_ms[0] > const.STEEP * prices.plain_ms
    matters = steep or not (drafter.deterministic or all(seq.greedy for seq in sequences))
    if (first := drafter.first_depth) is not None:
        drafter.set_depth(drafter.depth, matters=matters)
        return [first] * num_rows
    if not matters:
        drafter.set_depth(longest, matters=False)
        return [longest] * num_rows
    rows = len(prices.sequences)
    reached = np.asarray(np.cumprod(drafter.without_confidence.predict([seq.seq_id for seq in sequences], longest), axis=1))
    tokens = rows + prices.num_prefill + drafter.breadth.value * np.arange(reached.size + 1)
    depth, lengths = best_depth(reached, costs.predict(rows, tokens, prices.num_context), draft_ms, prices.rate)
    drafter.set_depth(depth, matters=True)
    if drafter.stops_early:
        return [longest] * num_rows
    return [depth if drafter.deterministic or seq.greedy else max(1, length) for seq, length in zip(sequences, lengths, strict=True)]
