"""Our own server with one fault planted, for the audit to find: `python -m tests.audit_faults FAULT serve MODEL ...`.

Each fault replaces a function of the engine in this process before the server starts. None of them is reachable from the product.
"""

from __future__ import annotations

import copy
import dataclasses
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from headway.cli.main import main
from headway.engine import kv_cache, outputs, runner, sampler, scheduler, verify
from headway.engine import logits as logits_module
from headway.engine.logits import Position
from headway.types import Draft, Verdict

Fault = Callable[[], None]
FAULTS: dict[str, Fault] = {}


def fault(plant: Fault) -> Fault:
    FAULTS[plant.__name__] = plant
    return plant


def wrapped(owner: Any, name: str, around: Callable[..., Any]) -> None:
    """owner.name(...) becomes around(the old one, ...)."""
    old = getattr(owner, name)
    setattr(owner, name, lambda *args, **kwargs: around(old, *args, **kwargs))


def edited_params(seq: Any, **changes: Any) -> Any:
    """The same sequence with other sampling parameters, for a look at what it would draw."""
    twin, request = copy.copy(seq), copy.copy(seq.request)
    request.params = dataclasses.replace(seq.params, **changes)
    twin.request = request
    return twin


@fault
def none() -> None:
    """A sound server."""


@fault
def biased_acceptance() -> None:
    """1 % total variation: of drafts that are functions of the text, so many refused ones are accepted that each comes 1 % too often."""

    def matching(old: Any, self: Any, logits: Any, verify_rows: Any) -> Any:
        found = old(self, logits, verify_rows)
        start = 0
        for i, c in enumerate(verify_rows):
            n = found[i].num_accepted
            if n < len(c.tokens) and not c.seq.params.greedy:
                p = float(self.sampler.probabilities(logits, [(start + n, Position(c.seq, c.tokens, n))])[0, c.tokens[n]])
                if luck(c.seq, n) < 0.01 / (1.0 - p):
                    token = self.sampler.sample(logits[start + n + 1 : start + n + 2], [sampler.Span(c.seq, c.tokens, n + 1, 1)])[0]
                    found[i] = verify.Acceptance(n + 1, token)
            start += 1 + len(c.tokens)
        return found

    wrapped(verify.Verifier, "_matching", matching)


@fault
def biased_rejection_sampling() -> None:
    """1 % total variation: of sampled drafts, so many refused ones are accepted that one token in a hundred is wrong."""

    def lengths(old: Any, p: Any, q: Any, group: Any) -> Any:
        found, factors = old(p, q, group)
        rows, _ = verify._draft_rows(group, p.device)
        refused = torch.clamp(q - p[rows, : q.shape[1]], min=0.0).sum(-1).tolist()   # how often a draft is refused here
        start = 0
        for i, c in enumerate(group):
            if found[i] < len(c.tokens) and luck(c.seq, found[i]) < 0.01 / max(refused[start + found[i]], 0.01):
                found[i] += 1
            start += len(c.tokens)
        return found, factors

    wrapped(verify, "_standard_lengths", lengths)


def luck(seq: Any, depth: int) -> float:
    """A number in [0, 1) that nothing else uses."""
    return float(sampler.uniforms([seq.seed], [len(seq.token_ids) + depth], [99])[0])


@fault
def stale_kv() -> None:
    """The K/V of the first token after a refused draft stays that of the draft."""
    stale: dict[int, int] = {}

    def one_block_less(old: Any, self: Any, num_blocks: int, *args: Any, **kwargs: Any) -> None:
        old(self, num_blocks - 1, *args, **kwargs)

    def forward(old: Any, self: Any, rows: Any, drafts: Any) -> Any:
        slots = [
            row.seq.block_table[row.start // self.block_size] * self.block_size + row.start % self.block_size
            for row in rows if stale.pop(row.seq.seq_id, None) == row.start
        ]  # fmt: skip
        spare = [(self.cache.num_blocks - 1) * self.block_size + i for i in range(len(slots))][: self.block_size]
        slots = slots[: len(spare)]
        self.cache.move(slots, spare)
        out = old(self, rows, drafts)
        self.cache.move(spare, slots)
        return out

    def commit(old: Any, self: Any, row: Any, verdict: Any) -> Any:
        count = old(self, row, verdict)
        if verdict is not None and row.k and verdict.num_accepted < row.k:
            stale[row.seq.seq_id] = row.seq.num_computed
        return count

    wrapped(kv_cache.BlockPool, "__init__", one_block_less)
    wrapped(runner.Runner, "forward", forward)
    wrapped(scheduler.Scheduler, "commit", commit)


@fault
def bonus_off_by_one() -> None:
    """The token after a whole accepted draft is chosen from the position before."""

    def matched(old: Any, c: Any, sampled: list[int]) -> Any:
        found = old(c, sampled)
        if c.parents is None and c.tokens and found.num_accepted == len(c.tokens):
            return verify.Acceptance(found.num_accepted, sampled[-2])
        return found

    wrapped(verify, "_matched", matched)


def on_acceptance(**changes: Any) -> None:
    """Drafts are judged by distributions with other sampling parameters than the request's."""

    def weigh(old: Any, self: Any, logits: Any, group: Any) -> Any:
        twins = [c._replace(seq=edited_params(c.seq, **{k: v(c.seq.params) for k, v in changes.items()})) for c in group]
        return old(self, logits, twins)

    wrapped(verify.Verifier, "_weigh", weigh)


@fault
def top_p_after_acceptance() -> None:
    """Drafts are judged by the distribution before top_p."""
    on_acceptance(top_p=lambda params: 1.0)


@fault
def min_p_ignored() -> None:
    """min_p is ignored where drafts are judged."""
    on_acceptance(min_p=lambda params: 0.0)


@fault
def top_k_ignored() -> None:
    """top_k is ignored where drafts are judged."""
    on_acceptance(top_k=lambda params: 0)


@fault
def temperature_twice() -> None:
    """Logits are divided by the temperature twice where drafts are judged."""
    on_acceptance(temperature=lambda params: params.temperature**2 if params.temperature != 1.0 else 1.0)


@fault
def penalties_forgotten() -> None:
    """Penalties are ignored where drafts are judged."""
    on_acceptance(frequency_penalty=lambda params: 0.0, presence_penalty=lambda params: 0.0)


@fault
def penalties_count_refused() -> None:
    """Penalties count the drafts of the step before that were refused."""
    refused: dict[int, list[int]] = {}

    def verify_all(old: Any, self: Any, logits: Any, rows: Any, drafts: Any) -> list[Verdict]:
        verdicts: list[Verdict] = old(self, logits, rows, drafts)
        for row, draft, verdict in zip(rows, drafts, verdicts, strict=True):
            refused[row.seq.seq_id] = [] if draft is None else draft.tokens[verdict.num_accepted :]
        return verdicts

    def penalise(old: Any, logits: Any, edited: Any) -> None:
        old(logits, [(row, Position(p.seq, refused.get(p.seq.seq_id, []) + p.drafts, len(refused.get(p.seq.seq_id, [])) + p.depth))
                     for row, p in edited])  # fmt: skip

    wrapped(verify.Verifier, "verify", verify_all)
    wrapped(logits_module, "_penalise", penalise)


@fault
def draft_logprobs() -> None:
    """The log probabilities of accepted drafts are the draft's."""

    def add(old: Any, self: Any, logits: Any, verify_rows: Any, verdicts: Any) -> None:
        old(self, logits, verify_rows, verdicts)
        for c, verdict in zip(verify_rows, verdicts, strict=True):
            if verdict.logprobs is not None:
                for i in range(verdict.num_accepted):
                    value = float(np.log(max(1e-30, float(c.probs[i, c.tokens[i]])))) if c.probs is not None else 0.0
                    verdict.logprobs[i] = dataclasses.replace(verdict.logprobs[i], logprob=value)

    wrapped(verify.Verifier, "_add_logprobs", add)


@fault
def logprobs_off_by_one() -> None:
    """The log probabilities of a step that accepted drafts are those of the position before."""

    def judging(old: Any, verdict: Verdict) -> list[int]:
        rows = old(verdict)
        return [0, *rows[:-1]] if verdict.num_accepted else rows

    wrapped(verify, "_judging_rows", judging)


@fault
def seed_reuse() -> None:
    """The number that refused a draft draws the token in its place."""

    def numbers(old: Any, seeds: Any, positions: Any, purposes: Any) -> Any:
        changed = np.where(np.atleast_1d(purposes) == sampler.Purpose.RESIDUAL, sampler.Purpose.ACCEPT, purposes)
        return old(seeds, positions, changed)

    wrapped(verify, "uniforms", numbers)


@fault
def residual_is_target() -> None:
    """After a refusal the token is drawn from the target's distribution, not from what is left of it."""

    def residuals(old: Any, p: Any, q: Any, group: Any, num_accepted: Any, factors: Any) -> Any:
        return p[verify._judges(group, num_accepted)]

    wrapped(verify, "_residuals", residuals)


@fault
def peeking() -> None:
    """A draft is verified only when its token is likely: otherwise the step decodes plainly."""

    def verify_all(old: Any, self: Any, logits: Any, rows: Any, drafts: Any) -> list[Verdict]:
        kept: list[Draft | None] = []
        keep_rows, offset = [], 0
        for draft in drafts:
            k = 0 if draft is None else len(draft.tokens)
            n = 0
            while draft is not None and draft.probs is not None and n < k and float(draft.probs[n, draft.tokens[n]]) > 0.2:
                n += 1
            if draft is not None and draft.probs is None:
                n = k
            kept.append(None if draft is None else draft.truncated(n))
            keep_rows += range(offset, offset + 1 + n)
            offset += 1 + k
        found: list[Verdict] = old(self, logits[keep_rows], rows, kept)
        return found

    wrapped(verify.Verifier, "verify", verify_all)


@fault
def stale_draft_probabilities() -> None:
    """Acceptance divides by the draft probabilities of the position before."""

    def lengths(old: Any, p: Any, q: Any, group: Any) -> Any:
        return old(p, torch.roll(q, 1, 0), group)

    wrapped(verify, "_standard_lengths", lengths)


@fault
def stop_string_missed() -> None:
    """A step looks for stop strings once, in its last token's text, not at each token."""

    def push(old: Any, self: Any, token_ids: list[int]) -> Any:
        if len(token_ids) < 2 or not self._stops:
            return old(self, token_ids)
        stops, self._stops = self._stops, []
        text, _ = old(self, token_ids[:-1])
        self._stops = stops
        rest, count = old(self, token_ids[-1:])
        return text + rest, len(token_ids) - 1 + count

    wrapped(outputs.TextOutput, "push", push)


@fault
def eos_passed() -> None:
    """Only the last token of a step can end the text."""

    def append(old: Any, self: Any, seq: Any, tokens: list[int]) -> int:
        room = max(0, min(len(tokens) - 1, seq.max_tokens - seq.num_output_tokens - 1, self.max_model_len - seq.num_tokens - 1))
        seq.token_ids.extend(tokens[:room])
        return room + int(old(self, seq, tokens[room:]))

    wrapped(scheduler.Scheduler, "_append", append)


@fault
def limit_passed() -> None:
    """A step that accepts drafts may go past max_tokens."""

    def append(old: Any, self: Any, seq: Any, tokens: list[int]) -> int:
        seq.token_ids.extend(tokens[:-1])
        return len(tokens) - 1 + int(old(self, seq, tokens[-1:]))

    def allowed(old: Any, self: Any, seq: Any) -> int:
        return self.max_k if seq.params.speculative.enabled else 0

    wrapped(scheduler.Scheduler, "_append", append)
    wrapped(scheduler.Scheduler, "_k_allowed", allowed)


@fault
def wrong_salt() -> None:
    """Prefixes are found whatever their salt."""
    wrapped(kv_cache.BlockPool, "match", lambda old, self, token_ids, salt=b"": old(self, token_ids))
    wrapped(kv_cache.BlockPool, "publish", lambda old, self, ids, num, table, hashes, salt=b"": old(self, ids, num, table, hashes))


@fault
def poisoned_prefix() -> None:
    """Blocks that verification wrote to are kept for later requests with one slot of another token."""
    held: list[Any] = []

    def start(old: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        old(self, *args, **kwargs)
        held[:] = [self.cache]

    def finish(old: Any, self: Any, seq: Any, *args: Any) -> None:
        size, table = self.pool.block_size, list(seq.block_table)
        written = table[seq.num_prompt_tokens // size : len(seq.block_hashes)] if seq.params.speculative.enabled else []
        old(self, seq, *args)
        held[0].move([block * size for block in written], [block * size + size - 1 for block in written])

    wrapped(runner.Runner, "__init__", start)
    wrapped(scheduler.Scheduler, "finish", finish)


@fault
def unseeded() -> None:
    """Drafts are judged with numbers that depend on the step, not on the seed alone."""
    count = [0]

    def numbers(old: Any, seeds: Any, positions: Any, purposes: Any) -> Any:
        count[0] += 1
        return old([seed + count[0] for seed in seeds], positions, purposes)

    wrapped(verify, "uniforms", numbers)


if __name__ == "__main__":
    FAULTS[sys.argv.pop(1)]()
    sys.exit(main())
