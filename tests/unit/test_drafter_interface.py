"""What the engine may rely on for every drafter that needs token ids only, the built-in ones found by listing."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from headway import plugins
from headway.control.policies.static import Static
from headway.control.policy import AdaptivePolicy
from headway.drafters.drafter import Committed, Drafter, DraftRequest, never_stop, stop_early
from headway.types import Draft

Bools = NDArray[np.bool_]


def token_only() -> list[str]:
    classes = {name: plugins.load("drafter", name) for name in plugins.names("drafter")}
    return [name for name, cls in classes.items() if cls.load is Drafter.load and not cls.needs_grammar]


@pytest.fixture(params=token_only())
def make(request: pytest.FixtureRequest) -> Callable[[], Drafter]:
    return plugins.load("drafter", request.param)


def text(seed: int, length: int = 200) -> list[int]:
    """Phrases that come back, with noise between them."""
    rng = random.Random(seed)
    phrases = [[rng.randrange(100) for _ in range(rng.randrange(5, 12))] for _ in range(4)]
    tokens: list[int] = []
    while len(tokens) < length:
        tokens += rng.choice(phrases) + [rng.randrange(100)] * rng.randrange(2)
    return tokens[:length]


def requests_for(histories: Sequence[list[int]], k: int = 6) -> list[DraftRequest]:
    return [DraftRequest(10 + i, history, 20, k, True) for i, history in enumerate(histories)]


class Recorder(Static, AdaptivePolicy):
    """Goes on behind a position while `allowed(seq_id, position)`; remembers what it was asked."""

    def __init__(self, allowed: Callable[[int, int], bool]) -> None:
        self.allowed = allowed
        self.calls: list[tuple[list[int], int, list[float]]] = []

    def continue_drafting(self, seq_ids: Sequence[int], position: int, confidence: NDArray[np.float64]) -> Bools:
        assert confidence.shape == (len(seq_ids),)
        self.calls.append((list(seq_ids), position, confidence.tolist()))
        return np.array([self.allowed(seq_id, position) for seq_id in seq_ids], dtype=np.bool_)


def test_one_draft_per_request_of_at_most_k_plain_ints(make: Callable[[], Drafter]) -> None:
    histories = [text(seed) for seed in range(6)] + [[1], [1, 2]]
    drafts = make().propose([DraftRequest(i, h, 1, 1 + i, True) for i, h in enumerate(histories)], never_stop)
    assert len(drafts) == len(histories)
    assert any(draft.tokens for draft in drafts)
    for number, draft in enumerate(drafts):
        assert len(draft) <= 1 + number
        assert all(type(token) is int and 0 <= token < 100 for token in draft.tokens)
        assert draft.confidence is None or len(draft.confidence) == len(draft)
    assert make().propose([], never_stop) == []


def test_drafts_do_not_depend_on_the_batch_or_the_sequence_id(make: Callable[[], Drafter]) -> None:
    histories = [text(seed) for seed in range(5)]
    together = make().propose(requests_for(histories), never_stop)
    alone = [make().propose([DraftRequest(77, h, 20, 6, False)], never_stop)[0] for h in histories]
    assert together == alone


def test_the_history_is_left_alone(make: Callable[[], Drafter]) -> None:
    history = text(1)
    drafter = make()
    drafter.commit([Committed(10, history, 20, 180, 0)])
    drafter.propose(requests_for([history]), never_stop)
    drafter.stop(10)
    assert history == text(1)


def test_gaps_change_nothing(make: Callable[[], Drafter]) -> None:
    """Asked each step, asked now and then, and asked only at the end (after steps with k = 0, or a preemption): the same draft."""
    full = text(3, 300)
    drafts = []
    for every in (1, 7, 10_000):
        drafter, live = make(), full[:100]
        for step in range(60):
            live += full[len(live) : len(live) + 1 + step % 5]
            drafter.commit([Committed(10, live, 20, 1 + step % 5, 0)])
            if step % every == every - 1:
                drafter.propose(requests_for([live]), never_stop)
        drafts.append([drafter.propose(requests_for([full[:n]]), never_stop)[0] for n in range(len(live), len(full))])
    assert drafts[0] == drafts[1] == drafts[2]
    assert any(draft.tokens for draft in drafts[0])


def test_stop_is_safe_at_any_time(make: Callable[[], Drafter]) -> None:
    drafter = make()
    drafter.stop(5)
    drafter.propose(requests_for([text(1)]), never_stop)
    drafter.stop(10)
    drafter.stop(10)
    drafter.propose(requests_for([text(2)]), never_stop)


def test_the_policy_is_asked_position_by_position_and_honoured(make: Callable[[], Drafter]) -> None:
    histories = [text(seed) for seed in range(6)]
    full = make().propose(requests_for(histories), never_stop)
    policy = Recorder(lambda seq_id, position: position < seq_id - 12)
    drafts = make().propose(requests_for(histories), policy.continue_drafting)
    assert drafts == [draft.truncated(min(len(draft), max(1, i - 1))) for i, draft in enumerate(full)]
    assert [position for _, position, _ in policy.calls] == list(range(len(policy.calls)))
    for seq_ids, position, confidence in policy.calls:
        assert seq_ids == [10 + i for i, draft in enumerate(full) if len(draft) > position + 1 and (position == 0 or position - 1 < i - 2)]
        expected = [c[position] if (c := full[seq_id - 10].confidence) is not None else np.nan for seq_id in seq_ids]
        np.testing.assert_equal(confidence, expected)


def test_who_never_goes_on_drafts_one_token(make: Callable[[], Drafter]) -> None:
    asked = requests_for([text(seed) for seed in range(4)])
    drafts, full = make().propose(asked, Recorder(lambda *_: False).continue_drafting), make().propose(asked, never_stop)
    assert [draft.tokens for draft in drafts] == [draft.tokens[:1] for draft in full]
    assert max(len(draft) for draft in full) > 1


# -- stop_early -----------------------------------------------------------------------------------------------------


def drafts_of(*lengths: int) -> list[Draft]:
    return [Draft(list(range(n)), confidence=[0.5] * n if n % 2 else None) for n in lengths]


def test_drafts_without_confidence_show_nan() -> None:
    policy = Recorder(lambda *_: True)
    drafts = drafts_of(3, 2, 0)
    assert stop_early(requests_for([[1]] * 3), drafts, policy.continue_drafting) == drafts
    np.testing.assert_equal(policy.calls, [([10, 11], 0, [0.5, np.nan]), ([10], 1, [0.5])])


def test_a_stopped_draft_is_not_asked_about_again() -> None:
    policy = Recorder(lambda seq_id, position: seq_id != 10 or position != 1)
    kept = stop_early(requests_for([[1]] * 2), drafts_of(4, 4), policy.continue_drafting)
    assert [len(draft) for draft in kept] == [2, 4]
    assert [seq_ids for seq_ids, _, _ in policy.calls] == [[10, 11], [10, 11], [11]]


def test_who_has_no_say_costs_nothing_and_any_hook_is_called() -> None:
    drafts = drafts_of(3)
    assert stop_early(requests_for([[1]]), drafts, never_stop) is drafts

    class Own(Static, AdaptivePolicy):
        def continue_drafting(self, seq_ids: Sequence[int], position: int, confidence: NDArray[np.float64]) -> Bools:
            return super().continue_drafting(seq_ids, position, confidence) & (position < 1)

    assert [len(d) for d in stop_early(requests_for([[1]]), drafts, Own().continue_drafting)] == [2]
    assert [len(d) for d in stop_early(requests_for([[1]]), drafts, lambda ids, position, _: np.array([position < 0]))] == [1]


# -- layers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "modules",
    [
        [f"headway.drafters.{name}" for name in token_only()],
        [f"headway.control.policies.{name}" for name in plugins.names("policy")],
        ["headway.config", "headway.plugins", "headway.types"],
    ],
)
def test_importing_does_not_import_torch(modules: list[str]) -> None:
    script = f"import sys; import {', '.join(modules)}; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_parsing_a_config_does_not_import_torch() -> None:
    script = (
        "import sys; from headway.config import SpeculativeConfig as C; c = C.parse('default'); "
        "c.build_drafter(); c.build_policy(); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_the_overhead_benchmark_ends_in_one_json_document() -> None:
    script = Path(__file__).parents[2] / "studies" / "drafter_overhead.py"
    small = ["--requests", "2", "--context", "150", "--steps", "3"]
    printed = subprocess.run([sys.executable, script, *small], check=True, capture_output=True, text=True).stdout
    document = json.loads(printed.splitlines()[-1])
    assert [(row["drafter"], row["text"]) for row in document["rows"]][-1] == ("suffix", "write")
    assert all(row["mean_accepted"] <= row["mean_drafted"] <= row["k"] for row in document["rows"])
