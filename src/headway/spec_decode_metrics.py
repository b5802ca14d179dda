"""What speculation did, counted. Standard library only."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields


@dataclass(slots=True)
class SpecDecodeMetrics:
    """Speculation in one sequence (or summed over many). vLLM's keys; a step counts when at least one draft was verified."""

    num_spec_steps: int = 0
    num_draft_tokens: int = 0        # verified, so neither trimmed by a policy nor merely proposed
    num_accepted_tokens: int = 0
    num_steps: int = 0               # every step that wrote tokens, speculative or not
    num_drafts_per_pos: list[int] = field(default_factory=list)
    num_reached_per_pos: list[int] = field(default_factory=list)   # of these, with every draft before them accepted
    num_accepted_per_pos: list[int] = field(default_factory=list)
    num_steps_per_k: list[int] = field(default_factory=list)       # [k]: steps in which k drafts were verified
    acceptance_histogram: list[int] = field(default_factory=list)  # [i]: steps in which i drafts were accepted
    compared_ms: float = 0.0         # that the steps took whose cost the policy forecast
    plain_equivalent_ms: float = 0.0 # that plain decoding would have taken for their tokens

    def observe(self, num_drafts: int, num_accepted: int, depth: int | None = None) -> None:
        """One step of one sequence. `depth`: of a tree of `num_drafts` nodes; positions are depths."""
        depth = num_drafts if depth is None else depth
        self.num_steps += 1
        self.num_steps_per_k.extend([0] * (depth + 1 - len(self.num_steps_per_k)))
        self.num_steps_per_k[depth] += 1
        if num_drafts == 0:
            return
        self.num_spec_steps += 1
        self.num_draft_tokens += num_drafts
        self.num_accepted_tokens += num_accepted
        for counts, upto in (
            (self.num_drafts_per_pos, depth),
            (self.num_reached_per_pos, min(depth, num_accepted + 1)),
            (self.num_accepted_per_pos, num_accepted),
        ):
            counts.extend([0] * (depth - len(counts)))
            for position in range(upto):
                counts[position] += 1
        self.acceptance_histogram.extend([0] * (num_accepted + 1 - len(self.acceptance_histogram)))
        self.acceptance_histogram[num_accepted] += 1

    def compare(self, step_ms: float, plain_ms: float, num_accepted: int) -> None:
        """A step of `step_ms`, in which the sequence kept `num_accepted` drafts, where a plain one takes `plain_ms`."""
        if 0.0 < step_ms < math.inf and 0.0 < plain_ms < math.inf:
            self.compared_ms += step_ms
            self.plain_equivalent_ms += plain_ms * (1 + num_accepted)

    def add(self, other: SpecDecodeMetrics) -> None:
        for spec in fields(self):
            mine, theirs = getattr(self, spec.name), getattr(other, spec.name)
            if isinstance(mine, list):
                mine.extend([0] * (len(theirs) - len(mine)))
                for position, count in enumerate(theirs):
                    mine[position] += count
            else:
                setattr(self, spec.name, mine + theirs)

    @property
    def draft_acceptance_rate(self) -> float:
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0

    @property
    def conditional_acceptance(self) -> list[float]:
        """P(position accepted | the ones before it were), by position: stays true when k varies."""
        counts = zip(self.num_accepted_per_pos, self.num_reached_per_pos, strict=False)
        return [accepted / reached if reached else 0.0 for accepted, reached in counts]

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens per speculative step, the bonus token included (vLLM's definition)."""
        return 1.0 + (self.num_accepted_tokens / self.num_spec_steps if self.num_spec_steps else 0.0)
