"""How drafted tokens are shown: coloured on a terminal, marked elsewhere."""

from __future__ import annotations

import io

import pytest

from headway.cli.generate import summary
from headway.cli.terminal import GREEN, RED_STRUCK, RESET, DraftWriter, colored, mark
from headway.spec_decode_metrics import SpecDecodeMetrics
from headway.types import OutputDelta


class Bytes:
    """Token n is byte n; 0 is special."""

    def decode(self, token_ids: list[int]) -> str:
        return bytes(token for token in token_ids if token).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id])


def written(deltas: list[OutputDelta], color: bool = False) -> str:
    stream = io.StringIO()
    writer = DraftWriter(Bytes(), stream, color)  # type: ignore[arg-type]
    for delta in deltas:
        writer.write(delta)
    return stream.getvalue()


def delta(text: bytes, num_accepted: int = 0, rejected: bytes = b"") -> OutputDelta:
    return OutputDelta("r", 0, list(text), [position < num_accepted for position in range(len(text))], rejected=list(rejected))


def test_accepted_then_rejected_then_the_models_own() -> None:
    assert written([delta(b"a"), delta(b"bcd", 2, b"xy"), delta(b"e", 0, b"z")]) == "a[+bc][-xy]d[-z]e"
    assert written([delta(b"bcd", 2, b"xy")], color=True) == f"{GREEN}bc{RESET}{RED_STRUCK}xy{RESET}d"


def test_a_character_may_come_in_pieces() -> None:
    assert written([delta("ü".encode()[:1]), delta("ü".encode()[1:])]) == "ü"
    assert written([delta("ü!".encode(), 1)]) == "ü!"
    assert written([delta(b"a", 0, "ü".encode()[:1])]) == "[-\ufffd]a"


def test_special_tokens_are_left_out() -> None:
    assert written([delta(b"ab\x00", 3, b"\x00")]) == "[+ab]"


def test_marks() -> None:
    assert (mark("x", True, False), mark("x", False, False)) == ("[+x]", "[-x]")


@pytest.mark.parametrize(
    ("environment", "expected"), [({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False), ({"NO_COLOR": ""}, True)]
)
def test_colour_is_for_terminals_that_want_it(environment: dict[str, str], expected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert colored(Terminal()) is expected
    assert colored(io.StringIO()) is False


def test_summary_line() -> None:
    stats = SpecDecodeMetrics(num_spec_steps=2, num_draft_tokens=8, num_accepted_tokens=6, num_steps=5)
    assert summary(stats, (11, 0.5, 2.5)) == (
        "11 tokens in 2.50 s: first after 500 ms, then 5.0 tokens/s; 6 of 8 drafts accepted (75%), 2.20 tokens per step"
    )
    assert summary(SpecDecodeMetrics(), (1, 0.5, 0.5)) == "1 tokens in 0.50 s: first after 500 ms, then -; nothing drafted"
