"""A serving loop without a model: known costs, known acceptance, a clock that is computed. For tests of policies.

The world is a set of requests that decode for ever, or each of which is followed by a new one (`World.request`). Each step a drafter
that is asked proposes what the request's `Texture` says, of which a random prefix is what the target writes. Policies see the same views
and feedback as in the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

import numpy as np
from numpy.typing import NDArray

from headway.control.costs import CostModel, Work
from headway.control.driver import NOBODY, DraftCall, Driver, OpenStep, Proposals, RowOutcome, StepOutcome
from headway.control.policies.static import Static
from headway.control.policy import BatchView, DrafterView, Policy, SequenceView, Setup, never_stop
from headway.control.shadows import KnownDraft, KnownShadows
from headway.drafters.drafter import DraftRequest, stop_early
from headway.types import Choice, Feedback, SequenceFeedback


@dataclass(frozen=True)
class Texture:
    """What a drafter finds in a text: with probability `hit` a draft of `length` tokens, each accepted with `rate`."""

    hit: float = 1.0
    length: int = 16
    rate: float = 0.8
    stated: Callable[[float], float] | None = lambda rate: rate   # the confidence it states for a token of that rate
    rates: tuple[float, ...] = ()   # one of these for each token, where they differ


EDIT, CHAT, NEVER = Texture(hit=0.9, rate=0.93), Texture(hit=0.15, rate=0.4, length=4), Texture(hit=0.3, rate=0.02, length=4)
Textures = Callable[[int, int], Mapping[str, Texture]]   # (step, request) -> one for each drafter


def always(**textures: Texture) -> Textures:
    return lambda step, request: textures


def half_and_half(step: int, request: int) -> Mapping[str, Texture]:
    """Every second request copies."""
    return {"suffix": EDIT if request % 2 else CHAT}


@dataclass(frozen=True)
class DrafterCost:
    fixed: float = 0.0
    each: float = 0.02
    step: float = 0.0        # per draft position
    unseen: float = 0.0      # per token to catch up with


SUFFIX, COPIER = {"suffix": DrafterCost(0.01, 0.06)}, {"suffix": DrafterCost(0.005, 0.02)}
HEAD = DrafterCost(0.1, 0.05, 0.27)      # a small network: 4.5 % of a step for each token


def cpu(work: Work) -> float:
    """About what a small model costs on two cores: flat at first, a step at a tile, then linear."""
    tokens, sampled = work.num_tokens, work.num_tokens - work.num_prefill_tokens
    return 9.0 + 0.04 * tokens + 1.5 * (tokens > 16) + 0.30 * max(0, tokens - 16) + 4e-4 * work.num_context_tokens + 0.03 * sampled


def gpu(work: Work) -> float:
    """Bound by memory up to a few hundred tokens."""
    return 6.0 + 0.002 * work.num_tokens + 0.03 * max(0, work.num_tokens - 256) + 2e-6 * work.num_context_tokens


@dataclass
class World:
    """`textures(step, request)` gives one texture per drafter."""

    num_requests: int
    textures: Textures
    cost: Callable[[Work], float] = cpu
    later: tuple[int, Callable[[Work], float]] | None = None   # from this step on another cost
    drafters: Mapping[str, DrafterCost] = field(default_factory=lambda: {"suffix": DrafterCost()})
    deterministic: bool = True
    copying: tuple[str, ...] = ()   # drafters that are deterministic whatever the others are
    drafts_ahead: bool = False
    stepwise: bool = False   # drafters ask before each further token
    greedy: bool = True
    noise: float = 0.04
    seed: int = 0
    max_k: int = 8
    slowdown: Callable[[int], float] = lambda step: 1.0
    clock: Callable[[int, float], float] = lambda step, ms: ms   # what the policy sees as a time
    targets: Mapping[int, float] = field(default_factory=dict)   # request -> tpot_slo_ms
    breadth: int = 1         # nodes of a draft at each depth; one of them is continued
    request: Callable[[int], tuple[int, int]] | None = None   # serial -> tokens of its prompt and of its answer; None: one without an end


@dataclass
class Result:
    ms: NDArray[np.float64]            # true, per step
    tokens: NDArray[np.int64]
    drafts: NDArray[np.int64]          # verified
    by_request: NDArray[np.int64]      # [steps, requests] tokens written
    k_by_request: NDArray[np.int64]    # [steps, requests] drafts verified
    policy: Policy
    feedback: list[Feedback]

    def rate(self, start: int = 0, end: int | None = None) -> float:
        """Tokens per millisecond."""
        return float(self.tokens[start:end].sum() / self.ms[start:end].sum())


def run(policy: Policy, world: World, steps: int, *, profiled: bool = True, keep: bool = False) -> Result:
    host = _Host(world, profiled)
    host.start(policy)
    n = world.num_requests
    per_step, per_request = np.zeros((2, steps), int), np.zeros((2, steps, n), int)
    result = Result(np.zeros(steps), *per_step, *per_request, policy, [])
    for number in range(steps):
        feedback = host.step(number, result)
        if keep:
            result.feedback.append(feedback)
    return result


class _Host:
    """The world as a host of the driver. Its own time stands still: what a policy decides must not depend on how long that takes."""

    def __init__(self, world: World, profiled: bool) -> None:
        self.world, self.random = world, np.random.default_rng(world.seed)
        self.costs = CostModel()
        if profiled:
            self.costs.learn(profile(world, self.random))
        n = world.num_requests
        self.context = np.full(n, 300)
        self.ids, self.left, self.serial = list(range(n)), [0] * n, n
        if world.request is not None:
            for i in range(n):
                self.context[i], self.left[i] = world.request(i)
        self.number, self.draft_ms = 0, 0.0
        self._asked_at: dict[tuple[str, int], int] = {}

    def start(self, policy: Policy) -> None:
        world = self.world
        views = tuple(DrafterView(name, self._copies(name), world.drafts_ahead, world.stepwise) for name in world.drafters)
        policy.start(Setup(views, world.max_k, self.costs))
        self.driver = _Driver(world.breadth, policy, views)

    def step(self, number: int, result: Result) -> Feedback:
        world, context = self.world, self.context
        self.number, self.draft_ms = number, 0.0
        view = BatchView(
            number, tuple(
                SequenceView(seq_id, int(context[i]), 10, True, world.max_k, world.greedy, 0, 0, 0, 1, world.targets.get(i))
                for i, seq_id in enumerate(self.ids)
            ),
            0, 1000, 4096, tuple(world.drafters), world.max_k,
        )  # fmt: skip
        step = self.driver.plan(view)
        self.driver.draft(step, dict(step.wishes) | {seq_id: NOBODY for seq_id in self.ids if seq_id not in step.wishes}, self.propose)
        verified = self.driver.select(step)
        rows, finished = [], []
        for i, seq_id in enumerate(list(self.ids)):
            draft = verified.get(seq_id, KnownDraft([]))
            assert isinstance(draft, KnownDraft)
            rows.append(RowOutcome(seq_id, int(context[i]), len(draft), draft.num_right))
            self._write(i, draft.num_right + 1, finished)
            result.by_request[number, i], result.k_by_request[number, i] = draft.num_right + 1, len(draft) * world.breadth
        ms, work = self._time(int(result.k_by_request[number].sum()))
        result.ms[number], result.tokens[number], result.drafts[number] = ms, result.by_request[number].sum(), work.num_tokens - len(rows)
        seen_ms = world.clock(number, ms)
        outcome = StepOutcome(
            number, rows, work.num_tokens, 0, work.num_context_tokens, len(rows), 0, world.clock(number, self.draft_ms), seen_ms, seen_ms,
            finished,
        )  # fmt: skip
        return self.driver.observe(step, outcome)

    def propose(self, call: DraftCall) -> Proposals:
        price = self.world.drafters[call.drafter]
        drafts = {seq_id: self._draft(seq_id, call, k) for seq_id, k in call.ks.items()}
        ks = call.ks
        if self.world.stepwise and call.continue_drafting is not never_stop and not call.is_lookup:
            requests = [DraftRequest(seq_id, [], 0, len(draft), True) for seq_id, draft in drafts.items()]
            drafts = dict(zip(drafts, stop_early(requests, list(drafts.values()), call.continue_drafting), strict=True))
            ks = {seq_id: len(draft) for seq_id, draft in drafts.items()}
        shadows = {seq_id: self._draft(seq_id, call, k) for seq_id, k in call.shadow_ks.items()}
        asked = [*ks.values(), *call.shadow_ks.values()]
        took = price.fixed + price.each * len(asked) + price.step * max(asked)
        num_catch_up = 0 if call.is_lookup else sum(self._catch_up(seq_id, call.drafter) for seq_id in (*call.ks, *call.shadow_ks))
        took += price.unseen * num_catch_up
        self.draft_ms += took
        return Proposals(drafts, shadows, self.world.clock(self.number, took), num_catch_up)

    def _catch_up(self, seq_id: int, drafter: str) -> int:
        num_context = int(self.context[self.ids.index(seq_id)])
        seen, self._asked_at[drafter, seq_id] = self._asked_at.get((drafter, seq_id), 0), num_context
        return max(0, num_context - 1 - seen)

    def _copies(self, name: str) -> bool:
        return self.world.deterministic or name in self.world.copying

    def _draft(self, seq_id: int, call: DraftCall, k: int) -> KnownDraft:
        texture = self.world.textures(self.number, seq_id)[call.drafter]
        random = self.random
        length = min(k, texture.length) if random.random() < texture.hit else 0
        rates = random.choice(texture.rates, length).tolist() if texture.rates else [texture.rate] * length
        right = int(np.cumprod(random.random(length) < rates).sum())
        confidence = [texture.stated(rate) for rate in rates] if texture.stated else None
        sampled = not (self._copies(call.drafter) or self.world.greedy or call.is_lookup)
        return KnownDraft([0] * length, sampled or None, confidence, None, right)

    def _write(self, i: int, num_tokens: int, finished: list[int]) -> None:
        self.context[i] += num_tokens
        self.left[i] -= num_tokens
        if self.world.request is None and self.context[i] > 900:
            self.context[i] = 300
        elif self.world.request is not None and self.left[i] <= 0:
            finished.append(self.ids[i])
            self.ids[i], self.serial = self.serial, self.serial + 1
            self.context[i], self.left[i] = self.world.request(self.ids[i])

    def _time(self, num_drafts: int) -> tuple[float, Work]:
        """Milliseconds of the step, and what it computed."""
        world, n = self.world, self.world.num_requests
        work = Work(n, n + num_drafts, int(self.context.sum()))
        cost = world.later[1] if world.later and self.number >= world.later[0] else world.cost
        noise = float(np.exp(world.noise * self.random.normal()))
        return (cost(work) * noise + self.draft_ms) * world.slowdown(self.number), work


class _Driver(Driver):
    """Reports a chain as a tree of `breadth` nodes at each depth, of which the first is continued."""

    def __init__(self, breadth: int, policy: Policy, drafters: Sequence[DrafterView]) -> None:
        super().__init__(policy, drafters, KnownShadows(), clock=lambda: 0.0)
        self.breadth = breadth

    def _row(self, step: OpenStep | None, row: RowOutcome) -> SequenceFeedback:
        seq, breadth = super()._row(step, row), self.breadth
        if breadth == 1 or not seq.num_drafts:
            return seq
        nodes = seq.num_drafts * breadth
        parents = tuple(-1 if node < breadth else node - node % breadth - breadth for node in range(nodes))
        path = tuple(range(0, seq.num_accepted * breadth, breadth))
        return replace(seq, num_proposed=nodes, num_drafts=nodes, confidence=None, parents=parents, path=path)


def profile(world: World, random: np.random.Generator) -> list[tuple[Work, float]]:
    shapes = [Work(b, b * t, b * c) for b in (1, 4, 16, 64) for t in (1, 2, 3, 5, 9) for c in (64, 600)]
    return [(work, world.cost(work) * float(np.exp(world.noise * random.normal()))) for work in shapes]


class Fixed(Static):
    """k drafts from one drafter for everybody."""

    def __init__(self, k: int, drafter: str = "suffix") -> None:
        self.k, self.drafter = k, drafter

    def plan(self, view: BatchView) -> dict[int, Choice]:
        return {seq.seq_id: Choice(self.drafter, self.k) for seq in view.sequences} if self.k else {}


def fixed_rates(world: World, steps: int, ks: Sequence[int] = (0, 1, 2, 3, 4, 6, 8), drafter: str = "suffix") -> dict[int, float]:
    """k -> tokens per millisecond."""
    return {k: run(Fixed(k, drafter), world, steps).rate() for k in ks if k <= world.max_k}


STEPS = 240
WORKLOADS = {"edit": always(suffix=EDIT), "chat": always(suffix=CHAT), "never": always(suffix=NEVER), "half": half_and_half}


@cache
def fixed_rate(workload: str, num_requests: int, k: int) -> float:
    """Tokens per millisecond of one of WORKLOADS with k drafts for everybody."""
    return run(Fixed(k), World(num_requests, WORKLOADS[workload], drafters=SUFFIX), STEPS).rate()
