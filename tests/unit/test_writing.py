"""JSON in pieces is the JSON in one piece, and no piece is large."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from headway.server.writing import PIECE, Mapped, pieces, text_of

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=2 * PIECE) | st.dictionaries(st.text(), inner),
    max_leaves=200,
)


@given(VALUES)
def test_the_text_says_the_same(value: object) -> None:
    assert json.loads(text_of(value)) == value
    assert json.loads(text_of({"a": [Mapped([value] * 3, lambda each: {"b": each})]})) == {"a": [[{"b": value}] * 3]}


def test_items_are_made_when_they_are_written() -> None:
    made = []
    parts = pieces({"list": Mapped(range(10 * PIECE), lambda number: made.append(number) or str(number))})
    assert next(parts) == "{"
    text = "{" + next(parts) + next(parts) + next(parts)
    assert len(made) == PIECE
    text += "".join(parts)
    assert json.loads(text) == {"list": [str(number) for number in range(10 * PIECE)]}
    assert all(len(part) < 10 * PIECE for part in pieces([list(range(10 * PIECE))] * 3))
