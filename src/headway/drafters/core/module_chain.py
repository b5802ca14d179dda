"""Chains of drafts from several multi-token prediction modules (arXiv:2412.19437, section 2.2).

Module j reads, for position i of the text, token i + 1 + j and what module j - 1 made of position i (module 0: the target's hidden state).
It predicts token i + 2 + j. So its rows lag behind those of the first module by j: a row is final when its token is known, and what the
module before it made is kept until then. Draft j continues with module j % (number of modules), as in vLLM and SGLang, over the rows whose
tokens have become known by drafting: these are scratch, like those of every chain, and the next catch-up overwrites them.

Every module has K/V of its own, in the blocks that the sequence has for the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor

from headway.drafters.core.chain import Prediction, catch_up
from headway.drafters.core.feature_chain import FeatureChain, SequenceState, Unread
from headway.drafters.core.feature_network import FeatureNetwork
from headway.drafters.drafter import DrafterContext, DrafterMemory, DraftRequest, DraftSampler, Target
from headway.errors import ConfigError
from headway.models.attention import KVCache
from headway.models.attention_plan import Row


@dataclass(slots=True)
class _Lag:
    """Of one sequence.

    waiting   by module: [n, hidden] its newest outputs that the next module has not read, for want of their tokens
    drafted   tokens of the draft that is being written
    outputs   [n, hidden] of the last draft pass
    """

    waiting: list[Tensor]
    drafted: list[int] = field(default_factory=list)
    outputs: Tensor | None = None


class ModuleChain(FeatureChain):
    """With one module it is a `FeatureChain`."""

    further: Sequence[FeatureNetwork] = ()

    def bind(self, context: DrafterContext) -> DrafterMemory:
        memory = super().bind(context)
        if self._file.num_modules > 1 and (self.tree_size or self.options.confidence_head):
            given = "topk > 1" if self.tree_size else "confidence_head"
            raise ConfigError(f"{given} is for a single module; {self._file.checkpoint.directory} has {self._file.num_modules}")
        return memory

    def load(self, target: Target) -> None:
        super().load(target)
        self.add_modules(self._file.load_further(target.model), target.cache.num_blocks)

    def start(self, network: FeatureNetwork, sampler: DraftSampler, num_blocks: int, block_size: int, kept_bytes: int) -> None:
        super().start(network, sampler, num_blocks, block_size, kept_bytes)
        self._lags: dict[int, _Lag] = {}

    def add_modules(self, modules: Sequence[FeatureNetwork], num_blocks: int) -> None:
        """The modules behind the first."""
        self.further = tuple(modules)
        self._modules = (self.network, *self.further)
        caches = [KVCache(module.shape, num_blocks, self.block_size, module.dtype, module.device) for module in modules]
        self._caches = (self.cache, *caches)

    def stop(self, seq_id: int) -> None:
        super().stop(seq_id)
        self._lags.pop(seq_id, None)

    def _prepare(self, requests: Sequence[DraftRequest]) -> list[int]:
        """Until every module has a row to continue, nothing is drafted."""
        ready = super()._prepare(requests)
        if not self.further:
            return ready
        tracks = {i: self._states[requests[i].seq_id].track for i in ready}
        return [i for i, track in tracks.items() if track.end - track.begin > len(self.further)]

    def _catch_up(self, requests: list[DraftRequest], states: list[SequenceState], num: int = 1) -> list[Prediction]:
        if not self.further:
            return super()._catch_up(requests, states, num)
        empty = self.network.embedding.new_empty(0, self.network.shape.hidden_size)
        for state in states:
            if state.filled == state.begin:
                self._lags[state.seq_id] = _Lag([empty] * len(self._modules))
        unread = [Unread(request, state, state.track.take()) for request, state in zip(requests, states, strict=True)]
        for part in catch_up([len(each) for each in unread]):
            self._read_all([unread[i].first(n) for i, n in part])
        return [Prediction(*self.network.predict(self._read_all(unread)))]

    def _read_all(self, parts: list[Unread]) -> Tensor:
        """Every module over what it can read by now. Returns the first one's last layer [parts, hidden] at the parts' last positions."""
        plan, token_ids, positions = self._read(parts, 1)
        read = torch.tensor([token_ids, positions], device=self.network.device)
        x = self.network.forward(read[0], read[1], self.network.fuse_parts([part.hidden for part in parts]), plan, self.cache)
        made = list(torch.split(self.network.handed_on(x), [len(part) for part in parts]))
        for index in range(1, len(self._modules)):
            made = self._follow(index, parts, made)
        for part, rows in zip(parts, made, strict=True):
            lag = self._lags[part.state.seq_id]
            lag.drafted, lag.outputs = [], None
            lag.waiting[-1] = torch.cat([lag.waiting[-1], rows])[-1:]   # only a draft that goes round reads it
        return x[[end - 1 for end in accumulate(len(part) for part in parts)]]

    def _follow(self, index: int, parts: list[Unread], made: list[Tensor]) -> list[Tensor]:
        """Module `index` over the outputs of the one before it whose tokens are known. Returns its own, by part."""
        ready: list[Tensor] = []
        rows: list[Row] = []
        token_ids: list[int] = []
        positions: list[int] = []
        for part, new in zip(parts, made, strict=True):
            lag, state = self._lags[part.state.seq_id], part.state
            waiting = torch.cat([lag.waiting[index - 1], new])
            ready.append(waiting[:-1])
            lag.waiting[index - 1] = waiting[-1:]
            num = len(ready[-1])
            begin = state.filled - index - num
            if num:
                rows.append((state.blocks, begin - state.begin, num))
            token_ids += part.request.token_ids[begin + 1 + index : begin + 1 + index + num]
            positions += range(begin, begin + num)
        if not rows:
            return ready
        return list(torch.split(self._pass(index, rows, token_ids, positions, torch.cat(ready))[1], [len(part) for part in ready]))

    def _pass(self, index: int, rows: list[Row], token_ids: list[int], positions: list[int], features: Tensor) -> tuple[Tensor, Tensor]:
        """One module. Returns its last layer's output and what it hands on, both [n, hidden]."""
        module, cache = self._modules[index], self._caches[index]
        read = torch.tensor([token_ids, positions], device=module.device)
        x = module.forward(read[0], read[1], features, cache.plan(rows), cache)
        return x, module.handed_on(x)

    def _advance(self, states: list[SequenceState], tokens: list[int], features: Tensor, position: int, num: int) -> list[Prediction]:
        """The rows that the newest tokens complete: one for each module before, as many as there are modules once all have drafted."""
        if not self.further:
            return super()._advance(states, tokens, features, position, num)
        step = position + 1
        index = step % len(self._modules)
        rows: list[Row] = []
        token_ids: list[int] = []
        positions: list[int] = []
        read: list[Tensor] = []
        lags = [self._lags[state.seq_id] for state in states]
        for state, lag, token in zip(states, lags, tokens, strict=True):
            lag.drafted.append(token)
            first = [lag.waiting[step - 1]] if step <= len(self._modules) else []
            read.append(torch.cat([*first, *([] if lag.outputs is None else [lag.outputs])]))
            num_rows = len(read[-1])
            begin = state.filled + step - index - num_rows
            rows.append((state.blocks, begin - state.begin, num_rows))
            token_ids += lag.drafted[-num_rows:]
            positions += range(begin, begin + num_rows)
        x, made = self._pass(index, rows, token_ids, positions, torch.cat(read))
        for lag, own in zip(lags, torch.split(made, [len(part) for part in read]), strict=True):
            lag.outputs = own
        ends = [end - 1 for end in accumulate(len(part) for part in read)]
        return [Prediction(*self._modules[index].predict(x[ends]))]
