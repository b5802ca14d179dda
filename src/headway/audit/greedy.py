"""Checks at temperature 0: the same tokens, the same log probabilities, alone, under load, and behind cached prefixes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from headway.audit.prompts import LONG_PROMPTS, PROMPTS
from headway.audit.records import FAULT, SKIPPED, SOUND, CheckResult, GreedyPair, Session
from headway.audit.side import Asker, Continuation

LENGTH = 64
NUM_TOPS = 5       # most likely tokens asked for: the margin of what the other side chose
AT_ONCE = 4
NUM_ALONE = 6      # texts that are asked for one at a time: slow, and enough to see the noise
ASKED = {"temperature": 0, "logprobs": NUM_TOPS}
MAX_EXAMPLES = 3


@dataclass(frozen=True, slots=True)
class Difference:
    """Where two texts part, and by how much: `margin` is how much likelier the plain token is to the plain run, None: not told."""

    position: int
    plain: str
    other: str
    margin: float | None

    def within(self, tolerance: float) -> bool:
        """A near-tie, which rounding may tip."""
        return self.margin is not None and self.margin <= tolerance


def first_difference(plain: Continuation, other: Continuation) -> Difference | None:
    """The first token that differs; None when there is none. Texts are compared where tokens are not told."""
    for i, (ours, theirs) in enumerate(zip(plain.tokens, other.tokens, strict=False)):
        if ours != theirs:
            known = plain.tops[i].get(theirs) if i < len(plain.tops) else None
            return Difference(i, ours, theirs, None if known is None else plain.logprobs[i] - known)
    shorter = min(len(plain.tokens), len(other.tokens))
    if len(plain.tokens) != len(other.tokens):
        ends = [each.tokens[shorter] if len(each.tokens) > shorter else "the end" for each in (plain, other)]
        return Difference(shorter, ends[0], ends[1], None)
    return Difference(shorter, plain.text, other.text, None) if plain.text != other.text else None


def largest_gap(plain: Continuation, other: Continuation) -> tuple[float, int]:
    """(largest difference of the log probabilities of one token, its position) before the texts part."""
    parts = first_difference(plain, other)
    end = len(plain.logprobs) if parts is None else parts.position
    gaps = [abs(a - b) for a, b in zip(plain.logprobs[:end], other.logprobs[:end], strict=False)]
    return max(((gap, i) for i, gap in enumerate(gaps)), default=(0.0, 0))


async def ask_all(side: Asker, prompts: Sequence[str], at_once: int, session: Session, length: int = LENGTH) -> list[Continuation]:
    """Greedy continuations, so many at a time."""
    gate = asyncio.Semaphore(at_once)

    async def one(prompt: str) -> Continuation:
        async with gate:
            salt = session.fresh_salt() if side is session.plain else {}
            return (await side.complete(prompt, max_tokens=length, **ASKED, **salt))[0]

    return list(await asyncio.gather(*[one(prompt) for prompt in prompts]))


async def measure_noise(session: Session) -> CheckResult:
    """How far apart two plain runs are: one request at a time against all at once. Everything later is held against that."""
    alone = await ask_all(session.plain, PROMPTS[:NUM_ALONE], 1, session)
    together = await ask_all(session.plain, PROMPTS, len(PROMPTS), session)
    if not any(each.logprobs for each in alone):
        return CheckResult("noise", SKIPPED, "the server tells no log probabilities: near-ties and faults look alike here")
    gaps = [largest_gap(*both)[0] for both in zip(alone, together, strict=False)]
    parted = [first_difference(*both) for both in zip(alone, together, strict=False)]
    margins = [each.margin for each in parted if each is not None and each.margin is not None]
    session.observe_noise(max([*gaps, *(margin / 2 for margin in margins)]))
    count = sum(each is not None for each in parted)
    summary = f"two plain runs differ by up to {session.noise:.2g} in log probability, and {count} of {len(alone)} texts part"
    return CheckResult("noise", SOUND, summary, {"largest_logprob_difference": session.noise, "texts_parted": count})


async def check_greedy(session: Session) -> list[CheckResult]:
    """Greedy divergence, and the log probabilities of equal texts."""
    plain = await ask_all(session.plain, PROMPTS, AT_ONCE, session)
    other = await ask_all(session.speculative, PROMPTS, AT_ONCE, session)
    session.keep_pairs([GreedyPair(*each, LENGTH) for each in zip(PROMPTS, plain, other, strict=True)])
    return [judge_texts("greedy text", session, session.pairs), _judge_logprobs(session, session.pairs)]


def judge_texts(name: str, session: Session, pairs: Sequence[GreedyPair]) -> CheckResult:
    near_ties: list[tuple[GreedyPair, Difference]] = []
    faults: list[tuple[GreedyPair, Difference]] = []
    num_tokens = 0
    for pair in pairs:
        parts = first_difference(pair.plain, pair.speculated)
        num_tokens += len(pair.plain.tokens) if parts is None else parts.position
        if parts is not None:
            (near_ties if parts.within(session.tolerance) else faults).append((pair, parts))
    figures = {
        "texts": len(pairs), "equal_tokens": num_tokens, "near_ties": len(near_ties), "faults": len(faults),
        "tolerance": session.tolerance,
        "divergences": [
            {"prompt": pair.prompt, "position": parts.position, "plain": parts.plain, "speculated": parts.other, "margin": parts.margin}
            for pair, parts in near_ties + faults
        ],
    }  # fmt: skip
    said = f"{len(pairs)} texts, {num_tokens} equal tokens"
    if near_ties:
        said += f", {len(near_ties)} parted at a near-tie (margin within {session.tolerance:.2g})"
    if not faults:
        return CheckResult(name, SOUND, said, figures)
    pair, parts = faults[0]
    margin = "not among the likeliest" if parts.margin is None else f"less likely by {parts.margin:.3g} in log probability"
    said += f"; {len(faults)} parted for no reason: token {parts.position + 1} is {parts.other!r} instead of {parts.plain!r}, {margin}"
    return CheckResult(name, FAULT, said, figures, tuple(_curl(session, pair) for pair, _ in faults[:MAX_EXAMPLES]))


def _judge_logprobs(session: Session, pairs: Sequence[GreedyPair]) -> CheckResult:
    name = "log probabilities"
    told = [pair for pair in pairs if pair.plain.logprobs and pair.speculated.logprobs]
    if not told:
        return CheckResult(name, SKIPPED, "the server tells none")
    gap, position, worst = max(((*largest_gap(pair.plain, pair.speculated), pair) for pair in told), key=lambda each: each[0])
    figures = {"largest_difference": gap, "tolerance": session.tolerance}
    said = f"of equal tokens differ by up to {gap:.2g} (tolerance {session.tolerance:.2g})"
    if gap <= session.tolerance:
        return CheckResult(name, SOUND, said, figures)
    return CheckResult(name, FAULT, f"{said}, at token {position + 1} of {worst.prompt!r}", figures, (_curl(session, worst),))


async def check_load(session: Session) -> CheckResult:
    """All prompts twice at once and a few at a time: how much is drafted follows the load, so drafting stops and starts inside texts."""
    prompts = PROMPTS + PROMPTS
    found = await ask_all(session.speculative, prompts, len(prompts), session)
    found += await ask_all(session.speculative, PROMPTS[:3], 3, session)
    plain = {pair.prompt: pair.plain for pair in session.pairs}
    pairs = [GreedyPair(p, plain[p], other, LENGTH) for p, other in zip((*prompts, *PROMPTS[:3]), found, strict=True)]
    return _with_logprobs(judge_texts("load that comes and goes", session, pairs), session, pairs)


async def check_prefix_cache(session: Session) -> CheckResult:
    """The speculating side answers long prompts and goes on behind its own answers, whose K/V verification wrote; plain runs are fresh."""
    other = session.speculative
    pairs, longer = [], list(LONG_PROMPTS)
    for _ in range(3):
        answers = await ask_all(other, longer, 2, session, LENGTH // 2)
        again = await ask_all(other, longer, 2, session, LENGTH // 2)
        plain = await ask_all(session.plain, longer, 2, session, LENGTH // 2)
        for found in (answers, again):
            pairs += [GreedyPair(*each, LENGTH // 2) for each in zip(longer, plain, found, strict=True)]
        longer = [f"{prompt}{answer.text} Then" for prompt, answer in zip(longer, answers, strict=True)]
    result = _with_logprobs(judge_texts("prefix cache", session, pairs), session, pairs)
    return result if result.status == FAULT or not session.salted else await _check_salt(session, result)


async def _check_salt(session: Session, result: CheckResult) -> CheckResult:
    """Prefixes of one salt are not found by another."""
    prompt, salts = LONG_PROMPTS[0], (session.fresh_salt(), session.fresh_salt())
    fields = {"temperature": 0, "max_tokens": 4}
    first, second, other = [(await session.speculative.complete(prompt, **fields, **salt))[0] for salt in (salts[0], *salts)]
    if not second.num_cached:   # it tells nothing, or caches nothing
        return result
    if other.num_cached or first.num_cached:
        said = f"a prefix of one cache_salt is found by another: {max(other.num_cached or 0, first.num_cached or 0)} tokens"
        return CheckResult(result.name, FAULT, said, result.figures, tuple(
            session.speculative.curl(prompt, **fields, **salt) for salt in salts
        ))  # fmt: skip
    return CheckResult(result.name, result.status, f"{result.summary}; cache_salt keeps prefixes apart", result.figures)


def _with_logprobs(result: CheckResult, session: Session, pairs: Sequence[GreedyPair]) -> CheckResult:
    """K/V that is not what it should be shows in log probabilities long before it changes a token."""
    logprobs = _judge_logprobs(session, pairs)
    if result.status == FAULT or logprobs.status != FAULT:
        return result
    figures = {**result.figures, **logprobs.figures}
    return CheckResult(result.name, FAULT, f"log probabilities {logprobs.summary}", figures, logprobs.examples)


def _curl(session: Session, pair: GreedyPair) -> str:
    return session.speculative.curl(pair.prompt, max_tokens=pair.length, **ASKED)
