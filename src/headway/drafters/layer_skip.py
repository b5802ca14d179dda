"""The target drafts for itself: its first layers, then its own final norm and output layer.

Nothing is loaded and nothing is read twice: the drafts of an exit at layer l use the target's K/V of layers 1..l. Which exit and how many
drafts pay is decided for each step, from the context itself: the hidden states that verification leaves behind, read through the
output layer, say what each exit would have drafted at positions whose token is known ("shadow tokens"). With a_l the share of
them that were right, d drafts from exit l write

    (1 - a_l^(d+1)) / (1 - a_l)  tokens for  d * (l + h) + L + h  layers

where L layers are the target's and h what its output layer weighs in layers; the pair with the most tokens per layer is taken, and
no drafts at all when they would write fewer than 1 / (L + h). A batch has one exit, so that a draft step stays one pass, and
a length for each sequence.

Works well on models trained to exit early (LayerSkip, Elhoushi et al. 2024, arXiv 2404.16710), hardly on others. Exit and length: DEL
(Zarch et al. 2025, arXiv 2504.05598), with the output layer's cost counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headway.config import option
from headway.drafters.core.chain import SampleOptions
from headway.drafters.core.model_chain import ChainDrafter
from headway.drafters.drafter import Committed, ContinueDrafting, DrafterContext, DrafterMemory, DraftRequest, Target
from headway.errors import ConfigError
from headway.models.attention_plan import Row as Span
from headway.types import Draft

NUM_EXITS = 8
"""Exits compared, evenly spaced."""

SHADOW_ROWS = 8
"""Positions of one sequence looked at in one go, the newest. Each costs the output layer a row for every exit."""

SHADOW_INTERVAL = 16
IDLE_INTERVAL = 64
"""Steps between looks, while drafting and while nothing is drafted: of a sequence, and of any while no exit pays for anybody."""

FORGET = 0.8
"""What evidence is worth one look later."""

PRIOR = 4.0
"""Positions of evidence that what is known of other sequences counts for."""


@dataclass(slots=True)
class _Context:
    """What is known about one sequence: how many shadow tokens of each exit were right, of how many."""

    hits: NDArray[np.float64]
    total: float = 0.0
    due: int = 0                     # steps until the next look
    seen: tuple[Tensor, list[int] | None] | None = None   # not looked at yet; see `_remember`


@dataclass(slots=True)
class _Plan:
    exit: int
    lengths: list[int] = field(default_factory=list)


class LayerSkip(ChainDrafter):
    @dataclass(frozen=True)
    class Options(SampleOptions):
        layer_skip_exit: int | None = option(None, "draft from this many layers, whatever the context; default: chosen by context")

        def __post_init__(self) -> None:
            if self.layer_skip_exit is not None and self.layer_skip_exit < 1:
                raise ConfigError(f"layer_skip_exit must be >= 1, got {self.layer_skip_exit}")

    def __init__(self, options: Options | None = None) -> None:
        self.options = options or self.Options()
        self.deterministic = self.options.deterministic

    def bind(self, context: DrafterContext) -> DrafterMemory:
        shape, fixed = context.target, self.options.layer_skip_exit
        if shape.num_layers < 2 or (fixed is not None and fixed >= shape.num_layers):
            raise ConfigError(f"layer_skip must exit before the last of the target's {shape.num_layers} layers, got {fixed or 'only one'}")
        self.num_layers, self.max_position = shape.num_layers, shape.max_position
        spaced = {round(shape.num_layers * i / (NUM_EXITS + 1)) for i in range(1, NUM_EXITS + 1)}
        self.exits = np.array(sorted(spaced - {0, shape.num_layers})) if fixed is None else np.array([fixed])
        self.hidden_layers = (*(self.exits - 1).tolist(), -1) if fixed is None else ()
        table = shape.vocab_size * shape.hidden_size
        layer = (shape.num_parameters - table * (1 if shape.tie_word_embeddings else 2)) / shape.num_layers
        self.head_cost = table / layer
        return DrafterMemory()

    def load(self, target: Target) -> None:
        super().load(target)
        self.cache = target.cache
        self.exit = int(self.exits[0])
        self._contexts: dict[int, _Context] = {}
        self._everyone = _Context(np.zeros(len(self.exits)))
        self._idle = False   # no exit paid for anybody when it was asked last
        self._wait = 0       # steps until another look, then

    # -- the network ----------------------------------------------------------------------------------------------

    def forward(self, token_ids: Tensor, positions: Tensor, spans: list[Span]) -> Tensor:
        return self.target.model.forward(token_ids, positions, self.cache.plan(spans), self.cache, num_layers=self.exit)[0]

    def logits(self, hidden: Tensor) -> Tensor:
        return self.target.model.logits(hidden)

    def num_filled(self, request: DraftRequest) -> int:
        return len(request.token_ids) - 1

    # -- exit and length ------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def propose(self, requests: Sequence[DraftRequest], continue_drafting: ContinueDrafting) -> list[Draft]:
        if not requests or self.options.layer_skip_exit is not None:
            return super().propose(requests, continue_drafting)
        contexts = [self._context(request.seq_id) for request in requests]
        self._look([context for context in contexts if context.seen is not None])
        plan = self._plan(contexts, [request.k for request in requests])
        self.exit = plan.exit
        self._idle = not any(plan.lengths)
        drafts = [Draft([]) for _ in requests]
        going = [i for i, length in enumerate(plan.lengths) if length > 0]
        asked = [replace(requests[i], k=plan.lengths[i]) for i in going]
        for i, draft in zip(going, super().propose(asked, continue_drafting) if asked else [], strict=True):
            drafts[i] = draft
        for context, length in zip(contexts, plan.lengths, strict=True):
            context.due = min(context.due, SHADOW_INTERVAL if length else IDLE_INTERVAL) - 1
        return drafts

    def commit(self, committed: Sequence[Committed]) -> None:
        """Keeps the last hidden states of a prompt, and those of a step now and then, until the next drafts are asked for."""
        super().commit(committed)
        self._wait = max(0, self._wait - 1) if self._idle else 0
        for c in committed:
            if c.hidden is None or c.num_new == 0 or self._wait:
                continue
            context = self._contexts.get(c.seq_id)
            written = len(c.token_ids) - c.num_prompt_tokens
            if written == c.num_new or (context is not None and context.due <= 0):
                self._remember(c, is_prompt=written == c.num_new)
                self._wait = IDLE_INTERVAL if self._idle else 0

    def stop(self, seq_id: int) -> None:
        super().stop(seq_id)
        self._contexts.pop(seq_id, None)

    def _context(self, seq_id: int) -> _Context:
        context = self._contexts.get(seq_id)
        if context is None:
            context = self._contexts[seq_id] = _Context(np.zeros(len(self.exits)), due=SHADOW_INTERVAL)
        return context

    def _remember(self, c: Committed, is_prompt: bool) -> None:
        """Hidden states [exits + 1, n, hidden], the target's last, and the n tokens that followed; a prompt's were not the target's
        choice, so there what the target would have written counts."""
        assert c.hidden is not None
        hidden = torch.stack([layer[-SHADOW_ROWS:] for layer in c.hidden])
        end = c.start + len(c.hidden[0])
        # A token that ended the sequence early leaves a hidden state without a successor.
        followed = c.token_ids[end - hidden.shape[1] + 1 : end + 1]
        context = self._context(c.seq_id)
        context.seen = hidden[:, : len(followed)], None if is_prompt else followed
        context.due = IDLE_INTERVAL

    def _look(self, contexts: list[_Context]) -> None:
        """Compares shadow tokens with the target's: one pass of the output layer for all."""
        seen = [context.seen for context in contexts if context.seen is not None]
        if not seen:
            return
        model = self.target.model
        hidden = torch.cat([part for part, _ in seen], 1)   # [exits + 1, rows, hidden], the last after the final norm
        rows = torch.cat([model.norm(hidden[:-1].flatten(0, 1)), hidden[-1]])
        shadows = model.logits(rows).float().argmax(-1).view(len(hidden), -1).cpu().numpy()
        begin = 0
        for context, (part, followed) in zip(contexts, seen, strict=True):
            mine = shadows[:, begin : begin + part.shape[1]]
            begin += part.shape[1]
            hits = (mine[:-1] == (mine[-1] if followed is None else np.array(followed))).sum(1)
            for known in (context, self._everyone):
                known.hits = known.hits * FORGET + hits
                known.total = known.total * FORGET + part.shape[1]
            context.seen = None

    def _plan(self, contexts: list[_Context], ks: list[int]) -> _Plan:
        """The exit that pays most for the batch as a whole, and each sequence's best length there."""
        general = (self._everyone.hits + 1.0) / (self._everyone.total + 2.0)
        rates = np.stack([(c.hits + PRIOR * general) / (c.total + PRIOR) for c in contexts])   # [n, exits]
        paying = self._tokens_per_layer(rates.mean(0), max(ks))
        best = int(paying.max(1).argmax())
        per_sequence = self._tokens_per_layer(rates[:, best], max(ks), self.exits[best])
        return _Plan(int(self.exits[best]), [int(row[: k + 1].argmax()) for row, k in zip(per_sequence, ks, strict=True)])

    def _tokens_per_layer(self, rates: NDArray[np.float64], k: int, exits: NDArray[np.int64] | None = None) -> NDArray[np.float64]:
        """rates [m], one per exit -> [m, 1 + k] tokens written per layer run, by the number of drafts."""
        exits = self.exits if exits is None else exits
        drafts = np.arange(k + 1)
        tokens = np.cumsum(rates[:, None] ** drafts, axis=1)
        layers = drafts * np.reshape(exits + self.head_cost, (-1, 1)) + self.num_layers + self.head_cost
        found: NDArray[np.float64] = tokens / layers
        return found
