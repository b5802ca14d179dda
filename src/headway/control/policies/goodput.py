"""Speculate where it pays: drafter, k and what is verified, per request and step, from measured cost and acceptance.

Time has a price: `rate`, the tokens a millisecond is worth, is the plain rate B / T(B) times the speed-up that speculation
reached lately. Every decision compares tokens gained with milliseconds spent at that price:

    whom to ask     what asking a drafter for this request has brought lately, net of verification and of drafting on
                    (goodput/gain.py), against what one draft costs, catching up included. The best drafter of a request wins,
                    with a bonus for the one it has; a group that does not pay for its drafter's fixed cost is not asked.
    in which order  drafters that copy for next to nothing are looked at before a dear one is asked, and each step decides with their
                    drafts in hand who drafts (goodput/decision.py)
    how deep        the k beyond which a further position gains less over all asked requests than drafting it costs; where one token
                    takes a while, decided before each by the confidence of those drafted (goodput/stopping.py)
    what to verify  goodput/allocation.py over all drafts at once, with calibrated confidence, against T(n) of the cost model

Sampled drafts get their length from statistics known before they are drawn and are verified whole, as the losslessness rule of
control/policy.py demands. Drafts that are a function of the prefix are trimmed after drafting, when their confidence is known.

Exploration is paid from a bucket per drafter, together a share of the time (goodput/drafter_state.py): requests it does not seem to pay for
are tried again, all at once; where another drafter is at work, with a shadow draft that is not verified. What probes lead to is put back
into the bucket, so that bursts of copied text pay for finding the next one. A shadow draft of a drafter that is switched off grants
another where it would have paid: it then spends that share over the share of those that would not. New drafters: goodput/exploration.py.

What is decided before drafting holds for HOLD_STEPS while the batch stays the same, and when nobody is worth asking nothing is decided
for REST_STEPS. The policy's own time has a price, too: when all that asking would gain is less than that, nobody is asked. What is
known of acceptance and worth outlives a run (`learned`), as a first guess that the first requests test.

The guard (goodput/guard.py) compares with a measured counterfactual. Guaranteed, while costs and acceptance change more slowly
than it remembers (150 steps): time lost against plain decoding is at most about that for probes, beyond what they bring, plus
TOLERANCE that counts as noise, plus the policy's own time; and each time a workload turns against a drafter, the loss of the steps until
its account shows it (20 to 150). Not guaranteed: anything against a workload that flips faster than that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.config import option
from headway.control.costs import Work
from headway.control.goodput.allocation import FEW
from headway.control.goodput.decision import STEEP, Held, Step, choice
from headway.control.goodput.draft_length import DEPTHS, choose_depth
from headway.control.goodput.drafter_state import FOUND_ASKS, Candidate, some
from headway.control.goodput.gain import Own
from headway.control.goodput.guard import Mean, Plain
from headway.control.goodput.verification import select_few, select_many
from headway.control.policy import AdaptivePolicy, BatchView, DraftView, SequenceView, Setup
from headway.errors import ConfigError
from headway.types import Choice, Feedback, Forecast, SequenceFeedback, ShadowFeedback

OBJECTIVES = ("throughput", "latency")
WAKE_STEPS = 16          # steps over which catching up after a sleep is written off
REST_STEPS = 6           # steps decided at once when nobody is worth asking: then deciding must cost nothing, too
HOLD_STEPS = 4           # steps for which it stays decided who is asked, while the batch is the same
STAY = 0.1               # bonus of the drafter a request has, as a share of what it is worth
NEXT_TO_NOTHING = 0.1    # tokens: a drafter whose draft costs no more is looked at before another one is asked
LITTLE = 0.25            # of what the dearest drafter costs: one of nearly the same price competes with it, one of less is looked at first
SLOW = 0.15              # a further token for all that costs this share of a plain step: it is asked for one by one
_SPEEDUP_MEMORY = 100.0  # steps
_DECIDING_MEMORY = 50.0  # steps
_HOPELESS_AFTER = 32     # drafts of a request that is in a hurry, after which
_HOPELESS = 0.1          # this acceptance is too little to help it
_NOBODY = -1


class Goodput(AdaptivePolicy):
    needs_costs = True

    @dataclass(frozen=True)
    class Options:
        objective: str = option("throughput", "throughput: most tokens per second; latency: least time per token of each request")
        tpot_slo_ms: float | None = option(
            None, "milliseconds per output token that no request should exceed, where that is possible; a request may bring its own"
        )

        def __post_init__(self) -> None:
            if self.objective not in OBJECTIVES:
                raise ConfigError(f"objective must be one of {', '.join(OBJECTIVES)}, got {self.objective!r}")
            if self.tpot_slo_ms is not None and not 0.0 < self.tpot_slo_ms < float("inf"):
                raise ConfigError(f"tpot_slo_ms must be > 0 and finite, got {self.tpot_slo_ms}")

    def __init__(self, options: Options | None = None) -> None:
        self.options = options or self.Options()

    def start(self, setup: Setup) -> None:
        self._costs = setup.costs
        self._drafters = [Candidate(view, setup.max_k, self._costs) for view in setup.drafters]
        self._by_name = {drafter.name: drafter for drafter in self._drafters}
        self._plain = Plain()
        self._speedup = Mean(_SPEEDUP_MEMORY, 1.0, 1.0)
        self._deciding = Mean(_DECIDING_MEMORY)   # milliseconds of the policy's own time in a step with drafts
        self._step: Step | None = None
        self._unread: list[tuple[Step | None, Feedback]] = []
        self._held = Held([], 0)
        self._rests_until = 0                  # step before which nothing is decided
        self._planned = 0                      # the latest step that was planned
        self._last: dict[int, int] = {}        # seq_id -> index of the drafter it was given last
        self.reason = "nothing seen yet"
        for name, saved in (setup.learned or {}).items():
            if name in self._by_name:
                self._by_name[name].load(saved)

    def learned(self) -> dict[str, Any]:
        self._read()
        return {drafter.name: saved for drafter in self._drafters if (saved := drafter.to_json()) is not None}

    # -- before drafting ------------------------------------------------------------------------------------------

    def rests(self, step: int) -> bool:
        return 0 < self._rests_until - step <= REST_STEPS

    def plan(self, view: BatchView) -> Mapping[int, Choice]:
        self._step, self.forecast = None, None
        self._speedup.observe(1.0, min(float(view.step - self._planned - 1), _SPEEDUP_MEMORY))   # not asked, at rest: plain steps
        self._planned = view.step
        decoding = [] if self.rests(view.step) else [seq for seq in view.sequences if seq.decoding]
        if not decoding:
            return {}
        able = [seq for seq in decoding if seq.max_k > 0]
        ids, held = [seq.seq_id for seq in able], self._held
        holds = ids == held.ids and 0 < held.until - view.step <= HOLD_STEPS
        if not holds:
            self._read()
        step = self._step = self._opened(view, decoding)
        if not able or (step.num_prefill == 0 and self._plain.is_due(self._speedup.value, self._costs.speed)):
            return {}
        if holds:
            step.plan, step.asked, step.nets, step.cheap, step.hurried = held.plan, held.asked, held.nets, held.cheap, held.hurried
        else:
            self._decide(step, able, ids)
        return step.plan

    def shadow(self, view: BatchView) -> Mapping[int, Choice]:
        return {} if self._step is None else self._step.wishes

    def _opened(self, view: BatchView, decoding: list[SequenceView]) -> Step:
        """The prices of the step to come."""
        num_rows, prefill = len(decoding), 0
        num_context = sum([seq.num_context for seq in decoding])
        if num_rows < len(view.sequences):
            prefill = min(sum(seq.num_pending for seq in view.sequences if not seq.decoding), max(0, view.token_budget - num_rows))
        predicted = self._costs.curve(num_rows, num_rows, 0, num_context)[0]
        more = self._costs.curve(num_rows, 2 * num_rows, 0, num_context)[0]
        plain_ms = max(1e-3, self._plain.factor * predicted)
        return Step(
            number=view.step, sequences=decoding, num_context=num_context, num_prefill=prefill,
            predicted_ms=predicted, plain_ms=plain_ms, rate=max(1.0, self._speedup.value) * num_rows / plain_ms,
            verify_ms=max(0.0, more - predicted) / num_rows,
        )  # fmt: skip

    def _cheap(self, step: Step) -> list[Candidate]:
        """Drafters whose draft is a function of the prefix, costs next to nothing, little against another's, and is worth that."""
        if len(self._drafters) == 1:
            return []
        prices = [step.rate * sum(drafter.prices(step.number)[:2]) for drafter in self._drafters]
        most = min(NEXT_TO_NOTHING, LITTLE * max(prices))
        return [
            drafter for drafter, price in zip(self._drafters, prices, strict=True)
            if drafter.deterministic and not drafter.account.off and drafter.is_priced
            and price <= most and (drafter.is_new or drafter.worth.pool > price)
        ]  # fmt: skip

    def _decide(self, step: Step, able: list[SequenceView], ids: list[int]) -> None:
        """Who is asked for how many drafts, and who is only watched. What is no probe holds for some steps."""
        for seq in able:
            if (drafter := self._held.asked.get(seq.seq_id)) is not None and seq.seq_id not in self._held.nets:   # was asked up to now
                own = drafter.worth.of(seq.seq_id)
                own.asked_at, own.seen = step.number - 1, seq.num_context - 1
        for drafter in self._drafters:
            drafter.listens = drafter.stepwise and drafter.first_depth is None and step.pass_ms(drafter) > SLOW * step.plain_ms
        step.cheap = self._cheap(step)
        held = self._held = Held(ids, step.number + HOLD_STEPS, step.cheap)
        known = [[drafter.worth.of(seq_id) for seq_id in ids] for drafter in self._drafters]
        owner, nets = self._assign(step, able, known)
        for index, drafter in enumerate(self._drafters):
            mine = [i for i, who in enumerate(owner) if who == index]
            self._ask(drafter, step, mine, able, known[index], held.plan, held.asked)
            drafter.share = len(mine) / len(step.sequences)
            if mine and drafter.is_new:
                held.until = 0
            for i in mine:
                self._last[ids[i]] = index
                if step.cheap and drafter not in step.cheap:
                    held.nets[ids[i]] = nets[i]
        for drafter in step.cheap:
            drafter.share += len(held.nets) / len(step.sequences)
        step.plan, step.asked, step.nets, held.hurried = held.plan, held.asked, held.nets, step.hurried
        if not held.plan:
            self._rests_until = step.number + REST_STEPS
        self._probe(step, able, known, owner)
        if step.nets:
            num_rows, k = len(step.sequences), max([drafter.max_k for drafter in step.cheap])
            curve = self._costs.curve(num_rows, num_rows, num_rows * k, step.num_context)
            held.prices = [step.rate * (ms - curve[0]) / num_rows for ms in curve[::num_rows]]

    def _probe(self, step: Step, able: list[SequenceView], known: list[list[Own]], owner: list[int]) -> None:
        """Tries drafters where they do not seem worth asking, as far as that is affordable. Where cheap ones are looked at, or could be, a
        dear one is tried on what they leave to it."""
        held, cheap = self._held, [drafter in step.cheap for drafter in self._drafters]
        rest = [
            [i for i, who in enumerate(owner) if who != index and not (cheap[index] and who != _NOBODY and not cheap[who])]
            for index in range(len(cheap))
        ]
        plain_ms = step.plain_ms / max(1, len(rest) - rest.count([]))
        for index, (drafter, others) in enumerate(zip(self._drafters, rest, strict=True)):
            unseen = sum([able[i].num_context - 1 - known[index][i].seen for i in others])
            if not drafter.affords(step.number, plain_ms, len(others), unseen, self._deciding.value):
                continue
            free = [
                i for i in others if not drafter.account.off and (owner[i] == _NOBODY or (cheap[owner[i]] and not cheap[index]))
            ]
            if step.plan is held.plan:
                step.plan, step.asked, step.nets = dict(held.plan), dict(held.asked), dict(held.nets)
            self._ask(drafter, step, free, able, known[index], step.plan, step.asked)
            for i in free:
                step.probed.add(able[i].seq_id)
                if step.cheap and not cheap[index]:
                    step.nets[able[i].seq_id] = 0.0
                owner[i] = index
            for i in others:
                if owner[i] != index and (able[i].greedy or drafter.deterministic):
                    step.watch(drafter, able[i])
                known[index][i].asked_at, known[index][i].seen = step.number, able[i].num_context
            if drafter.is_rich:
                self._rests_until = held.until = 0

    def _ask(
        self, drafter: Candidate, step: Step, mine: list[int], able: list[SequenceView], known: list[Own],
        plan: dict[int, Choice], asked: dict[int, Candidate],
    ) -> None:
        """Adds the sequences able[i], i in `mine`, to `plan` and `asked`."""
        if not mine:
            return
        first = () if drafter in step.cheap else tuple([choice(look.name, look.max_k) for look in step.cheap])
        for i, k in zip(mine, self._depths(drafter, step, [able[i] for i in mine]), strict=True):
            seq, own = able[i], known[i]
            plan[seq.seq_id] = choice(drafter.name, min(k, seq.max_k), first)
            asked[seq.seq_id] = drafter
            if not first:
                own.asked_at, own.seen = step.number, seq.num_context

    def _assign(self, step: Step, able: list[SequenceView], known: list[list[Own]]) -> tuple[list[int], list[float]]:
        """[n] index of the drafter that is worth asking most, or _NOBODY, and tokens net that it brings. A dear one goes before the cheap
        ones, which are looked at before it is asked."""
        best, owner, nets = [0.0] * len(able), [_NOBODY] * len(able), [0.0] * len(able)
        copied, copier = list(best), list(owner)   # the same of the cheap ones
        tried: list[int] = []
        for index, drafter in enumerate(self._drafters):
            if drafter.account.off:
                continue
            tried.append(index)
            most, who = (copied, copier) if drafter in step.cheap else (best, owner)
            _, each, per_unseen = drafter.prices(step.number)
            price, per_unseen = step.rate * each, step.rate * per_unseen / WAKE_STEPS
            # A sample is enough to find out.
            for i in range(min(len(able), drafter.first_asks // 2) if drafter.is_new else len(able)):
                own, seq = known[index][i], able[i]
                gain = self.expected(drafter, seq, own, step.number)
                net = raw = gain - price - per_unseen * max(0, seq.num_context - 1 - own.seen)
                if self._last.get(seq.seq_id) == index:
                    net += STAY * abs(gain)
                if net <= 0.0 and self._in_a_hurry(seq, step):
                    net = 1e-6
                    step.hurried.add(seq.seq_id)
                if net > most[i]:
                    most[i], who[i] = net, index
                    if who is owner:
                        nets[i] = raw
        if not step.hurried:
            self._drop_poor(step, tried, best, owner)
            self._drop_poor(step, tried, copied, copier)
        value = sum([max(dear, cheap) for dear, cheap in zip(best, copied, strict=True)])
        if value <= step.rate * self._deciding.value and not step.hurried and not any(drafter.is_new for drafter in self._drafters):
            return [_NOBODY] * len(owner), nets
        return [cheap if dear == _NOBODY else dear for dear, cheap in zip(owner, copier, strict=True)], nets

    def _drop_poor(self, step: Step, tried: list[int], best: list[float], owner: list[int]) -> None:
        """Leaves out groups that do not pay for their drafter's fixed cost. Who would have been second waits for the next decision."""
        poor = [
            index for index in tried
            if 0.0 < sum(net for net, who in zip(best, owner, strict=True) if who == index)
            <= step.rate * self._drafters[index].prices(step.number)[0]
        ]  # fmt: skip
        for i, who in enumerate(owner):
            if who in poor:
                best[i], owner[i] = 0.0, _NOBODY

    def expected(self, drafter: Candidate, seq: SequenceView, own: Own, step: int) -> float:
        """Tokens, net of verification, that asking `drafter` for a draft of this request brings."""
        return drafter.worth.predict(own, step)

    def _target(self, seq: SequenceView) -> float:
        """Milliseconds per token that the request may take."""
        slo = seq.tpot_slo_ms or self.options.tpot_slo_ms
        return float("inf") if slo is None else slo

    def _in_a_hurry(self, seq: SequenceView, step: Step) -> bool:
        """Plain steps take longer than its target, and drafts have helped it or were not tried yet: then they need not pay."""
        hopeless = seq.num_drafts >= _HOPELESS_AFTER and seq.num_accepted < _HOPELESS * seq.num_drafts
        return self._target(seq) < step.plain_ms and not hopeless

    def _depths(self, drafter: Candidate, step: Step, sequences: list[SequenceView]) -> list[int]:
        """How many drafts to ask for, per sequence."""
        longest, num_rows = drafter.max_k, len(sequences)
        steep = drafter.rise(num_rows) > STEEP * step.plain_ms
        drafter.blind_used = steep or not (drafter.deterministic or all(seq.greedy for seq in sequences))
        if (first := drafter.first_depth) is not None:
            return [first] * num_rows
        if not drafter.blind_used:
            drafter.depth = longest
            return [longest] * num_rows
        depths = [depth for depth in DEPTHS if depth <= longest] if steep else [longest]
        work = Work(len(step.sequences), len(step.sequences) + step.num_prefill, step.num_context)
        drafter.depth, lengths = choose_depth(drafter, self._costs, [seq.seq_id for seq in sequences], work, step.rate, depths)
        if drafter.listens:
            return [longest] * num_rows
        whole = [not (drafter.deterministic or seq.greedy) for seq in sequences]
        return [max(1, length) if fixed else drafter.depth for length, fixed in zip(lengths, whole, strict=True)]

    # -- while drafting -------------------------------------------------------------------------------------------

    def stops_early(self, drafter: str) -> bool:
        return self._step is not None and self._by_name[drafter].listens

    def continue_drafting(self, seq_ids: Sequence[int], position: int, confidence: NDArray[np.float64]) -> NDArray[np.bool_]:
        step = self._step
        assert step is not None
        return step.stopping_of(step.asked[seq_ids[0]], self._costs).keep(seq_ids, position, confidence)

    # -- after drafting -------------------------------------------------------------------------------------------

    def choose_lookup(self, drafts: Sequence[DraftView], view: BatchView) -> Mapping[int, str]:
        return {} if self._step is None else self._step.take(drafts, self._by_name, self._held.prices)

    def select(self, drafts: Sequence[DraftView], view: BatchView) -> Mapping[int, int]:
        step = self._step
        if step is None:
            return {}
        sampled = {seq.seq_id for seq in step.sequences if not seq.greedy}
        free = [draft for draft in drafts if draft.deterministic or draft.seq_id not in sampled]
        whole, num_free = sum([draft.length for draft in drafts]), sum([draft.length for draft in free])
        whole -= num_free
        num_rows, prefill = len(step.sequences), step.num_prefill
        work = (num_rows + (prefill > 0), num_rows + prefill + whole, step.num_context + prefill)
        has_target = self.options.tpot_slo_ms is not None or any(seq.tpot_slo_ms for seq in step.sequences)
        if num_free <= FEW and self.options.objective == "throughput" and not has_target:
            few_ms = self._costs.curve(work[0], work[1], num_free, work[2], prefill)
            lengths, gained = select_few(free, self._by_name, few_ms, step)
            none_ms, all_ms = few_ms[0], few_ms[total := sum(lengths.values())]
        else:
            many_ms = self._costs.predict(work[0], work[1] + np.arange(num_free + 1), work[2], prefill)
            slo = np.array([self._target(seq) for seq in step.sequences]) if has_target else None
            lengths, gained = select_many(
                free, self._by_name, many_ms, step, latency=self.options.objective == "latency", slo_ms=slo
            )
            none_ms, all_ms = float(many_ms[0]), float(many_ms[total := sum(lengths.values())])
        if total:
            step.verify_ms = (all_ms - none_ms) / total
        extra, drafting_ms = step.plain_ms - step.predicted_ms, step.drafting_ms(self._drafters, drafts, self._costs)
        self.forecast = Forecast(all_ms + extra + drafting_ms, num_rows + gained, step.plain_ms if whole else none_ms + extra)
        return lengths

    # -- after the step -------------------------------------------------------------------------------------------

    def observe(self, feedback: Feedback) -> None:
        """Steps for which everything was decided already are learned from together, before the next decision: beside a model code that
        ran a step ago has left the caches, and the first step costs several times what those behind it cost."""
        step, self._step = self._step, None
        self._unread.append((step, feedback))
        decided = step is not None and step.plan is not self._held.plan
        news = [shadow for shadow in feedback.shadows if shadow.num_verified or shadow.seq_id in self._by_name[shadow.drafter].watched]
        if decided or news or len(self._unread) >= HOLD_STEPS:
            self._read()

    def _read(self) -> None:
        while self._unread:
            self._take_in(*self._unread.pop(0))

    def _take_in(self, step: Step | None, feedback: Feedback) -> None:
        self._costs.observe(feedback)
        if step is None:
            self._speedup.observe(1.0, 1.0)   # a plain step
            if not feedback.shadows:
                return
        verified: dict[str, list[SequenceFeedback]] = {}
        for seq in feedback.sequences:
            if seq.num_drafts:
                verified.setdefault(seq.drafter, []).append(seq)
        if step is not None and feedback.num_prefill_tokens == 0 and 0.0 < feedback.step_ms < float("inf") and feedback.sequences:
            self._compare(step, feedback, verified)
        self._learn(step, feedback, verified)
        if feedback.step % 16 == 0:
            live = {seq.seq_id for seq in feedback.sequences}
            for drafter in self._drafters:
                drafter.forget(live)
            if len(self._last) > 2 * len(live) + 64:
                self._last = {seq_id: index for seq_id, index in self._last.items() if seq_id in live}

    def _compare(self, step: Step, feedback: Feedback, verified: Mapping[str, list[SequenceFeedback]]) -> None:
        """The step against a plain one, and each drafter's part in the difference, in plain steps."""
        if not (verified or feedback.drafters):
            self._plain.observe(feedback.step_ms / max(1e-3, step.predicted_ms), self._costs.speed)
            self._speedup.observe(step.plain_ms / feedback.step_ms, min(20.0, feedback.step_ms / step.plain_ms))
            return
        self._deciding.observe(min(feedback.policy_ms, 0.1 * step.plain_ms))
        drafting, num_rows = {part.drafter for part in feedback.drafters}, len(feedback.sequences)
        rest = max(1e-3, feedback.step_ms - sum([part.draft_ms for part in feedback.drafters]))
        drafts = {name: sum([seq.num_drafts for seq in mine]) for name, mine in verified.items()}
        accepted = {name: sum([seq.num_accepted for seq in mine]) for name, mine in verified.items()}
        num_drafts = sum(drafts.values())
        if num_drafts:
            self._plain.passed()
        else:
            self._plain.observe(rest / max(1e-3, step.predicted_ms), self._costs.speed)
        plain_steps = min(20.0, feedback.step_ms / step.plain_ms)
        self._speedup.observe((1.0 + sum(accepted.values()) / num_rows) / plain_steps, plain_steps)
        beyond = min(4.0, max(-0.5, rest / step.plain_ms - 1.0))
        probing = {step.asked[seq_id].name for seq_id in step.probed if seq_id in step.asked}
        for drafter in self._drafters:
            name = drafter.name
            # What a target asks for is no loss of the drafter's, and probes are paid for.
            if drafter.account.off or step.hurried or name in probing or not (name in drafts or name in drafting):
                continue
            share = drafts.get(name, 0) / max(1, num_drafts)
            spent = drafter.drafting_ms(feedback) / step.plain_ms + beyond * share
            if drafter.account.observe(accepted.get(name, 0) / num_rows, spent, num_rows, feedback.step):
                drafter.worth.restart(0.0)
                self._held.until = 0
                self.reason = f"{name} off: it loses {-100.0 * drafter.account.balance.value:.1f} % against plain steps"

    def _learn(self, step: Step | None, feedback: Feedback, verified: Mapping[str, list[SequenceFeedback]]) -> None:
        shadows: dict[str, list[ShadowFeedback]] = {}
        for shadow in feedback.shadows:
            shadows.setdefault(shadow.drafter, []).append(shadow)
        for drafter in self._drafters:
            watched = shadows.get(drafter.name, ())
            drafter.judge(verified.get(drafter.name, ()), watched, feedback.step)
            for shadow in watched:
                if (gain := drafter.promised(shadow)) is not None:
                    if drafter.account.off and gain > 0.0:
                        drafter.look_again()
                        self._rests_until = self._held.until = 0
                    own = drafter.worth.of(shadow.seq_id)
                    another = shadow.seq_id in self._held.asked and self._held.asked[shadow.seq_id] is not drafter
                    drafter.worth.learn(shadow.seq_id, gain, probed=not another)
                    if another and gain > own.mean:
                        own.mean, self._held.until = gain, 0
            if step is not None:
                if drafter.is_new:
                    drafter.book(feedback, verified.get(drafter.name, ()), step.verify_ms, step.plain_ms)
                self._tell(drafter, step)
        if step is None:
            return
        for seq_id, (look, promise) in some(list(step.left.items()), feedback.step):
            look.worth.learn(seq_id, promise)
        if step.asked and self._costs.is_known:   # else nobody knows the price
            self._learn_worth(step, feedback)

    def _learn_worth(self, step: Step, feedback: Feedback) -> None:
        """What asking brought: tokens accepted, less what verifying and drafting beyond the first draft cost."""
        num_asked = Counter([drafter.name for drafter in step.asked.values()])
        for seq in some(feedback.sequences, feedback.step):
            drafter = step.asked.get(seq.seq_id)
            if drafter is None or seq.seq_id in step.hurried or (seq.num_proposed > seq.num_drafts == 0 and seq.seq_id in drafter.watched):
                continue
            brought = seq.num_accepted - step.rate * step.verify_ms * seq.num_drafts
            gain = brought - step.rate * drafter.further_ms(num_asked[drafter.name], seq.num_proposed)
            own, probed = drafter.worth.of(seq.seq_id), seq.seq_id in step.probed
            drafter.worth.learn(seq.seq_id, gain, probed=probed)
            if probed and gain > 0.0:
                own.found = FOUND_ASKS
                self._rests_until = self._held.until = 0
            if probed:   # `affords` has paid for drafting
                drafter.refund(brought / step.rate, step.plain_ms)
            elif own.found > 0:
                own.found -= 1
                price_ms = drafter.prices(step.number)[1] + self._deciding.value / len(step.asked)
                drafter.refund(gain / step.rate - price_ms, step.plain_ms)

    def _tell(self, drafter: Candidate, step: Step) -> None:
        """Switches a drafter on again when its shadow drafts promise a profit; says when one begins or ceases to be asked."""
        if drafter.account.off:
            if drafter.promises_profit(step.number, step.rate, len(step.sequences)):
                drafter.account.reopen()
                self.reason = f"{drafter.name} on again: a shadow draft brings {drafter.worth.pool:.2f} tokens"
            return
        drafter.busy += 0.1 * (drafter.share - drafter.busy)
        if drafter.told is None or (drafter.told != (drafter.busy > 0.3) and not 0.15 < drafter.busy < 0.45):
            drafter.told = drafter.busy > 0.3
            self.reason = f"{drafter.name} {'pays' if drafter.told else 'does not pay'}: a draft brings {drafter.worth.pool:.2f} tokens net"

