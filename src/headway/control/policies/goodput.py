"""Speculate where it pays: drafter, k and what is verified, per request and step, from measured cost and acceptance.

Time has a price: the tokens that a millisecond brings now. Every decision compares tokens gained with milliseconds spent at
that price. This file has the hooks; the parts are in control/goodput/. Read them in this order:

    prices         the price of time, and what the step to come takes without drafts
    gain           what asking a drafter brings each request, net of verification
    assignment     whom to ask: the best drafter of a request wins when its gain exceeds its price
    draft_length   how many tokens to draft, and, where one takes a while, for whom to go on
    verification   which of the drafts to verify, for the whole batch at once
    decision       one step, from `plan` to `observe`; who drafts once the cheap drafters were looked up
    exploration    trying drafters that do not seem to pay, as far as their `budget` allows
    guard          plain steps are measured; a drafter that loses against them is switched off
    learning       what a step teaches
    acceptance, drafter_state    what is known of each drafter

Sampled drafts get their length from statistics known before they are drawn and are verified whole, as the losslessness rule of
control/policy.py demands. Drafts that are a function of the prefix are trimmed after drafting, when their confidence is known.

Whom to ask holds for HOLD_STEPS while the batch stays the same. The policy's own time has a price, too: when all that asking would gain
is less than that, nobody is asked. What is known outlives a run (`learned`), as a first guess that the first requests test.

Guaranteed, while costs and acceptance change more slowly than the guard remembers (150 steps): time lost against plain decoding is at
most what the budgets allow beyond what their probes bring, plus TOLERANCE that counts as noise, plus the policy's own time; and each time
a workload turns against a drafter, the loss of the steps until its account shows it (20 to 150). Not guaranteed: anything against a
workload that flips faster than that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.config import option
from headway.control import constants as const
from headway.control.goodput.assignment import Assigner, Assignment
from headway.control.goodput.decision import Step
from headway.control.goodput.drafter_state import DrafterState
from headway.control.goodput.exploration import probe
from headway.control.goodput.gain import RequestGain
from headway.control.goodput.learning import book_new, compare, learn_gains, learn_shadows
from headway.control.goodput.prices import Pricing
from headway.control.goodput.verification import select
from headway.control.policy import AdaptivePolicy, BatchView, DrafterView, DraftView, SequenceView, Setup
from headway.errors import ConfigError
from headway.types import Choice, Feedback, SequenceFeedback, ShadowFeedback

OBJECTIVES = ("throughput", "latency")


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
        self._drafters = [self._new_drafter(view, setup) for view in setup.drafters]
        self._by_name = {drafter.name: drafter for drafter in self._drafters}
        self._pricing = Pricing(self._costs)
        self._step: Step | None = None
        self._unread: list[tuple[Step | None, Feedback]] = []
        self._assignment = Assignment([])      # the latest
        self._holds_until = 0                  # step before which it is not decided anew
        self.reason = "nothing seen yet"
        for name, saved in (setup.learned or {}).items():
            if name in self._by_name:
                self._by_name[name].load(saved)

    def _new_drafter(self, view: DrafterView, setup: Setup) -> DrafterState:
        """What is known of one drafter, at first."""
        return DrafterState(view, setup.max_k, setup.costs)

    def learned(self) -> dict[str, Any]:
        self._read()
        return {drafter.name: saved for drafter in self._drafters if (saved := drafter.to_json()) is not None}

    # -- before drafting ------------------------------------------------------------------------------------------

    def rests(self, step: int) -> bool:
        return not self._assignment.plan and 0 < self._holds_until - step <= const.HOLD_STEPS

    def plan(self, view: BatchView) -> Mapping[int, Choice]:
        self._step, self.forecast = None, None
        self._pricing.skip_to(view.step)
        decoding = [] if self.rests(view.step) else [seq for seq in view.sequences if seq.decoding]
        if not decoding:
            return {}
        able = [seq for seq in decoding if seq.max_k > 0]
        holds = [seq.seq_id for seq in able] == self._assignment.ids and 0 < self._holds_until - view.step <= const.HOLD_STEPS
        if not holds:
            self._read()
        step = self._step = Step(self._pricing.of(view, decoding))
        if not able or self._is_measured_plain(step):
            return {}
        if holds:
            step.adopt(self._assignment)
        else:
            self._decide(step, able)
        return step.assignment.plan

    def _is_measured_plain(self, step: Step) -> bool:
        """Whether nobody is asked so that a plain step is measured."""
        return step.prices.num_prefill == 0 and self._pricing.wants_plain

    def shadow(self, view: BatchView) -> Mapping[int, Choice]:
        return {} if self._step is None else self._step.shadow_plan

    def _decide(self, step: Step, able: list[SequenceView]) -> None:
        """Who is asked for how many drafts, and who is only watched. What is no probe holds for some steps."""
        prices, before = step.prices, self._assignment
        for seq in able:
            if (drafter := before.asked.get(seq.seq_id)) is not None and seq.seq_id not in before.net_gains:   # was asked up to now
                drafter.gain.of(seq.seq_id).note_ask(seq.num_context - 1)
        for drafter in self._drafters:
            drafter.set_stops_early(
                drafter.stepwise and drafter.first_depth is None and prices.pass_ms(drafter) > const.SLOW * prices.plain_ms
            )
        self._assignment, owner = Assigner(
            self._drafters, prices, self._costs, self._expected, lambda seq: self._is_behind(seq, prices.plain_ms),
            self._pricing.deciding_ms,
        ).assign(able)
        step.adopt(self._assignment)
        news = any(drafter.is_new for drafter in self._assignment.asked.values())
        probe(step, self._drafters, able, owner, self._costs, self._pricing.deciding_ms)
        self._holds_until = 0 if news else prices.number + const.HOLD_STEPS

    def _expected(self, drafter: DrafterState, seq: SequenceView, own: RequestGain) -> float:
        """Tokens, net of verification, that asking `drafter` for a draft of this request brings."""
        return drafter.gain.predict(own)

    def _target(self, seq: SequenceView) -> float | None:
        """Milliseconds per token that the request may take."""
        return seq.tpot_slo_ms or self.options.tpot_slo_ms

    def _is_behind(self, seq: SequenceView, plain_ms: float) -> bool:
        """Plain steps take longer than its target: then drafts for it need not pay."""
        return (self._target(seq) or plain_ms) < plain_ms

    # -- while drafting -------------------------------------------------------------------------------------------

    def stops_early(self, drafter: str) -> bool:
        return self._step is not None and self._by_name[drafter].stops_early

    def continue_drafting(self, seq_ids: Sequence[int], position: int, confidence: NDArray[np.float64]) -> NDArray[np.bool_]:
        step = self._step
        assert step is not None
        return step.stopping_of(step.asked[seq_ids[0]], self._costs).goes_on(seq_ids, position, confidence)

    # -- after drafting -------------------------------------------------------------------------------------------

    def choose_lookup(self, drafts: Sequence[DraftView], view: BatchView) -> Mapping[int, str]:
        return {} if self._step is None else self._step.take(drafts, self._by_name)

    def select(self, drafts: Sequence[DraftView], view: BatchView) -> Mapping[int, int]:
        step = self._step
        if step is None:
            return {}
        targets = {seq.seq_id: ms for seq in step.prices.sequences if (ms := self._target(seq)) is not None}
        lengths, self.forecast = select(
            step, drafts, self._by_name, self._costs, latency=self.options.objective == "latency", slo_ms=targets
        )
        return lengths

    # -- after the step -------------------------------------------------------------------------------------------

    def observe(self, feedback: Feedback) -> None:
        """Steps for which everything was decided already are learned from together, before the next decision: beside a model code that
        ran a step ago has left the caches, and the first step costs several times what those behind it cost."""
        step, self._step = self._step, None
        self._unread.append((step, feedback))
        decided = step is not None and step.assignment is not self._assignment
        news = [shadow for shadow in feedback.shadows if shadow.num_verified or shadow.seq_id in self._by_name[shadow.drafter].shadows]
        if decided or news or len(self._unread) >= const.HOLD_STEPS:
            self._read()

    def _read(self) -> None:
        while self._unread:
            self._learn(*self._unread.pop(0))

    def _learn(self, step: Step | None, feedback: Feedback) -> None:
        self._costs.observe(feedback)
        if step is None:
            self._pricing.observe_unplanned()
            if not feedback.shadows:
                return
        verified: dict[str, list[SequenceFeedback]] = {}
        for seq in feedback.sequences:
            if seq.num_drafts:
                verified.setdefault(seq.drafter, []).append(seq)
        if step is not None and feedback.num_prefill_tokens == 0 and 0.0 < feedback.step_ms < float("inf") and feedback.sequences:
            for drafter in compare(step, feedback, verified, self._drafters, self._pricing):
                self._holds_until = 0
                self.reason = f"{drafter.name} off: it loses {-100.0 * drafter.account.balance.value:.1f} % against plain steps"
        shadows: dict[str, list[ShadowFeedback]] = {}
        for shadow in feedback.shadows:
            shadows.setdefault(shadow.drafter, []).append(shadow)
        for drafter in self._drafters:
            self._learn_drafter(drafter, step, feedback, verified.get(drafter.name, ()), shadows.get(drafter.name, ()))
        if step is not None and learn_gains(step, feedback, self._costs):
            self._holds_until = 0
        if feedback.step % 16 == 0:
            self._forget({seq.seq_id for seq in feedback.sequences})

    def _learn_drafter(
        self, drafter: DrafterState, step: Step | None, feedback: Feedback, verified: Sequence[SequenceFeedback],
        shadows: Sequence[ShadowFeedback],
    ) -> None:
        drafter.judge(verified, shadows, feedback.step)
        learn_shadows(drafter, shadows)
        if step is None:
            return
        prices = step.prices
        if drafter.is_new:
            book_new(drafter, step, feedback, verified)
        if not drafter.account.off:
            self.reason = drafter.report(self._assignment.shares.get(drafter.name, 0.0)) or self.reason
        elif drafter.promises_profit(prices.number, prices.rate, len(prices.sequences)):
            drafter.account.reopen()
            self.reason = f"{drafter.name} on again: a shadow draft brings {drafter.gain.pool:.2f} tokens"

    def _forget(self, live: set[int]) -> None:
        for drafter in self._drafters:
            drafter.forget(live)
