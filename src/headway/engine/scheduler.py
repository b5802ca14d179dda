"""Who runs in the next step, with how many tokens and at most how many drafts.

First come, first served within a priority (smaller runs first). Sequences that run keep running; the youngest of the
least urgent is preempted when blocks run out, and recomputed later. Policies wish, this file clamps: by what the request
allows, the tokens and context it has left, the token budget and the free blocks. Drafts never cause a preemption.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf

from headway.control.policy import BatchView, SequenceView
from headway.engine.kv_cache import BlockPool
from headway.types import NO_DRAFT, Choice, Row, Sequence, Status, StepPlan, Verdict


def _urgency(seq: Sequence) -> tuple[int, float, int]:
    return (seq.request.priority, seq.request.arrival_time, seq.seq_id)


class Scheduler:
    """Owns the sequences' state: only this class changes `token_ids`, `num_computed`, `block_table` and `status`."""

    def __init__(
        self,
        pool: BlockPool,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        drafters: tuple[str, ...] = (),
        max_k: int = 0,
        tree_sizes: Mapping[str, int] | None = None,
        drafts_need_grammar: bool = False,
    ) -> None:
        """drafts_need_grammar: nobody drafts for requests whose text may have any form."""
        self.pool = pool
        self.max_num_seqs = max_num_seqs
        self.token_budget = max_num_batched_tokens
        # A position of a prompt whose log probabilities are wanted passes the output layer, too, and is searched for the most likely
        # tokens: of a small model that is work for several.
        self.prompt_logprobs_budget = max(1, max_num_batched_tokens // 8)
        self.max_model_len = max_model_len
        self.drafters = drafters
        self.max_k = max_k
        self.tree_sizes = tree_sizes or {}   # nodes at most, of the drafters that draft trees
        self.drafts_need_grammar = drafts_need_grammar
        self.waiting: list[Sequence] = []   # by urgency
        self.running: list[Sequence] = []   # by urgency
        self.num_steps = 0
        self.num_preemptions = 0

    # -- entering and leaving -------------------------------------------------------------------------------------

    def add(self, seq: Sequence) -> None:
        bisect.insort(self.waiting, seq, key=_urgency)

    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def finish(self, seq: Sequence, reason: str, stop_reason: int | str | None = None) -> None:
        """Ends a sequence wherever it is and frees its blocks. One that has ended gets another reason: its last token may complete a
        stop string as well."""
        if seq.status is not Status.FINISHED:
            (self.running if seq.status is Status.RUNNING else self.waiting).remove(seq)
            self._free(seq)
            seq.status = Status.FINISHED
        seq.finish_reason = reason
        seq.stop_reason = stop_reason

    # -- planning -------------------------------------------------------------------------------------------------

    def view(self) -> BatchView:
        """What a policy may know about the step to come: the running sequences, and how many wait."""
        return BatchView(
            step=self.num_steps,
            sequences=tuple(
                SequenceView(
                    seq_id=seq.seq_id,
                    num_context=seq.num_tokens,
                    num_output=seq.num_output_tokens,
                    decoding=seq.is_decoding,
                    max_k=self._k_allowed(seq),
                    greedy=seq.params.greedy,
                    priority=seq.request.priority,
                    num_drafts=seq.stats.num_draft_tokens,
                    num_accepted=seq.stats.num_accepted_tokens,
                    num_pending=seq.num_tokens - seq.num_computed,
                    tpot_slo_ms=seq.params.speculative.tpot_slo_ms,
                )
                for seq in self.running
            ),
            num_waiting=len(self.waiting),
            num_free_blocks=self.pool.num_free,
            token_budget=self.token_budget,
            drafters=self.drafters,
            max_k=self.max_k,
        )

    def schedule(self, wishes: Mapping[int, Choice]) -> StepPlan:
        """Rows for the next step: every decoding sequence, then prefill chunks of running and of newly admitted ones."""
        self.num_steps += 1
        rows: dict[int, Row] = {}
        preempted: list[Sequence] = []
        budget, logprobs_budget = self.token_budget, self.prompt_logprobs_budget
        for seq in sorted(self.running, key=lambda seq: not seq.is_decoding):   # stable: urgency within each half
            length = min(seq.num_tokens - seq.num_computed, budget)
            if _shows_prompt(seq):
                length = min(length, logprobs_budget)
            if seq.status is Status.RUNNING and length > 0 and self._make_room(seq, seq.num_computed + length, rows, preempted):
                rows[seq.seq_id] = Row(seq, seq.num_computed, length)
                budget -= length
                logprobs_budget -= length if _shows_prompt(seq) else 0
        if not preempted:
            self._admit(rows, budget, logprobs_budget)
        self._grant_drafts(rows, wishes)
        return StepPlan(list(rows.values()), len(self.waiting), preempted)

    def reserve(self, rows: SequenceOf[Row]) -> None:
        """Blocks for the drafts to come. `schedule` promised them, so they are there; `commit` takes back what was not accepted."""
        for row in rows:
            if row.room > 0:
                self._extend(row.seq, row.start + row.length + row.room)

    def reserve_scratch(self, seq: Sequence, num_drafts: int) -> None:
        """Blocks for drafts of a decoding sequence that nobody will verify, as far as any are free; `commit` takes them back."""
        missing = self.pool.blocks_for(seq.num_tokens + num_drafts) - len(seq.block_table)
        if missing > 0:
            seq.block_table.extend(self.pool.allocate(min(missing, self.pool.num_free)))

    # -- committing -----------------------------------------------------------------------------------------------

    def commit(self, row: Row, verdict: Verdict | None) -> int:
        """Takes in what one row computed and wrote; returns how many new tokens the sequence has.

            [start, start + length)                     known tokens, now computed
            [start + length, ... + num_accepted)        accepted drafts, now computed
            one more token                              known, not yet computed
            rejected drafts                             computed but forgotten: their blocks go back
        """
        seq = row.seq
        seq.num_computed = row.start + row.length
        num_committed = 0
        if verdict is not None:
            num_committed = self._append(seq, verdict.tokens)
            seq.num_computed += min(verdict.num_accepted, num_committed - 1)
        if seq.status is Status.FINISHED:
            return num_committed
        self.pool.publish(seq.token_ids, seq.num_computed, seq.block_table, seq.block_hashes, seq.salt)
        keep = self.pool.blocks_for(seq.num_computed)
        if len(seq.block_table) > keep:
            self.pool.release(seq.block_table[keep:])
            del seq.block_table[keep:]
        return num_committed

    def check(self) -> None:
        """Raises AssertionError when bookkeeping is broken. Callable between any two steps."""
        self.pool.check(seq.block_table for seq in self.running)
        for seq in self.waiting:
            assert seq.status is Status.WAITING
            assert not seq.block_table
            assert seq.num_computed == 0
        for seq in self.running:
            assert seq.status is Status.RUNNING
            assert seq.num_computed < seq.num_tokens <= self.max_model_len
            assert len(seq.block_table) == self.pool.blocks_for(seq.num_computed)
        for queue in (self.waiting, self.running):
            assert queue == sorted(queue, key=_urgency)

    # -- inside ---------------------------------------------------------------------------------------------------

    def _k_allowed(self, seq: Sequence) -> int:
        """Drafts that could still become output: the token that verification adds needs room, too."""
        speculation = seq.params.speculative
        if not speculation.enabled or (self.drafts_need_grammar and seq.matcher is None):
            return 0
        cap = self.max_k if speculation.max_tokens is None else min(self.max_k, speculation.max_tokens)
        tokens_left = min(seq.max_tokens - seq.num_output_tokens, self.max_model_len - seq.num_tokens)
        return max(0, min(cap, tokens_left - 1))

    def _make_room(self, seq: Sequence, num_tokens: int, rows: dict[int, Row], preempted: list[Sequence]) -> bool:
        """Blocks for `num_tokens` of `seq`, preempting from the least urgent end; False when `seq` itself had to go."""
        while self.pool.blocks_for(num_tokens) - len(seq.block_table) > self.pool.num_free:
            victim = self.running[-1]
            self._preempt(victim)
            rows.pop(victim.seq_id, None)
            preempted.append(victim)
            if victim is seq:
                return False
        self._extend(seq, num_tokens)
        return True

    def _admit(self, rows: dict[int, Row], budget: int, logprobs_budget: int) -> None:
        """Starts waiting sequences while there is budget, a seat, and room for all of their known tokens."""
        prefilling = {row.seq.request.request_id for row in rows.values() if not row.seq.is_decoding}
        for seq in list(self.waiting):
            if budget == 0 or len(self.running) >= self.max_num_seqs:
                return
            if seq.request.request_id in prefilling and self.pool.enable_prefix_caching:
                continue   # a sibling (n > 1) is computing this very prompt: share its blocks next step
            shows_prompt = _shows_prompt(seq)
            if shows_prompt and logprobs_budget == 0:
                continue
            blocks, hashes = ([], []) if shows_prompt else self.pool.match(seq.token_ids, seq.salt)
            if self.pool.blocks_for(seq.num_tokens) - len(blocks) > self.pool.num_free:
                self.pool.release(blocks)
                return
            self.waiting.remove(seq)
            bisect.insort(self.running, seq, key=_urgency)
            seq.status = Status.RUNNING
            seq.block_table, seq.block_hashes = blocks, hashes
            seq.num_computed = seq.num_cached = len(blocks) * self.pool.block_size
            length = min(seq.num_tokens - seq.num_computed, budget)
            if shows_prompt:
                length = min(length, logprobs_budget)
                logprobs_budget -= length
            self._extend(seq, seq.num_computed + length)
            rows[seq.seq_id] = Row(seq, seq.num_computed, length)
            prefilling.add(seq.request.request_id)
            budget -= length

    def _grant_drafts(self, rows: dict[int, Row], wishes: Mapping[int, Choice]) -> None:
        """Clamps wishes to what fits: as many draft tokens as the budget has, shared fairly, in blocks that are free."""
        wanted: dict[int, tuple[int, int]] = {}   # seq_id -> (k, draft tokens in all)
        for seq_id, choice in wishes.items():
            row = rows.get(seq_id)
            if row is not None and row.seq.is_decoding and (choice.k > 0 or choice.lookups):
                asked = [each for each in (choice, *choice.lookups) if each.k > 0 and each.drafter in self.drafters]
                allowed = self._k_allowed(row.seq)
                k = min(choice.k, allowed) if choice in asked else 0
                # A tree has its size at full depth, and as many nodes per level when it is less deep: so k has a price there, too.
                sizes = [(min(each.k, allowed), self.tree_sizes.get(each.drafter, 0)) for each in asked]
                wanted[seq_id] = k, max([max(depth, -(-size * depth // self.max_k)) for depth, size in sizes], default=0)
        cap = _fair_cap([tokens for _, tokens in wanted.values()], self.token_budget)
        promised = 0
        for seq_id, (k, tokens) in wanted.items():
            row = rows[seq_id]
            end, held = row.start + row.length, len(row.seq.block_table)
            room = (held + self.pool.num_free - promised) * self.pool.block_size - end
            row.room = max(0, min(tokens, cap, room))
            row.k = min(k, row.room)
            row.drafter = wishes[seq_id].drafter if row.k else NO_DRAFT
            if wishes[seq_id].lookups and row.room:
                row.lookups = self._lookups(wishes[seq_id], min(row.room, self._k_allowed(row.seq)))
            promised += self.pool.blocks_for(end + row.room) - held

    def _lookups(self, choice: Choice, most: int) -> tuple[Choice, ...]:
        """Who is asked before, for at most `most` tokens each."""
        return tuple([
            look if look.k <= most else Choice(look.drafter, most)
            for look in choice.lookups if look.k > 0 and look.drafter in self.drafters and look.drafter != choice.drafter
        ])  # fmt: skip

    def _append(self, seq: Sequence, tokens: list[int]) -> int:
        """Appends up to and including the first token that ends the sequence; returns how many were appended."""
        for count, token in enumerate(tokens, start=1):
            seq.token_ids.append(token)
            is_complete = seq.matcher is not None and seq.matcher.advance(token)
            if token in seq.eos_token_ids or token in seq.stop_token_ids:
                self.finish(seq, "stop", token if token in seq.stop_token_ids else None)
                return count
            if is_complete:
                self.finish(seq, "stop")
                return count
            if seq.num_output_tokens >= seq.max_tokens or seq.num_tokens >= self.max_model_len:
                self.finish(seq, "length")
                return count
        return len(tokens)

    def _extend(self, seq: Sequence, num_tokens: int) -> None:
        missing = self.pool.blocks_for(num_tokens) - len(seq.block_table)
        if missing > 0:
            seq.block_table.extend(self.pool.allocate(missing))

    def _preempt(self, seq: Sequence) -> None:
        self.running.remove(seq)
        self._free(seq)
        seq.status = Status.WAITING
        seq.num_preemptions += 1
        self.num_preemptions += 1
        bisect.insort(self.waiting, seq, key=_urgency)

    def _free(self, seq: Sequence) -> None:
        self.pool.release(seq.block_table)
        seq.block_table = []
        seq.block_hashes = []
        seq.num_computed = 0


def _shows_prompt(seq: Sequence) -> bool:
    """Whether the log probabilities of its next tokens are wanted: of a request, its first sequence gathers them."""
    return seq.params.prompt_logprobs is not None and seq.index == 0 and seq.num_output_tokens == 0


def _fair_cap(wanted: list[int], budget: int) -> int:
    """The largest cap such that the sum of min(want, cap) fits into the budget."""
    cap, left, remaining = 0, budget, sorted(wanted)
    while remaining:
        share = cap + left // len(remaining)
        if remaining[0] > share:
            return share
        left -= (remaining[0] - cap) * len(remaining)
        cap = remaining[0]
        remaining = [want for want in remaining if want > cap]
    return cap
