"""What a request may ask of its text's form, and what keeps to it while the text is written.

Standard library only: the records of a step (`types.py`) and the drafters know these without torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Any, Protocol

from headway.errors import InvalidRequestError

KINDS = {
    "json": "the JSON schema", "regex": "the regular expression", "choice": "the choice", "grammar": "the grammar",
    "json_object": "any JSON object",
}   # fmt: skip
"""Field -> what it is called in a message."""
MAX_CHARACTERS = 1 << 16   # of a schema, expression, grammar, or of all choices together: ten times what applications send


@dataclass(frozen=True, slots=True)
class StructuredOutputsParams:
    """The one form that the text of a request must have; names are vLLM's. Raises InvalidRequestError unless exactly one is given.

    json         a JSON schema, as an object or as text
    regex        an expression that the whole text matches
    choice       the texts to choose from
    grammar      a context-free grammar: Lark, or GBNF (with `::=`)
    json_object  True: any JSON object
    disable_any_whitespace  with json and json_object: JSON without spaces and newlines between its parts
    """

    json: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: SequenceOf[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False

    def __post_init__(self) -> None:
        given = [kind for kind in KINDS if getattr(self, kind) is not None]
        if len(given) != 1:
            raise _invalid(f"structured_outputs takes exactly one of {', '.join(KINDS)}; got {' and '.join(given) or 'none'}")
        if self.json_object is False:
            raise _invalid("json_object must be true, or left out")
        if self.choice is not None and not (self.choice and all(isinstance(text, str) for text in self.choice)):
            raise _invalid("choice must be a list of one string or more")
        if self.disable_any_whitespace and self.kind not in ("json", "json_object"):
            raise _invalid("disable_any_whitespace goes with json or json_object")
        if len(self.text) > MAX_CHARACTERS:
            raise _invalid(f"{KINDS[self.kind]} has {len(self.text)} characters; at most {MAX_CHARACTERS} are accepted")

    @property
    def kind(self) -> str:
        return next(kind for kind in KINDS if getattr(self, kind) is not None)

    @property
    def text(self) -> str:
        """What was given, as text: JSON for what is not a text itself."""
        if self.json_object:
            return '{"type": "object"}'
        given = getattr(self, self.kind)
        if isinstance(given, str):
            return given
        try:
            return json.dumps(dict(given) if isinstance(given, Mapping) else given, ensure_ascii=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise _invalid(f"{KINDS[self.kind]} is not JSON: {error}") from None


def _invalid(message: str) -> InvalidRequestError:
    return InvalidRequestError(message, param="structured_outputs")


class GrammarError(RuntimeError):
    """A text can no longer be kept to its grammar (`Matcher.error`)."""


class Matcher(Protocol):
    """Where the text of one sequence stands in its grammar.

    A `path` is tokens that may come to follow what is committed: drafts. Asking about one changes nothing that can be seen.
    """

    error: str | None
    """Why this text can no longer be kept to its grammar: it became too complex. Then nothing is forbidden any more."""

    def mask(self, path: SequenceOf[int]) -> bytes | None:
        """Which tokens may follow the path: bit t % 8 of byte t // 8 is token t. None: any, since the path left the grammar or its end."""

    def num_legal(self, path: SequenceOf[int], tokens: SequenceOf[int]) -> int:
        """How many of these tokens, one after the other, may follow the path."""

    def forced(self, path: SequenceOf[int], limit: int) -> list[int]:
        """At most `limit` tokens that spell what must follow the path. Other tokens may spell the same."""

    def advance(self, token: int) -> bool:
        """Commits a token; whether the text is complete and nothing can follow it."""
