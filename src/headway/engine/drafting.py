"""What the engine gives its drafters: a place in the memory plan, and the target's own way to choose tokens."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headway.config import EngineConfig, SpeculativeConfig
from headway.drafters.drafter import Drafter, DrafterContext, DrafterMemory, DraftRequest
from headway.engine.logits import Position, argmax, is_edited
from headway.engine.sampler import Purpose, Sampler, draw, uniforms
from headway.errors import ConfigError
from headway.models.decoder import Decoder
from headway.types import Sequence

# The logit of a token that the draft vocabulary lacks: next to any other one its probability is 0. It is finite, so that where a grammar
# allows no other tokens they are drafted, each as likely as the next, and the distribution that they are drawn from exists.
OUTSIDE = -1e30


def bind_drafters(
    speculative: SpeculativeConfig | None, config: EngineConfig, model: Decoder, progress: bool = False
) -> tuple[dict[str, Drafter], dict[str, DrafterMemory]]:
    """The drafters a config names, bound to this target, and what each takes. `model` may lack its weights.

    Raises ConfigError or ModelError when a drafter cannot work for this target.
    """
    drafters: dict[str, Drafter] = {}
    memory: dict[str, DrafterMemory] = {}
    for name in speculative.methods if speculative else ():
        assert speculative is not None
        drafters[name] = speculative.build_drafter(name)
        memory[name] = drafters[name].bind(DrafterContext(
            target=model.config,
            directory=model.directory,
            model=speculative.model_of(name),
            dtype=model.dtype,
            device=model.device,
            block_size=config.block_size,
            max_num_seqs=config.max_num_seqs,
            num_speculative_tokens=speculative.num_speculative_tokens,
            progress=progress,
        ))  # fmt: skip
        if drafters[name].tree_size and speculative.rejection_sample_method != "standard":
            raise ConfigError(
                f"rejection_sample_method {speculative.rejection_sample_method!r} judges chains, and {name!r} is to draft trees: "
                "use standard, or topk 1"
            )
    return drafters, memory


def hidden_layers_of(drafters: Mapping[str, Drafter]) -> tuple[int, ...]:
    """What the target must keep for all of them together."""
    return tuple(sorted({layer for drafter in drafters.values() for layer in drafter.hidden_layers}))


class SequenceSampler:
    """The `DraftSampler` of an engine: finds each request's sequence by its id.

    The numbers that draw a draft are keyed by where its block starts, as those of block verification are (`verify.py`): a block that
    was judged as a whole says something about every number it used, so the next block must not use them again.
    """

    def __init__(self, sampler: Sampler, sequences: Mapping[int, Sequence]) -> None:
        self._sampler = sampler
        self._sequences = sequences

    def takes_largest(self, requests: SequenceOf[DraftRequest]) -> bool:
        return not any(is_edited(self._sequences[request.seq_id]) for request in requests)

    @torch.inference_mode()
    def likely(
        self, logits: Tensor, requests: SequenceOf[DraftRequest], drafted: SequenceOf[list[int]], token_ids: Tensor | None = None
    ) -> list[int]:
        positions = self._positions(requests, drafted)
        if token_ids is not None and not any(is_edited(position.seq) for position in positions):
            found: list[int] = token_ids[argmax(logits)].tolist()   # as wide as the draft vocabulary, not as the target's
            return found
        return self._sampler.likely(self._widened(logits, token_ids), positions)

    @torch.inference_mode()
    def sampled(
        self, logits: Tensor, requests: SequenceOf[DraftRequest], drafted: SequenceOf[list[int]], token_ids: Tensor | None = None
    ) -> tuple[list[int], Tensor]:
        positions, logits = self._positions(requests, drafted), self._widened(logits, token_ids)
        starts = [len(position.seq.token_ids) for position in positions]
        uniform = uniforms([p.seq.seed for p in positions], starts, [Purpose.DRAFT + p.depth for p in positions])
        probs = torch.empty(len(positions), self._sampler.vocab_size, device=logits.device)
        tokens: list[int] = []
        rows = list(enumerate(positions))
        for begin in range(0, len(rows), self._sampler.block_rows):
            block = rows[begin : begin + self._sampler.block_rows]
            weights = self._sampler.probabilities(logits, block)
            tokens += draw(weights, uniform[begin : begin + len(block)])
            probs[begin : begin + len(block)] = weights[:, : self._sampler.vocab_size]
        return tokens, probs

    @torch.inference_mode()
    def candidates(
        self, logits: Tensor, requests: SequenceOf[DraftRequest], drafted: SequenceOf[list[int]], count: int,
        token_ids: Tensor | None = None,
    ) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        positions = self._positions(requests, drafted)
        if all(p.seq.params.greedy and not is_edited(p.seq) for p in positions):
            scores = logits.float()
            best, columns = scores.topk(min(count, scores.shape[1]))
            probs = (best - scores.logsumexp(-1, keepdim=True)).exp_()
            tokens = columns if token_ids is None else token_ids[columns]
            return tokens.cpu().numpy(), probs.double().cpu().numpy()
        tokens, probs = self._sampler.candidates(self._widened(logits, token_ids), positions, count)
        return tokens.cpu().numpy(), probs.double().cpu().numpy()

    @torch.inference_mode()
    def branches(
        self, logits: Tensor, requests: SequenceOf[DraftRequest], drafted: SequenceOf[list[int]], counts: SequenceOf[int],
        firsts: SequenceOf[int], token_ids: Tensor | None = None,
    ) -> tuple[list[list[int]], Tensor]:
        positions, logits = self._positions(requests, drafted), self._widened(logits, token_ids)
        probs = torch.empty(len(positions), self._sampler.vocab_size, device=logits.device)
        found: list[list[int]] = [[] for _ in positions]
        rows = list(enumerate(positions))
        for begin in range(0, len(rows), self._sampler.block_rows):
            block = rows[begin : begin + self._sampler.block_rows]
            weights = self._sampler.probabilities(logits, block)
            probs[begin : begin + len(block)] = weights[:, : self._sampler.vocab_size]
            for turn in range(max(counts[row] for row, _ in block)):
                left = [(row, p.seq) for row, p in block if counts[row] > turn]
                purposes = [Purpose.DRAFT + firsts[row] + turn for row, _ in left]
                numbers = uniforms([seq.seed for _, seq in left], [len(seq.token_ids) for _, seq in left], purposes)
                where = [row - begin for row, _ in left]
                tokens = draw(weights[where], numbers)
                weights[where, tokens] = 0.0
                for (row, _), token in zip(left, tokens, strict=True):
                    found[row].append(token)
        return found, probs

    def _widened(self, logits: Tensor, token_ids: Tensor | None) -> Tensor:
        if token_ids is None:
            return logits
        wide = logits.new_full((len(logits), self._sampler.vocab_size), OUTSIDE, dtype=torch.float32)
        return wide.index_copy_(1, token_ids, logits.float())

    def _positions(self, requests: SequenceOf[DraftRequest], drafted: SequenceOf[list[int]]) -> list[Position]:
        return [Position(self._sequences[request.seq_id], tokens, len(tokens)) for request, tokens in zip(requests, drafted, strict=True)]
