"""Scheduler: random arrivals, lengths, aborts, drafts and preemptions; nothing leaks, nothing starves."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.engine.kv_cache import BlockPool
from headway.engine.scheduler import Scheduler, _fair_cap
from headway.sampling_params import RequestSpeculation, SamplingParams
from headway.types import Choice, Draft, Request, Sequence, Status, Verdict

EOS = 7


def make_sequence(
    seq_id: int,
    prompt: list[int],
    *,
    max_tokens: int = 4,
    priority: int = 0,
    arrival: float = 0.0,
    speculative: RequestSpeculation = RequestSpeculation(),  # noqa: B008 (frozen)
) -> Sequence:
    request = Request(str(seq_id), prompt, SamplingParams(max_tokens=max_tokens, speculative=speculative), None, priority, arrival)
    return Sequence(seq_id, request, 0, 0, frozenset({EOS}), frozenset(), (), max_tokens, list(prompt), len(prompt))


def make_scheduler(num_blocks: int = 64, *, max_k: int = 4, **options: int) -> Scheduler:
    settings = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "max_model_len": 40} | options
    return Scheduler(BlockPool(num_blocks, 4), drafters=("ngram",), max_k=max_k, **settings)


def run_step(scheduler: Scheduler, choose: random.Random, k: int, *, eos_odds: float = 0.0) -> list[Sequence]:
    """One step with random drafts and a random number of them accepted; returns the sequences that had a row."""
    wishes = {seq.seq_id: Choice("ngram", k) for seq in scheduler.running}
    plan = scheduler.schedule(wishes)
    drafts: list[Draft | None] = []
    for row in plan.rows:
        assert row.length >= 1
        assert row.k == 0 or (row.samples and row.seq.is_decoding and row.length == 1)
        num_drafts = choose.randint(0, row.k)
        drafts.append(Draft([choose.randint(0, 5) for _ in range(num_drafts)]) if num_drafts else None)
    assert plan.num_tokens <= scheduler.token_budget
    assert sum(row.k for row in plan.rows) <= scheduler.token_budget
    scheduler.reserve(plan.rows)
    for row in plan.rows:
        covered = len(row.seq.block_table) * scheduler.pool.block_size
        assert covered >= row.start + row.length + row.k, "a token without a slot"
    for row, draft in zip(plan.rows, drafts, strict=True):
        verdict = None
        if row.samples:
            num_accepted = choose.randint(0, len(draft)) if draft else 0
            extra = EOS if choose.random() < eos_odds else choose.randint(0, 5)
            verdict = Verdict([*(draft.tokens[:num_accepted] if draft else []), extra], num_accepted)
        scheduler.commit(row, verdict)
    scheduler.check()
    return [row.seq for row in plan.rows]


@settings(max_examples=120, deadline=None)
@given(data=st.data())
def test_everything_that_enters_is_finished_or_aborted_and_nothing_leaks(data: st.DataObject) -> None:
    choose = random.Random(data.draw(st.integers(0, 2**32)))
    num_blocks = data.draw(st.integers(10, 40), label="num_blocks")   # 40 tokens of one sequence need 10
    scheduler = make_scheduler(
        num_blocks,
        max_num_seqs=data.draw(st.integers(1, 6), label="max_num_seqs"),
        max_num_batched_tokens=data.draw(st.integers(6, 32), label="budget"),
        max_k=8,
    )
    arrivals = data.draw(
        st.lists(st.tuples(st.integers(1, 30), st.integers(1, 12), st.integers(0, 2), st.booleans()), min_size=1, max_size=12),
        label="arrivals",
    )
    pending = [
        make_sequence(i, [choose.randint(0, 2) for _ in range(length)], max_tokens=max_tokens, priority=priority, arrival=float(i))
        for i, (length, max_tokens, priority, _) in enumerate(arrivals)
    ]
    doomed = {i for i, (*_, abort) in enumerate(arrivals) if abort}
    sequences = list(pending)
    for step in range(2000):
        while pending and choose.random() < 0.5:
            scheduler.add(pending.pop(0))
        if choose.random() < 0.1:
            live = [seq for seq in (*scheduler.running, *scheduler.waiting) if seq.seq_id in doomed]
            if live:
                scheduler.finish(choose.choice(live), "abort")
        if scheduler.has_work():
            rows = run_step(scheduler, choose, k=choose.choice([0, 1, 4, 8]), eos_odds=0.05)
            assert rows, f"step {step}: work but no row"
        elif not pending:
            break
    assert all(seq.status is Status.FINISHED for seq in sequences), "something starved"
    assert scheduler.pool.num_free == num_blocks
    for seq in sequences:
        assert seq.num_output_tokens <= seq.max_tokens
        assert seq.token_ids.index(EOS) == seq.num_tokens - 1 if EOS in seq.token_ids else True


def test_the_least_urgent_is_preempted_and_the_most_urgent_never_is() -> None:
    scheduler = make_scheduler(12, max_num_seqs=3, max_k=0)
    sequences = [make_sequence(i, [i] * 14, max_tokens=20, arrival=float(i)) for i in range(3)]
    for seq in sequences:
        scheduler.add(seq)
    choose = random.Random(0)
    while scheduler.has_work():
        run_step(scheduler, choose, k=0)
    assert sequences[0].num_preemptions == 0
    assert sequences[2].num_preemptions >= 1
    assert all(seq.num_output_tokens == 20 for seq in sequences)


def test_priority_goes_first_then_arrival() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    for seq_id, priority in ((0, 5), (1, 1), (2, 1)):
        scheduler.add(make_sequence(seq_id, [1, 2], priority=priority, arrival=float(seq_id)))
    order = []
    choose = random.Random(0)
    while scheduler.has_work():
        order += [seq.seq_id for seq in run_step(scheduler, choose, k=0) if seq.seq_id not in order]
    assert order == [1, 2, 0]


def test_prefill_is_chunked_and_decodes_go_first() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=8)
    scheduler.add(make_sequence(0, [1, 2, 3], max_tokens=8))
    choose = random.Random(0)
    run_step(scheduler, choose, k=0)
    scheduler.add(make_sequence(1, list(range(20)), arrival=1.0))
    lengths = []
    for _ in range(3):
        plan = scheduler.schedule({})
        lengths.append([row.length for row in plan.rows])
        for row in plan.rows:
            scheduler.commit(row, Verdict([1], 0) if row.samples else None)
    assert lengths == [[1, 7], [1, 7], [1, 6]]


def test_drafts_never_cause_a_preemption() -> None:
    scheduler = make_scheduler(6, max_num_seqs=2, max_k=8, max_num_batched_tokens=32)
    for seq_id in range(2):
        scheduler.add(make_sequence(seq_id, [seq_id] * 11, max_tokens=20, arrival=float(seq_id)))
    run_step(scheduler, random.Random(0), k=0)   # prefills both: 3 blocks each, with room for one more token
    assert scheduler.pool.num_free == 0
    plan = scheduler.schedule({seq.seq_id: Choice("ngram", 8) for seq in scheduler.running})
    assert not plan.preempted
    assert all(row.k == 0 for row in plan.rows)


@pytest.mark.parametrize(
    ("max_tokens", "speculation", "expected"),
    [
        (3, RequestSpeculation(), 1),
        (9, RequestSpeculation(), 4),
        (9, RequestSpeculation(max_tokens=2), 2),
        (9, RequestSpeculation(enabled=False), 0),
    ],
)
def test_k_is_clamped_by_what_the_request_can_still_use(max_tokens: int, speculation: RequestSpeculation, expected: int) -> None:
    scheduler = make_scheduler()
    seq = make_sequence(0, [1, 2], max_tokens=max_tokens, speculative=speculation)
    scheduler.add(seq)
    run_step(scheduler, random.Random(0), k=0)
    plan = scheduler.schedule({0: Choice("ngram", 100)})
    assert scheduler.view().sequences[0].max_k == expected
    assert [row.k for row in plan.rows] == [expected]


def test_a_wish_for_a_drafter_nobody_configured_is_no_wish() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_sequence(0, [1, 2], max_tokens=9))
    run_step(scheduler, random.Random(0), k=0)
    assert scheduler.schedule({0: Choice("eagle", 4)}).rows[0].k == 0


def test_siblings_share_the_prompt_that_the_first_of_them_computes() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=64)
    first, second = make_sequence(0, list(range(13))), make_sequence(1, list(range(13)))
    second.request = first.request
    scheduler.add(first)
    scheduler.add(second)
    choose = random.Random(0)
    assert run_step(scheduler, choose, k=0) == [first]
    run_step(scheduler, choose, k=0)
    assert second.num_cached == 12
    assert second.block_table[:3] == first.block_table[:3]


def test_rejected_drafts_give_their_blocks_back() -> None:
    scheduler = make_scheduler(max_k=8)
    seq = make_sequence(0, [1, 2, 3], max_tokens=20)
    scheduler.add(seq)
    run_step(scheduler, random.Random(0), k=0)
    plan = scheduler.schedule({0: Choice("ngram", 8)})
    scheduler.reserve(plan.rows)
    assert len(seq.block_table) == 3
    scheduler.commit(plan.rows[0], Verdict([1, 1, 5], 2))
    assert (seq.num_computed, seq.num_tokens, len(seq.block_table)) == (6, 7, 2)
    scheduler.check()


def test_lent_blocks_come_back_and_are_never_taken_from_anyone() -> None:
    scheduler = make_scheduler(num_blocks=4, max_k=8)
    seq = make_sequence(0, [1, 2, 3], max_tokens=20)
    scheduler.add(seq)
    run_step(scheduler, random.Random(0), k=0)
    plan = scheduler.schedule({})
    scheduler.reserve_scratch(seq, 100)
    assert (len(seq.block_table), scheduler.pool.num_free) == (4, 0)
    scheduler.reserve_scratch(seq, 100)
    scheduler.commit(plan.rows[0], Verdict([5], 0))
    assert (len(seq.block_table), scheduler.pool.num_free) == (1, 3)
    scheduler.check()


@given(wanted=st.lists(st.integers(0, 20), max_size=12), budget=st.integers(0, 60))
def test_fair_cap_is_the_largest_that_fits(wanted: list[int], budget: int) -> None:
    cap = _fair_cap(wanted, budget)
    assert sum(min(want, cap) for want in wanted) <= budget
    if wanted and cap < max(wanted):
        assert sum(min(want, cap + 1) for want in wanted) > budget
