"""Grammars by llguidance: masks, drafts to check, tokens that are forced."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from headway.engine.tokenizer import Tokenizer

# A mask that takes longer than a few milliseconds holds up everybody's step: the library gives up on the text, and the request fails.
# The states of a lexer take one or two KB each.
LIMITS: dict[str, Any] = {"initial_lexer_fuel": 200_000, "step_lexer_fuel": 50_000, "step_max_items": 20_000, "max_lexer_states": 20_000}

MARK = "\x02"   # merges with nothing


class GuidanceBackend:
    limits = LIMITS

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        """`eos_token_ids`: the model's. Where it has none a text ends when its grammar leaves nothing else."""
        vocabulary: Any = _Vocabulary(tokenizer, vocab_size, min(eos_token_ids, default=0))
        self._tokenizer = LLTokenizer(TokenizerWrapper(vocabulary), n_vocab=vocab_size, eos_token=sorted(eos_token_ids) or [0])

    def compile(self, grammar: str) -> GuidanceGrammar:
        root = LLMatcher(self._tokenizer, grammar, log_level=0, limits=LLParserLimits(**LIMITS, verbose_errors=False))
        if root.is_error():
            raise ValueError(root.get_error())
        legal = _tokens(root.compute_bitmask())   # the first one takes longest: here, not in a step
        if root.is_stopped():
            raise ValueError("no text fits")
        first = root.deep_copy()
        first.try_consume_tokens(legal[:1])
        if first.is_error():
            raise ValueError(_reason(first))
        return GuidanceGrammar(root, self._tokenizer)


class GuidanceGrammar:
    def __init__(self, root: LLMatcher, tokenizer: LLTokenizer) -> None:
        self._root, self._tokenizer = root, tokenizer

    def matcher(self, eos_token_ids: frozenset[int]) -> GuidanceMatcher:
        return GuidanceMatcher(self._root.deep_copy(), self._tokenizer, eos_token_ids)


class GuidanceMatcher:
    """The library's matcher has consumed what is committed and then `_path`; whoever asks about another path has it moved there.

    It is never given a token that ends the text: what it makes of one it does not take back.
    """

    def __init__(self, matcher: LLMatcher, tokenizer: LLTokenizer, eos_token_ids: frozenset[int]) -> None:
        """`eos_token_ids`: of the tokens that the library allows where the text may end, those that do end this sequence."""
        self.error: str | None = None
        self._matcher, self._tokenizer = matcher, tokenizer
        self._path: list[int] = []
        self._masks: dict[tuple[int, ...], bytes | None] = {}
        self._eos_bits, self._eos = frozenset(tokenizer.eos_tokens), eos_token_ids
        self._ended = False
        self._num_committed = 0
        self._spelled: dict[int, bytes] = {}      # places ahead -> bytes that must come there
        self._habits: dict[bytes, list[int]] = {}  # such bytes -> the token that wrote them last

    def mask(self, path: SequenceOf[int]) -> bytes | None:
        key = tuple(path)
        if key not in self._masks:
            self._masks[key] = self._mask(key)
        return self._masks[key]

    def num_legal(self, path: SequenceOf[int], tokens: SequenceOf[int]) -> int:
        if not self._move(path):
            return 0
        self._move([*path, *tokens])
        count = len(self._path) - len(path)
        ends = count < len(tokens) and tokens[count] in self._eos and self._matcher.is_accepting()
        return count + ends

    def forced(self, path: SequenceOf[int], limit: int) -> list[int]:
        found: list[int] = []
        while len(found) < limit and self._move([*path, *found]):
            more = self._matcher.compute_ff_tokens()
            if not more and (spelled := self._matcher.compute_ff_bytes()):
                # A token that goes on behind these bytes may come as well: as it did before in this text.
                more = self._habits.get(spelled) or self._tokenizer.tokenize_bytes(spelled)
                self._spelled[self._num_committed + len(path) + len(found)] = spelled
            if not more:
                break
            found += more
        return found[: max(0, min(limit, self.num_legal(path, found)))]

    def advance(self, token: int) -> bool:
        self._masks.clear()
        if (spelled := self._spelled.pop(self._num_committed, None)) is not None:
            self._habits[spelled] = [token]
        self._num_committed += 1
        if token in self._eos_bits:
            self._ended = self._move(()) and self._matcher.is_accepting()
        elif self._path and self._path[0] == token:
            del self._path[0]
        elif not self._move(()) or not self._matcher.try_consume_tokens([token]):
            self._fail_with_library()
            self._fail(f"token {token} does not fit")
        if not self._ended and self._matcher.is_stopped():
            self._ended = self._move(()) and self._matcher.is_stopped()
            self._fail_with_library()
        return self._ended

    def _mask(self, path: tuple[int, ...]) -> bytes | None:
        if not self._move(path):
            return None
        bits = bytearray(self._matcher.compute_bitmask())
        if self._fail_with_library():
            return None
        silent = self._eos_bits - self._eos
        if silent and not self._matcher.is_stopped():
            for token in silent:
                bits[token // 8] &= ~(1 << token % 8)
        return bytes(bits)

    def _move(self, path: SequenceOf[int]) -> bool:
        """Consumes this path instead of the one before, as far as it is legal; whether all of it is."""
        if self.error is not None or self._ended:
            return False
        same = 0
        while same < min(len(path), len(self._path)) and path[same] == self._path[same]:
            same += 1
        if same < len(self._path):
            self._matcher.rollback(len(self._path) - same)
            del self._path[same:]
        rest = list(path[same:])
        end = next((i for i, token in enumerate(rest) if token in self._eos_bits), len(rest))
        if end:
            self._path += rest[: self._matcher.try_consume_tokens(rest[:end])]
        return not self._fail_with_library() and len(self._path) == len(path)

    def _fail_with_library(self) -> bool:
        if self._matcher.is_error():
            self._fail(_reason(self._matcher))
        return self.error is not None

    def _fail(self, reason: str) -> None:
        self.error = self.error or reason


class _Vocabulary:
    """What llguidance wants to know of a tokenizer."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_id: int) -> None:
        self.eos_token_id, self.bos_token_id = eos_token_id, None
        self.tokens = [tokenizer.token_bytes(token) for token in range(vocab_size)]
        self.special_token_ids = sorted(tokenizer.special_token_ids)
        self._tokenizer = tokenizer
        self._by_bytes = {data: token for token, data in enumerate(self.tokens) if token not in tokenizer.special_token_ids}
        self._longest = max(map(len, self._by_bytes))

    def __call__(self, text: str | bytes) -> list[int]:
        """As the tokenizer writes it in the middle of a text: SentencePiece's would begin it with a space, so a mark stands before it."""
        given = text.decode() if isinstance(text, bytes) else text
        for before in ("", MARK):
            ids, size = self._tokenizer.encode(before + given, add_special_tokens=False), len(given.encode())
            while ids and sum(len(self.tokens[token]) for token in ids) > size:
                ids = ids[1:]
            if b"".join(self.tokens[token] for token in ids) == given.encode():
                return ids
        return self._longest_first(given.encode())

    def _longest_first(self, data: bytes) -> list[int]:
        """Where the tokenizer does not give back what it was given."""
        ids: list[int] = []
        while data:
            length = next((n for n in range(min(len(data), self._longest), 0, -1) if data[:n] in self._by_bytes), 0)
            if not length:
                break
            ids.append(self._by_bytes[data[:length]])
            data = data[length:]
        return ids


def _tokens(mask: bytes) -> list[int]:
    tokens: list[int] = np.flatnonzero(np.unpackbits(np.frombuffer(mask, dtype=np.uint8), bitorder="little")).tolist()
    return tokens


def _reason(matcher: LLMatcher) -> str:
    return matcher.get_error().partition("\n")[0]
