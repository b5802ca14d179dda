"""Speculate where it pays: drafter, k and what is verified, per request and step, from measured cost and acceptance.

Time has a price: `rate`, the tokens a millisecond is worth, is the plain rate B / T(B) times the speed-up that speculation
reached lately. Every decision compares tokens gained with milliseconds spent at that price:

    whom to ask     what asking a drafter for this request has brought lately, net of verification (control/worth.py),
                    against what its draft costs, catching up after a sleep included. The best drafter of a request wins,
                    with a bonus for the one it has; a group that does not pay for its drafter's fixed cost is not asked.
    how deep        the k beyond which a further position gains less over all asked requests than drafting it costs
    what to verify  control/allocation.py over all drafts at once, with calibrated confidence, against T(n) of the cost model

Sampled drafts get their length from statistics known before they are drawn and are verified whole, as the losslessness rule of
control/policy.py demands. Drafts that are a function of the prefix are trimmed after drafting, when their confidence is known.

Exploration is paid from a bucket per drafter, together PROBE_SHARE of the time: requests it does not seem to pay for are
tried again, longest unasked first; where another drafter is at work, with a shadow draft that is not verified.

The guard (control/guard.py) compares with a measured counterfactual. Guaranteed, while costs and acceptance change more slowly
than it remembers (150 steps): time lost against plain decoding is at most about PROBE_SHARE for probes, plus TOLERANCE that
counts as noise, plus the policy's own time; and each time a workload turns against a drafter, the loss of the steps until its
account shows it (20 to 150). Not guaranteed: anything against a workload that flips faster than that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from headway.config import option
from headway.control.acceptance import Acceptance
from headway.control.allocation import allocate
from headway.control.costs import CostModel
from headway.control.guard import Account, Mean, Plain
from headway.control.policy import BatchView, DraftView, Policy, SequenceView, Setup
from headway.control.worth import Worth
from headway.errors import ConfigError
from headway.types import Choice, Feedback, Forecast

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

OBJECTIVES = ("throughput", "latency")
PROBE_SHARE = 0.005      # of the time, over all drafters
WAKE_STEPS = 16          # steps over which catching up after a sleep is written off
REST_STEPS = 4           # steps decided at once when nobody is worth asking: then deciding must cost nothing, too
STAY = 0.1               # bonus of the drafter a request has, as a share of what it is worth
STEEP = 0.02             # drafting to max_k that costs this share of a plain step more than one draft: depth is worth a thought
RETURN = 1.5             # what shadow drafts must promise, against the price of drafting, before a drafter is switched on again
_FIRST_ASKS = 32         # asks of a new drafter, half of them in one step, before a whole large batch asks it
_FIRST_DEPTHS = (4, 1, 1 << 30, 2)   # drafts asked for meanwhile
_DEPTHS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32)
_NUM_SHADOWS = 8         # shadow drafts before that is judged
_SPEEDUP_MEMORY = 100.0  # steps
_LEAST_JUDGED = 6        # drafts that are waited for before the acceptance model learns
_MOST_JUDGED = 32        # drafts that the acceptance model learns from in a step
_NOBODY = -1


class Goodput(Policy):
    needs_costs = True

    @dataclass(frozen=True)
    class Options:
        objective: str = option("throughput", "throughput: most tokens per second; latency: least time per token of each request")
        tpot_slo_ms: float | None = option(None, "milliseconds per output token that no request should exceed, where that is possible")

        def __post_init__(self) -> None:
            if self.objective not in OBJECTIVES:
                raise ConfigError(f"objective must be one of {', '.join(OBJECTIVES)}, got {self.objective!r}")
            if self.tpot_slo_ms is not None and not 0.0 < self.tpot_slo_ms < float("inf"):
                raise ConfigError(f"tpot_slo_ms must be > 0 and finite, got {self.tpot_slo_ms}")

    def __init__(self, options: Options | None = None) -> None:
        self.options = options or self.Options()

    def start(self, setup: Setup) -> None:
        self._costs = setup.costs
        self._drafters = [_Drafter(view.name, view.deterministic, setup.max_k, self._costs) for view in setup.drafters]
        self._plain = Plain()
        self._speedup = Mean(_SPEEDUP_MEMORY, 1.0, 1.0)
        self._step: _Step | None = None
        self._wishes: dict[int, Choice] = {}   # shadow drafts of this step
        self._choices: dict[tuple[str, int], Choice] = {}
        self._rests_until = 0                  # step before which nothing is decided
        self._last: dict[int, int] = {}        # seq_id -> index of the drafter it was given last
        self.reason = "nothing seen yet"

    # -- before drafting ------------------------------------------------------------------------------------------

    def plan(self, view: BatchView) -> Mapping[int, Choice]:
        self._step, self._wishes, self.forecast = None, {}, None
        if 0 < self._rests_until - view.step <= REST_STEPS:
            return {}
        decoding = [seq for seq in view.sequences if seq.decoding]
        if not decoding:
            return {}
        step = self._step = self._opened(view, decoding)
        able = [seq for seq in decoding if seq.max_k > 0]
        if not able or (step.num_prefill == 0 and self._plain.is_due(self._speedup.value, self._costs.speed)):
            return {}
        ids = [seq.seq_id for seq in able]
        context = np.array([seq.num_context for seq in able], dtype=np.int64)
        slots = [drafter.worth.of(ids) for drafter in self._drafters]
        owner = self._assign(step, ids, slots, context)
        for index, drafter in enumerate(self._drafters):
            probed = drafter.probe(step, slots[index], np.flatnonzero(owner != index))
            for i in probed.tolist():
                if owner[i] == _NOBODY and not drafter.account.off:
                    owner[i] = index
                elif able[i].greedy or drafter.deterministic:
                    self._watch(drafter, able[i], step)
            drafter.worth.ask(slots[index][probed], context[probed], step.number)
        for index, drafter in enumerate(self._drafters):
            mine = np.flatnonzero(owner == index)
            if len(mine) == 0:
                continue
            depths = self._depths(drafter, step, [able[i] for i in mine.tolist()])
            for i, k in zip(mine.tolist(), depths, strict=True):
                step.asked[ids[i]] = drafter
                step.plan[ids[i]] = self._choice(drafter.name, min(k, able[i].max_k))
                self._last[ids[i]] = index
            drafter.worth.ask(slots[index][mine], context[mine], step.number)
        if not (step.plan or self._wishes):
            self._rests_until = step.number + REST_STEPS
        return step.plan

    def shadow(self, view: BatchView) -> Mapping[int, Choice]:
        return self._wishes

    def _opened(self, view: BatchView, decoding: list[SequenceView]) -> _Step:
        """The prices of the step to come."""
        num_rows = len(decoding)
        num_context = sum(seq.num_context for seq in decoding)
        prefill = min(sum(seq.num_pending for seq in view.sequences if not seq.decoding), max(0, view.token_budget - num_rows))
        predicted, more = self._costs.predict(num_rows, np.array([num_rows, 2 * num_rows]), num_context).tolist()
        plain_ms = max(1e-3, self._plain.factor * predicted)
        return _Step(
            number=view.step, rows={seq.seq_id: row for row, seq in enumerate(decoding)},
            sampled={seq.seq_id for seq in decoding if not seq.greedy},
            num_context=num_context, num_prefill=prefill,
            predicted_ms=predicted, plain_ms=plain_ms, rate=max(1.0, self._speedup.value) * num_rows / plain_ms,
            verify_ms=max(0.0, more - predicted) / num_rows,
        )  # fmt: skip

    def _assign(self, step: _Step, ids: list[int], slots: list[IntArray], context: IntArray) -> IntArray:
        """[n] index of the drafter that is worth asking most, or _NOBODY."""
        net = np.full((len(self._drafters), len(ids)), -np.inf)
        last = np.array([self._last.get(seq_id, _NOBODY) for seq_id in ids]) if len(net) > 1 else None
        for index, drafter in enumerate(self._drafters):
            if drafter.account.off:
                continue
            _, each, per_unseen = drafter.prices(step.number)
            worth = drafter.worth.predict(slots[index], step.number)
            unseen = np.maximum(0, context - 1 - drafter.worth.seen[slots[index]])
            net[index] = worth - step.rate * (each + per_unseen * unseen / WAKE_STEPS)
            if last is not None:
                net[index] += np.where(last == index, STAY * np.abs(worth), 0.0)
            if drafter.worth.num_learned < _FIRST_ASKS:
                net[index, _FIRST_ASKS // 2 :] = -np.inf   # a sample is enough to find out
        while True:
            owner: IntArray = net.argmax(axis=0)
            best = net.max(axis=0)
            owner[best <= 0.0] = _NOBODY
            poor = [i for i, d in enumerate(self._drafters) if 0.0 < best[owner == i].sum() <= step.rate * d.prices(step.number)[0]]
            if not poor:
                return owner
            net[poor] = -np.inf

    def _depths(self, drafter: _Drafter, step: _Step, sequences: list[SequenceView]) -> list[int]:
        """How many drafts to ask for, per sequence."""
        longest, num_rows = drafter.max_k, len(sequences)
        whole = [not (drafter.deterministic or seq.greedy) for seq in sequences]
        steep = drafter.rise(num_rows) > STEEP * step.plain_ms
        drafter.blind_used = steep or any(whole)
        if drafter.worth.num_learned < _FIRST_ASKS:
            # What depth costs shows only when it varies.
            return [min(longest, _FIRST_DEPTHS[step.number % len(_FIRST_DEPTHS)])] * num_rows
        if not drafter.blind_used:
            drafter.depth = longest
            return [longest] * num_rows
        reached = np.asarray(np.cumprod(drafter.blind.predict([seq.seq_id for seq in sequences], longest), axis=1), dtype=np.float64)
        base = len(step.rows) + step.num_prefill
        step_ms = self._costs.predict(len(step.rows), base + np.arange(reached.size + 1), step.num_context)
        best, depth, lengths = -np.inf, longest, np.zeros(num_rows, dtype=np.int64)
        for tried in [depth for depth in _DEPTHS if depth <= longest] if steep else [longest]:
            part: FloatArray = reached[:, :tried]
            chosen = allocate(part, step_ms, rate=step.rate)
            tokens = float(part[np.arange(tried) < chosen[:, None]].sum())
            ms = float(step_ms[int(chosen.sum())]) + self._costs.predict_draft(drafter.name, num_rows, tried)
            if tokens - step.rate * ms > best:
                best, depth, lengths = tokens - step.rate * ms, tried, chosen
        drafter.depth = depth
        return [max(1, length) if fixed else depth for length, fixed in zip(lengths.tolist(), whole, strict=True)]

    def _watch(self, drafter: _Drafter, seq: SequenceView, step: _Step) -> None:
        """A shadow draft, unless one is under way already."""
        if seq.seq_id not in self._wishes and seq.seq_id not in drafter.watched:
            self._wishes[seq.seq_id] = self._choice(drafter.name, min(drafter.max_k, seq.max_k))
            drafter.watched[seq.seq_id] = step.rate * step.verify_ms

    def _choice(self, name: str, k: int) -> Choice:
        return self._choices.setdefault((name, k), Choice(name, k))

    # -- after drafting -------------------------------------------------------------------------------------------

    def select(self, drafts: Sequence[DraftView], view: BatchView) -> Mapping[int, int]:
        step = self._step
        if step is None:
            return {}
        free = [draft for draft in drafts if draft.deterministic or draft.seq_id not in step.sampled]
        num_rows, whole = len(step.rows), sum(draft.length for draft in drafts) - sum(draft.length for draft in free)
        values = np.zeros((num_rows, max([draft.length for draft in free], default=1)))
        for drafter in self._drafters:
            mine = [draft for draft in free if draft.drafter == drafter.name]
            if mine:
                made = drafter.values(mine)
                values[[step.rows[draft.seq_id] for draft in mine], : made.shape[1]] = made
        base = num_rows + step.num_prefill + whole
        totals = np.arange(base, base + int(np.count_nonzero(values)) + 1)
        context = step.num_context + step.num_prefill
        step_ms = self._costs.predict(num_rows + (step.num_prefill > 0), totals, context, step.num_prefill)
        step_ms = step_ms + (step.plain_ms - step.predicted_ms)
        slo = None if self.options.tpot_slo_ms is None else np.full(num_rows, self.options.tpot_slo_ms)
        lengths = allocate(values, step_ms, rate=step.rate, latency=self.options.objective == "latency", slo_ms=slo)
        for drafter in self._drafters:
            if drafter.worth.num_learned < _FIRST_ASKS:   # what confidence is worth, and what verification costs, shows by verifying
                first = [step.rows[draft.seq_id] for draft in free if draft.drafter == drafter.name]
                lengths[first] = np.maximum(lengths[first], 1)
        total = int(lengths.sum())
        if total:
            step.verify_ms = float(step_ms[total] - step_ms[0]) / total
        chosen = np.arange(values.shape[1]) < lengths[:, None]
        asked = Counter(drafter.name for drafter in step.asked.values())
        drafting = sum(self._costs.predict_draft(drafter.name, asked[drafter.name], drafter.depth) for drafter in self._drafters)
        self.forecast = Forecast(
            float(step_ms[total]) + drafting, num_rows + float(values[chosen].sum()), step.plain_ms if whole else float(step_ms[0])
        )
        found = lengths.tolist()
        return {draft.seq_id: found[step.rows[draft.seq_id]] for draft in free}

    # -- after the step -------------------------------------------------------------------------------------------

    def observe(self, feedback: Feedback) -> None:
        self._costs.observe(feedback)
        step = self._step
        if step is not None and feedback.num_prefill_tokens == 0 and 0.0 < feedback.step_ms < float("inf") and feedback.sequences:
            self._compare(step, feedback)
        self._learn(step, feedback)
        live = {seq.seq_id for seq in feedback.sequences}
        for drafter in self._drafters:
            drafter.forget(live)
        if len(self._last) > 2 * len(live) + 64:
            self._last = {seq_id: index for seq_id, index in self._last.items() if seq_id in live}

    def _compare(self, step: _Step, feedback: Feedback) -> None:
        """The step against a plain one, and each drafter's part in the difference, in plain steps."""
        drafting = {part.drafter: part.draft_ms for part in feedback.drafters}
        rest = max(1e-3, feedback.step_ms - sum(drafting.values()))
        num_rows = len(feedback.sequences)
        num_drafts = sum(seq.num_drafts for seq in feedback.sequences)
        if num_drafts:
            self._plain.passed()
        else:
            self._plain.observe(rest / max(1e-3, step.predicted_ms), self._costs.speed)
        num_tokens = num_rows + sum(seq.num_accepted for seq in feedback.sequences)
        plain_steps = min(20.0, feedback.step_ms / step.plain_ms)
        self._speedup.observe(num_tokens / num_rows / plain_steps, plain_steps)
        beyond = min(4.0, max(-0.5, rest / step.plain_ms - 1.0))
        for drafter in self._drafters:
            mine = [seq for seq in feedback.sequences if seq.drafter == drafter.name and seq.num_drafts]
            if drafter.account.off or not (mine or drafter.name in drafting):
                continue
            share = sum(seq.num_drafts for seq in mine) / max(1, num_drafts)
            saved = sum(seq.num_accepted for seq in mine) / num_rows
            if drafter.account.observe(saved, drafting.get(drafter.name, 0.0) / step.plain_ms + beyond * share, num_rows, feedback.step):
                drafter.worth.restart(0.0)
                self.reason = f"{drafter.name} off: it loses {-100.0 * drafter.account.balance.value:.1f} % against plain steps"

    def _learn(self, step: _Step | None, feedback: Feedback) -> None:
        for drafter in self._drafters:
            mine = [seq for seq in feedback.sequences if seq.drafter == drafter.name]
            shadows = [shadow for shadow in feedback.shadows if shadow.drafter == drafter.name]
            verified: list[_Judged] = [(s.seq_id, s.num_drafts, s.num_accepted, 0, s.confidence) for s in mine if s.num_drafts]
            watched: list[_Judged] = [
                (s.seq_id, s.num_drafts, s.num_verified + s.num_confirmed, s.num_verified, s.confidence) for s in shadows if s.num_drafts
            ]
            drafter.judge(verified, watched, feedback.step)
            if step is None:
                continue
            price = step.rate * step.verify_ms
            gains = {
                seq.seq_id: seq.num_accepted - price * seq.num_drafts
                for seq in feedback.sequences
                if step.asked.get(seq.seq_id) is drafter
            }
            for shadow in shadows:
                if (asked := drafter.watched.pop(shadow.seq_id, None)) is not None:
                    gains[shadow.seq_id] = max(0.0, shadow.num_confirmed - asked * min(shadow.num_drafts, shadow.num_confirmed + 1))
            if gains:
                drafter.worth.learn(list(gains), np.array(list(gains.values())))
            self._tell(drafter, step)

    def _tell(self, drafter: _Drafter, step: _Step) -> None:
        """Switches a drafter on again when its shadow drafts promise a profit; says when one begins or ceases to be asked."""
        fixed, each, _ = drafter.prices(step.number)
        if drafter.account.off:
            if drafter.worth.num_learned >= _NUM_SHADOWS and drafter.worth.pool > RETURN * step.rate * (fixed / len(step.rows) + each):
                drafter.account.reopen()
                self.reason = f"{drafter.name} on again: a shadow draft brings {drafter.worth.pool:.2f} tokens"
            return
        share = sum(choice is drafter for choice in step.asked.values()) / len(step.rows)
        drafter.busy += 0.1 * (share - drafter.busy)
        if drafter.told is None or (drafter.told != (drafter.busy > 0.3) and not 0.15 < drafter.busy < 0.45):
            drafter.told = drafter.busy > 0.3
            self.reason = f"{drafter.name} {'pays' if drafter.told else 'does not pay'}: a draft brings {drafter.worth.pool:.2f} tokens net"


@dataclass(slots=True)
class _Step:
    """What was decided and expected, from `plan` until `observe`. Rates in tokens per millisecond."""

    number: int
    rows: dict[int, int]          # seq_id -> row, of the sequences that decode
    sampled: set[int]             # those that are not greedy
    num_context: int
    num_prefill: int              # tokens expected in the same step
    predicted_ms: float           # of the decoding rows without drafts
    plain_ms: float               # the same, corrected by measured plain steps
    rate: float
    verify_ms: float              # of one more draft
    plan: dict[int, Choice] = field(default_factory=dict)
    asked: dict[int, _Drafter] = field(default_factory=dict)


_Judged = tuple[int, int, int, int, tuple[float, ...] | None]   # seq_id, num_drafts, num_accepted, first judged, confidence


class _Drafter:
    """What is known about one drafter."""

    def __init__(self, name: str, deterministic: bool, max_k: int, costs: CostModel) -> None:
        self.name, self.deterministic, self.max_k = name, deterministic, max_k
        self.worth = Worth()
        self.account = Account()
        self.sighted = Acceptance(max_k)     # of drafts that were made, by their confidence
        self.blind = Acceptance(max_k)       # of drafts to be made
        self.blind_used = False
        self.depth = min(2, max_k)           # that was found worth asking for last
        self.watched: dict[int, float] = {}  # shadow drafts under way: seq_id -> tokens a verified token would cost
        self.busy = 0.0
        self.told: bool | None = None
        self._costs = costs
        self._judged: list[_Judged] = []     # not learned from yet
        self._credit = 0.0                   # milliseconds that may go into probes
        self._probed_at = 0
        self._prices = (0.0, 0.0, 0.0)
        self._priced_at = -8
        self._rise = 0.0

    def prices(self, step: int) -> tuple[float, float, float]:
        """Milliseconds of asking it at all, for each sequence, and for each token it has not seen; refreshed every few steps."""
        if step >= self._priced_at + 8 or step < self._priced_at:
            self._priced_at = step
            one, two = (self._costs.predict_draft(self.name, rows, self.depth) for rows in (1, 2))
            woken = self._costs.predict_draft(self.name, 1, self.depth, 256)
            self._prices = (max(0.0, 2.0 * one - two), max(0.0, two - one), max(0.0, woken - one) / 256.0)
        return self._prices

    def rise(self, num_rows: int) -> float:
        """Milliseconds that drafting to the end costs more than one draft."""
        return self._costs.predict_draft(self.name, num_rows, self.max_k) - self._costs.predict_draft(self.name, num_rows, 1)

    def probe(self, step: _Step, slots: IntArray, others: IntArray) -> IntArray:
        """Which of `others` to try although it does not seem to pay: what the bucket affords, longest unasked first."""
        fixed, each, _ = self.prices(step.number)
        income = PROBE_SHARE * step.plain_ms
        elapsed = max(1, min(REST_STEPS, step.number - self._probed_at))
        self._probed_at = step.number
        self._credit = min(self._credit + elapsed * income, fixed + each + 4.0 * income)
        if len(others) == 0 or self._credit < fixed + each or (self.account.off and step.number < self.account.until):
            return others[:0]
        count = min(len(others), 1 + int((self._credit - fixed - each) / max(each, 1e-6)))
        self._credit -= fixed + each * count
        waited = self.worth.asked_at[slots[others]]
        return others[np.argsort(waited, kind="stable")[:count]]

    def values(self, drafts: list[DraftView]) -> FloatArray:
        """[n, k] P(the draft is accepted up to here), 0 beyond its end."""
        lengths = np.array([draft.length for draft in drafts])
        confidence = _padded([draft.confidence for draft in drafts], int(lengths.max()))
        rates = self.sighted.predict([draft.seq_id for draft in drafts], confidence.shape[1], confidence)
        return np.where(np.arange(confidence.shape[1]) < lengths[:, None], np.cumprod(rates, axis=1), 0.0)

    def judge(self, verified: list[_Judged], watched: list[_Judged], step: int) -> None:
        """Learns acceptance; of a small batch in groups of drafts, since each time has its price."""
        self._judged += _some(verified + watched, step)
        if len(self._judged) >= _LEAST_JUDGED:
            _judge(self.sighted, self._judged)
            self._judged = []
        if self.blind_used:
            _judge(self.blind, [(*judged[:4], None) for judged in _some(verified, step)])

    def forget(self, live: set[int]) -> None:
        self.worth.forget(live)
        for model in (self.sighted, self.blind):
            if model.num_requests > 2 * len(live) + 64:
                model.forget(live)
        if len(self.watched) > 2 * len(live) + 64:
            self.watched = {seq_id: price for seq_id, price in self.watched.items() if seq_id in live}


def _some(judged: list[_Judged], step: int) -> list[_Judged]:
    """At most _MOST_JUDGED of them, in turns: a large batch has more evidence than it needs, and learning takes time."""
    if len(judged) <= _MOST_JUDGED:
        return judged
    start = step * _MOST_JUDGED % len(judged)
    return (judged + judged)[start : start + _MOST_JUDGED]


def _judge(model: Acceptance, judged: list[_Judged]) -> None:
    if not judged:
        return
    ids, drafts, accepted, first, confidence = zip(*judged, strict=True)
    num_drafts = np.array(drafts)
    model.observe(ids, num_drafts, np.array(accepted), _padded(confidence, int(num_drafts.max())), np.array(first))


def _padded(confidences: Sequence[tuple[float, ...] | None], width: int) -> FloatArray:
    """[n, width], NaN where there is none."""
    padded = np.full((len(confidences), width), np.nan)
    for row, confidence in enumerate(confidences):
        if confidence:
            padded[row, : len(confidence)] = confidence[:width]
    return padded
