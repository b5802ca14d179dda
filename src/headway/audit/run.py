"""One audit from its first request to its verdict."""

from __future__ import annotations

import random
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from headway.audit import greedy, limits
from headway.audit.prompts import PROMPTS
from headway.audit.records import FAULT, SKIPPED, CheckResult, Session
from headway.audit.sampled import SETTINGS, SampledCheck, anticipation, survey_prompts
from headway.audit.side import Asker, Refused, Side
from headway.bench.client import Endpoint, RequestFailed
from headway.bench.http_load import served_model
from headway.errors import ConfigError

Say = Callable[[str], None]

# How one request to Headway's own server turns speculation off, and something it would refuse: who takes both ignores the field.
SWITCH = {"speculative": {"enabled": False}}
NONSENSE = {"speculative": {"enabled": "never"}}
# Servers have defaults of their own (a model's recommended ones, llama.cpp's); these switch them off.
NEUTRAL = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}


@dataclass(frozen=True)
class AuditTarget:
    """What is audited: one server with a switch (`off`: fields that make a request decode plainly), or two."""

    url: str
    plain_url: str | None = None
    off: Mapping[str, Any] | None = None
    api_key: str | None = None


@dataclass
class Report:
    """What an audit found."""

    target: AuditTarget
    seed: int
    results: list[CheckResult] = field(default_factory=list)
    num_drafted: float | None = None
    seconds: float = 0.0

    @property
    def faults(self) -> list[CheckResult]:
        return [result for result in self.results if result.status == FAULT]


async def audit(target: AuditTarget, minutes: float, seed: int, say: Say, fail_fast: bool = False) -> Report:
    """`fail_fast`: ends at the first fault.

    Raises ConfigError when the servers cannot be asked, or when there was nothing to audit: not one token was drafted.
    """
    began = time.monotonic()
    report = Report(target, seed)
    try:
        session, drafting = await open_session(target, minutes, seed)
        before = await drafting.num_drafted()
        async for result in checks(session, say, fail_fast):
            report.results.append(result)
            if fail_fast and result.status == FAULT:
                break
        after = await drafting.num_drafted()
    except RequestFailed as error:
        raise ConfigError(f"the audit broke off: {error}") from error
    if before is not None and after is not None:
        report.num_drafted = after - before
        if report.num_drafted == 0 and not report.faults:
            raise ConfigError(f"{target.url} drafted nothing during the audit, so there was nothing to test: is speculation on, and pays?")
    report.seconds = time.monotonic() - began
    return report


async def open_session(target: AuditTarget, minutes: float, seed: int) -> tuple[Session, Side]:
    """Both sides, probed for what they can. Raises ConfigError."""
    endpoint = Endpoint.parse(target.url, target.api_key)
    speculative = Side(endpoint, _base(target.url), await served_model(endpoint))
    if target.plain_url is not None:
        other = Endpoint.parse(target.plain_url, target.api_key)
        plain = Side(other, _base(target.plain_url), await served_model(other))
    else:
        off = target.off if target.off is not None else await _switch(speculative)
        plain = Side(endpoint, speculative.url, speculative.model, off)
    try:
        repeats = all([len(await side.complete("one two", max_tokens=2, n=2, temperature=1.0)) == 2 for side in (plain, speculative)])
    except Refused:
        repeats = False
    neutral = NEUTRAL if all([await _takes(side, NEUTRAL) for side in (plain, speculative)]) else {"top_p": 1.0}
    plain, speculative = [Side(s.endpoint, s.url, s.model, s.extra, repeats) for s in (plain, speculative)]
    salted = target.plain_url is None and await _takes(speculative, {"cache_salt": "audit"})
    await _require(plain)
    ends = time.monotonic() + 60 * minutes
    return Session(plain, speculative, random.Random(seed), ends, salted=salted, neutral=neutral), speculative


async def checks(session: Session, say: Say, fail_fast: bool = False) -> AsyncIterator[CheckResult]:
    """Every check's result, in turn. Sampled checks get what time is left, or with `fail_fast` until one has found a fault."""
    say("noise of plain decoding")
    yield await greedy.measure_noise(session)
    say("greedy text")
    for result in await greedy.check_greedy(session):
        yield result
    for name, check in (
        ("ends of texts", limits.check_ends), ("seeds", limits.check_seeds), ("load that comes and goes", greedy.check_load),
        ("prefix cache", greedy.check_prefix_cache), ("structured output", limits.check_structure),
    ):  # fmt: skip
        if session.seconds_left() <= 0:
            yield CheckResult(name, SKIPPED, "no time was left")
            continue
        say(name)
        yield await check(session)
    if session.seconds_left() <= 0:
        yield CheckResult("sampling", SKIPPED, "no time was left")
        return
    say("sampling")
    survey = await survey_prompts(session)
    sampled = [SampledCheck(setting, session, survey) for setting in SETTINGS]
    await run_sampled(sampled, session, say, fail_fast)
    for each in sampled:
        yield each.result()
    yield anticipation(sampled[0])


async def run_sampled(sampled: list[SampledCheck], session: Session, say: Say, fail_fast: bool = False) -> None:
    """Batch after batch until every check is done or time is up; what is suspected then is confirmed or dropped.

    Every other batch goes to the check that has had least time, with the first one, which looks closest, counted a third; the rest to the
    check that doubts most.
    """
    turn = 0
    while session.seconds_left() > 0 and (open_checks := [check for check in sampled if not check.done]):
        if fail_fast and any(check.found for check in sampled):
            break
        if turn % 40 == 0:
            texts = sum(sum(each.test.num_samples) for each in sampled)
            say(f"sampling: {texts} texts and more, {session.seconds_left() / 60:.1f} minutes left")
        doubts = turn % 4 == 3
        patient = min(open_checks, key=lambda each: each.seconds / (3 if each is sampled[0] else 1))
        await (max(open_checks, key=SampledCheck.log_evidence) if doubts else patient).step()
        turn += 1
    while sampled[0].pending:   # plain samples only: their number is bounded
        await sampled[0].step()


async def _switch(side: Side) -> Mapping[str, Any]:
    if not await _takes(side, NONSENSE) and await _takes(side, SWITCH):
        return SWITCH
    raise ConfigError(
        f"{side.url} has no switch for speculation in a request that is known: give the URL of the same model served without speculation "
        "as a second one, or the fields that turn it off with --plain"
    )


async def _takes(side: Side, fields: Mapping[str, Any]) -> bool:
    try:
        await side.complete("one two", max_tokens=1, **fields)
    except Refused:
        return False
    return True


async def _require(side: Asker) -> None:
    """Raises ConfigError when the server does not answer a plain completion with log probabilities, without which tokens are not told."""
    try:
        found = await side.complete(PROMPTS[0], max_tokens=2, temperature=0, logprobs=1)
    except Refused as error:
        raise ConfigError(f"a completion with logprobs is refused: {error}") from error
    if not found or not found[0].tokens:
        raise ConfigError("the server does not tell the tokens of a completion (logprobs: 1), which an audit needs")


def _base(url: str) -> str:
    return url.rstrip("/").removesuffix("/v1")


def verdict(report: Report) -> str:
    """One sentence."""
    skipped = sum(result.status == SKIPPED for result in report.results)
    tested = len(report.results) - skipped
    if report.faults:
        return f"FAULT: {', '.join(result.name for result in report.faults)} ({len(report.faults)} of {tested} checks)"
    return f"SOUND: nothing found in {tested} checks ({skipped} skipped)"
