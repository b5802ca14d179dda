"""Text <-> token ids: encoding, chat template, decoding one token at a time."""

from __future__ import annotations

import codecs
import re
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from functools import cached_property
from pathlib import Path
from typing import Any

from headway.engine.byte_chars import BYTE_OF_CHAR
from headway.engine.token_reach import reach_of
from headway.errors import InvalidRequestError, ModelError

Message = Mapping[str, Any]

_Utf8Decoder = codecs.getincrementaldecoder("utf-8")
_LONGEST_CHARACTER = 4   # bytes of UTF-8
_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")


class Tokenizer:
    """The tokenizer of a Hugging Face directory. Raises ModelError when the directory has none that works."""

    def __init__(self, directory: Path) -> None:
        from transformers import AutoTokenizer  # seconds to import: only when a model is really loaded

        try:
            self._hf: Any = AutoTokenizer.from_pretrained(str(directory))
        except Exception as error:   # of several libraries; the tokenizers' own is a bare Exception
            raise ModelError(f"no usable tokenizer in {directory}: {type(error).__name__}: {error}") from error
        if not getattr(self._hf, "is_fast", False):
            raise ModelError(f"{directory} has no tokenizer.json; a tokenizer of that form is needed")
        self._rust = self._hf.backend_tokenizer
        self._pieces = TokenBytes(self._rust)
        self._reach = reach_of(self._rust)
        self._special = frozenset(id for id, token in self._rust.get_added_tokens_decoder().items() if token.special)

    @property
    def vocab_size(self) -> int:
        """Ids in use, added tokens included; the model's output layer may be larger."""
        return len(self._hf)

    @property
    def eos_token_id(self) -> int | None:
        eos: int | None = self._hf.eos_token_id
        return eos

    @property
    def special_token_ids(self) -> frozenset[int]:
        """Tokens that are no text of their own, as those that end a turn."""
        return self._special

    @property
    def has_chat_template(self) -> bool:
        return bool(self._hf.chat_template)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text; no other Python thread runs meanwhile."""
        return self._rust.encode(_printable(text), add_special_tokens=add_special_tokens).ids

    def encode_aside(self, texts: SequenceOf[str], add_special_tokens: bool = True) -> list[list[int]]:
        """`encode` of several texts, during which other threads run. For a short text it takes longer."""
        encoded = self._rust.encode_batch_fast([_printable(text) for text in texts], add_special_tokens=add_special_tokens)
        return [each.ids for each in encoded]

    def min_num_tokens(self, text: str) -> int:
        """At least so many tokens become of a text, found without tokenizing it; 0 where this tokenizer may drop any length of text."""
        return self._reach.min_num_tokens(text) if self._reach else 0

    def decode(self, token_ids: SequenceOf[int], skip_special_tokens: bool = True) -> str:
        """What the tokens say. U+FFFD stands for each sequence of bytes that is no character, as Unicode recommends.

        Tokens stand for bytes and what is written stays written. (Hugging Face's decoder agrees, except that it turns a whole run of
        byte tokens into U+FFFD, newlines and all, when a later one breaks a character.)
        """
        stream = self.stream((), skip_special_tokens)
        return "".join([*map(stream.push, token_ids), stream.flush()])

    def render(self, messages: SequenceOf[Message], add_generation_prompt: bool = True) -> str:
        """A conversation as the text to continue. Raises InvalidRequestError when the template refuses it or there is none."""
        if not self.has_chat_template:
            raise InvalidRequestError("this model has no chat template; use plain completions", param="messages")
        try:
            text: str = self._hf.apply_chat_template(list(messages), add_generation_prompt=add_generation_prompt, tokenize=False)
        except Exception as error:   # a template is a program of the model's author: it may raise anything
            raise InvalidRequestError(f"the chat template refused the messages: {error}", param="messages") from error
        return text

    def apply_chat_template(self, messages: SequenceOf[Message], add_generation_prompt: bool = True) -> list[int]:
        """Token ids of a conversation. Raises InvalidRequestError as `render` does."""
        return self.encode(self.render(messages, add_generation_prompt), add_special_tokens=False)

    def token_text(self, token_id: int) -> str:
        """What a token adds to a text that has begun; incomplete UTF-8 shows as U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """`token_text` before it is decoded: several tokens may share one character."""
        return self._pieces[token_id]

    def bad_words_ids(self, words: SequenceOf[str]) -> tuple[tuple[int, ...], ...]:
        """Token sequences that would write each word, at the start of a text and after a space."""
        texts = [text for word in words for text in (word, " " + word.lstrip())]
        found: dict[tuple[int, ...], None] = {}
        for text, ids in zip(texts, self.encode_aside(texts, add_special_tokens=False) if texts else (), strict=True):
            if ids and self.decode(ids, skip_special_tokens=False).strip() == text.strip():
                found[tuple(ids)] = None
        return tuple(found)

    def stream(self, prompt_token_ids: SequenceOf[int], skip_special_tokens: bool) -> TextStream:
        return TextStream(self._pieces, prompt_token_ids, self._special if skip_special_tokens else frozenset())


class TokenBytes(dict[int, bytes]):
    """Token id -> the UTF-8 bytes that it adds to a text that has begun; found when first asked for. b"" for ids without a token."""

    def __init__(self, rust: Any) -> None:
        super().__init__()
        self._rust = rust
        self._is_byte_level = "ByteLevel" in repr(rust.decoder)
        self._has_byte_fallback = "ByteFallback" in repr(rust.decoder)

    def __missing__(self, token_id: int) -> bytes:
        piece = self._rust.id_to_token(token_id)
        if piece is None:
            data = b""
        elif self._is_byte_level:
            known = all(char in BYTE_OF_CHAR for char in piece)
            data = bytes(BYTE_OF_CHAR[char] for char in piece) if known else piece.encode()
        elif self._has_byte_fallback and (byte := _BYTE_TOKEN.fullmatch(piece)):
            data = bytes.fromhex(byte[1])
        else:
            before = self._any_text
            data = self._decode([*before, token_id]).removeprefix(self._decode(before)).encode()
        self[token_id] = data
        return data

    def at_start(self, token_id: int) -> bytes:
        """What the token writes when nothing stands before it: SentencePiece's decoders drop the space that they put before a text."""
        data, alone = self[token_id], self._decode([token_id]).encode()
        return alone if data.endswith(alone) else data   # a part of a character has no text of its own

    def _decode(self, token_ids: list[int]) -> str:
        text: str = self._rust.decode(token_ids, skip_special_tokens=False)
        return text

    @cached_property
    def _any_text(self) -> list[int]:
        """A token to stand before another one, so that this one is not at the start."""
        for token_id in range(self._rust.get_vocab_size()):
            text = self._decode([token_id])
            if text and text.isascii() and text.isprintable() and text.strip() == text:
                return [token_id]
        return []


class TextStream:
    """Decodes one continuation token by token, whatever the tokens; text appears once its characters are complete.

    The pieces joined are what the continuation adds to `Tokenizer.decode` of the prompt. A character that the prompt leaves unfinished is
    written where the continuation goes on with it; otherwise its bytes are the prompt's and are not written.
    """

    def __init__(self, pieces: TokenBytes, prompt_token_ids: SequenceOf[int], skipped: frozenset[int]) -> None:
        self._pieces = pieces
        self._skipped = skipped
        self._utf8 = _Utf8Decoder("replace")
        self._prompt_end = _last_bytes(pieces, prompt_token_ids, skipped)
        self._begun = False

    def push(self, token_id: int) -> str:
        """The text that this token completes, often "" inside a multi-byte character."""
        if token_id in self._skipped:
            return ""
        data = self._pieces[token_id]
        if data and not self._begun:
            data = self._begin(token_id, data)
        return self._utf8.decode(data)

    def flush(self) -> str:
        """What is left when the continuation ends inside a character."""
        return self._utf8.decode(b"", final=True)

    def _begin(self, token_id: int, data: bytes) -> bytes:
        """The first bytes of the continuation, and before them what they complete of the prompt's last character."""
        self._begun = True
        if not self._prompt_end:
            return self._pieces.at_start(token_id)
        self._utf8.decode(self._prompt_end)
        unfinished, _ = self._utf8.getstate()
        self._utf8.reset()
        try:
            _Utf8Decoder("strict").decode(unfinished + data[:1])
        except UnicodeDecodeError:
            return data
        return unfinished + data


def _last_bytes(pieces: TokenBytes, token_ids: SequenceOf[int], skipped: frozenset[int]) -> bytes:
    """At least the last character of a text, finished or not; b"" of an empty one."""
    found = b""
    for token_id in reversed(token_ids):
        if token_id not in skipped:
            found = pieces[token_id] + found
        if len(found) >= _LONGEST_CHARACTER:
            break
    return found


def _printable(text: str) -> str:
    """JSON can carry lone surrogates, UTF-8 cannot."""
    return text.encode("utf-8", errors="replace").decode("utf-8") if not text.isascii() else text
