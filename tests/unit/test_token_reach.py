"""A prompt is refused by its length only when its tokens could not fit."""

from __future__ import annotations

import json
import sys
import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from headway.engine.byte_chars import BYTE_OF_CHAR
from headway.engine.token_reach import CANONICAL_SHRINKS, reach_of
from tests.tiny import byte_fallback_tokenizer, byte_level_tokenizer

TEXT = "\u2014\x04 Å \u212b\u1fef\u037e 한국어 \u1112\u1161\u11ab e\u0301 漢字 😀 the the    \n\n\t0123 <|im_end|>    <|im_end|>"


def byte_level(normalizer: normalizers.Normalizer | None = None) -> Tokenizer:
    tokenizer = byte_level_tokenizer(320)
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    return tokenizer


def stripping() -> Tokenizer:
    tokenizer = byte_level()
    tokenizer.add_special_tokens([AddedToken("<all around>", lstrip=True, rstrip=True)])
    return tokenizer


def without_some_bytes(normalizer: normalizers.Normalizer | None = None) -> Tokenizer:
    description = json.loads(byte_level(normalizer).to_str())
    vocabulary = description["model"]["vocab"]
    for byte in (0x04, 0xE2, 0xF1):
        vocabulary[f"-{byte}-"] = vocabulary.pop({value: char for char, value in BYTE_OF_CHAR.items()}[byte])
    return Tokenizer.from_str(json.dumps(description))


KNOWN = {
    "bytes": byte_level(),
    "NFC": byte_level(normalizers.NFC()),
    "NFD": byte_level(normalizers.NFD()),
    "replace": byte_level(normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace("the", "t")])),
    "fallback": byte_fallback_tokenizer(320),
    "stripping": stripping(),
    "some bytes": without_some_bytes(),
}
UNKNOWN = {
    "NFKC": byte_level(normalizers.NFKC()),
    "strip": byte_level(normalizers.Strip()),
    "regex": byte_level(normalizers.Replace(Regex(" +"), " ")),
    "removal": byte_level(normalizers.Replace(" ", "")),
    "words": Tokenizer(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]")),
    "bytes that a normalizer makes": without_some_bytes(normalizers.NFC()),
    "no bytes": Tokenizer(models.BPE({"a": 0, "?": 1}, [], unk_token="?", fuse_unk=True)),
}


def splitting_spaces_off() -> Tokenizer:
    tokenizer = byte_level()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.ByteLevel()])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


@settings(max_examples=200)
@pytest.mark.parametrize("name", KNOWN)
@given(text=st.one_of(st.text(max_size=200), st.text(st.sampled_from(TEXT), max_size=300), st.text(" <al>roundthe", max_size=300)))
def test_never_more_than_the_tokens_that_come_out(name: str, text: str) -> None:
    reach = reach_of(KNOWN[name])
    assert reach is not None
    for whole in (text, text * 5, text + "<all around>" + " " * 500, text + "\x04\u2014" * 500):
        count = len(KNOWN[name].encode(whole.encode("utf-8", "replace").decode(), add_special_tokens=False).ids)
        assert reach.min_num_tokens(whole) <= count


@pytest.mark.parametrize("name", KNOWN)
def test_a_long_text_is_known_to_be_long(name: str) -> None:
    reach = reach_of(KNOWN[name])
    assert reach is not None
    assert reach.min_num_tokens("a" * 1_000_000) > 10_000


@pytest.mark.parametrize("tokenizer", [*UNKNOWN.values(), splitting_spaces_off()], ids=[*UNKNOWN, "spaces"])
def test_nothing_is_claimed_of_a_tokenizer_that_may_drop_text(tokenizer: Tokenizer) -> None:
    assert reach_of(tokenizer) is None


def test_canonical_equivalence_shrinks_no_character_by_more() -> None:
    sizes: dict[str, int] = {}
    for code in range(sys.maxunicode + 1):
        if not 0xD800 <= code < 0xE000:
            # The longest way to write each piece of a canonical decomposition.
            size = len(chr(code).encode())
            decomposed = unicodedata.normalize("NFD", chr(code))
            if len(decomposed) == 1:
                sizes[decomposed] = max(sizes.get(decomposed, 0), size)
    for code in range(sys.maxunicode + 1):
        if not 0xD800 <= code < 0xE000 and unicodedata.normalize("NFC", chr(code)) == chr(code):
            longest = sum(sizes[piece] for piece in unicodedata.normalize("NFD", chr(code)))
            assert longest <= CANONICAL_SHRINKS * len(chr(code).encode()), hex(code)
