"""Replay: what a trace tells, and that deciding it again as it was decided gives what was measured."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headway.cli.main import main
from headway.config import EngineConfig, SpeculativeConfig
from headway.control.policy import AdaptivePolicy, BatchView
from headway.engine.engine import Engine
from headway.errors import ConfigError
from headway.sampling_params import SamplingParams
from headway.telemetry.trace import Trace, TraceStep, read_trace
from headway.tune import replay
from headway.tune.evidence import ENDLESS, HIT, MISS, NONE, Evidence, gather
from headway.tune.regret import split
from headway.types import Choice, DrafterFeedback, Feedback, LookupFeedback, Request, SequenceFeedback, ShadowFeedback
from tests.tiny import tiny_model_dir

Row = tuple[int, int, int, int, int, int]   # seq_id, num_context, k, proposed, verified, accepted


def trace_of(*steps: list[Row], ms: Callable[[int, int], float] = lambda rows, tokens: 10.0 + 0.1 * tokens, prefill: int = 0) -> Trace:
    found = []
    for index, rows in enumerate(steps):
        sequences = tuple(
            SequenceFeedback(seq_id, "ngram" if k else "none", k, proposed, verified, accepted, context)
            for seq_id, context, k, proposed, verified, accepted in rows
        )
        tokens = len(rows) + sum(row[4] for row in rows)
        took = ms(len(rows), tokens)
        drafting = (DrafterFeedback("ngram", len(rows), 4, 0, 4, 0.1),) if any(row[2] for row in rows) else ()
        feedback = Feedback(
            index, sequences, prefill if index == 0 else 0, tokens, sum(row[1] for row in rows), 0.1, took, took, len(rows),
            drafters=drafting,
        )
        found.append(TraceStep(10.0 * index, (8,) * len(rows), feedback))
    return Trace({"max_k": 8, "drafters": ["ngram"]}, tuple(found))


# -- evidence -----------------------------------------------------------------------------------------------------


def codes(evidence: Evidence) -> list[int]:
    return [int(code) for code in evidence.sequences[0].drafts["ngram"].codes]


def test_codes_say_where_the_drafter_is_right_wrong_or_has_nothing() -> None:
    evidence = gather(trace_of(
        [(1, 50, 0, 0, 0, 0)],     # the prompt: writes position 0
        [(1, 51, 4, 4, 4, 2)],     # positions 1, 2 right, 3 wrong
        [(1, 54, 4, 2, 2, 2)],     # 4, 5 right, nothing to propose at 6
        [(1, 57, 4, 0, 0, 0)],     # nothing at 7
        [(1, 58, 4, 4, 4, 4)],     # 8 to 11 right, 12 unknown
    ))
    assert codes(evidence)[1:12] == [HIT, HIT, MISS, HIT, HIT, NONE, NONE, HIT, HIT, HIT, HIT]
    assert evidence.known["ngram"] == 11 / 13
    [sequence] = evidence.sequences
    assert (sequence.num_prompt, sequence.num_output) == (50, 13)
    limits = sequence.drafts["ngram"].limits
    assert [limits[at] for at in (1, 4, 7, 8)] == [ENDLESS, 2, 0, ENDLESS]


def test_a_lookup_that_was_not_chosen_tells_as_much_as_what_was_verified() -> None:
    trace = trace_of([(1, 50, 0, 0, 0, 0)], [(1, 51, 0, 0, 0, 0)], [(1, 52, 0, 0, 0, 0)], *[[(1, 53 + i, 0, 0, 0, 0)] for i in range(4)])
    told: dict[int, dict[str, Any]] = {
        1: {"lookups": (LookupFeedback(1, "ngram", 4, 3),)},                              # three tokens from position 1 on
        3: {"lookups": (LookupFeedback(1, "ngram", 4, 0),)},
        4: {"shadows": (ShadowFeedback(1, "ngram", 0, 3, 1, (0.5, 0.4, 0.3), 51),)},  # the first of the three was right
    }
    steps = tuple(replace(step, feedback=replace(step.feedback, **told.get(i, {}))) for i, step in enumerate(trace.steps))
    evidence = gather(Trace(trace.header, steps))
    assert codes(evidence)[1:4] == [HIT, MISS, NONE]
    ngram = evidence.sequences[0].drafts["ngram"]
    assert (ngram.limits[1], ngram.limits[3]) == (3, 0)
    assert ngram.confidence[1] == (0.5, 0.4, 0.3)
    assert evidence.known["ngram"] == 3 / 7


def test_lookups_are_decided_again() -> None:
    """Half of the positions can be copied, and a second drafter is asked for the others."""
    rows, context = [[(1, 50, 0, 0, 0, 0)]], 51
    for i in range(60):
        rows.append([(1, context, 4, 4, 4, 4)] if i % 2 else [(1, context, 4, 0, 0, 0)])
        context += 5 if i % 2 else 1
    trace = trace_of(*rows)
    steps = []
    for step in trace.steps:   # the same positions, where the network has two right
        seen = [ShadowFeedback(1, "eagle", 0, 4, 2, None, seq.num_context) for seq in step.feedback.sequences if seq.k]
        steps.append(replace(step, feedback=replace(step.feedback, shadows=tuple(seen))))
    world = replay.World(Trace({"max_k": 4, "drafters": ["eagle", "ngram"]}, tuple(steps)))

    class First(replay.Fixed):
        def plan(self, view: BatchView) -> Mapping[int, Choice]:
            return {seq_id: Choice("eagle", 4, (Choice("ngram", 4),)) for seq_id in super().plan(view)}

    drafted: set[str] = set()

    def see(feedback: Feedback) -> None:
        drafted.update(seq.drafter for seq in feedback.sequences if seq.num_drafts)

    both = replay.run(First("eagle", 4), world, see)
    alone = [replay.run(replay.Fixed(name, 4), world) for name in ("eagle", "ngram")]
    assert drafted == {"eagle", "ngram"}
    assert both.num_tokens == alone[0].num_tokens == alone[1].num_tokens
    assert both.num_steps < min(outcome.num_steps for outcome in alone)


def test_a_draft_of_another_length_is_read_from_the_codes() -> None:
    trace = trace_of([(1, 50, 0, 0, 0, 0)], [(1, 51, 4, 4, 4, 2)], [(1, 54, 4, 2, 2, 2)], [(1, 57, 1, 1, 1, 0)])
    ngram = gather(trace).sequences[0].drafts["ngram"]
    assert ngram.draft(1, 1) == (1, 1)
    assert ngram.draft(1, 3) == (3, 2)
    assert ngram.draft(2, 4)[1] == 1     # began one later: one right, then wrong
    assert ngram.draft(4, 8) == (2, 2)
    assert ngram.draft(6, 4) == (0, 0)


def test_a_draft_that_was_trimmed_tells_nothing_beyond() -> None:
    evidence = gather(trace_of([(1, 50, 0, 0, 0, 0)], [(1, 51, 4, 4, 1, 1)]))
    assert codes(evidence)[1] == HIT
    assert evidence.known["ngram"] == 1 / 3


def test_unknown_positions_follow_the_statistics_of_the_trace() -> None:
    random = np.random.default_rng(0)
    steps, context = [[(1, 50, 0, 0, 0, 0)]], 51
    for _ in range(2000):
        accepted = int(np.argmin(np.append(random.random(4) < 0.8, False)))
        steps.append([(1, context, 4, 4, 4, accepted)])
        context += accepted + 1
    steps += [[(2, 50, 0, 0, 0, 0)]] + [[(2, 51 + i, 0, 0, 0, 0)] for i in range(3000)]
    second = gather(trace_of(*steps)).sequences[1].drafts["ngram"].codes
    assert np.mean(second == HIT) == pytest.approx(0.8, abs=0.06)
    assert (second == gather(trace_of(*steps)).sequences[1].drafts["ngram"].codes).all()


def test_how_many_were_in_flight_when_each_began() -> None:
    evidence = gather(trace_of(
        [(1, 9, 2, 2, 2, 0), (2, 9, 0, 0, 0, 0)], [(1, 10, 0, 0, 0, 0), (3, 9, 0, 0, 0, 0)], [(4, 9, 0, 0, 0, 0)],
    ))
    assert [(seq.seq_id, seq.num_in_flight) for seq in evidence.sequences] == [(1, 1), (2, 2), (3, 2), (4, 1)]


# -- replaying ----------------------------------------------------------------------------------------------------


def recorded(tmp_path: Path, k: int, name: str, num_requests: int = 6) -> Trace:
    """A tiny model, three requests in flight, static k."""
    directory = tmp_path / "llama-0"
    if not directory.exists():
        tiny_model_dir(tmp_path)
    engine = Engine(EngineConfig(
        model=str(directory), dtype="float32", kv_cache_memory_bytes=1 << 23, trace=str(tmp_path / name), max_num_seqs=3,
        speculative=SpeculativeConfig.parse({"method": "ngram", "num_speculative_tokens": k, "policy": "static"}),
    ))
    for i in range(num_requests):
        prompt = [3 + (7 * i + j * (i + 1)) % 19 for j in range(40)]
        engine.add(Request(f"r{i}", prompt, SamplingParams(temperature=0.0, max_tokens=120, ignore_eos=True)))
    while engine.has_work():
        engine.step()
    assert engine.trace is not None
    engine.trace.close()
    return read_trace(tmp_path / name)


def test_deciding_as_it_was_decided_gives_what_was_recorded(tmp_path: Path) -> None:
    trace = recorded(tmp_path, 4, "four")
    world = replay.World(trace)
    again = replay.run(replay.Fixed("ngram", 4), world)
    assert again.num_tokens == 6 * 120
    assert again.num_steps == pytest.approx(world.recorded.num_steps, rel=0.1)
    assert again.num_accepted == pytest.approx(world.recorded.num_accepted, rel=0.05)
    assert again.num_drafts == pytest.approx(world.recorded.num_drafts, rel=0.05)


def test_another_k_is_predicted_from_a_longer_one(tmp_path: Path) -> None:
    world = replay.World(recorded(tmp_path, 8, "eight"))
    truth = replay.World(recorded(tmp_path, 2, "two")).recorded
    predicted = replay.run(replay.Fixed("ngram", 2), world)
    assert predicted.num_tokens / predicted.num_rows == pytest.approx(truth.num_tokens / truth.num_rows, rel=0.1)
    assert predicted.mean_k == pytest.approx(truth.mean_k, rel=0.15)


def always(accepted: int, seconds: Callable[[int, int], float]) -> Trace:
    """Two sequences whose drafts of four are always right for `accepted` tokens; every third step is plain."""
    steps: list[list[Row]] = [[(1, 50, 0, 0, 0, 0), (2, 50, 0, 0, 0, 0)]]
    context = 51
    for step in range(150):
        k = 0 if step % 3 == 0 else 4
        right = min(accepted, k)
        steps.append([(1, context, k, k, k, right), (2, context, k, k, k, right)])
        context += right + 1
    return trace_of(*steps, ms=seconds)


@pytest.mark.parametrize(("accepted", "per_token", "best"), [(4, 0.05, "ngram k=4"), (0, 2.0, "off")])
def test_the_best_fixed_k_follows_cost_and_acceptance(accepted: int, per_token: float, best: str) -> None:
    trace = always(accepted, lambda rows, tokens: 10.0 + per_token * tokens)
    fixed = replay.World(trace, max_k=4).fixed()
    assert max(fixed, key=lambda name: fixed[name].goodput) == best
    assert fixed["off"].mean_k == 0.0
    # Plain: two tokens per step of two rows.
    assert fixed["off"].goodput == pytest.approx(2 / (10.0 + 2 * per_token) * 1e3, rel=0.1)


class Curious(AdaptivePolicy):
    """Uses every hook, and remembers what it was shown."""

    def __init__(self) -> None:
        self.views: list[BatchView] = []
        self.feedback: list[Feedback] = []

    def plan(self, view: BatchView) -> Mapping[int, Choice]:
        self.views.append(view)
        return {seq.seq_id: Choice("ngram", 4) for seq in view.sequences if seq.decoding and seq.seq_id == 1}

    def shadow(self, view: BatchView) -> Mapping[int, Choice]:
        return {seq.seq_id: Choice("ngram", 4) for seq in view.sequences if seq.decoding and seq.seq_id == 2}

    def stops_early(self, drafter: str) -> bool:
        return True

    def continue_drafting(self, seq_ids: Any, position: int, confidence: Any) -> Any:
        return np.full(len(seq_ids), position < 2)

    def select(self, drafts: Any, view: BatchView) -> Mapping[int, int]:
        return {draft.seq_id: 2 for draft in drafts}

    def observe(self, feedback: Feedback) -> None:
        self.feedback.append(feedback)


def test_every_hook_of_a_policy_is_honoured() -> None:
    policy = Curious()
    out = replay.run(policy, replay.World(always(4, lambda rows, tokens: 10.0), max_k=4))
    rows = [seq for feedback in policy.feedback for seq in feedback.sequences]
    assert {seq.num_drafts for seq in rows if seq.seq_id == 2} == {0}
    assert max(seq.num_proposed for seq in rows) == 3     # `continue_drafting`
    assert max(seq.num_drafts for seq in rows) == 2       # `select`
    shadows = [shadow for feedback in policy.feedback for shadow in feedback.shadows if shadow.seq_id == 2]
    assert max(shadow.num_confirmed for shadow in shadows) == 4
    assert not policy.views[0].num_decoding               # the first step is the prompts
    assert sum(feedback.num_prefill_tokens for feedback in policy.feedback) >= 2
    assert all(seq.max_k <= 4 for view in policy.views for seq in view.sequences)
    assert out.num_tokens == sum(seq.num_output for seq in gather(always(4, lambda rows, tokens: 10.0)).sequences)


def test_prompts_are_computed_in_chunks_within_the_budget() -> None:
    trace = trace_of([(1, 700, 0, 0, 0, 0)], [(1, 701, 2, 2, 2, 1)], prefill=700)
    trace.header["max_num_batched_tokens"] = 300
    seen: list[Feedback] = []
    replay.run(replay.Fixed("ngram", 2), replay.World(trace), seen.append)
    assert [feedback.num_prefill_tokens for feedback in seen][:3] == [300, 300, 100]


def test_a_trace_without_drafts_cannot_be_replayed() -> None:
    with pytest.raises(ConfigError, match="nothing was drafted"):
        replay.World(trace_of([(1, 50, 0, 0, 0, 0)], [(1, 51, 0, 0, 0, 0)]))


# -- the command --------------------------------------------------------------------------------------------------


def test_the_command_prints_goodput_and_regret(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorded(tmp_path, 4, "t", num_requests=3)
    assert main(["replay", str(tmp_path / "t"), "--policy", "static", "--policy", "disable_by_batch_size:disable_by_batch_size=1"]) == 0
    out = capsys.readouterr().out
    assert "/ best k" in out
    assert "regret" in out
    assert "as recorded" in out
    assert main(["replay", str(tmp_path / "t"), "--policy", "static", "--max-k", "2", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert set(result["fixed"]) == {"off", "ngram k=1", "ngram k=2"}
    assert result["policies"]["static"]["regret"] == pytest.approx(
        1 - result["fixed"]["ngram k=2"]["goodput"] / result["fixed"][result["best_fixed"]]["goodput"]
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["replay", "no-such-file"], "cannot read the trace"),
        (["replay", "{trace}", "--policy", "statik"], "Did you mean 'static'"),
        (["replay", "{trace}", "--max-k", "0"], "--max-k must be >= 1"),
    ],
)
def test_what_cannot_be_replayed_is_named(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "t").write_text(
        '{"format":"headway-trace","version":1,"max_k":4}\n'
        '{"step":0,"at_ms":1,"num_waiting":0,"num_rows":1,"num_prefill_tokens":0,"num_tokens":3,"num_context_tokens":9,"draft_ms":0,'
        '"verify_ms":1,"step_ms":1,"seq_id":[0],"num_context":[9],"max_k":[2],"drafter":["ngram"],"k":[2],"num_proposed":[2],'
        '"num_drafts":[2],"num_accepted":[1],"confidence":[null]}\n'
    )
    assert main([word.format(trace=tmp_path / "t") for word in words]) == 2
    assert message in capsys.readouterr().err


# -- regret ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("accepted", "per_token"), [(4, 0.05), (0, 2.0)])
def test_the_parts_of_the_regret_add_up(accepted: int, per_token: float) -> None:
    world = replay.World(always(accepted, lambda rows, tokens: 10.0 + per_token * tokens), max_k=4)
    best = max(out.goodput for out in world.fixed().values())
    parts = split(world, best)
    total = parts.pop("total")
    assert list(parts) == ["cost-model error", "acceptance error", "exploration", "choice"]
    assert sum(parts.values()) == pytest.approx(total)
    assert 0.0 <= total < 0.25
    assert parts["choice"] < 0.03          # told everything it is as good as the best fixed k
    if accepted == 0:
        assert parts["exploration"] > 0.0  # where nothing is right, trying costs


def test_replay_says_where_goodput_loses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorded(tmp_path, 8, "eight", num_requests=3)
    assert main(["replay", str(tmp_path / "eight"), "--split"]) == 0
    assert "told beforehand which drafts are right" in capsys.readouterr().out
    assert main(["replay", str(tmp_path / "eight"), "--split", "--json"]) == 0
    parts = json.loads(capsys.readouterr().out)["regret_split"]
    assert parts["total"] == pytest.approx(sum(part for name, part in parts.items() if name != "total"))


def test_a_trace_is_decided_again_at_another_load(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorded(tmp_path, 8, "eight", num_requests=3)
    steps = []
    for load in ([], ["--in-flight", "1"]):
        assert main(["replay", str(tmp_path / "eight"), "--json", *load]) == 0
        steps.append(json.loads(capsys.readouterr().out)["fixed"]["off"]["num_steps"])
    assert steps[1] > steps[0]
