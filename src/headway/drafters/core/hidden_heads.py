"""Drafters that read the target's last hidden state alone: Medusa's heads and IBM's MLP speculators. No K/V, no history."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from headway.drafters.core.chain import Prediction, draft_chain
from headway.drafters.core.checkpoint import Checkpoint
from headway.drafters.core.tree import Level, TreeOptions, draft_trees
from headway.drafters.drafter import Committed, ContinueDrafting, Drafter, DrafterContext, DrafterMemory, DraftRequest, DraftSampler, Target
from headway.models import hub
from headway.models.config import ModelConfig
from headway.models.decoder import Decoder
from headway.types import Draft


class HeadsNetwork(Protocol):
    """`num_heads` tokens ahead at most; `target_ids` as in `FeatureNetwork`; `reads_tokens`: what a head says depends on the draft tokens
    before it."""

    num_heads: int
    reads_tokens: bool
    target_ids: Tensor | None

    def begin(self, hidden: Tensor) -> Tensor:
        """The target's last hidden states [n, hidden] -> the state before the first head [n, ...]."""

    def step(self, index: int, state: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Head `index` after the newest `tokens` [n] -> (logits [n, draft vocabulary], the state before the next head)."""


class HeadsFile(Protocol):
    """A checkpoint, read as far as its configuration."""

    checkpoint: Checkpoint

    def load(self, target: Decoder) -> HeadsNetwork:
        """Reads the weights. Raises ModelError."""


class HiddenHeads(Drafter):
    """Per sequence: the hidden state behind which its last token was chosen."""

    takes_model = True
    needs_model = True
    hidden_layers = (-1,)
    Options = TreeOptions

    def __init__(self, options: TreeOptions | None = None) -> None:
        self.options = options or TreeOptions()
        self.tree_size = self.options.tree_size
        self.stepwise = self.tree_size == 0
        self.deterministic = self.options.deterministic

    @abstractmethod
    def read(self, directory: Path, target: ModelConfig) -> HeadsFile:
        """The checkpoint in `directory`, its weights not read yet. Raises ModelError."""

    def bind(self, context: DrafterContext) -> DrafterMemory:
        assert context.model is not None
        self.options.check_depth(context.num_speculative_tokens)
        directory = hub.resolve(context.model, progress=context.progress, weights=hub.SPECULATOR_WEIGHTS)
        self._file = self.read(directory, context.target)
        return DrafterMemory(weight_bytes=self._file.checkpoint.num_elements() * context.dtype.itemsize)

    def load(self, target: Target) -> None:
        with torch.inference_mode():
            self.start(self._file.load(target.model), target.sampler)

    def start(self, network: HeadsNetwork, sampler: DraftSampler) -> None:
        self.network, self.sampler = network, sampler
        self._hidden: dict[int, tuple[int, Tensor]] = {}   # (positions computed, the last one's hidden state [hidden])

    def commit(self, committed: Sequence[Committed]) -> None:
        for c in committed:
            if c.hidden is not None and len(c.hidden[0]):
                self._hidden[c.seq_id] = c.start + len(c.hidden[0]), c.hidden[0][-1].clone()

    def stop(self, seq_id: int) -> None:
        self._hidden.pop(seq_id, None)

    @torch.inference_mode()
    def propose(self, requests: Sequence[DraftRequest], continue_drafting: ContinueDrafting) -> list[Draft]:
        drafts = [Draft([]) for _ in requests]
        known = [i for i, r in enumerate(requests) if self._hidden.get(r.seq_id, (-1,))[0] == len(r.token_ids) - 1]
        if not known:
            return drafts
        asked = [requests[i] for i in known]
        network = self.network
        tokens = torch.tensor([request.token_ids[-1] for request in asked])
        state = network.begin(torch.stack([self._hidden[request.seq_id][1] for request in asked]))
        first = Prediction(*network.step(0, state, tokens.to(state.device)))

        def advance(going: list[int], tokens: list[int], state: Tensor, position: int, num: int) -> list[Prediction]:
            return [Prediction(*network.step(position + 1, state, torch.tensor(tokens, device=state.device)))]

        def go_on(level: Level, state: Tensor) -> Prediction:
            tokens, num = level.tokens.flatten(), level.tokens.shape[1]
            if network.reads_tokens:
                return Prediction(*network.step(level.depth + 1, state, tokens))
            logits, _ = network.step(level.depth + 1, state[::num], tokens[::num])   # once for all nodes of a request
            return Prediction(logits.repeat_interleave(num, 0), state)

        asked = [replace(request, k=min(request.k, network.num_heads)) for request in asked]
        if self.tree_size:
            found = draft_trees(asked, continue_drafting, self.sampler, first, go_on, network.target_ids, self.options)
        else:
            found = draft_chain(
                asked, continue_drafting, self.sampler, [first], advance, network.target_ids, deterministic=self.deterministic
            )
        for i, draft in zip(known, found, strict=True):
            drafts[i] = draft
        return drafts
