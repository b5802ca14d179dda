"""The speculator that ships with Headway, trained by `headway train eagle3`, drafts in vLLM as it is."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from conftest import MODEL, Server, flags_of

from headway.drafters.core import automatic

PROMPT = "<|im_start|>user\nExplain photosynthesis to a child.<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def server(serve: Callable[..., Server]) -> Server:
    found = automatic.shipped(MODEL)
    if found is None:
        pytest.skip("no speculator is shipped here")
    return serve(*flags_of({"method": "eagle3", "model": found[1], "num_speculative_tokens": 3}, scheduler=False))


def test_vllm_loads_it_and_accepts_its_drafts(server: Server) -> None:
    reply = server.complete(PROMPT, max_tokens=96)
    assert reply["usage"]["completion_tokens"] > 20
    seen = server.settled()
    drafts, accepted = (seen.total(f"vllm:spec_decode_num_{name}_total") for name in ("drafts", "accepted_tokens"))
    assert drafts > 10
    # Headway's own engine drafts 46 times for this answer and accepts 49 tokens; wrongly read layers would leave next to nothing.
    assert accepted / drafts > 0.8
