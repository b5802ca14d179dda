"""How much text one token can stand for: what tells that a prompt is too long without tokenizing it.

Known for tokenizers that write down every byte they have a token for: BPE over bytes, or with a token for each byte, behind steps that
drop nothing. The steps are read from the tokenizer itself; with one that is not listed here nothing is claimed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headway.engine.byte_chars import BYTE_OF_CHAR

# Canonical equivalence makes at most 3.5 bytes into one: U+1FBE U+0308 U+0301, seven bytes, are U+0390, two.
CANONICAL_SHRINKS = 4
NEVER_IN_UTF8 = {0xC0, 0xC1, *range(0xF5, 0x100)}
BYTE_TOKENS = [f"<0x{byte:02X}>" for byte in range(256)]

Part = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Reach:
    """What a token stands for at most.

    longest  bytes of UTF-8
    strips   some tokens take in all white space around them, which is not counted then
    unknown  bytes without a token, which become nothing or one unknown token for any number of them, and are not counted either
    """

    longest: int
    strips: bool
    unknown: bytes

    def min_num_tokens(self, text: str) -> int:
        counted = "".join(text.split()) if self.strips else text
        return -(-len(counted.encode("utf-8", "replace").translate(None, self.unknown)) // self.longest)


def reach_of(rust: Any) -> Reach | None:
    """Of a `tokenizers.Tokenizer`; None where it may drop text, or where that is not known."""
    normalizers, pre_tokenizers = _parts(rust.normalizer, "normalizers"), _parts(rust.pre_tokenizer, "pretokenizers")
    shrinks = math.prod(map(_shrinks, normalizers))
    is_byte_level = any(part["type"] == "ByteLevel" for part in pre_tokenizers)
    vocabulary = rust.get_vocab(with_added_tokens=False)
    if type(rust.model).__name__ != "BPE" or rust.truncation or not (shrinks and all(map(_keeps_all, pre_tokenizers))):
        return None
    if is_byte_level:
        unknown = bytes(byte for char, byte in BYTE_OF_CHAR.items() if char not in vocabulary and byte not in NEVER_IN_UTF8)
    elif rust.model.byte_fallback and all(token in vocabulary for token in BYTE_TOKENS):
        unknown = b""
    else:
        return None
    if unknown and normalizers:   # they may make such bytes
        return None
    added = rust.get_added_tokens_decoder().values()
    longest = max(len(token) if is_byte_level else len(token.encode()) for token in vocabulary)
    return Reach(
        shrinks * max([longest, *(len(token.content.encode()) for token in added)]),
        any(token.lstrip or token.rstrip for token in added),
        unknown,
    )


def _parts(step: Any, name: str) -> list[Part]:
    """The steps of a `tokenizers` component, as its file writes them; a sequence may hold sequences."""

    def flat(part: Part) -> list[Part]:
        return [each for inner in part[name] for each in flat(inner)] if part["type"] == "Sequence" else [part]

    return [] if step is None else flat(json.loads(step.__getstate__()))


def _shrinks(normalizer: Part) -> int:
    """How many bytes of a text may become one; 0: any number, for all that is known."""
    if normalizer["type"] in ("NFC", "NFD"):
        return CANONICAL_SHRINKS
    if normalizer["type"] == "Replace" and (replaced := normalizer["pattern"].get("String")) and normalizer["content"]:
        return -(-len(replaced.encode()) // len(normalizer["content"].encode()))
    return 1 if normalizer["type"] == "Prepend" else 0


def _keeps_all(pre_tokenizer: Part) -> bool:
    if pre_tokenizer["type"] == "Split":
        return bool(pre_tokenizer["behavior"] != "Removed")
    return pre_tokenizer["type"] in ("ByteLevel", "Metaspace", "Digits")
