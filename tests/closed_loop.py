"""A serving loop without a model: known costs, known acceptance, a clock that is computed. For tests of policies.

The world is a set of requests that decode for ever, or each of which is followed by a new one (`World.request`). Each step a drafter
that is asked proposes what the request's `Texture` says, of which a random prefix is what the target writes. Policies see the same views
and feedback as in the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from headway.control.costs import CostModel, Work
from headway.control.policies.static import Static
from headway.control.policy import AdaptivePolicy, BatchView, DrafterView, DraftView, Policy, SequenceView, Setup, hooks_of
from headway.drafters.drafter import DraftRequest, stop_early
from headway.types import NO_DRAFT, Choice, Draft, DrafterFeedback, Feedback, SequenceFeedback, ShadowFeedback


@dataclass(frozen=True)
class Texture:
    """What a drafter finds in a text: with probability `hit` a draft of `length` tokens, each accepted with `rate`."""

    hit: float = 1.0
    length: int = 16
    rate: float = 0.8
    told: Callable[[float], float] | None = lambda rate: rate   # the confidence it states for a token of that rate
    rates: tuple[float, ...] = ()   # one of these for each token, where they differ


_Draft = tuple[int, int, tuple[float, ...] | None]
"""(length, how many of them are right, confidence)"""


@dataclass(frozen=True)
class DrafterCost:
    fixed: float = 0.0
    each: float = 0.02
    step: float = 0.0        # per draft position
    unseen: float = 0.0      # per token to catch up with


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
    textures: Callable[[int, int], Mapping[str, Texture]]
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
    clock: Callable[[int, float], float] = lambda step, ms: ms   # what the policy is told a time was
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
    random = np.random.default_rng(world.seed)
    costs = CostModel()
    if profiled:
        costs.learn(profile(world, random))
    names = tuple(world.drafters)
    views = tuple(DrafterView(name, world.deterministic or name in world.copying, world.drafts_ahead, world.stepwise) for name in names)
    policy.start(Setup(views, world.max_k, costs))
    hooks = hooks_of(policy)
    n = world.num_requests
    context = np.full(n, 300)
    ids, left, serial = list(range(n)), [0] * n, n
    if world.request is not None:
        for i in range(n):
            context[i], left[i] = world.request(i)
    per_step, per_request = np.zeros((2, steps), int), np.zeros((2, steps, n), int)
    result = Result(np.zeros(steps), *per_step, *per_request, policy, [])
    asked_at: dict[tuple[str, int], int] = {}
    for step in range(steps):
        view = BatchView(
            step, tuple(
                SequenceView(seq_id, int(context[i]), 10, True, world.max_k, world.greedy, 0, 0, 0, 1, world.targets.get(i))
                for i, seq_id in enumerate(ids)
            ),
            0, 1000, 4096, names, world.max_k,
        )  # fmt: skip
        slots = {seq_id: i for i, seq_id in enumerate(ids)}
        wishes = {slots[seq_id]: choice for seq_id, choice in policy.plan(view).items()}
        shadow_wishes = {slots[seq_id]: choice for seq_id, choice in hooks.shadow(view).items()}
        drafting, drafts, shadows, draft_ms = [], {}, [], 0.0
        looked: dict[int, list[tuple[str, int, int, int, tuple[float, ...] | None]]] = {}
        settled: set[int] = set()
        for name, price in world.drafters.items():
            ks = {i: look.k for i, c in wishes.items() for look in c.lookups if look.drafter == name}
            if ks:
                took = price.fixed + price.each * len(ks) + price.step * max(ks.values())
                draft_ms += took
                drafting.append(DrafterFeedback(name, len(ks), max(ks.values()), 0, 0, world.clock(step, took)))
                for i, k in ks.items():
                    looked.setdefault(i, []).append((name, k, *_draft(world, random, step, ids[i], name, k)))
        found = [DraftView(ids[i], name, length, True, told) for i, each in looked.items() for name, _, length, _, told in each if length]
        taken = hooks.choose_lookup(found, view)
        for i, each in looked.items():
            for name, _, length, right, told in each:
                if taken.get(ids[i]) == name:
                    settled.add(i)
                    drafts[i] = name, length, right, told
                elif length:
                    shadows.append(ShadowFeedback(ids[i], name, 0, length, right, told))
        for name, price in world.drafters.items():
            mine = {i: c.k for i, c in wishes.items() if c.drafter == name and c.k > 0 and i not in settled}
            watched = {i: c.k for i, c in shadow_wishes.items() if c.drafter == name and i not in mine}
            if not (mine or watched):
                continue
            made = {i: _draft(world, random, step, ids[i], name, k) for i, k in mine.items()}
            if world.stepwise and hooks.stops_early(name):
                made = _stopped(hooks, ids, made)
                mine = {i: draft[0] for i, draft in made.items()}
            ks = [*mine.values(), *watched.values()]
            took = price.fixed + price.each * len(ks) + price.step * max(ks)
            unseen = sum(max(0, int(context[i]) - 1 - asked_at.get((name, ids[i]), 0)) for i in (*mine, *watched))
            asked_at.update({(name, ids[i]): int(context[i]) for i in (*mine, *watched)})
            took += price.unseen * unseen
            draft_ms += took
            drafting.append(DrafterFeedback(name, len(ks), max(ks), unseen, 0, world.clock(step, took)))
            drafts.update({i: (name, *draft) for i, draft in made.items()})
            for i, k in watched.items():
                length, right, told = _draft(world, random, step, ids[i], name, k)
                shadows.append(ShadowFeedback(ids[i], name, 0, length, min(right, length), told))
        free = {i for i in range(n) if world.deterministic or world.greedy or i in settled or drafts.get(i, ("",))[0] in world.copying}
        views = [DraftView(ids[i], name, length, i in free, told) for i, (name, length, _, told) in drafts.items() if length]
        lengths = {view.seq_id: view.length for view in views} | dict(policy.select(views, view))
        sequences = []
        for i in range(n):
            name, length, right, told = drafts.get(i, (NO_DRAFT, 0, 0, None))
            verified = min(length, lengths.get(ids[i], length))
            accepted = min(right, verified)
            if accepted == verified < length and (world.deterministic or world.greedy or name in world.copying):
                shadows.append(ShadowFeedback(ids[i], name, verified, length, min(right, length) - verified, told))
            k = world.max_k if i in settled else wishes[i].k if i in wishes else 0
            sure = told[:verified] if told else None
            if world.breadth > 1 and verified:
                nodes = verified * world.breadth
                parents = tuple(-1 if node < world.breadth else node - node % world.breadth - world.breadth for node in range(nodes))
                path = tuple(range(0, accepted * world.breadth, world.breadth))
                sequences.append(SequenceFeedback(ids[i], name, k, nodes, nodes, accepted, int(context[i]), None, parents, path))
            else:
                sequences.append(SequenceFeedback(ids[i], name, k, length, verified, accepted, int(context[i]), sure))
            context[i] += accepted + 1
            result.by_request[step, i], result.k_by_request[step, i] = accepted + 1, verified * world.breadth
            left[i] -= accepted + 1
            if world.request is None and context[i] > 900:
                context[i] = 300
            elif world.request is not None and left[i] <= 0:
                ids[i], serial = serial, serial + 1
                context[i], left[i] = world.request(ids[i])
        work = Work(n, n + int(result.k_by_request[step].sum()), int(context.sum()))
        cost = world.later[1] if world.later and step >= world.later[0] else world.cost
        ms = (cost(work) * float(np.exp(world.noise * random.normal())) + draft_ms) * world.slowdown(step)
        result.ms[step], result.tokens[step], result.drafts[step] = ms, result.by_request[step].sum(), work.num_tokens - n
        told_ms = world.clock(step, ms)
        feedback = Feedback(
            step, tuple(sequences), 0, work.num_tokens, work.num_context_tokens, world.clock(step, draft_ms), told_ms, told_ms, n,
            drafters=tuple(drafting), shadows=tuple(shadows), forecast=policy.forecast, reason=policy.reason,
        )  # fmt: skip
        policy.observe(feedback)
        if keep:
            result.feedback.append(feedback)
    return result


def _draft(world: World, random: np.random.Generator, step: int, request: int, name: str, k: int) -> _Draft:
    texture = world.textures(step, request)[name]
    length = min(k, texture.length) if random.random() < texture.hit else 0
    rates = random.choice(texture.rates, length).tolist() if texture.rates else [texture.rate] * length
    right = int(np.cumprod(random.random(length) < rates).sum())
    return length, right, tuple([texture.told(rate) for rate in rates]) if texture.told else None


def _stopped(policy: AdaptivePolicy, ids: Sequence[int], drafts: dict[int, _Draft]) -> dict[int, _Draft]:
    """Each draft up to where the policy stopped it."""
    requests = [DraftRequest(ids[i], [], 0, length, True) for i, (length, _, _) in drafts.items()]
    made = [Draft([0] * length, confidence=list(told) if told else None) for length, _, told in drafts.values()]
    kept = [len(draft) for draft in stop_early(requests, made, policy.continue_drafting)]
    return {
        i: (length, min(right, length), told[:length] if told else None)
        for length, (i, (_, right, told)) in zip(kept, drafts.items(), strict=True)
    }


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
