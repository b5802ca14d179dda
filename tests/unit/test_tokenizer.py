"""Text from token ids, at once and one by one: for every vocabulary and any ids, whatever a model writes."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models

from headway.engine.outputs import TextOutput
from headway.engine.tokenizer import TextStream, TokenBytes, Tokenizer
from headway.sampling_params import SamplingParams
from headway.types import Request
from headway.types import Sequence as Written
from tests.tiny import MIN_VOCAB, PIECES, SPECIAL, byte_fallback_tokenizer, byte_level_tokenizer, tiny_model_dir

VOCAB = 300
TEXTS = ["the sea", " a", "\n", "é", "漢字", "\ufffd", "\U0001f600", "\U0001f469\u200d\U0001f680", "a\ufffd", "\ufffd\ufffd"]
EMOJI = [3 + byte for byte in "\U0001f600".encode()]
X = MIN_VOCAB + PIECES.index("x")


@pytest.fixture(scope="module", params=["byte_level", "byte_fallback"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def tokenizer(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load(kind, tmp_path_factory.mktemp("tokenizer"))


def load(kind: str, path: Path) -> Tokenizer:
    return Tokenizer(tiny_model_dir(path, vocab_size=VOCAB, byte_fallback=kind == "byte_fallback"))


def encoded(kind: str) -> list[list[int]]:
    tokenizer = byte_level_tokenizer(VOCAB) if kind == "byte_level" else byte_fallback_tokenizer(VOCAB)
    return [tokenizer.encode(text).ids for text in TEXTS]


ENCODED = {kind: encoded(kind) for kind in ("byte_level", "byte_fallback")}
# Whole texts, bytes, text tokens, special tokens, and ids that the model has and the vocabulary has not.
PARTS = st.one_of(
    st.integers(0, len(TEXTS) - 1), st.lists(st.integers(3, 258), max_size=3), st.lists(st.integers(0, VOCAB + 9), max_size=3)
)
MANY_PARTS = st.lists(PARTS, max_size=8)


def ids_of(kind: str, parts: Sequence[int | list[int]]) -> list[int]:
    return [token for part in parts for token in (part if isinstance(part, list) else ENCODED[kind][part])]


def pieces(tokenizer: Tokenizer, prompt: list[int], ids: list[int], skip: bool = True) -> list[str]:
    stream = tokenizer.stream(prompt, skip)
    return [*[stream.push(token) for token in ids], stream.flush()]


def letter_a(tokenizer: Tokenizer) -> int:
    return tokenizer.encode("xa")[-1]


def raw(tokenizer: Tokenizer, ids: list[int], skip: bool) -> bytes:
    return b"".join(tokenizer.token_bytes(token) for token in ids if not (skip and token < len(SPECIAL)))


def unfinished_end(data: bytes) -> bytes:
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(data)
    return decoder.getstate()[0]


def goes_on(begun: bytes, data: bytes) -> bool:
    """Whether `data` takes the character `begun` one byte further."""
    try:
        codecs.getincrementaldecoder("utf-8")().decode(begun + data[:1])
    except UnicodeDecodeError:
        return False
    return bool(begun and data)


@settings(deadline=None)
@given(MANY_PARTS, MANY_PARTS, st.booleans())
def test_pieces_joined_are_the_whole_decode(
    kind: str, tokenizer: Tokenizer, prompt_parts: list[int | list[int]], parts: list[int | list[int]], skip: bool
) -> None:
    prompt, ids = ids_of(kind, prompt_parts), ids_of(kind, parts)
    before, whole = tokenizer.decode(prompt, skip), tokenizer.decode(prompt + ids, skip)
    joined = "".join(pieces(tokenizer, prompt, ids, skip))
    begun, answer = unfinished_end(raw(tokenizer, prompt, skip)), raw(tokenizer, ids, skip)
    # A character that the prompt begins and the answer goes on with is the answer's; a broken one is the prompt's.
    assert whole == (before[:-1] if goes_on(begun, answer) else before) + joined


@settings(deadline=None)
@given(MANY_PARTS, st.booleans())
def test_a_whole_decode_is_that_of_the_bytes(kind: str, tokenizer: Tokenizer, parts: list[int | list[int]], skip: bool) -> None:
    ids = ids_of(kind, parts)
    text = tokenizer.decode(ids, skip)
    theirs = tokenizer._rust.decode(ids, skip_special_tokens=skip)
    if kind == "byte_level" or "\ufffd" not in text:
        assert text == theirs
    shown = raw(tokenizer, ids, skip).decode("utf-8", "replace")
    assert text == (shown.removeprefix(" ") if kind == "byte_fallback" else shown)


@pytest.mark.parametrize(("ids", "expected"), [
    ([13, 229, X], ["\n", "", "\ufffdx", ""]),                       # a newline, a lead byte, and a token that does not go on with it
    ([13, 229], ["\n", "", "\ufffd"]),
    ([*EMOJI[:2], 13, X], ["", "", "\ufffd\n", "x", ""]),
    ([EMOJI[1], X], ["\ufffd", "x", ""]),                            # a byte that begins nothing
    ([*EMOJI, EMOJI[0], *EMOJI], ["", "", "", "\U0001f600", "", "\ufffd", "", "", "\U0001f600", ""]),
    ([EMOJI[0], 2, *EMOJI[1:]], ["", "", "", "", "\U0001f600", ""]),   # a special token that is left out does not part a character
    ([VOCAB + 5, X, 10**6, X], ["", "x", "", "x", ""]),              # ids without a token
])  # fmt: skip
def test_broken_characters_of_a_byte_fallback_vocabulary(tmp_path: Path, ids: list[int], expected: list[str]) -> None:
    tokenizer = load("byte_fallback", tmp_path)
    assert pieces(tokenizer, [X], ids) == expected
    assert tokenizer.decode([X, *ids]) == "x" + "".join(expected)


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_a_prompt_that_ends_inside_a_character(tokenizer: Tokenizer, cut: int) -> None:
    prompt = [*tokenizer.encode("the sea is blue "), *EMOJI[:cut]]
    a = letter_a(tokenizer)
    assert "".join(pieces(tokenizer, prompt, [*EMOJI[cut:], a])) == "\U0001f600a"
    assert "".join(pieces(tokenizer, prompt, [a, a])) == "aa"
    assert "".join(pieces(tokenizer, prompt, [2, a])) == "a"
    assert "".join(pieces(tokenizer, prompt, [2])) == ""
    assert "".join(pieces(tokenizer, prompt, EMOJI)) == "\U0001f600"


@pytest.mark.parametrize("prompt", ["the sea \ufffd", "\ufffd", "the \ufffd\ufffd", "the sea \ufffd\U0001f600\ufffd"])
def test_a_prompt_that_ends_in_the_replacement_character(tokenizer: Tokenizer, prompt: str) -> None:
    a = letter_a(tokenizer)
    assert pieces(tokenizer, tokenizer.encode(prompt), [a, a]) == ["a", "a", ""]


def test_the_prompt_is_not_searched_for_stop_strings(tokenizer: Tokenizer) -> None:
    prompt = tokenizer.encode("the sea\ufffd")
    params = SamplingParams(stop=["sea", "the", "\ufffd"])
    seq = Written(0, Request("r", prompt, params), 0, 0, frozenset(), frozenset(), (), 16, list(prompt), len(prompt))
    output = TextOutput(tokenizer, seq)
    a = letter_a(tokenizer)
    assert output.push([a, a, a]) == ("aaa", 3)
    assert output.stopped_by is None


GEMMA = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])


@settings(deadline=None)
@given(st.lists(st.integers(0, 4), max_size=6))
@pytest.mark.parametrize("decoder", [decoders.Metaspace(), decoders.Metaspace(prepend_scheme="never"), GEMMA, decoders.WordPiece(), None])
def test_decoders_of_other_kinds(decoder: decoders.Decoder | None, ids: list[int]) -> None:
    rust = tokenizers.Tokenizer(models.WordLevel({"▁": 0, "▁the": 1, "sea": 2, "漢": 3, "▁▁a": 4}))
    if decoder is not None:
        rust.decoder = decoder
    stream = TextStream(TokenBytes(rust), [], frozenset())
    assert "".join([*map(stream.push, ids), stream.flush()]) == rust.decode(ids)


def test_the_space_that_sentencepiece_puts_before_a_text(tmp_path: Path) -> None:
    tokenizer = load("byte_fallback", tmp_path)
    the = MIN_VOCAB + PIECES.index("▁the")
    assert tokenizer.decode([the, the]) == tokenizer.decode([0, the, the]) == "the the"
    assert pieces(tokenizer, [0], [the, the]) == ["the", " the", ""]     # nothing but a beginning-of-text token stands before
    assert pieces(tokenizer, [0, X], [the]) == [" the", ""]
    assert pieces(tokenizer, [0], [the], skip=False) == [" the", ""]
    assert (tokenizer.token_text(the), tokenizer.token_bytes(3 + 0xE2)) == (" the", b"\xe2")
