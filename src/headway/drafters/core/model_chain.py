"""Drafting token after token with a network of its own K/V: the loop that draft_model, layer_skip and cascade share.

A sequence's known tokens that the network has not read enter in one ragged pass for all sequences, whose last rows give the first
draft token of each; every further token is one more pass over the sequences that go on. K/V of draft tokens is kept as
long as the tokens turn out to be what was committed; behind that the next drafts overwrite it.

With a helper (a drafter that costs nothing, such as suffix or ngram) a pass reads the helper's guesses, too, behind the token it has
to read anyway. Guesses are kept while they are what the network itself would have drafted, so the draft is the same and
takes fewer passes.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from headway.drafters.core.chain import catch_up
from headway.drafters.drafter import Committed, ContinueDrafting, Drafter, DraftRequest, Target, never_stop
from headway.models.attention import KVCache
from headway.models.attention_plan import Row as Span
from headway.types import Draft


@dataclass(slots=True)
class Chain:
    """One sequence while it is drafted for.

    unread   tokens the next pass reads: known ones, or the last draft, then the helper's guesses
    start    position of the first of them
    """

    request: DraftRequest
    k: int
    start: int
    unread: list[int]
    num_guesses: int = 0
    tokens: list[int] = field(default_factory=list)
    confidence: list[float] = field(default_factory=list)
    probs: list[Tensor] = field(default_factory=list)

    @property
    def end(self) -> int:
        return self.start + len(self.unread)

    def result(self) -> Draft:
        return Draft(self.tokens, torch.stack(self.probs) if self.probs else None, self.confidence)


class ChainDrafter(Drafter):
    """`deterministic`: drafts are the likeliest tokens; else requests that sample get drafts drawn from the network's distribution."""

    stepwise = True
    reads_commits = True
    helper: Drafter | None = None
    head: Callable[[Tensor], Tensor] | None = None   # estimates confidence; None: the distribution's maximum does
    target: Target
    cache: KVCache          # of the network
    max_position: int       # positions the network knows

    def load(self, target: Target) -> None:
        self.target = target
        self._pending: dict[int, tuple[int, list[int]]] = {}   # seq_id -> (position, draft tokens read from there on)

    def judge_by(self, head: Callable[[Tensor], Tensor]) -> None:
        """From now on `head` estimates confidence: hidden states [n, hidden] -> [n]."""
        self.head = head

    # -- what the network is --------------------------------------------------------------------------------------

    @abstractmethod
    def forward(self, token_ids: Tensor, positions: Tensor, spans: list[Span]) -> Tensor:
        """One pass of the network: hidden states [num_tokens, hidden] that `logits` reads; writes K/V to `cache`."""

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """[n, hidden] -> [n, vocab of the target]"""

    @abstractmethod
    def num_filled(self, request: DraftRequest) -> int:
        """Leading known positions, the last one not counted, whose K/V is there."""

    def fill(self, block_table: list[int], start: int, stop: int) -> None:
        """Positions [start, stop) now hold the K/V of committed tokens."""
        return

    def confidence(self, hidden: Tensor, logits: Tensor) -> Tensor:
        """P(the token to be drafted is accepted) from what is known before it is drawn: [n]."""
        if self.head is not None:
            return self.head(hidden)
        scores = logits.float()
        return (scores.amax(-1) - scores.logsumexp(-1)).exp_()

    # -- the interface --------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def propose(self, requests: Sequence[DraftRequest], continue_drafting: ContinueDrafting) -> list[Draft]:
        chains = [self._start(request) for request in requests]
        live = [chain for chain in chains if chain.k > 0]
        if live:
            self._catch_up(live)
        while live:
            hidden = self._read(live)
            live = self._extend(live, hidden, continue_drafting)
            self._guess(live)
        for chain in chains:
            known = len(chain.request.token_ids)
            if chain.start > known:
                self._pending[chain.request.seq_id] = known, chain.tokens[: chain.start - known]
        return [chain.result() if chain.tokens else Draft([]) for chain in chains]

    def commit(self, committed: Sequence[Committed]) -> None:
        """Draft tokens that were read and then committed keep their K/V."""
        for c in committed:
            known, tokens = self._pending.pop(c.seq_id, (0, []))
            stop = known
            for token in tokens:
                # The last known token has no place in the cache yet.
                if stop + 1 >= len(c.token_ids) or c.token_ids[stop] != token:
                    break
                stop += 1
            if stop > known and c.block_table:
                self.fill(c.block_table, known, stop)
        if self.helper:
            self.helper.commit(committed)

    def stop(self, seq_id: int) -> None:
        self._pending.pop(seq_id, None)
        if self.helper:
            self.helper.stop(seq_id)

    # -- the loop -------------------------------------------------------------------------------------------------

    def _start(self, request: DraftRequest) -> Chain:
        known = len(request.token_ids)
        filled = self.num_filled(request)
        # The last draft is never read, so it needs no slot.
        room = min(len(request.block_table) * self.cache.block_size, self.max_position) - known + 1
        return Chain(request, max(0, min(request.k, room)), filled, request.token_ids[filled:])

    def _catch_up(self, chains: list[Chain]) -> None:
        """Reads all but the last known token where there are many."""
        for part in catch_up([len(chain.unread) for chain in chains]):
            self._pass([(chains[i], chains[i].unread[:num]) for i, num in part])
            for i, num in part:
                chain = chains[i]
                self.fill(chain.request.block_table, chain.start, chain.start + num)
                chain.start += num
                del chain.unread[:num]

    def _pass(self, reads: list[tuple[Chain, list[int]]]) -> Tensor:
        device = self.target.model.device
        token_ids = torch.tensor([token for _, tokens in reads for token in tokens], device=device)
        positions = np.concatenate([np.arange(chain.start, chain.start + len(tokens)) for chain, tokens in reads])
        spans = [(chain.request.block_table, chain.start, len(tokens)) for chain, tokens in reads]
        return self.forward(token_ids, torch.from_numpy(positions).to(device), spans)

    def _read(self, chains: list[Chain]) -> list[Tensor]:
        """Reads everything unread; the hidden states after the token that comes before the guesses and after each guess, by chain."""
        hidden = self._pass([(chain, chain.unread) for chain in chains])
        rows = []
        end = 0
        for chain in chains:
            end += len(chain.unread)
            rows.append(hidden[end - 1 - chain.num_guesses : end])
            known = len(chain.request.token_ids)
            if chain.start < known:
                self.fill(chain.request.block_table, chain.start, known)
        return rows

    def _extend(self, chains: list[Chain], hidden: list[Tensor], continue_drafting: ContinueDrafting) -> list[Chain]:
        """Drafts on while there are hidden states to draft from: one token, and one more for each guess that was right. Returns the
        chains that go on, each with the one token it has to read next."""
        going = chains
        rows = {id(chain): iter(part) for chain, part in zip(chains, hidden, strict=True)}
        on = []
        while going:
            kept = self._draft(going, torch.stack([next(rows[id(chain)]) for chain in going]), continue_drafting)
            going = []
            for chain in kept:
                guess = chain.unread[-chain.num_guesses] if chain.num_guesses else None
                if guess == chain.tokens[-1]:
                    chain.num_guesses -= 1
                    going.append(chain)
                else:
                    chain.start += len(chain.unread) - chain.num_guesses
                    chain.unread, chain.num_guesses = [chain.tokens[-1]], 0
                    on.append(chain)
        return on

    def _draft(self, chains: list[Chain], hidden: Tensor, continue_drafting: ContinueDrafting) -> list[Chain]:
        """One more draft token for each chain; returns those that are to go on, the others end here."""
        logits = self.logits(hidden)
        sure = self.confidence(hidden, logits).double().cpu().numpy()
        for part in self._drawn(chains):
            chosen = [chains[i] for i in part]
            scores = logits if len(part) == len(chains) else logits[torch.tensor(part, device=logits.device)]
            requests, drafted = [chain.request for chain in chosen], [chain.tokens for chain in chosen]
            probs = None
            if self.deterministic or chosen[0].request.greedy:
                tokens = self.target.sampler.likely(scores, requests, drafted)
            else:
                tokens, probs = self.target.sampler.sampled(scores, requests, drafted)
            for row, (i, chain) in enumerate(zip(part, chosen, strict=True)):
                chain.tokens.append(tokens[row])
                chain.confidence.append(float(sure[i]))
                if probs is not None:
                    chain.probs.append(probs[row])
        going = np.array([len(chain.tokens) < chain.k for chain in chains])
        if continue_drafting is not never_stop:
            for position, members in _by_position(chains, np.flatnonzero(going)):
                going[members] = continue_drafting([chains[i].request.seq_id for i in members], position, sure[members])
        for i in np.flatnonzero(~going).tolist():
            chains[i].start += len(chains[i].unread) - chains[i].num_guesses
        return [chain for chain, goes in zip(chains, going.tolist(), strict=True) if goes]

    def _drawn(self, chains: list[Chain]) -> Iterator[list[int]]:
        """Which chains get their tokens together: those drafted greedily, and those that sample."""
        greedy = [i for i, chain in enumerate(chains) if self.deterministic or chain.request.greedy]
        yield from (part for part in (greedy, [i for i in range(len(chains)) if i not in set(greedy)]) if part)

    def _guess(self, chains: list[Chain]) -> None:
        """Lets the helper guess what the network will draft next."""
        if self.helper is None or not chains:
            return
        asks = [
            DraftRequest(
                c.request.seq_id, c.request.token_ids + c.tokens, c.request.num_prompt_tokens, c.k - len(c.tokens) - 1, True,
                num_tentative=len(c.tokens), salt=c.request.salt,
            )
            for c in chains
        ]
        wanting = [(chain, ask) for chain, ask in zip(chains, asks, strict=True) if ask.k > 0]
        drafts = self.helper.propose([ask for _, ask in wanting], never_stop)
        for (chain, ask), draft in zip(wanting, drafts, strict=True):
            guesses = draft.tokens[: ask.k]
            chain.unread += guesses
            chain.num_guesses = len(guesses)


def _by_position(chains: Sequence[Chain], going: np.ndarray) -> list[tuple[int, list[int]]]:
    """(position drafted last, those of the chains `going` that are there), in order."""
    found: dict[int, list[int]] = {}
    for i in going.tolist():
        found.setdefault(len(chains[i].tokens) - 1, []).append(i)
    return sorted(found.items())
