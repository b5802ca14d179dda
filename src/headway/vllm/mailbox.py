"""What the proposer and the scheduler tell one another when they live in one process (vLLM without worker processes).

The worker makes the proposer, the engine core the scheduler; what they share is vLLM's instance id. In other layouts each has a mailbox
that nobody else opens, and both do without: the proposer always drafts, the scheduler knows no confidence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class Mailbox:
    wanted: bool = True        # by the scheduler: whether the step that runs should draft
    # By the proposer: of its latest drafts, in its order.
    confidence: list[Sequence[float]] = field(default_factory=list)
    draft_ms: float = 0.0


_boxes: dict[str, Mailbox] = {}


def mailbox(instance_id: str) -> Mailbox:
    return _boxes.setdefault(instance_id, Mailbox())
