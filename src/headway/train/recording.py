"""Hidden states kept while texts are written: the target has just computed what the head is to learn from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from headway.config import SpeculativeConfig
from headway.drafters.drafter import Committed, ContinueDrafting, Drafter, DrafterContext, DrafterMemory, DraftRequest
from headway.engine.engine import Engine
from headway.train.data import Text, TextFile
from headway.train.eagle3 import feature_layers
from headway.train.hidden_state_file import HiddenStateFile
from headway.types import Draft


class Keeper(Drafter):
    """Drafts nothing, and keeps every row of hidden states until whoever wrote the text takes them. Prefixes must not be reused: rows that
    are not computed are not seen."""

    def bind(self, context: DrafterContext) -> DrafterMemory:
        self.hidden_layers = (*feature_layers(context.target), -1)
        self._rows: dict[int, tuple[list[int], list[Tensor]]] = {}   # sequence -> (its tokens, rows of each step)
        self._ended: dict[tuple[int, ...], list[Tensor]] = {}
        self._most = 2 * context.max_num_seqs
        return DrafterMemory()

    def propose(self, requests: Sequence[DraftRequest], continue_drafting: ContinueDrafting) -> list[Draft]:
        return [Draft([]) for _ in requests]

    def commit(self, committed: Sequence[Committed]) -> None:
        for what in committed:
            assert what.hidden is not None
            if what.start == 0:   # new, or preempted: all of it is computed again
                self._rows[what.seq_id] = what.token_ids, []
            self._rows[what.seq_id][1].append(torch.cat(what.hidden, -1))

    def stop(self, seq_id: int) -> None:
        token_ids, rows = self._rows.pop(seq_id, ([], []))
        self._ended[tuple(token_ids)] = rows
        while len(self._ended) > self._most:   # user turns, and texts that were not kept
            del self._ended[next(iter(self._ended))]

    def take(self, token_ids: Sequence[int]) -> Tensor | None:
        """[length, layers * hidden] of a text that has just ended, zeros for its last token, which nothing was computed for. None: not all
        rows were seen."""
        rows = self._ended.pop(tuple(token_ids), [])
        states = torch.cat([*rows, torch.zeros_like(rows[0][:1])]) if rows else None
        return states if states is not None and len(states) == len(token_ids) else None


@contextmanager
def recorded_states(engine: Engine, file: TextFile, store: HiddenStateFile) -> Iterator[Callable[[Text], None]]:
    """Inside, what is given is to be called with each text that was added to `file`, after the step that ended it."""
    method = f"{Keeper.__module__}:{Keeper.__name__}"
    engine.speculate(SpeculativeConfig.parse({"method": method, "num_speculative_tokens": 1, "policy": "static"}))
    (keeper,) = engine.drafters.values()
    assert isinstance(keeper, Keeper)

    def keep(text: Text) -> None:
        states = keeper.take(text.token_ids)
        follows = store.num_texts == file.num_texts - 1 and store.fits(store.num_rows + len(text.token_ids))
        if states is None or not follows:   # computed later, with all behind it
            return
        normalizers = torch.zeros(len(states))
        learned = slice(text.num_prompt - 1, len(states) - 1)
        last = states[learned, -engine.model.config.hidden_size :]
        normalizers[learned] = engine.model.logits(last.contiguous()).float().logsumexp(-1)
        store.append(text, states, normalizers)

    yield keep
    engine.speculate(None)
