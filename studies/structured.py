"""Structured output: are finished answers valid, what do masks take, and what do drafts bring where text has a form?

    python studies/structured.py [--concurrency 1 8 32] [--prompts 16 48 64] [--only off default] [--output FILE.json]

200 schemas, 20 shapes of 10 forms to be filled in from a text that says what goes in: the kinds of JSONSchemaBench, whose own schemas are
in no package. One engine for each configuration around one loaded model; they answer the same prompts, greedily, in turns of a batch. A
prompt is answered once by each, after two warm-up batches of other prompts (16 prompts at least). Ratios are of total tokens per second
against `off`, which keeps to the schemas without drafts.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path
from typing import Any

import jsonschema_rs
from record import origin, publish, timed

from headway.config import EngineConfig, SpeculativeConfig
from headway.drafters.core.automatic import shipped, spell_out
from headway.engine.engine import Engine
from headway.engine.structured.guidance import GuidanceMatcher
from headway.models.loader import load_model
from headway.sampling_params import SamplingParams
from headway.structured_outputs import StructuredOutputsParams
from headway.types import Request

MODEL = "smollm2-135m"
MAX_TOKENS = 160
Fields = dict[str, tuple[str, dict[str, Any]]]
STRING, INTEGER, NUMBER, BOOLEAN = ({"type": kind} for kind in ("string", "integer", "number", "boolean"))

# What a text says, by field: (as it is said, its type).
FORMS: dict[str, Fields] = {
    "person": {"name": ("Bob Smith", STRING), "age": ("31", INTEGER), "city": ("Leeds", STRING), "married": ("yes", BOOLEAN)},
    "order": {"item": ("garden chair", STRING), "quantity": ("4", INTEGER), "price": ("29.90", NUMBER), "express": ("no", BOOLEAN)},
    "flight": {"origin": ("Oslo", STRING), "destination": ("Rome", STRING), "seats": ("2", INTEGER), "refundable": ("yes", BOOLEAN)},
    "book": {"title": ("The Old Harbour", STRING), "author": ("Anna Berg", STRING), "year": ("1987", INTEGER), "rating": ("4.5", NUMBER)},
    "recipe": {"dish": ("onion soup", STRING), "minutes": ("45", INTEGER), "servings": ("4", INTEGER), "vegetarian": ("yes", BOOLEAN)},
    "ticket": {"subject": ("login fails", STRING), "product": ("webshop", STRING), "severity": ("2", INTEGER), "open": ("yes", BOOLEAN)},
    "patient": {"name": ("Carlos Diaz", STRING), "weight": ("81.5", NUMBER), "symptom": ("headache", STRING), "days": ("3", INTEGER)},
    "house": {"street": ("Mill Lane 7", STRING), "rooms": ("5", INTEGER), "rent": ("1450.0", NUMBER), "garden": ("yes", BOOLEAN)},
    "event": {"title": ("spring fair", STRING), "place": ("town hall", STRING), "guests": ("120", INTEGER), "indoor": ("no", BOOLEAN)},
    "job": {"position": ("nurse", STRING), "company": ("City Hospital", STRING), "salary": ("3900", INTEGER), "remote": ("no", BOOLEAN)},
}


def plain(fields: Fields, **more: Any) -> dict[str, Any]:
    properties = {name: schema for name, (_, schema) in fields.items()}
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False, **more}


def changed(fields: Fields, change: Any, **more: Any) -> dict[str, Any]:
    """`change` makes a schema of a name and its schema."""
    found = plain(fields, **more)
    found["properties"] = {name: change(name, schema) for name, schema in found["properties"].items()}
    return found


def shapes(fields: Fields) -> dict[str, dict[str, Any]]:
    flat, first = plain(fields), next(iter(fields))
    named = {"$ref": "#/$defs/one"}
    return {
        "flat": flat,
        "optional": {**flat, "required": [first]},
        "open": {**flat, "additionalProperties": {"type": "integer"}},
        "nested": plain({}, properties={"form": flat, "checked": BOOLEAN}, required=["form", "checked"]),
        "list": {"type": "array", "items": flat, "minItems": 1, "maxItems": 2},
        "tuple": {"type": "array", "prefixItems": [schema for _, schema in fields.values()], "items": False, "minItems": len(fields)},
        "enum": changed(fields, lambda name, schema: {"enum": [fields[name][0], "unknown"]} if schema is STRING else schema),
        "const": {**flat, "properties": {"kind": {"const": "form"}, **flat["properties"]}, "required": ["kind", *flat["required"]]},
        "nullable": changed(fields, lambda _, schema: {"anyOf": [schema, {"type": "null"}]}),
        "types": changed(fields, lambda _, schema: {"type": [schema["type"], "null"]}),
        "bounded": changed(fields, lambda _, schema: {**schema, "minimum": 0, "maximum": 5000} if schema in (INTEGER, NUMBER) else schema),
        "lengths": changed(fields, lambda _, schema: {**schema, "minLength": 2, "maxLength": 20} if schema is STRING else schema),
        "pattern": changed(fields, lambda _, schema: {**schema, "pattern": "^[A-Za-z0-9 ]+$"} if schema is STRING else schema),
        "format": {**flat, "properties": {**flat["properties"], "date": {"type": "string", "format": "date"}},
                   "required": [*flat["required"], "date"]},
        "email": {**flat, "properties": {**flat["properties"], "contact": {"type": "string", "format": "email"}},
                  "required": [*flat["required"], "contact"]},
        "references": {"$defs": {"one": flat}, **plain({}, properties={"first": named, "second": named}, required=["first", "second"])},
        "recursive": {
            "$defs": {"one": {**flat, "properties": {**flat["properties"], "next": {"anyOf": [named, {"type": "null"}]}}}}, **named,
        },
        "choice of forms": {"anyOf": [flat, plain({"error": ("", STRING)})]},
        "all of": {"allOf": [{**flat, "additionalProperties": True}, {"type": "object", "properties": {first: {"maxLength": 30}}}]},
        "notes": {**flat, "properties": {**flat["properties"], "notes": {"type": "array", "items": STRING, "maxItems": 3}},
                  "required": [*flat["required"], "notes"]},
    }   # fmt: skip


def tasks() -> list[tuple[dict[str, Any], str]]:
    """(schema, what is asked), in an order of their own that is always the same."""
    found = []
    for form, fields in FORMS.items():
        text = ", ".join(f"{name} {said}" for name, (said, _) in fields.items())
        for shape, schema in shapes(fields).items():
            names = ", ".join(fields)
            ask = f"Here is what we know of a {form}: {text}. Case {shape}.\nFill in the form as JSON with the fields {names}."
            found.append((schema, ask))
    random.Random(1).shuffle(found)
    return found


def configurations() -> dict[str, Any]:
    eagle = shipped(MODEL)
    assert eagle is not None, "the speculator of the embedded model is not here"
    return {
        "off": None, "suffix": {"method": "suffix"}, "eagle": {"method": eagle[0], "model": eagle[1]}, "grammar": {"method": "grammar"},
        "default": spell_out("default", MODEL)[0],
    }   # fmt: skip


def answer(engine: Engine, batch: list[tuple[dict[str, Any], str]]) -> tuple[float, list[tuple[str, str, int]]]:
    """(seconds, by task: text, finish reason, tokens)"""
    requests = []
    for number, (schema, ask) in enumerate(batch):
        params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, structured_outputs=StructuredOutputsParams(json=schema))
        requests.append(Request(str(number), engine.tokenizer.apply_chat_template([{"role": "user", "content": ask}]), params))
    prepared = engine.prepare(requests)
    found: dict[str, str] = {}
    reasons: dict[str, str] = {}
    counts: dict[str, int] = {}
    began = time.perf_counter()
    for each in prepared:
        engine.add(each)
    while engine.has_work():
        for delta in engine.step():
            found[delta.request_id] = found.get(delta.request_id, "") + delta.text
            counts[delta.request_id] = counts.get(delta.request_id, 0) + len(delta.token_ids)
            reasons[delta.request_id] = delta.finish_reason or ""
    seconds = time.perf_counter() - began
    return seconds, [(found[r.request_id], reasons[r.request_id], counts[r.request_id]) for r in requests]


def is_valid(schema: dict[str, Any], text: str) -> bool:
    try:
        return jsonschema_rs.is_valid(schema, json.loads(text))
    except ValueError:
        return False


class Tally:
    """What one configuration did at one concurrency."""

    def __init__(self) -> None:
        self.seconds = self.mask_seconds = 0.0
        self.tokens = self.masks = self.finished = self.cut = self.invalid = self.failed = self.differs = 0

    def add(self, batch: list[tuple[dict[str, Any], str]], seconds: float, answers: list[tuple[str, str, int]], plain: list[str]) -> None:
        self.seconds += seconds
        for (schema, _), (text, reason, count), reference in zip(batch, answers, plain, strict=True):
            self.tokens += count
            self.finished += reason == "stop"
            self.cut += reason == "length"
            self.failed += reason == "error"
            self.invalid += reason == "stop" and not is_valid(schema, text)
            self.differs += text != reference

    def summary(self, plain: Tally) -> dict[str, Any]:
        rate = self.tokens / self.seconds
        return {
            "tokens_per_s": rate, "ratio": rate / (plain.tokens / plain.seconds), "tokens": self.tokens, "seconds": self.seconds,
            "finished": self.finished, "cut_by_max_tokens": self.cut, "invalid_among_finished": self.invalid, "failed": self.failed,
            "texts_other_than_off": self.differs, "mask_us_mean": 1e6 * self.mask_seconds / max(1, self.masks),
            "mask_share_of_time": self.mask_seconds / self.seconds,
        }   # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--prompts", type=int, nargs="+", default=[16, 48, 64], help="for each concurrency; at most 200")
    parser.add_argument("--only", nargs="+", default=None, help="configurations beside off")
    parser.add_argument("--output", type=Path, default=None)
    args = parser.parse_args()
    spent, masks = [0.0], [0]
    compute = timed(GuidanceMatcher._mask, spent)

    def counted(self: GuidanceMatcher, path: tuple[int, ...]) -> bytes | None:
        masks[0] += 1
        found: bytes | None = compute(self, path)
        return found

    GuidanceMatcher._mask = counted   # type: ignore[method-assign]
    model = load_model(MODEL, dtype="auto", device="auto")
    engines = {
        name: Engine(EngineConfig(MODEL, max_model_len=1024, kv_cache_memory_bytes=300 << 20, speculative=SpeculativeConfig.parse(given)),
                     model=model)
        for name, given in configurations().items() if args.only is None or name in ("off", *args.only)
    }   # fmt: skip
    everything, results = tasks(), {}
    for concurrency, num_prompts in zip(args.concurrency, args.prompts, strict=True):
        tallies = {name: Tally() for name in engines}
        # The warm-up takes the tasks at the other end.
        warm_up, measured = everything[-max(2 * concurrency, 16) :], everything[:num_prompts]
        batches = [(part, part[i : i + concurrency]) for part in (warm_up, measured) for i in range(0, len(part), concurrency)]
        for part, batch in batches:
            plain: list[str] = []
            for name, engine in engines.items():
                spent[0], masks[0] = 0.0, 0
                seconds, answers = answer(engine, batch)
                plain = plain or [text for text, _, _ in answers]
                if part is measured:
                    tally = tallies[name]
                    tally.add(batch, seconds, answers, plain)
                    tally.mask_seconds, tally.masks = tally.mask_seconds + spent[0], tally.masks + masks[0]
        results[str(concurrency)] = {name: tally.summary(tallies["off"]) for name, tally in tallies.items()}
        for name, row in results[str(concurrency)].items():
            print(concurrency, name, {key: round(value, 3) for key, value in row.items()}, flush=True)
    document = {"benchmark": "structured", "num_schemas": len(everything), "prompts": args.prompts, "results": results, **origin()}
    publish(document, args.output)


if __name__ == "__main__":
    main()
