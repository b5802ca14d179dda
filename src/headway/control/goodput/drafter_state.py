"""What is known of one drafter: how many of its tokens are accepted, what drafting takes, and its accounts. Written by itself alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from headway.control import constants as const
from headway.control.costs import CostModel
from headway.control.goodput.acceptance import AcceptanceModel
from headway.control.goodput.budget import Budget
from headway.control.goodput.gain import Gain
from headway.control.goodput.guard import Account, Mean
from headway.control.policy import DrafterView, DraftView
from headway.types import SequenceFeedback, ShadowFeedback, depths_of

FloatArray = NDArray[np.float64]

_NAN = float("nan")
_FORMER_NAMES = {"worth": "gain", "sighted": "with_confidence", "blind": "without_confidence"}   # in files of earlier versions


@dataclass(frozen=True, slots=True)
class ShadowPrice:
    """What a shadow draft would have cost, in tokens."""

    verify: float    # of each verified token
    further: float   # of all that was drafted after the first one


class DrafterState:
    def __init__(self, view: DrafterView, max_k: int, costs: CostModel) -> None:
        self.name, self.deterministic, self.stepwise, self._drafts_ahead = view.name, view.deterministic, view.stepwise, view.drafts_ahead
        self.max_k = max_k
        self.gain = Gain()
        self.account = Account()
        self.budget = Budget()
        self.with_confidence = AcceptanceModel(max_k)      # of drafts that were made
        self.without_confidence = AcceptanceModel(max_k)   # of drafts to be made
        self.depth = min(2, max_k)           # that it is asked for
        self.stops_early = False             # it is asked for as much as it may draft, and stopped where that ceases to pay
        self.breadth = Mean(const.MEAN_MEMORY, 1.0)    # draft tokens verified for each position: more than one in a tree
        self.shadows: dict[int, ShadowPrice] = {}   # under way, by seq_id
        self._first_asks = const.FIRST_ASKS
        self._depth_matters = False          # so acceptance is learned without confidence, too
        self._busy = 0.0                     # share of the sequences that it is asked for, lately
        self._reported: bool | None = None   # whether it was last said to pay
        self._costs = costs
        self._judged, self._judged_without = _Judged(), _Judged()
        self._prices = (0.0, 0.0, 0.0)
        self._further: dict[tuple[int, int], float] = {}   # by rows and steps, as long as the prices hold
        self._priced_at = -const.PRICE_STEPS

    # -- while it is new ------------------------------------------------------------------------------------------

    @property
    def is_new(self) -> bool:
        """Not asked often enough to be judged."""
        return self.gain.num_learned < self._first_asks

    @property
    def sample_size(self) -> int:
        """Requests that are asked in one step while it is new: enough to find out."""
        return self._first_asks // 2

    @property
    def first_depth(self) -> int | None:
        """How many drafts to ask for while it is not known what depth costs: that shows only when it varies."""
        times, was_known = self._costs.num_drafted(self.name), self._first_asks == const.KNOWN_ASKS
        if not self.is_new or was_known or (self._costs.is_known and (self._drafts_ahead or times >= len(const.FIRST_DEPTHS))):
            return None
        return min(self.max_k, const.FIRST_DEPTHS[times % len(const.FIRST_DEPTHS)])

    def allowed(self, step_ms: Sequence[float], plain_ms: float) -> int | None:
        """How many of its drafts may be verified while it is new; None while nobody knows what that costs: it shows by verifying."""
        return self.budget.num_covered(step_ms, plain_ms) if self._costs.is_known else None

    # -- prices ---------------------------------------------------------------------------------------------------

    def prices(self, step: int) -> tuple[float, float, float]:
        """Milliseconds of asking it at all for one draft, for each sequence, and for each token it has not seen; refreshed every few
        steps. What it costs to draft on is part of what asking brings."""
        if not 0 <= step - self._priced_at < const.PRICE_STEPS:
            self._priced_at = step
            self._further.clear()
            one, two = (self._costs.predict_draft(self.name, rows, 1) for rows in (1, 2))
            unread = self._costs.predict_draft(self.name, 1, 1, 256)
            self._prices = (max(0.0, 2.0 * one - two), max(0.0, two - one), max(0.0, unread - one) / 256.0)
        return self._prices

    def further_ms(self, num_rows: int, num_steps: int) -> float:
        """What drafting `num_steps` tokens for each of `num_rows` sequences costs more than one, per sequence."""
        if num_steps <= 1:
            return 0.0
        found = self._further.get((num_rows, num_steps))
        if found is None:
            one, all_steps = (self._costs.predict_draft(self.name, num_rows, steps) for steps in (1, num_steps))
            found = self._further[num_rows, num_steps] = max(0.0, all_steps - one) / num_rows
        return found

    @property
    def is_priced(self) -> bool:
        """Its price has been measured."""
        return self._costs.predict_draft(self.name, 1, 1) > 0.0

    # -- how much it is asked for ---------------------------------------------------------------------------------

    def set_stops_early(self, stops_early: bool) -> None:
        self.stops_early = stops_early

    def set_depth(self, depth: int, *, matters: bool) -> None:
        """How deep it is asked to draft; `matters`: that was weighed against what it costs."""
        self.depth, self._depth_matters = depth, matters

    def report(self, share: float) -> str | None:
        """It was asked for this share of the sequences: a phrase when it begins or ceases to be asked."""
        self._busy += 0.1 * (share - self._busy)
        if self._reported is not None and (self._reported == (self._busy > 0.3) or 0.15 < self._busy < 0.45):
            return None
        self._reported = self._busy > 0.3
        return f"{self.name} {'pays' if self._reported else 'does not pay'}: a draft brings {self.gain.pool:.2f} tokens net"

    # -- acceptance -----------------------------------------------------------------------------------------------

    def values(self, drafts: list[DraftView]) -> FloatArray:
        """[n, k] P(the draft is accepted up to here), 0 beyond its end."""
        lengths = np.array([draft.length for draft in drafts])
        confidence = np.full((len(drafts), int(lengths.max())), np.nan)
        for row, draft in enumerate(drafts):
            if draft.confidence:
                stated = draft.confidence[: confidence.shape[1]]
                confidence[row, : len(stated)] = stated
        rates = self.with_confidence.predict([draft.seq_id for draft in drafts], confidence.shape[1], confidence)
        values: FloatArray = np.where(np.arange(confidence.shape[1]) < lengths[:, None], np.cumprod(rates, axis=1), 0.0)
        for row, draft in enumerate(drafts):
            if draft.parents is not None:
                values[row, : draft.length] = self._node_values(draft)
        return values

    def reach(self, draft: DraftView) -> list[float]:
        """The same for one draft."""
        if draft.parents is not None:
            return self._node_values(draft)
        return self.with_confidence.reach(draft.seq_id, draft.length, draft.confidence)

    def _node_values(self, draft: DraftView) -> list[float]:
        """Of a tree. Nodes come in the order of the drafter's scores; where ours differs, a node counts no more than those before it: they
        are verified with it."""
        assert draft.parents is not None
        depths = np.array(depths_of(draft.parents))
        each = np.arange(draft.length)
        by_depth = np.full((draft.length, int(depths.max()) + 1), np.nan)
        by_depth[each, depths] = np.nan if draft.confidence is None else draft.confidence
        rates = self.with_confidence.predict([draft.seq_id] * draft.length, by_depth.shape[1], by_depth)[each, depths].tolist()
        values: list[float] = []
        for rate, parent in zip(rates, draft.parents, strict=True):
            values.append(rate if parent < 0 else rate * values[parent])
        falling: list[float] = np.minimum.accumulate(values).tolist()
        return falling

    def judge(self, verified: Sequence[SequenceFeedback], shadows: Sequence[ShadowFeedback], step: int) -> None:
        """Learns acceptance, in groups of drafts: each call has its price."""
        for seq in some(verified, step):
            if seq.parents is None:
                self._judged.add(seq.seq_id, 0, seq.num_accepted, min(seq.num_drafts, self.max_k), seq.confidence, step)
            else:
                self.breadth.observe(seq.num_drafts / seq.depth)
            for depth, hit, confidence in judged_nodes(seq):
                if depth < self.max_k:
                    self._judged.add(seq.seq_id, depth, depth + hit, depth + 1, (_NAN,) * depth + (confidence,), step)
            if self._depth_matters:
                self._judged_without.add(seq.seq_id, 0, seq.num_accepted, min(seq.depth, self.max_k), None, step)
        for shadow in some(shadows, step):
            accepted = shadow.num_verified + shadow.num_confirmed
            self._judged.add(shadow.seq_id, shadow.num_verified, accepted, min(shadow.num_drafts, self.max_k), shadow.confidence, step)
        self._judged.teach(self.with_confidence, step)
        self._judged_without.teach(self.without_confidence, step)

    # -- shadow drafts --------------------------------------------------------------------------------------------

    def watch(self, seq_id: int, k: int, num_rows: int, rate: float, verify_ms: float) -> None:
        """A draft of `k` tokens for one of `num_rows` sequences is to be compared with what the target writes, at the prices of now."""
        self.shadows[seq_id] = ShadowPrice(rate * verify_ms, rate * self.further_ms(num_rows, k))

    def gain_of(self, shadow: ShadowFeedback) -> float | None:
        """Tokens that asking would have brought, net of verification and of drafting on; None for one that was not watched."""
        prices = self.shadows.pop(shadow.seq_id, None)
        if prices is None:
            return None
        verifying = prices.verify * min(shadow.num_drafts, shadow.num_confirmed + 1)
        return max(0.0, shadow.num_confirmed - verifying - prices.further)

    def promises_profit(self, step: int, rate: float, num_rows: int) -> bool:
        """Whether shadow drafts, while it is switched off, bring clearly more than it costs. `rate`: tokens per millisecond."""
        fixed, each, _ = self.prices(step)
        return self.gain.pool > const.RETURN_MARGIN * rate * (fixed / num_rows + each)

    # -- from one run to the next ---------------------------------------------------------------------------------

    def forget(self, live: set[int]) -> None:
        """Drops what is known of requests that are not in `live`, once it is much."""
        if max(len(self.gain), len(self.shadows), self.with_confidence.num_requests) > 2 * len(live) + 64:
            for part in (self.gain, self.with_confidence, self.without_confidence):
                part.forget(live)
            self.shadows = {seq_id: prices for seq_id, prices in self.shadows.items() if seq_id in live}

    def to_json(self) -> dict[str, Any] | None:
        """What outlives a run; None while there is nothing."""
        if self.is_new:
            return None
        return {
            "gain": self.gain.pool, "depth": self.depth, "max_k": self.max_k,
            "with_confidence": self.with_confidence.to_json(), "without_confidence": self.without_confidence.to_json(),
        }  # fmt: skip

    def load(self, saved: Any) -> None:
        """What `to_json` wrote: a better first guess, to be tested on the first requests. Raises ValueError, TypeError or KeyError."""
        if saved["max_k"] != self.max_k:
            return
        saved = {_FORMER_NAMES.get(name, name): value for name, value in saved.items()}
        gain, depth = float(saved["gain"]), int(saved["depth"])
        if not (np.isfinite(gain) and 1 <= depth <= self.max_k):
            raise ValueError("what was saved of a drafter is out of range")
        self.with_confidence.load(saved["with_confidence"])
        self.without_confidence.load(saved["without_confidence"])
        self.gain.restart(gain)
        self.depth, self._first_asks = depth, const.KNOWN_ASKS


def judged_nodes(seq: SequenceFeedback) -> list[tuple[int, bool, float]]:
    """(depth, whether it was accepted, confidence) of each node of a tree on which verification said something: those that follow an
    accepted one, or nothing."""
    if seq.parents is None:
        return []
    reached = {-1: 0} | {node: depth for depth, node in enumerate(seq.path or (), start=1)}
    confidence = seq.confidence or (_NAN,) * len(seq.parents)
    return [(reached[parent], node in reached, confidence[node]) for node, parent in enumerate(seq.parents) if parent in reached]


_T = TypeVar("_T")


def some(items: Sequence[_T], step: int) -> Sequence[_T]:
    """At most LEARNED_PER_STEP of them, in turns: a large batch has more evidence than it needs, and learning takes time."""
    if len(items) <= const.LEARNED_PER_STEP:
        return items
    start = step * const.LEARNED_PER_STEP % len(items)
    return (*items[start : start + const.LEARNED_PER_STEP], *items[: max(0, start + const.LEARNED_PER_STEP - len(items))])


class _Judged:
    """Judged tokens that were not learned from yet, as columns."""

    def __init__(self) -> None:
        self._num_learned = 0
        self._columns: tuple[list[int], list[int], list[float], list[float]] = ([], [], [], [])
        self._since = 0

    def add(self, seq_id: int, first: int, num_accepted: int, num_drafts: int, confidence: Sequence[float] | None, step: int) -> None:
        """Of positions [first, num_drafts) those below `num_accepted` were accepted, the next one was not."""
        end = min(num_accepted + 1, num_drafts)
        count = end - first
        if count <= 0:
            return
        seq_ids, positions, hits, stated = self._columns
        if not hits:
            self._since = step
        seq_ids += [seq_id] * count
        positions += range(first, end)
        num_hits = min(end, num_accepted) - first
        hits += [1.0] * num_hits + [0.0] * (count - num_hits)
        known = confidence[first:end] if confidence is not None else ()
        stated += [*known, *([_NAN] * (count - len(known)))]

    def teach(self, model: AcceptanceModel, step: int) -> None:
        """When enough has come together, a tenth of all there was, or the first of it has waited long enough."""
        seq_ids, positions, hits, stated = self._columns
        if hits and (len(hits) >= min(const.JUDGED_GROUP, self._num_learned // 10) or not 0 <= step - self._since < const.JUDGED_WAIT):
            model.learn(seq_ids, np.array(positions), np.array(hits), np.array(stated, dtype=np.float64))
            self._num_learned += len(hits)
            self._columns = ([], [], [], [])
