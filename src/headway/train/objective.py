"""What is minimised, and what is counted: distances and acceptance at each draft step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from headway.models.decoder import Decoder
from headway.train.batches import Batch
from headway.train.eagle3 import Eagle3Head
from headway.train.losses import Loss

STEP_DECAY = 0.8
"""Weight of a draft step relative to the one before: later drafts are verified less often."""


@dataclass(frozen=True)
class Targets:
    """The fixed part: the target's embedding, and its output rows for the draft vocabulary [draft vocabulary, hidden], float32."""

    embedding: Tensor
    output: Tensor

    @classmethod
    def of(cls, target: Decoder, target_ids: Tensor) -> Targets:
        """Reads the output layer through the identity: its weight may be packed for the device."""
        hidden = target.config.hidden_size
        identity = torch.eye(hidden, dtype=target.dtype, device=target.device)
        rows = torch.cat([target.logits(part)[:, target_ids] for part in torch.split(identity, 64)])
        return cls(target.embedding.clone(), rows.t().float().contiguous().clone())


def distances(
    head: Eagle3Head, batch: Batch, targets: Targets, loss: Loss, num_steps: int, offset: int = 0
) -> tuple[Tensor, Tensor]:
    """(sum over positions of the weighted distance, number of positions of the first step)

    Row i of step s predicts what the target's position i + 1 + s does. A position counts as much as the draft vocabulary covers of its
    distribution: what is not in it cannot be learned. Step s is judged at every (s + 1)-th position, from `offset` on, which stands for
    the others: the output layer is half the work, and neighbours teach much the same.
    """
    learned = batch.learned()
    logits = F.linear(batch.last[learned].to(targets.output.dtype), targets.output).float()
    normalizer = logits.logsumexp(-1)
    covered = (normalizer - batch.log_normalizer[learned]).exp().clamp(max=1.0)
    log_p = logits - normalizer[:, None]
    index = torch.full(learned.shape, -1, device=learned.device)
    index[learned] = torch.arange(len(logits), device=learned.device)
    total = torch.zeros((), device=learned.device)
    for step, x in enumerate(head.steps(batch.token_ids, batch.hidden, batch.lengths, targets.embedding, num_steps)):
        where = _ahead(index, 1 + step, -1)
        every = step + 1
        judged = (where >= 0) & (torch.arange(where.shape[1], device=where.device) % every == offset % every)
        rows = where[judged]
        log_q = F.log_softmax(head.lm_head(x[judged]).float(), -1)
        total = total + every * STEP_DECAY**step * (covered[rows] * loss(log_p[rows], log_q)).sum()
    return total, learned.sum()


def _ahead(values: Tensor, count: int, fill: int | bool) -> Tensor:
    """[batch, length]: what stands `count` positions further on, `fill` behind the end."""
    return F.pad(values[:, count:], (0, min(count, values.shape[1])), value=fill)


@torch.no_grad()
def acceptance(head: Eagle3Head, batches: Sequence[Batch], targets: Targets, num_steps: int) -> list[float]:
    """P(draft token j is the text's | the ones before it were), for j = 1 .. num_steps, over texts the target wrote greedily.

    A draft that was right so far has read the text's own tokens, so this is what greedy verification accepts.
    """
    right, judged = [0] * num_steps, [0] * num_steps
    for batch in batches:
        learned = batch.learned()
        length = learned.shape[1]
        # Drafting begins behind the first token the target wrote itself.
        alive = torch.arange(length, device=learned.device) >= batch.num_prompt[:, None] - 1
        for step, x in enumerate(head.steps(batch.token_ids, batch.hidden, batch.lengths, targets.embedding, num_steps)):
            alive = alive & _ahead(learned, 1 + step, False)
            judged[step] += int(alive.sum())
            alive &= head.target_ids[head.lm_head(x).argmax(-1)] == batch.token_ids[:, 2 + step : 2 + step + length]
            right[step] += int(alive.sum())
    return [r / j if j else 0.0 for r, j in zip(right, judged, strict=True)]


def mean_acceptance_length(rates: Sequence[float]) -> float:
    """Tokens per verification, the target's own included."""
    total, product = 1.0, 1.0
    for rate in rates:
        product *= rate
        total += product
    return total
