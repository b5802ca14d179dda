"""The confidence of drafts that vLLM's ngram drafter copied."""

from __future__ import annotations

from headway.drafters.core.ngram_index import acceptance
from headway.vllm.copy_confidence import History


def test_the_longer_the_match_the_surer() -> None:
    text = [1, 2, 3, 4, 5, 6, 7, 8, 9, 3, 4, 5, 6]
    assert History(text).confidence([7, 8]) == [acceptance(1, 1, 4), acceptance(1, 1, 5)]
    assert History([9, 9, 5, 6, 7, 1, 2, 5, 6]).confidence([7]) == [acceptance(1, 1, 2)]


def test_not_copied_from_here() -> None:
    assert History([1, 2, 3]).confidence([7]) is None
    assert History([1]).confidence([1]) is None


def test_follows_a_text_that_grows() -> None:
    text = [1, 2, 3, 4, 1, 2]
    history = History(text)
    assert history.confidence([3]) == [acceptance(1, 1, 2)]
    text += [3, 4]
    assert history.confidence([1]) == [acceptance(1, 1, 4)]


def test_bytes_that_look_alike_between_tokens_are_no_match() -> None:
    # 0x01000000 ends where the next token begins: one byte later the bytes of [1, 0] appear.
    text = [256, 0, 7, 1, 0]
    assert History([0x100, 0, 5, 1]).confidence([0]) is None
    assert History(text).confidence([7]) == [acceptance(1, 1, 1)]
