"""A smaller model of the same vocabulary drafts, token by token.

Any model the engine could serve as a target can draft for a larger one whose tokenizer maps the same ids to the same tokens. It keeps K/V
of its own for the text, laid out beside the target's (`core/draft_cache.py`), and is run only when asked: after a pause it
reads what was written meanwhile in one pass. How its tokens are chosen: `core/chain.py`.

Source: Leviathan et al. 2023 (arXiv 2211.17192), Chen et al. 2023 (arXiv 2302.01318).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch.nn.functional as F
from torch import Tensor

from headway.config import option
from headway.drafters.core.chain import SampleOptions
from headway.drafters.core.confidence_head import ConfidenceHead
from headway.drafters.core.draft_cache import DraftCache
from headway.drafters.core.model_chain import ChainDrafter
from headway.drafters.core.vocabulary import check_same_vocabulary
from headway.drafters.drafter import DrafterContext, DrafterMemory, DraftRequest, Target
from headway.models import hub
from headway.models.attention import KVCache
from headway.models.attention_plan import Row as Span
from headway.models.config import ModelConfig
from headway.models.loader import load_model


class DraftModel(ChainDrafter):
    takes_model = True
    needs_model = True

    @dataclass(frozen=True)
    class Options(SampleOptions):
        confidence_head: str | None = option(None, "safetensors file of an acceptance head; default: confidence is the largest probability")

    def __init__(self, options: Options | None = None) -> None:
        self.options = options or self.Options()
        self.deterministic = self.options.deterministic

    def bind(self, context: DrafterContext) -> DrafterMemory:
        assert context.model is not None
        self.directory = hub.resolve(context.model, progress=context.progress)
        config = ModelConfig.from_directory(self.directory)
        check_same_vocabulary(context.directory, self.directory)
        self.max_position = config.max_position
        return DrafterMemory(
            weight_bytes=config.num_parameters * context.dtype.itemsize,
            kv_bytes_per_block=KVCache.bytes_per_block(config, context.block_size, context.dtype),
        )

    def load(self, target: Target) -> None:
        super().load(target)
        dtype = str(target.model.dtype).removeprefix("torch.")
        self.model = load_model(str(self.directory), dtype=dtype, device=str(target.model.device), progress=False)
        self.beside = DraftCache(self.model.config, target)
        self.cache = self.beside.kv
        if self.options.confidence_head is not None:
            self.head = ConfidenceHead(Path(self.options.confidence_head).expanduser(), self.model.config.hidden_size, target.model.device)

    def forward(self, token_ids: Tensor, positions: Tensor, spans: list[Span]) -> Tensor:
        # Output layers are padded to round sizes, so one may have rows the other has not; no text uses them.
        known = token_ids.clamp(max=self.model.config.vocab_size - 1)
        return self.model.forward(known, positions, self.cache.plan(spans), self.cache)[0]

    def logits(self, hidden: Tensor) -> Tensor:
        logits, wanted = self.model.logits(hidden), self.target.model.config.vocab_size
        return F.pad(logits, (0, wanted - logits.shape[-1]), value=float("-inf")) if logits.shape[-1] != wanted else logits

    def num_filled(self, request: DraftRequest) -> int:
        return self.beside.num_filled(request.block_table, len(request.token_ids) - 1)

    def fill(self, block_table: list[int], start: int, stop: int) -> None:
        self.beside.fill(block_table, start, stop)
