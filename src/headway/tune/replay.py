"""Decides a trace again without a model: another policy, the same sequences, the machine's own costs.

A step takes what the cost model, fitted to the trace, says; what a draft would have brought is in `tune/evidence.py`. Sequences start when
as many others are in flight as were in the trace, so a closed loop stays one, and a policy that is faster gets its next request sooner.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from headway.control.costs import CostModel
from headway.control.driver import NOBODY, DraftCall, Driver, Proposals, RowOutcome, StepOutcome
from headway.control.policy import BatchView, DrafterView, Policy, SequenceView, Setup
from headway.control.shadows import KnownDraft, KnownShadows
from headway.drafters.drafter import DraftRequest, stop_early
from headway.errors import ConfigError
from headway.telemetry.trace import Trace
from headway.tune.evidence import Evidence, Recorded, gather
from headway.types import Choice, Draft, Feedback

LENGTHS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32)
DEFAULT_BUDGET = 512


@dataclass(slots=True)
class Outcome:
    """One replay. Times in milliseconds."""

    ms: float = 0.0
    num_steps: int = 0
    num_tokens: int = 0
    num_rows: int = 0
    num_drafts: int = 0
    num_accepted: int = 0
    rows_by_k: dict[int, int] = field(default_factory=dict)   # drafts verified -> (sequence, step)

    @property
    def goodput(self) -> float:
        """Output tokens per second."""
        return self.num_tokens / self.ms * 1e3 if self.ms > 0.0 else 0.0

    @property
    def mean_k(self) -> float:
        return self.num_drafts / self.num_rows if self.num_rows else 0.0

    @property
    def acceptance(self) -> float | None:
        return self.num_accepted / self.num_drafts if self.num_drafts else None


class Fixed(Policy):
    """k drafts of one drafter for everybody, at any load."""

    name = "fixed"

    def __init__(self, drafter: str, k: int) -> None:
        self._drafter, self._k = drafter, k

    def plan(self, view: BatchView) -> Mapping[int, Choice]:
        if self._k == 0:
            return {}
        return {seq.seq_id: Choice(self._drafter, min(self._k, seq.max_k)) for seq in view.sequences if seq.decoding and seq.max_k > 0}


class World:
    """A trace, ready to be decided again."""

    def __init__(
        self, trace: Trace, *, max_k: int | None = None, seed: int = 0, costs: CostModel | None = None, in_flight: int | None = None
    ) -> None:
        """max_k: the largest k a policy may use (default: the trace's); costs: of the machine (default: fitted to the trace);
        in_flight: sequences at a time (default: as many as there were).

        Raises ConfigError for a trace without drafts.
        """
        self.evidence: Evidence = gather(trace, seed, in_flight)
        if not self.evidence.drafters:
            raise ConfigError("nothing was drafted in this trace, so it does not tell what a draft brings: record one with speculation")
        self.max_k = max_k or trace.max_k
        self.token_budget = int(trace.header.get("max_num_batched_tokens") or DEFAULT_BUDGET)
        most = max(record.num_in_flight for record in self.evidence.sequences)
        self.max_num_seqs = in_flight or int(trace.header.get("max_num_seqs") or most)
        self.costs = costs or fitted(trace)
        self._saved = self.costs.to_json()
        self.recorded = _recorded(trace)
        # Steps of sequences alone: without any, what plain decoding costs is extrapolated.
        self.num_plain_steps = sum(
            not step.feedback.num_prefill_tokens and not any(seq.num_drafts for seq in step.feedback.sequences) for step in trace.steps
        )

    def fresh_costs(self) -> CostModel:
        """The fitted costs as a policy may have them: its own copy."""
        return CostModel.from_json(self._saved)

    def fixed(self) -> dict[str, Outcome]:
        """Every fixed k of every drafter, k = 0 as "off"."""
        found = {"off": run(Fixed(self.evidence.drafters[0], 0), self)}
        for drafter in self.evidence.drafters:
            found |= {f"{drafter} k={k}": run(Fixed(drafter, k), self) for k in LENGTHS if k <= self.max_k}
        return found


def fitted(*traces: Trace) -> CostModel:
    """What steps cost, learned from recorded ones."""
    costs = CostModel()
    for trace in traces:
        for step in trace.steps:
            costs.observe(step.feedback)
    return costs


def _recorded(trace: Trace) -> Outcome:
    """What the trace itself reached, counted in the same way."""
    out = Outcome()
    for step in trace.steps:
        out.ms += step.feedback.step_ms
        out.num_steps += 1
        for seq in step.feedback.sequences:
            _count(out, seq.num_drafts, seq.num_accepted, seq.num_accepted + 1)
    return out


def _count(out: Outcome, num_drafts: int, num_accepted: int, num_tokens: int) -> None:
    out.num_rows += 1
    out.num_drafts += num_drafts
    out.num_accepted += num_accepted
    out.num_tokens += num_tokens
    out.rows_by_k[num_drafts] = out.rows_by_k.get(num_drafts, 0) + 1


@dataclass(slots=True, eq=False)
class _Live:
    """A sequence that runs. position: tokens written."""

    record: Recorded
    prefill_left: int
    position: int = 0
    num_drafts: int = 0
    num_accepted: int = 0

    @property
    def num_context(self) -> int:
        return self.record.num_prompt + self.position

    @property
    def decoding(self) -> bool:
        return self.position > 0

    @property
    def finished(self) -> bool:
        return self.position >= self.record.num_output

    def prefill(self, most: int) -> int:
        """Reads up to so many tokens of its prompt; returns how many."""
        num_tokens = min(self.prefill_left, most)
        self.prefill_left -= num_tokens
        return num_tokens

    def write(self, num_drafts: int, num_accepted: int) -> int:
        """Writes the accepted drafts and one more token; returns how many tokens there was room for."""
        num_tokens = min(num_accepted + 1, self.record.num_output - self.position)
        self.position += num_tokens
        self.num_drafts += num_drafts
        self.num_accepted += num_accepted
        return num_tokens


_NOTHING = KnownDraft([])


def run(
    policy: Policy, world: World, observe: Callable[[Feedback], None] = lambda feedback: None, costs: CostModel | None = None
) -> Outcome:
    """Decides the whole trace by `policy`; `observe` sees every step's feedback. `costs`: what the policy knows of them, else all."""
    views = tuple(DrafterView(name, True) for name in world.evidence.drafters)
    policy.start(Setup(views, world.max_k, costs or world.fresh_costs()))
    driver = Driver(policy, views, KnownShadows(), clock=lambda: 0.0)   # deciding takes no time here
    waiting = list(world.evidence.sequences)[::-1]
    live: list[_Live] = []
    out = Outcome()
    while waiting or live:
        while waiting and (len(live) < min(waiting[-1].num_in_flight, world.max_num_seqs) or not live):
            record = waiting.pop()
            live.append(_Live(record, max(1, round(record.num_prompt * world.evidence.prefill_share))))
        observe(_step(driver, world, live, len(waiting), out))
        live = [seq for seq in live if not seq.finished]
    return out


def _step(driver: Driver, world: World, live: list[_Live], num_waiting: int, out: Outcome) -> Feedback:
    view = BatchView(out.num_steps, tuple(_view(seq, world.max_k) for seq in live), num_waiting, 1 << 20, world.token_budget,
                     world.evidence.drafters, world.max_k)
    decoding = {seq.record.seq_id: seq for seq in live if seq.decoding}
    step = driver.plan(view)
    prefill, sampled = _prefill(live, world.token_budget - len(decoding))
    driver.draft(step, {seq_id: step.wishes.get(seq_id, NOBODY) for seq_id in decoding}, partial(_propose, world, decoding))
    verified = driver.select(step)
    context = sum(seq.num_context for seq in live)
    rows = []
    for seq in (*decoding.values(), *sampled):
        draft = verified.get(seq.record.seq_id, _NOTHING)
        assert isinstance(draft, KnownDraft)
        rows.append(RowOutcome(seq.record.seq_id, seq.num_context, len(draft), draft.num_right))
        _count(out, len(draft), draft.num_right, seq.write(len(draft), draft.num_right))
    num_tokens = len(decoding) + prefill + sum(row.num_drafts for row in rows)
    draft_ms = sum(part.draft_ms for part in step.drafters)
    rest = float(world.costs.predict(len(live), num_tokens, context, prefill))
    out.ms += rest + draft_ms
    out.num_steps += 1
    return driver.observe(step, StepOutcome(
        out.num_steps, rows, num_tokens, prefill, context, len(live), num_waiting, draft_ms, rest, rest + draft_ms,
        [seq.record.seq_id for seq in live if seq.finished],
    ))  # fmt: skip


def _view(seq: _Live, max_k: int) -> SequenceView:
    left = seq.record.num_output - seq.position
    return SequenceView(
        seq.record.seq_id, seq.num_context, seq.position, seq.decoding, min(max_k, max(0, left - 1)) if seq.decoding else 0, True, 0,
        seq.num_drafts, seq.num_accepted,
    )


def _prefill(live: Sequence[_Live], budget: int) -> tuple[int, list[_Live]]:
    """(prompt tokens of this step, the sequences whose prompt it completes)"""
    total, done = 0, []
    for seq in live:
        if not seq.decoding and total < budget:
            total += seq.prefill(budget - total)
            if seq.prefill_left == 0:
                done.append(seq)
    return total, done


def _propose(world: World, decoding: Mapping[int, _Live], call: DraftCall) -> Proposals:
    """What the drafter proposes, by the trace, and what that costs. Drafting times of a trace have catching up in them."""
    drafts = {seq_id: _draft(decoding[seq_id], call.drafter, k) for seq_id, k in call.ks.items()}
    if not call.is_lookup:
        requests = [DraftRequest(seq_id, [], decoding[seq_id].record.num_prompt, k, True) for seq_id, k in call.ks.items()]
        drafts = dict(zip(drafts, stop_early(requests, list(drafts.values()), call.continue_drafting), strict=True))
    shadows = {
        seq_id: _draft(decoding[seq_id], call.drafter, k) for seq_id, k in call.shadow_ks.items()
        if call.drafter in decoding[seq_id].record.drafts
    }  # fmt: skip
    ks = [*call.ks.values(), *call.shadow_ks.values()]
    return Proposals(drafts, shadows, world.costs.predict_draft(call.drafter, len(ks), max(ks)))


def _draft(seq: _Live, drafter: str, k: int) -> Draft:
    """The confidence is that of the draft which began here in the trace, its last value repeated when this one is longer."""
    known = seq.record.drafts[drafter]
    length, right = known.draft(seq.position, k)
    told = known.confidence.get(seq.position)
    confidence = [told[min(i, len(told) - 1)] for i in range(length)] if told else None
    return KnownDraft([0] * length, None, confidence, None, right)
