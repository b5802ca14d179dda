"""Sampled text: sequential tests whether both sides choose tokens, and lengths, with the same probabilities."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from headway.audit.evidence import DIFFERENCES, WagerBook, detectable, log_average
from headway.audit.known import KnownSamples
from headway.audit.prompts import PROMPTS
from headway.audit.records import FAULT, SKIPPED, SOUND, CheckResult, Session
from headway.audit.side import Asker, Continuation, Refused
from headway.audit.strata import BRANCH, END, KINDS, Path, TwoSamples

ALPHA = 1e-3      # odds that a sound server is called faulty by any of the sampled checks
DEPTH = 4         # tokens of a continuation: the first is the prompt's own, the others are drafted
BATCH = 64        # continuations of one request
TARGET = DIFFERENCES[0]   # a difference this small is worth looking for; where it would have been found, a check is done
NUM_PROMPTS = 3   # of all, those that tell most
FIRST_BATCHES = 2 * NUM_PROMPTS   # of both sides, before told probabilities are relied on
PLAIN_EVERY = 8
STOP_SHARE = 0.08
LENGTHS = 24      # tokens at most where the length is what is tested


@dataclass(frozen=True, slots=True)
class SampleSetting:
    """One way to sample, a check of its own."""

    name: str
    fields: Mapping[str, Any]
    of_length: bool = False   # outcomes are lengths of whole texts, not tokens
    told: bool = False        # the reported probabilities are those drawn from


SETTINGS = (
    SampleSetting("sampling at temperature 1", {"temperature": 1.0}, told=True),
    SampleSetting("sampling at temperature 0.6", {"temperature": 0.6}),
    SampleSetting("top_p", {"temperature": 1.0, "top_p": 0.6}),
    SampleSetting("min_p", {"temperature": 1.0, "min_p": 0.2}),
    SampleSetting("top_k", {"temperature": 1.0, "top_k": 5}),
    SampleSetting("penalties", {"temperature": 0.6, "frequency_penalty": 1.5, "presence_penalty": 1.0}),
    SampleSetting("length", {"temperature": 1.0}, of_length=True),
)
PEEKED = "rank 1"     # a policy that looks at a draft before it decides to verify it favours, or shuns, what is likely
NUM_TESTS = len(SETTINGS) + 2   # anticipation counts twice: it looks at pairs or at told probabilities
THRESHOLD = NUM_TESTS / ALPHA   # each of the tests may err with ALPHA / NUM_TESTS
DISTRUST = THRESHOLD**0.5       # less than what accuses: the control must not lag behind an accusation that it would have to take back

Survey = Mapping[str, Sequence[Continuation]]


async def survey_prompts(session: Session) -> Survey:
    """A first look at what plain decoding writes behind every prompt, at temperature 1.

    Those are tested after which few texts are likely, so that positions inside a draft are reached again and again.
    """
    fields = {**session.neutral, "temperature": 1.0, "max_tokens": DEPTH, "n": BATCH, "logprobs": 1}
    return {prompt: await session.plain.complete(prompt, seed=session.fresh_seed(), **fields) for prompt in PROMPTS}


class SampledCheck:
    """One setting's test on its way: batches of both sides, prompt by prompt."""

    def __init__(self, setting: SampleSetting, session: Session, survey: Survey) -> None:
        self.setting, self.session = setting, session
        self.prompts = sorted(survey, key=lambda prompt: -_worth([_path(each) for each in survey[prompt]]))[:NUM_PROMPTS]
        self.stops = [_frequent(survey[prompt]) if setting.of_length else [] for prompt in self.prompts]
        self.test = TwoSamples(session.noise, NUM_PROMPTS)
        self.known = KnownSamples(session.noise, NUM_PROMPTS) if setting.told else None
        self.batches = 0
        self.seconds = 0.0
        self.refused: str | None = None
        self.too_long: int | None = None

    def log_evidence(self) -> float:
        """The logarithm of the e-value."""
        pairs, known = self.test.ledger.log_evidence(), self._trusted()
        if not self.setting.told:
            return pairs
        both = pairs if known is None else float(np.logaddexp(pairs, known.ledger.log_evidence()))
        return both - math.log(2)   # half of the capital was the other test's, also where that is not relied on any more

    def log_evidence_of_peeking(self) -> float:
        """The same of the likeliest token after the first alone, by the sharper of the two tests."""
        return log_average({PEEKED: (1.0, self.peeked())})

    def peeked(self) -> WagerBook:
        return (self._trusted() or self.test).ledger.later[PEEKED]

    @property
    def pending(self) -> bool:
        """Whether a fault by told probabilities waits for the control: as many plain samples must have agreed with these."""
        known = self._trusted()
        suspicion = max(self.log_evidence(), self.log_evidence_of_peeking())
        return known is not None and known.num_control < known.num_samples and suspicion >= math.log(THRESHOLD)

    @property
    def found(self) -> bool:
        return self.too_long is not None or (self.log_evidence() >= math.log(THRESHOLD) and not self.pending)

    @property
    def done(self) -> bool:
        return self.refused is not None or self.found or (self.detectable <= TARGET and not self.pending)

    @property
    def detectable(self) -> float:
        """The difference in the probability of the likeliest token after the first that would have been found."""
        books = [each.ledger.later[PEEKED] for each in (self.test, self._trusted()) if each]
        return detectable(max(book.sharpness for book in books), THRESHOLD, 4 * len(KINDS))

    async def step(self) -> None:
        """One batch. Every other one goes to the prompt that looks worst. Where probabilities are told, few plain samples are needed."""
        began = time.monotonic()
        try:
            await self._batch()
        except Refused as refused:
            self.refused = str(refused)
        self.seconds += time.monotonic() - began

    async def _batch(self) -> None:
        index = self.batches // 2 % NUM_PROMPTS
        if self.batches % 2:
            index = max(range(NUM_PROMPTS), key=self._prompt_evidence)
        self.batches += 1
        text, known = self.prompts[index], self._trusted()
        if known is not None and self.pending:
            found = await self._ask(self.session.plain, index)
            known.learn(index, text, [self._path(each) for each in found], [each.logprobs for each in found])
            return
        if known is not None and self.batches > FIRST_BATCHES and self.batches % PLAIN_EVERY:
            both = await asyncio.gather(*[self._ask(self.session.speculative, index) for _ in range(2)])
            known.add(index, text, [self._path(each) for side in both for each in side])
            return
        plain, other = await asyncio.gather(*[self._ask(side, index) for side in (self.session.plain, self.session.speculative)])
        if self.setting.of_length:
            self.too_long = next((len(each.tokens) for each in other if len(each.tokens) > LENGTHS), None)
        paths = [self._path(each) for each in plain], [self._path(each) for each in other]
        if known is not None:
            known.add(index, text, paths[1])
            known.learn(index, text, paths[0], [each.logprobs for each in plain])
        self.test.add(index, text, paths)

    def fields(self, index: int) -> dict[str, Any]:
        length = LENGTHS if self.setting.of_length else DEPTH
        stop = {"stop": self.stops[index]} if self.stops[index] else {}
        return {**self.session.neutral, **self.setting.fields, "max_tokens": length, "n": BATCH, "logprobs": 1, **stop}

    def result(self) -> CheckResult:
        name, log_e, known = self.setting.name, self.log_evidence(), self._trusted()
        if self.refused is not None:
            return CheckResult(name, SKIPPED, f"not supported: {self.refused[:120]}")
        if not self.batches:
            return CheckResult(name, SKIPPED, "no time was left")
        plain, other = self.test.num_samples
        other += known.num_samples if known else 0
        event, size = strongest([self.test, *([known] if known else [])])
        figures = {
            "log10_e_value": log_e / math.log(10), "threshold": THRESHOLD, "samples": [plain, other], "texts": self.test.num_strata,
            "probabilities_told": known is not None, "would_have_found": self.detectable, "strongest_event": event,
            "strongest_difference": size, "seconds": round(self.seconds, 1),
        }  # fmt: skip
        said = f"{plain} + {other} samples, e-value {power_of_ten(log_e)}"
        if self.too_long is not None:
            said = f"a text has {self.too_long} tokens where at most {LENGTHS} were asked for"
        elif self.found:
            often = "more" if size > 0 else "less"
            said += f": {event}, {often} often with speculation (by about {abs(size):.0%}); by chance once in {THRESHOLD:.0f}"
        else:
            said += f"; a difference of {self.detectable:.1%} at every position would have been found"
        worst = max(range(NUM_PROMPTS), key=self._prompt_evidence)
        example = self.session.speculative.curl(self.prompts[worst], **self.fields(worst), seed=self.session.first_seed)
        return CheckResult(name, FAULT if self.found else SOUND, said, figures, (example,) if self.found else ())

    def _trusted(self) -> KnownSamples | None:
        """The test against told probabilities, unless plain decoding itself seems not to draw from what it tells."""
        return self.known if self.known is not None and self.known.control.log_evidence() < math.log(DISTRUST) else None

    def _prompt_evidence(self, index: int) -> float:
        known = self._trusted()
        return max(each.ledger.of_prompt(index) for each in (self.test, known) if each)

    async def _ask(self, side: Asker, index: int) -> list[Continuation]:
        return await side.complete(self.prompts[index], seed=self.session.fresh_seed(), **self.fields(index))

    def _path(self, found: Continuation) -> Path:
        if self.setting.of_length:   # after each token: does the text end here?
            return ("goes on",) * (len(found.tokens) - 1) + ((END,) if found.finish_reason == "stop" else ("goes on",))
        return _path(found)


def _path(found: Continuation) -> Path:
    return (*found.tokens, END) if found.finish_reason == "stop" else found.tokens


def _worth(paths: Sequence[Path]) -> float:
    """How much samples after a prompt tell: positions after texts that came several times, where the next token is open."""
    texts: dict[Path, Counter[str]] = {}
    for path in paths:
        for i in range(1, len(path)):
            texts.setdefault(path[:i], Counter())[path[i]] += 1
    worth = 0.0
    for counts in texts.values():
        total, most = counts.total(), max(counts.values())
        if total >= BRANCH:
            p = (most + 0.5) / (total + 1)
            worth += total * 4 * p * (1 - p)
    return worth


def _frequent(found: Sequence[Continuation]) -> list[str]:
    """A stop string that ends most texts before LENGTHS tokens: a token of about STOP_SHARE of all that plain decoding writes here."""
    counts = Counter(token for each in found for token in each.tokens)
    usable = [token for token in counts if token.isprintable() and token.strip() and "\ufffd" not in token]
    return [min(usable, key=lambda token: (abs(counts[token] / counts.total() - STOP_SHARE), token))] if usable else []


def strongest(tests: Sequence[TwoSamples | KnownSamples]) -> tuple[str, float]:
    """(the event that differs most, by how much): the one whose wager has won most."""
    books: dict[str, WagerBook] = {}
    for test, told in zip(tests, ("", " (by told probabilities)"), strict=False):
        books |= {name + told: book for name, book in test.ledger.all_books().items()}
    name = max(books, key=lambda each: books[each].best()[0])
    return name, books[name].best()[1]


def anticipation(check: SampledCheck) -> CheckResult:
    """Whether the likeliest token comes too often or too seldom where it was drafted: this event alone, of one check."""
    if check.refused is not None or not check.batches:
        return CheckResult("anticipation", SKIPPED, "nothing was sampled")
    log_e, book = check.log_evidence_of_peeking(), check.peeked()
    found = log_e >= math.log(THRESHOLD)
    said = f"the likeliest token after the first, {book.num_pairs} times, e-value {power_of_ten(log_e)}"
    if found:
        often = "more" if book.best()[1] > 0 else "less"
        said += f": {often} often with speculation, as when the draft decides whether it is verified"
    return CheckResult("anticipation", FAULT if found else SOUND, said, {"log10_e_value": log_e / math.log(10), "threshold": THRESHOLD})


def power_of_ten(log_value: float) -> str:
    return f"10^{log_value / math.log(10):.1f}"
