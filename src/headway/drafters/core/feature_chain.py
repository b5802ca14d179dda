"""Chains and trees of drafts from a network that continues the target's hidden states (EAGLE, multi-token prediction).

Per sequence: the hidden states that were committed and not read yet, and the network's own K/V for the positions that were. When a
sequence is drafted for, its unread positions enter the network in one pass, whose last row predicts the first draft token; each
further token is one pass of one row on the network's own output, over K/V that the next catch-up overwrites with what
the target really computed. A sequence that is not asked for gathers hidden states, nothing else.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

from headway.config import option
from headway.drafters.core.chain import Prediction, catch_up, draft_chain, num_unasked
from headway.drafters.core.confidence_head import ConfidenceHead
from headway.drafters.core.feature_network import FeatureFile, FeatureNetwork, bytes_per_weight
from headway.drafters.core.features import FeatureStore, FeatureTrack, Hidden
from headway.drafters.core.tree import Level, TreeOptions, draft_trees
from headway.drafters.drafter import Committed, ContinueDrafting, Drafter, DrafterContext, DrafterMemory, DraftRequest, DraftSampler, Target
from headway.errors import ConfigError
from headway.models import hub
from headway.models.attention import KVCache
from headway.models.attention_native import make_plan
from headway.models.attention_plan import AttentionPlan, Row, Tree
from headway.models.config import ModelConfig
from headway.types import Draft


@dataclass(slots=True)
class SequenceState:
    seq_id: int
    track: FeatureTrack
    blocks: list[int] = field(default_factory=list)
    begin: int = 0        # K/V slot 0 is this position
    filled: int = 0       # K/V of positions [begin, filled) is there
    lost: bool = False    # the K/V was given to others


class FeatureChain(Drafter):
    """The state and the loop of all such drafters; each says how its checkpoints are read."""

    takes_model = True
    needs_model = True

    @dataclass(frozen=True)
    class Options(TreeOptions):
        confidence_head: str | None = option(None, "safetensors file of an acceptance head; default: confidence is the largest probability")

        def __post_init__(self) -> None:
            TreeOptions.__post_init__(self)
            if self.confidence_head is not None and self.topk > 1:
                raise ConfigError("confidence_head judges chains; in a tree (topk > 1) confidence is a token's own probability")

    def __init__(self, options: Options | None = None) -> None:
        self.options = options or self.Options()
        self.tree_size = self.options.tree_size
        self.stepwise = self.tree_size == 0
        self.deterministic = self.options.deterministic
        self.head: Callable[[Tensor], Tensor] | None = None

    @abstractmethod
    def read(self, directory: Path, target: ModelConfig) -> FeatureFile:
        """The checkpoint in `directory`, its weights not read yet. Raises ModelError."""

    def bind(self, context: DrafterContext) -> DrafterMemory:
        self.options.check_depth(context.num_speculative_tokens)
        directory = context.directory
        if context.model is not None:
            directory = hub.resolve(context.model, progress=context.progress, weights=hub.SPECULATOR_WEIGHTS)
        self._file = self.read(directory, context.target)
        self.hidden_layers = self._file.hidden_layers
        self._dtype, self.block_size = context.dtype, context.block_size
        own = self._file.num_modules * KVCache.bytes_per_block(self._file.shape, context.block_size, context.dtype)
        self._kept_bytes = len(self.hidden_layers) * context.target.hidden_size * context.block_size * context.dtype.itemsize
        weights = self._file.num_elements * bytes_per_weight(context.dtype, context.device)
        return DrafterMemory(weight_bytes=weights, kv_bytes_per_block=own + self._kept_bytes)

    def load(self, target: Target) -> None:
        num_blocks = target.cache.num_blocks
        self.start(self._file.load(target.model), target.sampler, num_blocks, self.block_size, num_blocks * self._kept_bytes)
        if self.options.confidence_head is not None:
            self.head = ConfidenceHead(Path(self.options.confidence_head).expanduser(), self.network.shape.hidden_size, target.model.device)

    def judge_by(self, head: Callable[[Tensor], Tensor]) -> None:
        """From now on `head` estimates confidence: hidden states [n, hidden] -> [n]."""
        self.head = head

    def start(self, network: FeatureNetwork, sampler: DraftSampler, num_blocks: int, block_size: int, kept_bytes: int) -> None:
        """`num_blocks` of its own K/V, in blocks of `block_size` tokens; `kept_bytes` of hidden states for prefix hits."""
        self.network, self.sampler, self.block_size = network, sampler, block_size
        self.store = FeatureStore(block_size, kept_bytes)
        self.cache = KVCache(network.shape, num_blocks, block_size, network.dtype, network.device)
        self._free = list(range(num_blocks - 1, -1, -1))
        self._states: dict[int, SequenceState] = {}

    def commit(self, committed: Sequence[Committed]) -> None:
        for c in committed:
            if c.hidden is None:
                continue
            state = self._states.get(c.seq_id)
            if state is None:
                state = self._states[c.seq_id] = SequenceState(c.seq_id, FeatureTrack(self.store, c.salt))
            state.track.add(c.start, c.hidden, c.token_ids)

    def stop(self, seq_id: int) -> None:
        state = self._states.pop(seq_id, None)
        if state is not None:
            self._free += state.blocks

    def propose(self, requests: Sequence[DraftRequest], continue_drafting: ContinueDrafting) -> list[Draft]:
        drafts = [Draft([]) for _ in requests]
        ready = self._prepare(requests)
        if ready:
            with torch.inference_mode():
                found = self._draft([requests[i] for i in ready], [self._states[requests[i].seq_id] for i in ready], continue_drafting)
            for i, draft in zip(ready, found, strict=True):
                drafts[i] = draft
        return drafts

    def _prepare(self, requests: Sequence[DraftRequest]) -> list[int]:
        """Which requests can be drafted for: their hidden states reach the last known token, and there is room for their K/V."""
        wanted = {request.seq_id for request in requests}
        ready = []
        for i, request in enumerate(requests):
            state = self._states.get(request.seq_id)
            if state is None or state.track.end != len(request.token_ids) - 1:
                continue
            if state.lost:
                state.track.rewind(request.token_ids)
                state.lost = False
            if state.track.end == state.track.kept:   # nothing new to read: what would predict was read before
                continue
            state.begin, state.filled = state.track.begin, state.track.kept
            scratch = self.options.topk * (request.k - 1) if self.tree_size else request.k
            needed = -(-(state.track.end - state.begin + scratch) // self.block_size)
            if self._grow(state, needed, wanted):
                ready.append(i)
        return ready

    def _grow(self, state: SequenceState, num_blocks: int, wanted: set[int]) -> bool:
        """Takes blocks from the pool; when it is empty, from the sequences not asked for, which read everything anew when they are."""
        missing = num_blocks - len(state.blocks)
        if missing > len(self._free):
            for seq_id in [seq_id for seq_id, other in self._states.items() if other.blocks and seq_id not in wanted]:
                self._release(seq_id)
                if missing <= len(self._free):
                    break
        if missing > len(self._free):
            return False
        state.blocks += [self._free.pop() for _ in range(missing)]
        return True

    def _release(self, seq_id: int) -> None:
        state = self._states[seq_id]
        self._free += state.blocks
        state.blocks, state.lost = [], True

    # -- the draft ------------------------------------------------------------------------------------------------

    def _draft(self, requests: list[DraftRequest], states: list[SequenceState], continue_drafting: ContinueDrafting) -> list[Draft]:
        def advance(going: list[int], tokens: list[int], features: Tensor, position: int, num: int) -> list[Prediction]:
            return self._advance([states[i] for i in going], tokens, features, position, num)

        def go_on(level: Level, features: Tensor) -> Prediction:
            return self._continue([states[i] for i in level.requests], level, features)

        ids = self.network.target_ids
        if self.tree_size:
            return draft_trees(requests, continue_drafting, self.sampler, self._catch_up(requests, states)[0], go_on, ids, self.options)
        num = num_unasked(requests, continue_drafting, self.sampler, self.head, self.deterministic)
        first = self._catch_up(requests, states, num)
        return draft_chain(requests, continue_drafting, self.sampler, first, advance, ids, self.head, deterministic=self.deterministic)

    def _catch_up(self, requests: list[DraftRequest], states: list[SequenceState], num: int = 1) -> list[Prediction]:
        """Reads what was committed since; returns what the network says at each last position, and behind it, up to `num` times."""
        unread = [Unread(request, state, state.track.take()) for request, state in zip(requests, states, strict=True)]
        for part in catch_up([len(each) for each in unread]):
            parts = [unread[i].first(num) for i, num in part]
            plan, token_ids, positions = self._read(parts, 1)
            features, device = self.network.fuse_parts([each.hidden for each in parts]), self.network.device
            read = torch.tensor([token_ids, positions], device=device)
            self.network.forward(read[0], read[1], features, plan, self.cache, fill=True)
        num = num if self.network.several(self.cache) else 1
        ends = [end - 1 for end in accumulate(len(each) for each in unread)]
        plan, token_ids, positions = self._read(unread, num)
        return self.network.steps(token_ids, positions, [each.hidden for each in unread], plan, self.cache, ends, num)

    def _advance(self, states: list[SequenceState], tokens: list[int], features: Tensor, position: int, num: int) -> list[Prediction]:
        """One more row per sequence, on the network's own output, or `num` of them; their K/V is scratch."""
        at, num = [state.filled + position for state in states], num if self.network.several(self.cache) else 1
        rows = [(state.blocks, where - state.begin, 1) for state, where in zip(states, at, strict=True)]
        positions = [where + i for i in range(num) for where in at]
        return self.network.steps(tokens, positions, features, self._plan(rows, num), self.cache, range(len(rows)), num)

    def _plan(self, rows: list[Row], num: int) -> AttentionPlan:
        return self.cache.plan(rows) if num == 1 else make_plan(rows, self.block_size, self.network.device, ahead=num - 1)

    def _continue(self, states: list[SequenceState], level: Level, features: Tensor) -> Prediction:
        """The nodes of a level: as `_advance`, `topk` rows per sequence, each seeing its own path."""
        num = level.tokens.shape[1]
        rows, trees = [], []
        for state, parents in zip(states, level.parents, strict=True):
            base = state.filled - state.begin
            rows.append((state.blocks, base + len(parents) - num, num))
            trees.append(Tree(base, parents))
        positions = [state.filled + level.depth for state in states for _ in range(num)]
        plan, tokens = self.cache.plan(rows, trees), level.tokens.flatten().tolist()
        return self.network.steps(tokens, positions, features.contiguous(), plan, self.cache, range(len(tokens)))[0]

    def _read(self, parts: list[Unread], num: int) -> tuple[AttentionPlan, list[int], list[int]]:
        """(plan, token ids, positions) of a pass over unread positions, which become part of the state, and of `num` - 1 behind it."""
        spans: list[Row] = []
        token_ids: list[int] = []
        positions: list[int] = []
        for part in parts:
            state, begin = part.state, part.state.filled
            stop = state.filled = begin + len(part)
            token_ids += part.request.token_ids[begin + 1 : stop + 1]
            positions += range(begin, stop)
            spans.append((state.blocks, begin - state.begin, stop - begin))
        positions += [part.state.filled + i for i in range(num - 1) for part in parts]
        return self._plan(spans, num), token_ids, positions


@dataclass(slots=True)
class Unread:
    request: DraftRequest
    state: SequenceState
    hidden: Hidden

    def __len__(self) -> int:
        return len(self.hidden[0])

    def first(self, num: int) -> Unread:
        """Split off."""
        part = Unread(self.request, self.state, tuple(layer[:num] for layer in self.hidden))
        self.hidden = tuple(layer[num:] for layer in self.hidden)
        return part
