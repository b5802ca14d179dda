"""Structured output: what is accepted, what is refused and how soon, and that a text keeps to its form whatever is drafted."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema_rs
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headway import StructuredOutputsParams
from headway.config import EngineConfig, SpeculativeConfig
from headway.drafters.drafter import DraftRequest, never_stop
from headway.drafters.grammar import FORCED, Grammar
from headway.engine.engine import Engine
from headway.engine.proposing import _kept_to
from headway.engine.structured.ahead import paths
from headway.engine.structured.guidance import GuidanceMatcher
from headway.errors import InvalidRequestError
from headway.sampling_params import SamplingParams
from headway.structured_outputs import MAX_CHARACTERS, Matcher
from headway.types import Draft, Request, Row
from tests.tiny import MIN_VOCAB, PIECES, tiny_model_dir

EOS = 2
PERSON = {
    "type": "object", "required": ["name", "age"], "additionalProperties": False,
    "properties": {"name": {"type": "string", "pattern": "^[a-z]{0,4}$"}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
}   # fmt: skip


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_dir(tmp_path_factory.mktemp("tiny"), "llama", seed=3)


@pytest.fixture(scope="module")
def engine(model_dir: Path) -> Engine:
    return build(model_dir, None)


@pytest.fixture(scope="module")
def drafting(model_dir: Path) -> Engine:
    return build(model_dir, {"method": "suffix", "policy": "static", "num_speculative_tokens": 4})


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return build(tiny_model_dir(tmp_path_factory.mktemp("pieces"), "llama", byte_fallback=True), None)


def build(model_dir: Path, speculative: Any) -> Engine:
    shape = {"max_model_len": 384, "block_size": 16, "profile": False, "max_num_seqs": 32}
    return Engine(EngineConfig(model=str(model_dir), dtype="float32", speculative=SpeculativeConfig.parse(speculative), **shape))


def form(**given: Any) -> StructuredOutputsParams:
    return StructuredOutputsParams(**given)


def matcher_of(engine: Engine, eos: frozenset[int] = frozenset((EOS,)), **given: Any) -> Matcher:
    return engine.grammars.compile(form(**given)).matcher(eos)


def tokens(text: str) -> list[int]:
    """Of the tiny tokenizer."""
    return [3 + byte for byte in text.encode()]


def legal(matcher: Matcher, path: list[int]) -> str:
    """The characters that may come next; the end is shown as $."""
    mask = matcher.mask(path)
    assert mask is not None
    found = np.flatnonzero(np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")).tolist()
    return "".join([chr(token - 3) for token in found if token != EOS] + ["$"] * (EOS in found))


def write(engine: Engine, params: SamplingParams, prompt: str = "ab ab ab ", count: int = 1) -> list[tuple[str, str | None, list[int]]]:
    """(text, finish reason, tokens) of `count` sequences."""
    for index in range(count):
        engine.add(Request(f"r{index}", tokens(prompt), params))
    found: dict[tuple[str, int], tuple[str, str | None, list[int]]] = {}
    while engine.has_work():
        for delta in engine.step():
            text, _, ids = found.get((delta.request_id, delta.index), ("", None, []))
            found[delta.request_id, delta.index] = text + delta.text, delta.finish_reason, ids + delta.token_ids
        engine.check()
    return [found[key] for key in sorted(found)]


class TestRequests:
    @pytest.mark.parametrize(
        "given", [{}, {"json": {}, "regex": "a"}, {"regex": "a", "choice": ["b"]}, {"json_object": True, "grammar": "x"}]
    )
    def test_exactly_one_form(self, given: dict[str, Any]) -> None:
        with pytest.raises(InvalidRequestError, match="exactly one of json, regex, choice, grammar, json_object"):
            form(**given)

    @pytest.mark.parametrize(
        ("given", "message"),
        [
            ({"json_object": False}, "json_object must be true"),
            ({"choice": []}, "a list of one string or more"),
            ({"choice": [1]}, "a list of one string or more"),
            ({"regex": "a", "disable_any_whitespace": True}, "goes with json"),
            ({"regex": "a" * (MAX_CHARACTERS + 1)}, f"at most {MAX_CHARACTERS}"),
            ({"json": {"a": {1}}}, "is not JSON"),
        ],
    )
    def test_what_cannot_be(self, given: dict[str, Any], message: str) -> None:
        with pytest.raises(InvalidRequestError, match=message) as caught:
            form(**given)
        assert caught.value.param == "structured_outputs"

    def test_a_structural_tag_is_refused_by_name(self) -> None:
        with pytest.raises(TypeError, match="structural_tag"):
            form(structural_tag="x")


NEST = "start: r0\n" + "\n".join(f'r{i}: "a{i}" r{i + 1} | "b"' for i in range(2000)) + '\nr2000: "z"'
MANY_ANDS = {"allOf": [{"type": "string", "pattern": f"^.*a.{{{i}}}$"} for i in range(1, 25)]}
REFUSED = {
    "keyword": ({"json": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
    "not": ({"json": {"not": {"type": "string"}}}, "not"),
    "format": ({"json": {"type": "string", "format": "colour"}}, "Unknown format: colour"),
    "type": ({"json": {"type": "text"}}, "text"),
    "no schema": ({"json": '"abc"'}, "[Ee]xpecting object"),
    "no JSON": ({"json": "{"}, "EOF"),
    "bounds": ({"json": {"type": "integer", "minimum": 5, "maximum": 3}}, r"minimum \(5\) is greater than maximum \(3\)"),
    "types": ({"json": {"allOf": [{"type": "string"}, {"type": "integer"}]}}, "Unsatisfiable"),
    "empty enum": ({"json": {"enum": []}}, "Unsatisfiable"),
    "itself": ({"json": {"$ref": "#"}}, "no text fits"),
    "each other": ({"json": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}}, "no text fits"),
    "deep JSON": ({"json": '{"anyOf":[' * 1000 + '{"type":"string"}' + "]}" * 1000}, "recursion limit"),
    "many intersections": ({"json": MANY_ANDS}, "takes longer than"),
    "regex": ({"regex": "(a"}, "unclosed group"),
    "look-ahead": ({"regex": "(?=a)b"}, "look-ahead"),
    "long regex": ({"regex": "a{1000000}"}, "too many expressions"),
    "5000 rules": ({"grammar": "start: " + " | ".join(f'"w{i:05d}"' for i in range(5000))}, "5001 items; max is 2000"),
    "rule": ({"grammar": "start: foo"}, 'unknown name: "foo"'),
    "no grammar": ({"grammar": "hello world $$$"}, "Expected ::="),
    "deep grammar": ({"grammar": NEST}, "nested too deeply"),
    "gbnf": ({"grammar": "root ::= (("}, "GBNF"),
}   # fmt: skip

SERVED = {
    "doubling regex": {"regex": "(a|b)*a(a|b){40}"},
    "nested plus": {"regex": "(x+x+)+y"},
    "nested counts": {"regex": "((a{0,100}){0,100}){0,100}"},
    "9000 words": {"regex": "|".join(f"w{i:05d}" for i in range(9000))},
    "5000 literals": {"grammar": "start: W\nW: " + " | ".join(f'"w{i:05d}"' for i in range(5000))},
    "5000 choices": {"choice": [f"w{i:05d}" for i in range(5000)]},
    "ambiguous": {"grammar": 'start: s\ns: s s | "a"'},
    "enum": {"json": {"enum": [f"v{i}" for i in range(5000)]}},
    "recursive": {"json": {"$ref": "#/$defs/n", "$defs": {"n": {"type": "object", "properties": {"c": {"$ref": "#/$defs/n"}}}}}},
}


class TestCompiling:
    @pytest.mark.parametrize("case", REFUSED)
    def test_the_reason_is_named(self, engine: Engine, case: str) -> None:
        given, reason = REFUSED[case]
        for _ in range(2):   # the second time from memory
            with pytest.raises(InvalidRequestError, match=reason) as caught:
                engine.grammars.compile(form(**given))
            assert caught.value.param == "structured_outputs"
            assert len(str(caught.value)) < 600

    def test_after_one_that_was_killed_the_next_one_compiles(self, engine: Engine) -> None:
        with pytest.raises(InvalidRequestError, match="takes longer"):
            engine.grammars.compile(form(json={**MANY_ANDS, "title": "again"}))
        assert legal(matcher_of(engine, regex="x[yz]"), tokens("x")) == "yz"

    @pytest.mark.parametrize("case", SERVED)
    def test_large_and_recursive_ones_are_served(self, engine: Engine, case: str) -> None:
        assert matcher_of(engine, **SERVED[case]).mask([])

    def test_a_request_that_is_refused_leaves_nothing(self, engine: Engine) -> None:
        with pytest.raises(InvalidRequestError):
            engine.add(Request("r", [5], SamplingParams(structured_outputs=form(json={"type": "text"}))))
        assert not engine.has_work()
        engine.check()

    def test_the_same_form_is_compiled_once(self, engine: Engine) -> None:
        assert engine.grammars.compile(form(regex="once")) is engine.grammars.compile(form(regex="once"))


class TestMatcher:
    def test_masks_follow_the_path_and_come_back(self, engine: Engine) -> None:
        matcher = matcher_of(engine, regex="ab(c|de)f?")
        following = {"": "a", "a": "b", "ab": "cd", "abd": "e", "abc": "f$", "abde": "f$", "abcf": "$"}
        assert {path: legal(matcher, tokens(path)) for path in following} == following
        assert legal(matcher, tokens("ab")) == "cd"
        assert matcher.mask(tokens("ax")) is None
        assert legal(matcher, []) == "a"

    def test_behind_the_end_and_behind_an_illegal_token_nothing_is_forbidden(self, engine: Engine) -> None:
        matcher = matcher_of(engine, regex="ab?")
        assert matcher.mask([*tokens("a"), EOS]) is None
        assert matcher.mask([*tokens("a"), EOS, 7]) is None
        assert matcher.mask(tokens("ba")) is None
        assert legal(matcher, tokens("a")) == "b$"
        assert matcher.error is None

    def test_counts_what_is_legal(self, engine: Engine) -> None:
        matcher = matcher_of(engine, regex="ab(c|de)f?")
        assert matcher.num_legal([], tokens("abdx")) == 3
        assert matcher.num_legal(tokens("ab"), [*tokens("c"), EOS, 9]) == 2
        assert matcher.num_legal(tokens("ab"), [EOS]) == 0
        assert matcher.num_legal(tokens("x"), tokens("a")) == 0
        assert matcher.num_legal([], []) == 0

    def test_advancing_ends_where_nothing_can_follow(self, engine: Engine) -> None:
        matcher = matcher_of(engine, regex="ab?")
        matcher.mask(tokens("ab"))
        assert not matcher.advance(tokens("a")[0])
        assert legal(matcher, []) == "b$"
        assert matcher.advance(tokens("b")[0])
        assert matcher.mask([]) is None
        assert matcher.error is None

    def test_the_end_of_text_token_ends_it(self, engine: Engine) -> None:
        matcher = matcher_of(engine, regex="ab?")
        assert not matcher.advance(tokens("a")[0])
        assert matcher.advance(EOS)
        assert matcher.error is None

    def test_an_illegal_token_is_an_error(self, engine: Engine) -> None:
        matcher = matcher_of(engine, regex="ab?")
        assert not matcher.advance(tokens("x")[0])
        assert matcher.error
        assert matcher.mask([]) is None

    def test_without_an_end_of_text_token(self, engine: Engine) -> None:
        matcher = matcher_of(engine, frozenset(), regex="ab?")
        assert legal(matcher, tokens("a")) == "b"

    def test_forced_tokens(self, engine: Engine) -> None:
        matcher = matcher_of(engine, json=PERSON, disable_any_whitespace=True)
        for token in tokens('{"'):
            matcher.advance(token)
        forced = matcher.forced([], 20)
        assert forced == tokens('name":"')
        assert matcher.forced(tokens("na"), 20) == tokens('me":"')
        assert matcher.forced(tokens("x"), 20) == []
        assert matcher.forced([], 2) == forced[:2]
        assert legal(matcher, []) == "n"

    def test_with_a_vocabulary_of_sentencepiece(self, sentencepiece: Engine) -> None:
        """Its encoder begins a text with a space that nobody asked for."""
        for regex in ("ab", "the? xh", "(the? x)+z", " the", "é漢x"):
            text, reason, _ = write(sentencepiece, SamplingParams(max_tokens=200, seed=1, structured_outputs=form(regex=regex)), "x")[0]
            assert (re.fullmatch(regex, text) and reason == "stop") or (reason == "length" and "+" in regex), (regex, text)

    def test_bytes_that_are_forced_are_spelled_as_they_were_before(self, sentencepiece: Engine) -> None:
        """`th` must come, and `the` is one token: nothing forces its end."""
        matcher = matcher_of(sentencepiece, regex="(the? x)+z?")
        th, the = (MIN_VOCAB + PIECES.index(piece) for piece in ("th", "the"))
        assert matcher.forced([], 1) == [th]
        for token in (the, *tokens(" x")):
            assert not matcher.advance(token)
        matcher.forced([], 1)
        for token in (the, *tokens(" x")):
            assert not matcher.advance(token)
        assert matcher.num_legal([], [the]) == 1
        assert matcher.error is None

    def test_characters_of_several_bytes(self, engine: Engine) -> None:
        matcher = matcher_of(engine, choice=["é", "ê", "漢"])
        first = tokens("é")[0]
        assert matcher.num_legal([], tokens("漢")) == 3
        assert matcher.num_legal([first], [tokens("ê")[1]]) == 1
        assert matcher.num_legal([first], [tokens("漢")[1]]) == 0

    def test_special_tokens_are_no_text(self, engine: Engine) -> None:
        mask = matcher_of(engine, regex="(?s:.*)").mask([])
        assert mask is not None
        bits = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")
        assert not bits[0]
        assert not bits[1]
        assert bits[EOS]

    @settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(data=st.data())
    def test_any_order_of_questions_gives_the_same_masks(self, engine: Engine, data: st.DataObject) -> None:
        """Against a matcher that is asked one question only."""
        given = {"grammar": 'start: "<" item ("," item)* ">"\nitem: "a" /[bc]+/ | "d" start?'}
        texts = ["", "<", "<a", "<ab", "<abc,d", "<d<d>", "<d>", "<d<abb,ac>,d", "<x", "<d,", "<dd"]
        matcher, written = matcher_of(engine, **given), ""
        for _ in range(data.draw(st.integers(1, 12))):
            if data.draw(st.booleans()):
                fresh = matcher_of(engine, **given)
                for token in tokens(written):
                    fresh.advance(token)
                path = tokens(data.draw(st.sampled_from(texts))[data.draw(st.integers(0, 4)) :])
                assert matcher.mask(path) == fresh.mask(path)
            else:
                character = data.draw(st.sampled_from([each for each in legal(matcher, []) if each != "$"] or [""]))
                if not character or matcher.advance(tokens(character)[0]):
                    return
                written += character


class TestDrafts:
    @staticmethod
    def kept(engine: Engine, regex: str, draft: Draft, k: int = 8) -> Draft:
        return _kept_to(DraftRequest(0, [5], 1, k, True, matcher=matcher_of(engine, regex=regex)), draft)

    def test_a_copied_chain_is_cut_at_the_first_illegal_token(self, engine: Engine) -> None:
        kept = self.kept(engine, "abc*", Draft(tokens("abxc"), confidence=[0.5] * 4))
        assert kept == Draft(tokens("ab"), confidence=[0.5] * 2)

    def test_what_is_forced_follows_a_chain(self, engine: Engine) -> None:
        kept = self.kept(engine, "a[bc]defg[hi]", Draft(tokens("abx"), confidence=[0.5] * 3))
        assert kept == Draft(tokens("abdefg"), confidence=[0.5, 0.5, *[FORCED] * 4])
        assert self.kept(engine, "a[bc]defg[hi]", Draft(tokens("ab"), confidence=[0.5] * 2), k=4).tokens == tokens("abde")
        assert self.kept(engine, "abc", Draft([])) == Draft(tokens("abc"), confidence=[FORCED] * 3)
        assert self.kept(engine, "ab[cd]", Draft(tokens("a"))) == Draft(tokens("ab"))

    def test_a_tree_loses_illegal_nodes_and_what_follows_them(self, engine: Engine) -> None:
        draft = Draft(tokens("axbzdcd"), None, [0.7, 0.1, 0.6, 0.1, 0.5, 0.4, 0.3], parents=(-1, -1, 0, 1, 2, 0, 5))
        assert self.kept(engine, "a(b|c)d", draft) == Draft(tokens("abdcd"), None, [0.7, 0.6, 0.5, 0.4, 0.3], parents=(-1, 0, 1, 0, 3))

    def test_what_was_drawn_stays(self, engine: Engine) -> None:
        draft = Draft(tokens("xy"), probs=np.ones((2, 320)) / 320)
        assert self.kept(engine, "ab", draft) is draft

    def test_without_a_grammar_nothing_changes(self, engine: Engine) -> None:
        draft = Draft(tokens("xy"))
        assert _kept_to(DraftRequest(0, [5], 1, 8, True), draft) is draft
        assert Grammar().propose([DraftRequest(0, [5], 1, 8, True)], never_stop) == [Draft([], confidence=[])]


class TestTexts:
    @pytest.mark.parametrize("which", ["engine", "drafting"])
    def test_every_form(self, which: str, request: pytest.FixtureRequest) -> None:
        engine = request.getfixturevalue(which)
        params = {"temperature": 1.0, "seed": 5, "max_tokens": 60}
        for kind, fits in (
            ({"regex": "[A-C]{3}-[0-9]{2,4}"}, lambda text: re.fullmatch("[A-C]{3}-[0-9]{2,4}", text)),
            ({"choice": ["yes", "no", 'quo"te', "é\n"]}, lambda text: text in ("yes", "no", 'quo"te', "é\n")),
            ({"json": PERSON}, lambda text: jsonschema_rs.is_valid(PERSON, json.loads(text))),
            ({"json": json.dumps(PERSON), "disable_any_whitespace": True}, lambda text: " " not in text and json.loads(text)),
            ({"grammar": 'start: "a" b\nb: /[xy]{1,3}/'}, lambda text: re.fullmatch("a[xy]{1,3}", text)),
            ({"grammar": 'root ::= "a" b\nb ::= [xy]'}, lambda text: re.fullmatch("a[xy]", text)),
        ):
            for text, reason, _ in write(engine, SamplingParams(n=3, structured_outputs=form(**kind), **params)):
                assert reason == "length" or fits(text), (kind, text)
                assert reason == "stop" or "json" in kind

    def test_it_ends_without_a_token_for_the_end_where_nothing_can_follow(self, engine: Engine) -> None:
        text, reason, ids = write(engine, SamplingParams(max_tokens=10, structured_outputs=form(regex="ab")))[0]
        assert (text, reason, ids) == ("ab", "stop", tokens("ab"))

    def test_ignoring_the_end_of_text_writes_as_long_as_the_grammar_goes_on(self, engine: Engine) -> None:
        for regex, expected in (("ab*", ("abbbbbbbbb", "length")), ("ab{3}", ("abbb", "stop"))):
            params = SamplingParams(max_tokens=10, ignore_eos=True, structured_outputs=form(regex=regex))
            assert write(engine, params)[0][:2] == expected

    def test_min_tokens_delays_the_end_as_far_as_the_grammar_goes_on(self, engine: Engine) -> None:
        bias = {EOS: 100.0}
        for regex, expected in (("ab*", "abbbb"), ("ab{1,2}", "abb")):
            params = SamplingParams(max_tokens=20, min_tokens=5, logit_bias=bias, structured_outputs=form(regex=regex))
            text, reason, _ = write(engine, params)[0]
            assert (text, reason) == (expected, "stop")

    def test_bans_that_leave_nothing_of_the_grammar_give_way(self, engine: Engine) -> None:
        params = SamplingParams(max_tokens=20, bad_words=["b", "c"], structured_outputs=form(regex="a[bc]d"), seed=1)
        assert write(engine, params)[0][0] in ("abd", "acd")
        params = SamplingParams(max_tokens=20, bad_words=["b"], structured_outputs=form(regex="a[bc]d"), seed=1)
        assert write(engine, params)[0][0] == "acd"

    def test_a_stop_string_and_biases_work_as_ever(self, drafting: Engine) -> None:
        params = SamplingParams(
            max_tokens=20, stop="yy", logit_bias={tokens("y")[0]: 100.0}, structured_outputs=form(regex="a[xy]+"), temperature=0.0
        )
        assert write(drafting, params)[0][:2] == ("a", "stop")

    @pytest.mark.parametrize("temperature", [0.0, 0.9])
    def test_log_probabilities_are_those_among_what_is_allowed(self, engine: Engine, drafting: Engine, temperature: float) -> None:
        params = SamplingParams(
            temperature=temperature, seed=3, max_tokens=30, logprobs=3, ignore_eos=True, structured_outputs=form(regex="(ab|ac)+")
        )
        found = []
        for each in (engine, drafting):
            each.add(Request("r", tokens("abacab"), params))
            found.append([entry for delta in _deltas(each) for entry in delta.logprobs])
        assert found[0] == found[1]
        for entry in found[0]:
            total = sum(np.exp(logprob) for _, logprob in entry.top)
            assert total == pytest.approx(1.0, abs=1e-5)
            assert entry.token_id in [token for token, _ in entry.top]
            assert len(entry.top) == (1 if entry.token_id == tokens("a")[0] else 2)

    def test_a_text_that_outgrows_the_library_fails_alone(self, engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
        engine.add(Request("bad", tokens("a"), SamplingParams(max_tokens=20, structured_outputs=form(regex="[ab]+"))))
        engine.add(Request("good", tokens("a"), SamplingParams(max_tokens=20, ignore_eos=True)))
        engine.step()
        engine.requests["bad"][0].matcher.advance(tokens("x")[0])   # what is committed is no longer what was written
        ends = {delta.request_id: delta.finish_reason for delta in _deltas(engine) if delta.finish_reason}
        assert ends == {"bad": "error", "good": "length"}
        assert "does not fit" in caplog.text

    def test_aborted_in_the_middle(self, drafting: Engine) -> None:
        params = SamplingParams(n=2, max_tokens=50, structured_outputs=form(regex="[ab]+"), ignore_eos=True)
        drafting.add(Request("r", tokens("ab"), params))
        for _ in range(5):
            drafting.step()
        drafting.abort("r")
        drafting.check()
        assert not drafting.has_work()


def _deltas(engine: Engine) -> Iterator[Any]:
    while engine.has_work():
        yield from engine.step()


NAMES = st.text("abc", min_size=1, max_size=3)
SCALARS = st.one_of(
    st.sampled_from([{"type": "boolean"}, {"type": "null"}]),
    st.builds(lambda low, size: {"type": "integer", "minimum": low, "maximum": low + size}, st.integers(-50, 50), st.integers(0, 200)),
    st.builds(lambda size: {"type": "string", "pattern": f"^[a-f]{{0,{size}}}$"}, st.integers(1, 4)),
    st.builds(lambda values: {"enum": values}, st.lists(NAMES | st.integers(-5, 5) | st.none(), min_size=1, max_size=4, unique=True)),
    st.builds(lambda value: {"const": value}, st.one_of(NAMES, st.integers(-5, 5))),
)   # fmt: skip


def _objects(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.dictionaries(NAMES, inner, max_size=3).flatmap(
        lambda properties: st.lists(st.sampled_from(sorted(properties)), unique=True).map(
            lambda required: {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
        ) if properties else st.just({"type": "object", "additionalProperties": False})
    )   # fmt: skip


SCHEMAS = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        _objects(inner),
        st.builds(lambda items, most: {"type": "array", "items": items, "maxItems": most}, inner, st.integers(0, 3)),
        st.builds(lambda arms: {"anyOf": arms}, st.lists(inner, min_size=1, max_size=3)),
    ),
    max_leaves=5,
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(schema=SCHEMAS, seed=st.integers(0, 1000), compact=st.booleans())
def test_what_is_finished_is_valid(engine: Engine, drafting: Engine, schema: dict[str, Any], seed: int, compact: bool) -> None:
    """Of random schemas, by a model that knows nothing; with drafts the same text."""
    params = SamplingParams(
        temperature=0.8, seed=seed, max_tokens=100, structured_outputs=form(json=schema, disable_any_whitespace=compact),
        logit_bias={tokens(space)[0]: -8.0 for space in " \n\t\r"},
    )   # fmt: skip
    written = write(engine, params)
    for text, reason, _ in written:
        assert reason in ("stop", "length")
        assert reason == "length" or jsonschema_rs.is_valid(schema, json.loads(text)), text
    assert write(drafting, params) == written


def test_paths_of_a_draft() -> None:
    assert paths(None) == [[]]
    assert paths(Draft([1, 2])) == [[], [1], [1, 2]]
    assert paths(Draft([1, 2, 3, 4], parents=(-1, -1, 0, 2))) == [[], [1], [2], [1, 3], [1, 3, 4]]


def test_masks_are_there_when_the_target_has_run(engine: Engine) -> None:
    """What `verify` asks for was computed before it asks."""
    engine.add(Request("r", tokens("a"), SamplingParams(max_tokens=3, structured_outputs=form(regex="[ab]+"))))
    matcher = engine.requests["r"][0].matcher
    assert isinstance(matcher, GuidanceMatcher)
    engine.masks.begin([Row(engine.requests["r"][0], 0, 1)], [Draft(tokens("ab"))])
    engine.masks.wait()
    assert list(matcher._masks) == [(), tuple(tokens("a")), tuple(tokens("ab"))]
    engine.abort("r")
