"""Text <-> token ids: encoding, chat template, decoding one token at a time."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers.decoders import DecodeStream

from headway.errors import InvalidRequestError, ModelError

Message = Mapping[str, Any]


class Tokenizer:
    """The tokenizer of a Hugging Face directory. Raises ModelError when the directory has none that works."""

    def __init__(self, directory: Path) -> None:
        from transformers import AutoTokenizer  # seconds to import: only when a model is really loaded

        try:
            self._hf: Any = AutoTokenizer.from_pretrained(str(directory))
        except (OSError, ValueError, KeyError) as error:
            raise ModelError(f"no usable tokenizer in {directory}: {error}") from error
        if not getattr(self._hf, "is_fast", False):
            raise ModelError(f"{directory} has no tokenizer.json; a tokenizer of that form is needed")
        self._rust = self._hf.backend_tokenizer

    @property
    def vocab_size(self) -> int:
        """Ids in use, added tokens included; the model's output layer may be larger."""
        return len(self._hf)

    @property
    def eos_token_id(self) -> int | None:
        eos: int | None = self._hf.eos_token_id
        return eos

    @property
    def has_chat_template(self) -> bool:
        return bool(self._hf.chat_template)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return self._rust.encode(_printable(text), add_special_tokens=add_special_tokens).ids

    def decode(self, token_ids: SequenceOf[int], skip_special_tokens: bool = True) -> str:
        return self._rust.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def apply_chat_template(self, messages: SequenceOf[Message], add_generation_prompt: bool = True) -> list[int]:
        """Token ids of a conversation. Raises InvalidRequestError when the template refuses it or there is none."""
        if not self.has_chat_template:
            raise InvalidRequestError("this model has no chat template; use plain completions", param="messages")
        try:
            text = self._hf.apply_chat_template(list(messages), add_generation_prompt=add_generation_prompt, tokenize=False)
        except Exception as error:   # a template is a program of the model's author: it may raise anything
            raise InvalidRequestError(f"the chat template refused the messages: {error}", param="messages") from error
        return self.encode(text, add_special_tokens=False)

    def token_text(self, token_id: int) -> str:
        """One token alone, as text; incomplete UTF-8 shows as U+FFFD."""
        return self._rust.decode([token_id], skip_special_tokens=False)

    def token_bytes(self, token_id: int) -> bytes:
        """One token alone, as the bytes it stands for (several tokens may share one character)."""
        piece = self._rust.id_to_token(token_id)
        if piece is not None and piece.startswith("<0x") and piece.endswith(">") and len(piece) == 6:
            return bytes([int(piece[3:5], 16)])
        if piece is not None and self._is_byte_level and token_id not in self._added:
            return bytes(self._byte_of_char[char] for char in piece if char in self._byte_of_char)
        return self.token_text(token_id).encode("utf-8", errors="replace")

    def bad_words_ids(self, words: SequenceOf[str]) -> tuple[tuple[int, ...], ...]:
        """Token sequences that would write each word, at the start of a text and after a space."""
        found: dict[tuple[int, ...], None] = {}
        for word in words:
            for text in (word, " " + word.lstrip()):
                ids = tuple(self.encode(text, add_special_tokens=False))
                if ids and self.decode(ids, skip_special_tokens=False).strip() == word.strip():
                    found[ids] = None
        return tuple(found)

    def stream(self, prompt_token_ids: SequenceOf[int], skip_special_tokens: bool) -> TextStream:
        return TextStream(self._rust, prompt_token_ids, skip_special_tokens)

    @cached_property
    def _added(self) -> frozenset[int]:
        return frozenset(self._rust.get_added_tokens_decoder())

    @cached_property
    def _is_byte_level(self) -> bool:
        return "ByteLevel" in str(type(self._rust.decoder)) or "ByteLevel" in repr(self._rust.decoder)

    @cached_property
    def _byte_of_char(self) -> dict[str, int]:
        """GPT-2's printable stand-ins for the 256 bytes."""
        keep = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
        rest = [byte for byte in range(256) if byte not in keep]
        return {chr(byte): byte for byte in keep} | {chr(256 + index): byte for index, byte in enumerate(rest)}


class TextStream:
    """Decodes one continuation token by token; text appears once its characters are complete."""

    # Enough context for a decoder that treats the first token of a text differently (Llama's leading space).
    _NUM_CONTEXT = 8

    def __init__(self, rust: Any, prompt_token_ids: SequenceOf[int], skip_special_tokens: bool) -> None:
        self._rust = rust
        self._skip_special_tokens = skip_special_tokens
        self._stream = DecodeStream(list(prompt_token_ids[-self._NUM_CONTEXT :]), skip_special_tokens)
        self._pending: list[int] = []

    def push(self, token_id: int) -> str:
        """The text that this token completes, often "" inside a multi-byte character."""
        self._pending.append(token_id)
        text = self._stream.step(self._rust, token_id)
        if text is None:
            return ""
        self._pending.clear()
        return text

    def flush(self) -> str:
        """What is left when the continuation ends inside a character."""
        pending, self._pending = self._pending, []
        return self._rust.decode(pending, skip_special_tokens=self._skip_special_tokens) if pending else ""


def _printable(text: str) -> str:
    """JSON can carry lone surrogates, UTF-8 cannot."""
    return text.encode("utf-8", errors="replace").decode("utf-8") if not text.isascii() else text
