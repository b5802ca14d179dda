"""Decides a trace again without a model: another policy, the same sequences, the machine's own costs.

A step takes what the cost model, fitted to the trace, says; what a draft would have brought is in `tune/evidence.py`. Sequences start when
as many others are in flight as were in the trace, so a closed loop stays one, and a policy that is faster gets its next request sooner.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from headway.control.costs import CostModel
from headway.control.policy import BatchView, DrafterView, DraftView, Policy, SequenceView, Setup, hooks_of
from headway.control.trace import Trace
from headway.drafters.drafter import DraftRequest, never_stop, stop_early
from headway.errors import ConfigError
from headway.tune.evidence import Evidence, Recorded, gather
from headway.types import NO_DRAFT, Choice, Draft, DrafterFeedback, Feedback, LookupFeedback, SequenceFeedback, ShadowFeedback

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
        self.evidence: Evidence = gather(trace, seed)
        if not self.evidence.drafters:
            raise ConfigError("nothing was drafted in this trace, so it does not tell what a draft brings: record one with speculation")
        self.max_k = max_k or trace.max_k
        self.token_budget = int(trace.header.get("max_num_batched_tokens") or DEFAULT_BUDGET)
        if in_flight is not None:
            for record in self.evidence.sequences:
                record.num_in_flight = in_flight
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


def run(
    policy: Policy, world: World, observe: Callable[[Feedback], None] = lambda feedback: None, costs: CostModel | None = None
) -> Outcome:
    """Decides the whole trace by `policy`; `observe` sees every step's feedback. `costs`: what the policy knows of them, else all."""
    views = tuple(DrafterView(name, True) for name in world.evidence.drafters)
    policy.start(Setup(views, world.max_k, costs or world.fresh_costs()))
    waiting = list(world.evidence.sequences)[::-1]
    live: list[_Live] = []
    out = Outcome()
    while waiting or live:
        while waiting and (len(live) < min(waiting[-1].num_in_flight, world.max_num_seqs) or not live):
            record = waiting.pop()
            live.append(_Live(record, max(1, round(record.num_prompt * world.evidence.prefill_share))))
        feedback = _step(policy, world, live, len(waiting), out)
        policy.observe(feedback)
        observe(feedback)
        live = [seq for seq in live if seq.position < seq.record.num_output]
    return out


def _step(policy: Policy, world: World, live: list[_Live], num_waiting: int, out: Outcome) -> Feedback:
    view = BatchView(out.num_steps, tuple(_view(seq, world.max_k) for seq in live), num_waiting, 1 << 20, world.token_budget,
                     world.evidence.drafters, world.max_k)
    decoding = [seq for seq in live if seq.decoding]
    before = [seq.num_context for seq in decoding]
    wishes, watched = policy.plan(view), hooks_of(policy).shadow(view)
    prefill, sampled = _prefill(live, world.token_budget - len(decoding))
    drafts, drafting, shadows, looks = _look(policy, world, view, decoding, wishes)
    asked, made = _draft(policy, world, [seq for seq in decoding if seq.record.seq_id not in drafts], wishes, watched)
    drafts, drafting = drafts | asked, drafting + made
    verified = _select(policy, view, drafts)
    shadows += _shadows(decoding, watched, wishes)
    sequences = []
    for seq, num_context in zip(decoding, before, strict=True):
        drafter, k, length, right, confidence = drafts.get(seq.record.seq_id, (NO_DRAFT, 0, 0, 0, None))
        num_drafts = min(length, verified.get(seq.record.seq_id, length))
        num_accepted = min(right, num_drafts)
        if num_accepted == num_drafts < length:
            confirmed = min(right, length) - num_drafts
            shadows.append(ShadowFeedback(seq.record.seq_id, drafter, num_drafts, length, confirmed, confidence))
        sequences.append(SequenceFeedback(
            seq.record.seq_id, drafter, k, length, num_drafts, num_accepted, num_context, confidence[:num_drafts] if confidence else None
        ))
        _count(out, num_drafts, num_accepted, _write(seq, num_accepted))
        seq.num_drafts += num_drafts
        seq.num_accepted += num_accepted
    for seq in sampled:
        sequences.append(SequenceFeedback(seq.record.seq_id, NO_DRAFT, 0, 0, 0, 0, seq.record.num_prompt))
        _count(out, 0, 0, _write(seq, 0))
    num_tokens = len(decoding) + prefill + sum(seq.num_drafts for seq in sequences)
    num_rows = len(live)
    context = sum(before) + sum(seq.record.num_prompt for seq in live) - sum(seq.record.num_prompt for seq in decoding)
    draft_ms = sum(part.draft_ms for part in drafting)
    rest = float(world.costs.predict(num_rows, num_tokens, context, prefill))
    out.ms += rest + draft_ms
    out.num_steps += 1
    return Feedback(
        out.num_steps, tuple(sequences), prefill, num_tokens, context, draft_ms, rest, rest + draft_ms, num_rows, num_waiting,
        drafters=tuple(drafting), shadows=tuple(shadows), lookups=tuple(looks), forecast=policy.forecast, reason=policy.reason,
    )


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
            chunk = min(seq.prefill_left, budget - total)
            seq.prefill_left -= chunk
            total += chunk
            if seq.prefill_left == 0:
                done.append(seq)
    return total, done


_Proposal = tuple[str, int, int, int, tuple[float, ...] | None]   # drafter, k, length, right, confidence


def _look(
    policy: Policy, world: World, view: BatchView, decoding: Sequence[_Live], wishes: Mapping[int, Choice]
) -> tuple[dict[int, _Proposal], list[DrafterFeedback], list[ShadowFeedback], list[LookupFeedback]]:
    """Lookups: the drafts that were chosen, what they cost, those that were not chosen, judged, and the record of these."""
    looks: dict[int, dict[str, _Proposal]] = {}
    costs = []
    for name in world.evidence.drafters:
        ks = {seq.record.seq_id: look.k for seq in decoding for look in _lookups(wishes, seq) if look.drafter == name and look.k > 0}
        for seq in decoding:
            if (k := ks.get(seq.record.seq_id)) is not None:
                looks.setdefault(seq.record.seq_id, {})[name] = _proposal(seq, name, k)
        if ks:
            draft_ms = world.costs.predict_draft(name, len(ks), max(ks.values()))
            costs.append(DrafterFeedback(name, len(ks), max(ks.values()), 0, sum(looks[seq_id][name][2] for seq_id in ks), draft_ms))
    if not looks:
        return {}, [], [], []
    found = [(seq_id, each) for seq_id, mine in looks.items() for each in mine.values() if each[2]]
    views = [DraftView(seq_id, name, length, True, told) for seq_id, (name, _, length, _, told) in found]
    taken = hooks_of(policy).choose_lookup(views, view)
    drafts = {seq_id: mine[taken[seq_id]] for seq_id, mine in looks.items() if taken.get(seq_id) in mine}
    left = [(seq_id, each) for seq_id, mine in looks.items() for each in mine.values() if drafts.get(seq_id) is not each]
    judged = [ShadowFeedback(seq_id, name, 0, length, right, told) for seq_id, (name, _, length, right, told) in left if length]
    return drafts, costs, judged, [LookupFeedback(seq_id, name, k, length) for seq_id, (name, k, length, _, _) in left]


def _lookups(wishes: Mapping[int, Choice], seq: _Live) -> tuple[Choice, ...]:
    choice = wishes.get(seq.record.seq_id)
    return () if choice is None else choice.lookups


def _proposal(seq: _Live, name: str, k: int) -> _Proposal:
    length, right = seq.record.drafts[name].draft(seq.position, k)
    told = _confidence(seq, name, length)
    return name, k, length, right, tuple(told) if told is not None else None


def _draft(
    policy: Policy, world: World, decoding: Sequence[_Live], wishes: Mapping[int, Choice], watched: Mapping[int, Choice]
) -> tuple[dict[int, _Proposal], list[DrafterFeedback]]:
    """What each drafter that is asked proposes, and what that costs."""
    found: dict[int, _Proposal] = {}
    costs, hooks = [], hooks_of(policy)
    for name in world.evidence.drafters:
        mine = [seq for seq in decoding if _asks(wishes, seq, name)]
        others = [seq for seq in decoding if _asks(watched, seq, name) and seq not in mine]
        if not mine and not others:
            continue
        requests, drafts = [], []
        for seq in mine:
            k = wishes[seq.record.seq_id].k
            length, _ = seq.record.drafts[name].draft(seq.position, k)
            requests.append(DraftRequest(seq.record.seq_id, [], seq.record.num_prompt, k, True))
            drafts.append(Draft([0] * length, confidence=_confidence(seq, name, length)))
        drafts = stop_early(requests, drafts, hooks.continue_drafting if hooks.stops_early(name) else never_stop)
        for seq, request, draft in zip(mine, requests, drafts, strict=True):
            _, right = seq.record.drafts[name].draft(seq.position, request.k)
            confidence = tuple(draft.confidence) if draft.confidence is not None else None
            found[request.seq_id] = (name, request.k, len(draft), min(right, len(draft)), confidence)
        ks = [request.k for request in requests] + [watched[seq.record.seq_id].k for seq in others]
        draft_ms = world.costs.predict_draft(name, len(ks), max(ks))
        costs.append(DrafterFeedback(name, len(ks), max(ks), 0, sum(map(len, drafts)), draft_ms))
    return found, costs


def _asks(wishes: Mapping[int, Choice], seq: _Live, drafter: str) -> bool:
    choice = wishes.get(seq.record.seq_id)
    return choice is not None and choice.drafter == drafter and choice.k > 0


def _confidence(seq: _Live, drafter: str, length: int) -> list[float] | None:
    """That of the draft which began here in the trace, its last value repeated when this one is longer; None when none began here."""
    told = seq.record.drafts[drafter].confidence.get(seq.position)
    return None if not told else [told[min(i, len(told) - 1)] for i in range(length)]


def _select(policy: Policy, view: BatchView, drafts: Mapping[int, _Proposal]) -> Mapping[int, int]:
    views = [DraftView(seq_id, name, length, True, told) for seq_id, (name, _, length, _, told) in drafts.items() if length]
    return policy.select(views, view) if views else {}


def _shadows(decoding: Sequence[_Live], watched: Mapping[int, Choice], wishes: Mapping[int, Choice]) -> list[ShadowFeedback]:
    """Shadow drafts, judged at once: what the target writes is known."""
    found = []
    for seq in decoding:
        choice = watched.get(seq.record.seq_id)
        if choice is not None and choice.k > 0 and not _asks(wishes, seq, choice.drafter) and choice.drafter in seq.record.drafts:
            length, right = seq.record.drafts[choice.drafter].draft(seq.position, choice.k)
            told = _confidence(seq, choice.drafter, length)
            found.append(ShadowFeedback(seq.record.seq_id, choice.drafter, 0, length, right, tuple(told) if told else None))
    return found


def _write(seq: _Live, num_accepted: int) -> int:
    """Tokens that the sequence keeps."""
    kept = min(num_accepted + 1, seq.record.num_output - seq.position)
    seq.position += kept
    return kept
