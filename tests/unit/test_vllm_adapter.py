"""vLLM's scheduler as the adapter sees it, imitated: requests, outputs, preemption, overlap. The real one is in tests/vllm."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from headway.control.costs import CostModel
from headway.control.policy import AdaptivePolicy, BatchView, DrafterView, DraftView, Policy, Setup
from headway.types import Choice, Feedback
from headway.vllm.adapter import QUIET, REST, SHADOWS, Adapter
from headway.vllm.proposer import ScoredDraft
from headway.vllm.scheduler_counters import Counters


class Recorder(AdaptivePolicy):
    """Asks everybody for `k`, verifies `verify` of them, and remembers what it was told."""

    def __init__(self, k: int = 4, verify: int = 2) -> None:
        self.k, self.verify = k, verify
        self.views: list[BatchView] = []
        self.drafts: list[Sequence[DraftView]] = []
        self.feedback: list[Feedback] = []
        self.shadows: Mapping[int, Choice] = {}

    def plan(self, view: BatchView) -> Mapping[int, Choice]:
        assert len(self.views) == len(self.feedback), "the policy is asked again before it knows what became of its last plan"
        self.views.append(view)
        return {seq.seq_id: Choice("ngram", min(self.k, seq.max_k)) for seq in view.sequences if seq.decoding and seq.max_k}

    def shadow(self, view: BatchView) -> Mapping[int, Choice]:
        return self.shadows

    def select(self, drafts: Sequence[DraftView], view: BatchView) -> Mapping[int, int]:
        self.drafts.append(drafts)
        return {draft.seq_id: self.verify for draft in drafts}

    def observe(self, feedback: Feedback) -> None:
        self.feedback.append(feedback)


class FakeRequest(SimpleNamespace):
    all_token_ids: list[int]

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.all_token_ids) - self.num_prompt_tokens

    def is_finished(self) -> bool:
        return bool(self.finished)


def request(name: str, prompt: list[int], max_tokens: int = 50, **xargs: object) -> FakeRequest:
    return FakeRequest(
        request_id=name, all_token_ids=list(prompt), num_prompt_tokens=len(prompt), num_computed_tokens=0, spec_token_ids=[], priority=0,
        max_tokens=max_tokens, sampling_params=SimpleNamespace(extra_args=xargs or None, temperature=0.0), num_output_placeholders=0,
        num_stale_output_tokens=0, is_prefill_chunk=False, finished=False,
    )  # fmt: skip


class Engine:
    """The loop of vLLM's engine core around a scheduler that schedules everything at once."""

    def __init__(self, policy: Policy, max_k: int = 4, copies: bool = False) -> None:
        self.now = 0.0
        self.running: list[FakeRequest] = []
        self.waiting: list[FakeRequest] = []
        self.requests: dict[str, FakeRequest] = {}
        self.max_model_len, self.max_num_running_reqs, self.max_num_scheduled_tokens = 200, 8, 64
        self.kv_cache_manager = SimpleNamespace(block_pool=SimpleNamespace(get_num_free_blocks=lambda: 7))
        self.counters = Counters("recorder", "ngram", max_k)
        drafter = DrafterView("ngram", True, drafts_ahead=True)
        policy.start(Setup((drafter,), max_k, CostModel()))
        self.adapter = Adapter(self, policy, drafter, max_k, self.counters, copies=copies, clock=lambda: self.now)
        self.num_to_draft = 0

    def add(self, *requests: Any) -> None:
        for it in requests:
            self.requests[it.request_id] = it
            self.waiting.append(it)

    def schedule(self) -> Any:
        self.adapter.before_schedule()
        self.running, self.waiting = self.running + self.waiting, []
        self.num_to_draft = self.adapter.num_to_draft()
        counts, spec = {}, {}
        for it in self.running:
            counts[it.request_id] = it.num_tokens + len(it.spec_token_ids) - it.num_computed_tokens
            if it.spec_token_ids:
                spec[it.request_id] = it.spec_token_ids
            it.num_computed_tokens += counts[it.request_id]
            it.spec_token_ids = []
        output = SimpleNamespace(
            num_scheduled_tokens=counts, scheduled_spec_decode_tokens=spec, total_num_scheduled_tokens=sum(counts.values()),
            num_invalid_spec_tokens=None,
        )
        self.adapter.after_schedule(output)
        return output

    def update(self, output: Any, written: Mapping[str, list[int]], ms: float = 10.0) -> None:
        self.now += ms / 1e3
        order = list(output.num_scheduled_tokens)
        sampled = SimpleNamespace(req_id_to_index={name: i for i, name in enumerate(order)},
                                  sampled_token_ids=[written.get(name, []) for name in order])  # fmt: skip
        self.adapter.read_output(output, sampled)
        for name in order:
            it, new = self.requests.get(name), written.get(name, [])
            if it is not None and new:
                it.num_computed_tokens -= len(output.scheduled_spec_decode_tokens.get(name, ())) - (len(new) - 1)
                it.all_token_ids.extend(new)
            self.adapter.after_output()

    def step(self, drafts: Mapping[str, list[int]] | None = None, **written: list[int]) -> Any:
        """Schedules, writes, and takes the drafts that were made at the end."""
        output = self.schedule()
        self.update(output, written)
        self.draft(drafts or {})
        return output

    def draft(self, drafts: Mapping[str, list[int]]) -> None:
        for name, tokens in drafts.items():
            self.requests[name].spec_token_ids = tokens
        self.adapter.note_drafts(SimpleNamespace(req_ids=list(drafts), draft_token_ids=list(drafts.values())))

    def finish(self, name: str) -> None:
        it = self.requests.pop(name)
        it.finished = True
        self.running.remove(it)


def verified(output: Any) -> dict[str, int]:
    return {name: len(tokens) for name, tokens in output.scheduled_spec_decode_tokens.items()}


def test_trims_to_what_is_worth_verifying_and_learns() -> None:
    engine = Engine(policy := Recorder())
    engine.add(request("a", [1, 2, 3]), request("b", [1, 2]))
    engine.step({"a": [7, 8, 9, 10], "b": [5]}, a=[6], b=[4])
    output = engine.step({}, a=[7, 8, 20], b=[9])
    assert verified(output) == {"a": 2, "b": 1}
    first, second = policy.feedback
    assert (first.num_prefill_tokens, first.num_tokens, first.step_ms, len(first.sequences)) == (5, 5, pytest.approx(10.0), 2)
    assert [(s.k, s.num_proposed, s.num_drafts, s.num_accepted) for s in second.sequences] == [(4, 4, 2, 2), (4, 1, 1, 0)]
    assert (second.num_prefill_tokens, second.num_tokens, second.num_context_tokens, second.num_rows) == (0, 5, 7, 2)
    assert {key[:3]: rows for key, rows in engine.counters.verified.items()} == {("ngram", 2, 2): 1, ("ngram", 1, 0): 1}


def test_what_was_trimmed_is_compared_later() -> None:
    engine = Engine(policy := Recorder(verify=0))
    engine.add(request("a", [1, 2, 3]))
    engine.step({"a": [7, 8]}, a=[6])
    engine.step({}, a=[7])
    engine.step({}, a=[9])
    shadows = [shadow for feedback in policy.feedback for shadow in feedback.shadows]
    assert [(shadow.num_verified, shadow.num_drafts, shadow.num_confirmed) for shadow in shadows] == [(0, 2, 1)]


def test_the_price_of_prompts_is_known_before_they_run() -> None:
    engine = Engine(policy := Recorder())
    engine.add(request("a", [1, 2, 3]), request("b", list(range(60))), request("c", list(range(90))))
    engine.schedule()
    seen = policy.views[0].sequences
    assert [(seq.decoding, seq.num_pending) for seq in seen] == [(False, 3), (False, 60), (False, 90)]
    assert policy.views[0].num_free_blocks == 7


@pytest.mark.parametrize(("xargs", "most"), [({"headway_enabled": 0}, 0), ({"headway_max_tokens": 1}, 1), ({"headway_k": 1}, 2), ({}, 2)])
def test_one_requests_wishes(xargs: dict[str, object], most: int) -> None:
    engine = Engine(Recorder())
    engine.add(request("a", [1, 2, 3], **xargs))
    engine.step({"a": [7, 8, 9]}, a=[6])
    assert verified(engine.schedule()).get("a", 0) == most
    assert engine.counters.num_invalid_requests == ("headway_k" in xargs)


def test_no_more_drafts_than_tokens_left() -> None:
    engine = Engine(policy := Recorder(verify=9))
    engine.add(request("a", [1, 2, 3], max_tokens=3, headway_tpot_slo_ms=20), request("b", list(range(197))))
    engine.step({"a": [7, 8, 9], "b": [7, 8, 9]}, a=[6], b=[6])
    assert verified(engine.schedule()) == {"a": 1, "b": 1}
    assert [(seq.max_k, seq.tpot_slo_ms) for seq in policy.views[1].sequences] == [(1, 20.0), (1, None)]


def test_preempted_output_is_not_learned_from() -> None:
    engine = Engine(policy := Recorder())
    engine.add(request("a", [1, 2, 3]), request("b", [1, 2]))
    engine.step({"a": [7, 8]}, a=[6], b=[4])
    output = engine.schedule()
    engine.requests["a"].num_stale_output_tokens = 3
    engine.update(output, {"a": [7, 8, 9], "b": [5]})
    assert [seq.num_drafts for seq in policy.feedback[-1].sequences] == [0]
    assert engine.counters.num_stale_outputs == 1


def test_aborted_and_finished_requests_leave_nothing_behind() -> None:
    engine = Engine(policy := Recorder(verify=0))
    for turn in range(50):
        engine.add(request(f"a{turn}", [1, 2, 3]), request(f"b{turn}", [1, 2, 3]))
        engine.step({f"a{turn}": [7, 8], f"b{turn}": [7]}, **{f"a{turn}": [6], f"b{turn}": [6]})
        output = engine.schedule()
        engine.finish(f"a{turn}")
        engine.update(output, {f"b{turn}": [9]})
        engine.finish(f"b{turn}")
        engine.update(engine.schedule(), {})
    assert not engine.adapter.requests
    assert not engine.adapter.requests.by_seq_id
    assert not engine.adapter._flights
    assert not engine.adapter.shadows._live
    assert len(policy.feedback) == len(policy.views)


def test_an_idle_server_is_no_slow_step() -> None:
    engine = Engine(policy := Recorder())
    engine.add(request("a", [1, 2, 3]))
    engine.step({}, a=[6])
    engine.finish("a")       # aborted between two steps
    engine.update(engine.schedule(), {})
    engine.now += 100.0
    engine.add(request("b", [1, 2, 3]))
    engine.step({}, b=[4])
    assert policy.feedback[-1].step_ms == pytest.approx(10.0)


def test_drafting_rests_while_nothing_is_worth_verifying() -> None:
    engine = Engine(Recorder(verify=0))
    engine.add(request("a", [1, 2, 3], max_tokens=500))
    asked = []
    for _ in range(3 * QUIET):
        engine.update(engine.schedule(), {"a": [6]})
        engine.draft({"a": [7]} if engine.num_to_draft else {})
        asked.append(engine.num_to_draft)
    assert all(k == 4 for k in asked[:QUIET])
    assert 0 < sum(k > 0 for k in asked[-QUIET:]) <= QUIET // 2


def test_at_rest_the_policy_is_asked_where_there_are_drafts() -> None:
    engine = Engine(policy := Recorder(verify=0))
    engine.add(request("a", [1, 2, 3], max_tokens=500))
    for step in range(4 * QUIET):
        if step == 2 * QUIET:
            num_asked, num_shadows = len(policy.views), sum(len(feedback.shadows) for feedback in policy.feedback)
        engine.update(engine.schedule(), {"a": [6]})
        engine.draft({"a": [6, 7]} if engine.num_to_draft else {})
    seen = policy.views[num_asked:]
    assert len(seen) == 2 * QUIET // REST
    assert all(view.sequences[0].max_k for view in seen)
    assert len({view.step for view in policy.views}) == len(policy.views)
    assert sum(len(feedback.shadows) for feedback in policy.feedback) - num_shadows >= len(seen) - 1   # judged meanwhile, told then
    assert engine.counters.num_steps == 4 * QUIET


def test_confidence_of_the_proposer_and_of_copies() -> None:
    engine = Engine(policy := Recorder())
    engine.add(request("a", [1, 2, 3]))
    draft = ScoredDraft([7, 8], [0.9, 0.5])
    draft.draft_ms = 2.0
    engine.step({"a": draft}, a=[6])
    output = engine.step({}, a=[7, 9])
    assert type(output.scheduled_spec_decode_tokens["a"]) is list
    assert policy.drafts[-1][0].confidence == (0.9, 0.5)
    assert engine.counters.draft_ms == 2.0
    engine = Engine(policy := Recorder(), copies=True)
    engine.add(request("a", [1, 2, 3, 4, 1]))
    engine.step({"a": [3, 4]}, a=[2])
    engine.schedule()
    confidence = policy.drafts[-1][0].confidence
    assert confidence is not None
    assert confidence[0] < confidence[1]


class AsyncEngine(Engine):
    """Two steps in flight, drafts that never come back: vLLM's asynchronous scheduler."""

    def __init__(self, policy: Policy, max_k: int = 4) -> None:
        super().__init__(policy, max_k)
        self.placed: Any = None

    def schedule(self) -> Any:
        self.running, self.waiting = self.running + self.waiting, []
        counts, spec = {}, {}
        for it in self.running:
            count = it.num_tokens + len(it.spec_token_ids) + it.num_output_placeholders - it.num_computed_tokens
            counts[it.request_id] = count
            if it.spec_token_ids:
                spec[it.request_id] = it.spec_token_ids
        output = SimpleNamespace(
            num_scheduled_tokens=counts, scheduled_spec_decode_tokens=spec, total_num_scheduled_tokens=sum(counts.values()),
            num_invalid_spec_tokens=None, num_spec_tokens_to_schedule=None,
        )
        decided, self.placed = self.placed, None
        give_placeholders = self.adapter.place(output)
        self.placed = self.adapter.take_decision()
        self.adapter.after_schedule(output, decided_before=decided)
        for it in self.running:
            it.num_computed_tokens += counts[it.request_id]
            it.num_output_placeholders += 1 + len(spec.get(it.request_id, ()))
            it.spec_token_ids = [-1] * output.num_spec_tokens_to_schedule
        give_placeholders()
        return output

    def update(self, output: Any, written: Mapping[str, list[int]], ms: float = 10.0) -> None:
        for name, new in written.items():
            it, drafted = self.requests[name], len(output.scheduled_spec_decode_tokens.get(name, ()))
            it.num_output_placeholders -= drafted - (len(new) - 1) + len(new)
        super().update(output, written, ms)


def test_async_places_lengths_and_judges_each_decision_once() -> None:
    engine = AsyncEngine(policy := Recorder(k=4, verify=3))
    engine.add(request("a", [1, 2, 3]), request("b", [4, 5], headway_max_tokens=1))
    first = engine.schedule()
    assert first.num_spec_tokens_to_schedule == 3
    assert [it.spec_token_ids for it in engine.running] == [[-1] * 3, [-1]]
    second = engine.schedule()   # before the first is done: the decision is held
    assert verified(second) == {"a": 3, "b": 1}
    assert len(policy.views) == 1
    engine.update(first, {"a": [6], "b": [6]})
    assert not policy.feedback   # no decision of ours was in it
    third = engine.schedule()
    engine.update(second, {"a": [7, 8], "b": [7, 8]})
    assert [(s.num_drafts, s.num_accepted) for s in policy.feedback[0].sequences] == [(3, 1), (1, 1)]
    engine.schedule()
    assert len(policy.views) == 2
    engine.update(third, {"a": [9, 9, 9, 9], "b": [9]})
    assert len(policy.feedback) == 1   # held: counted, not judged
    assert engine.counters.num_verified_drafts == 8


def test_async_a_shadow_wish_becomes_a_rare_verification() -> None:
    policy = Recorder(k=0)
    engine = AsyncEngine(policy)
    engine.add(request("a", [1, 2, 3], max_tokens=500))
    output = engine.schedule()
    drafted = []
    for _ in range(150):
        policy.shadows = {0: Choice("ngram", 2)}
        following = engine.schedule()
        drafts = len(output.scheduled_spec_decode_tokens.get("a", ()))
        drafted.append(drafts)
        engine.update(output, {"a": [5] * (1 + drafts)})
        output = following
    assert 0 < sum(map(bool, drafted)) < 12
    told = [shadow for feedback in policy.feedback for shadow in feedback.shadows]
    assert told
    assert all((shadow.num_verified, shadow.num_drafts, shadow.num_confirmed) == (0, 2, 2) for shadow in told)
    assert all(s.num_drafts == 0 for feedback in policy.feedback for s in feedback.sequences)


def test_a_plan_that_is_older_than_the_step_is_clamped() -> None:
    class Stubborn(Recorder):
        def plan(self, view: BatchView) -> Mapping[int, Choice]:
            super().plan(view)
            return {seq_id: Choice("ngram", 4) for seq_id in range(3)}

    engine = Engine(Stubborn(verify=9))
    engine.add(request("a", [1, 2, 3], max_tokens=3), request("b", [1, 2], headway_enabled=0))
    engine.step({"a": [7, 8, 9], "b": [7, 8, 9]}, a=[6], b=[6])
    assert verified(engine.schedule()) == {"a": 1}


def test_while_another_batch_is_under_way_the_decision_holds() -> None:
    engine = Engine(policy := Recorder())
    engine.add(request("a", [1, 2, 3]), request("b", [1, 2, 3]))
    engine.step({"a": [7, 8, 9]}, a=[6], b=[6])
    assert verified(engine.schedule()) == {"a": 2}
    engine.requests["b"].spec_token_ids = [7, 8, 9]   # pipeline parallel: it was not in that batch
    engine.adapter.before_schedule()
    assert engine.requests["b"].spec_token_ids == [7, 8]
    assert len(policy.views) == 2


class Resting(Recorder):
    """Rests in the steps before `until`."""

    until = 0

    def rests(self, step: int) -> bool:
        return step < self.until


def test_a_policy_that_rests_is_not_asked_and_nothing_is_drafted_for_it() -> None:
    engine = Engine(policy := Resting())
    engine.add(request("a", [1, 2, 3], max_tokens=500), request("b", [4, 5], max_tokens=500, headway_enabled="perhaps"))
    for step in range(12):
        if step == 4:
            policy.until, num_asked = policy.views[-1].step + 7, len(policy.views)
        engine.update(engine.schedule(), {"a": [6], "b": [7]})
        engine.draft({"a": [6, 7]} if engine.num_to_draft else {})
    assert [view.step for view in policy.views[num_asked:]] == [policy.views[num_asked - 1].step + 1, *range(policy.until, 13)]
    counters = engine.counters
    assert (counters.num_steps, counters.num_sampling_rows, counters.chosen_k.num_values) == (12, 24, 24)
    assert counters.num_step_tokens == 5 + 2 * 11 + counters.num_verified_drafts
    assert counters.step_ms == pytest.approx(120.0)
    assert counters.num_invalid_requests == 1
    assert counters.num_verified_drafts == sum(feedback.sequences[0].num_drafts for feedback in policy.feedback)


def test_a_large_batch_is_compared_in_turns() -> None:
    engine = Engine(policy := Recorder(verify=0))
    names = [f"r{i}" for i in range(3 * SHADOWS)]
    engine.add(*(request(name, [1, 2, 3], max_tokens=500) for name in names))
    for _ in range(8):
        engine.update(engine.schedule(), {name: [6] for name in names})
        engine.draft({name: [9] for name in names})
    told = [shadow.seq_id for feedback in policy.feedback for shadow in feedback.shadows]
    assert len(told) <= 8 * SHADOWS
    assert set(told) == set(range(len(names)))
