"""Where a text must end: stop strings and token limits inside a draft; seeds that say the same twice; answers bound to a schema."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

from headway.audit.greedy import MAX_EXAMPLES, first_difference
from headway.audit.prompts import CHAT, PROMPTS, SCHEMA
from headway.audit.records import FAULT, SKIPPED, SOUND, CheckResult, GreedyPair, Session
from headway.audit.side import Refused, Side

SEED_LENGTH = 32
NUM_STRUCTURED = 16


async def check_ends(session: Session) -> CheckResult:
    """Stop strings that begin at any token of a greedy text, and limits of any length: the text must end there, drafts or not."""
    wrong, count = [], 0
    sides = session.plain, session.speculative
    for pair in session.pairs:
        if first_difference(pair.plain, pair.speculated) is not None:
            continue   # near-ties tip again
        asked = list(_ends(pair))
        plain, other = [
            await asyncio.gather(*[side.complete(pair.prompt, temperature=0, **fields) for fields in asked]) for side in sides
        ]  # fmt: skip
        for fields, (ours, *_), (theirs, *_) in zip(asked, plain, other, strict=True):
            count += 1
            if ours.text != theirs.text or ours.finish_reason != theirs.finish_reason:
                wrong.append((session.speculative.curl(pair.prompt, temperature=0, **fields), fields, ours, theirs))
    if not count:
        return CheckResult("ends of texts", SKIPPED, "no greedy text is the same on both sides")
    figures = {"requests": count, "wrong": len(wrong)}
    if not wrong:
        return CheckResult("ends of texts", SOUND, f"{count} stop strings and limits inside drafts end the text where they should", figures)
    # Rounding may tip a near-tie in one of these, too; noise says whether that is likely.
    allowed = 0 if session.noise < 1e-3 else count // 20
    _, fields, ours, theirs = wrong[0]
    said = f"{len(wrong)} of {count} texts end elsewhere: with {json.dumps(fields)} at {theirs.text!r} ({theirs.finish_reason})"
    said += f", without speculation at {ours.text!r} ({ours.finish_reason})"
    status = FAULT if len(wrong) > allowed else SOUND
    return CheckResult("ends of texts", status, said, figures, tuple(command for command, *_ in wrong[:MAX_EXAMPLES]))


def _ends(pair: GreedyPair) -> Iterator[dict[str, Any]]:
    """Fields that end this text at places all over it."""
    text, tokens = pair.plain.text, pair.plain.tokens
    if not text:
        return
    size = max(1, len(text) // max(1, len(tokens)))   # characters of a token
    for place in range(4):
        start = size * (2 + 3 * place)
        stop = text[start : start + size + 1]          # reaches into the next token
        if len(stop) > size and stop.strip() and "\ufffd" not in stop:
            yield {"max_tokens": pair.length, "stop": [stop]}
    for length in (2, 3, 5):
        if length < len(tokens):
            yield {"max_tokens": length}


async def check_seeds(session: Session) -> CheckResult:
    """The same seed twice, sampled: the same text. Held against plain decoding, which some servers do not repeat either."""
    fields = {"temperature": 1.0, "max_tokens": SEED_LENGTH}

    async def differ(side: Any) -> list[str]:
        changed = []
        for prompt in PROMPTS[:8]:
            seed = session.fresh_seed()
            first, second = await side.complete(prompt, seed=seed, **fields), await side.complete(prompt, seed=seed, **fields)
            if first[0].text != second[0].text:
                changed.append(side.curl(prompt, seed=seed, **fields))
        return changed

    changed = await differ(session.speculative)
    if not changed:
        return CheckResult("seeds", SOUND, "8 seeds write the same text twice", {"changed": 0})
    if plain := await differ(session.plain):
        said = f"plain decoding does not repeat its seeds either ({len(plain)} of 8 differ)"
        return CheckResult("seeds", SKIPPED, said, {"changed": len(changed), "changed_plain": len(plain)})
    said = f"{len(changed)} of 8 seeds write another text the second time; without speculation all repeat"
    return CheckResult("seeds", FAULT, said, {"changed": len(changed)}, tuple(changed[:MAX_EXAMPLES]))


async def check_structure(session: Session) -> CheckResult:
    """Sampled answers bound to a schema: every one that ends must fit it."""
    name, side = "structured output", session.speculative
    if not isinstance(side, Side):
        return CheckResult(name, SKIPPED, "no chat here")
    body = {
        "model": side.model, "messages": [{"role": "user", "content": CHAT}], "temperature": 1.0, "max_tokens": 96, **side.extra,
        "response_format": {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}},
    }  # fmt: skip
    try:
        answers = [await side.post("/v1/chat/completions", {**body, "seed": session.fresh_seed()})]
    except Refused as refused:
        return CheckResult(name, SKIPPED, f"not supported: {str(refused)[:120]}")
    answers += await asyncio.gather(*[
        side.post("/v1/chat/completions", {**body, "seed": session.fresh_seed()}) for _ in range(NUM_STRUCTURED - 1)
    ])  # fmt: skip
    ended = [answer["choices"][0]["message"]["content"] for answer in answers if answer["choices"][0]["finish_reason"] == "stop"]
    leaks = [text for text in ended if not fits(text)]
    figures = {"answers": len(answers), "ended": len(ended), "leaks": len(leaks)}
    if leaks:
        return CheckResult(name, FAULT, f"{len(leaks)} of {len(ended)} answers do not fit the schema: {leaks[0][:80]!r}", figures)
    if not ended:
        return CheckResult(name, SKIPPED, f"none of {len(answers)} answers ended", figures)
    return CheckResult(name, SOUND, f"{len(ended)} of {len(answers)} answers ended, and all of these fit the schema", figures)


def fits(text: str) -> bool:
    """Whether this is an object of SCHEMA."""
    try:
        found = json.loads(text)
    except ValueError:
        return False
    return (
        isinstance(found, dict) and found.keys() == SCHEMA["properties"].keys()  # type: ignore[attr-defined]
        and isinstance(found["name"], str) and isinstance(found["age"], int) and not isinstance(found["age"], bool)
    )  # fmt: skip
