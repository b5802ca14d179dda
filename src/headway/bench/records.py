"""What a run measured, and the summary of it: one ruler for every engine.

    ttft_ms   request sent -> first token
    tpot_ms   (last token - first token) / (tokens - 1), per request: what speculation shortens
    e2el_ms   request sent -> last token

Throughput is all output tokens over the time from the first request to the last token.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from headway.spec_decode_metrics import SpecDecodeMetrics


@dataclass(slots=True)
class Record:
    """One request. Times in seconds on one clock; `first` and `last` are 0.0 until a token came.

    output  the token ids where the engine gives them, else the text
    """

    num_prompt_tokens: int
    sent: float
    first: float = 0.0
    last: float = 0.0
    num_output_tokens: int = 0
    output: list[int] | str = field(default_factory=list)
    error: str | None = None

    def observe(self, now: float, token_ids: Sequence[int]) -> None:
        """These tokens came at `now`; for a record whose output is token ids."""
        assert isinstance(self.output, list)
        self.first = self.first or now
        self.last = now
        self.num_output_tokens += len(token_ids)
        self.output += token_ids


@dataclass(frozen=True, slots=True)
class TimeShares:
    """Shares of step time. overhead: neither drafting nor the target pass (scheduling, commit, text)."""

    draft: float
    verify: float
    overhead: float


@dataclass(frozen=True, slots=True)
class Run:
    """One measured run. `shares` and `mean_k` are None where the engine does not tell."""

    records: tuple[Record, ...]
    speculation: SpecDecodeMetrics
    shares: TimeShares | None
    mean_k: float | None
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def errors(self) -> list[str]:
        return [record.error for record in self.records if record.error is not None]

    @property
    def duration_s(self) -> float:
        return max((r.last for r in self.records), default=0.0) - min((r.sent for r in self.records), default=0.0)

    @property
    def num_output_tokens(self) -> int:
        return sum(record.num_output_tokens for record in self.records)

    @property
    def output_tokens_per_s(self) -> float:
        return self.num_output_tokens / self.duration_s if self.duration_s > 0 else 0.0

    @property
    def mean_tpot_ms(self) -> float:
        """Of all requests together; 0.0 when none wrote a second token."""
        tokens = sum(max(0, record.num_output_tokens - 1) for record in self.records)
        return sum(record.last - record.first for record in self.records) * 1e3 / tokens if tokens else 0.0

    @property
    def output_hash(self) -> str:
        return hash_outputs(record.output for record in self.records)

    def summary(self) -> dict[str, Any]:
        """The measured half of the final JSON document."""
        done = [record for record in self.records if record.error is None and record.num_output_tokens]
        spec = self.speculation
        return {
            "output_tokens_per_s": self.output_tokens_per_s,
            "requests_per_s": len(done) / self.duration_s if self.duration_s > 0 else 0.0,
            "num_requests": len(self.records),
            "num_prompt_tokens": sum(record.num_prompt_tokens for record in self.records),
            "num_output_tokens": self.num_output_tokens,
            "duration_s": self.duration_s,
            "ttft_ms": percentiles([(r.first - r.sent) * 1e3 for r in done]),
            "tpot_ms": percentiles([(r.last - r.first) * 1e3 / (r.num_output_tokens - 1) for r in done if r.num_output_tokens > 1]),
            "e2el_ms": percentiles([(r.last - r.sent) * 1e3 for r in done]),
            "mean_acceptance_length": spec.mean_acceptance_length if spec.num_spec_steps else None,
            "draft_acceptance_rate": spec.draft_acceptance_rate if spec.num_draft_tokens else None,
            "acceptance_by_position": [count / spec.num_spec_steps for count in spec.num_accepted_per_pos],
            "num_draft_tokens": spec.num_draft_tokens,
            "num_accepted_tokens": spec.num_accepted_tokens,
            "mean_k": self.mean_k,
            "time_shares": asdict(self.shares) if self.shares else None,
            "output_hash": self.output_hash,
            "output_hash_of": "token ids" if all(isinstance(r.output, list) for r in self.records) else "text",
            "invalid": bool(self.errors),
            "errors": self.errors[:5],
            **self.extra,
        }


def percentiles(values: Sequence[float]) -> dict[str, float] | None:
    """p50, p99 (linear interpolation between neighbours) and mean; None for no values."""
    if not values:
        return None
    p50, p99 = np.percentile(np.asarray(values, dtype=np.float64), (50, 99))
    return {"p50": float(p50), "p99": float(p99), "mean": float(np.mean(values))}


def hash_outputs(outputs: Iterable[list[int] | str]) -> str:
    """SHA-256 over all outputs in the order of the prompts; lengths count, so moving a token between requests shows."""
    digest = hashlib.sha256()
    for output in outputs:
        data = output.encode("utf-8", "replace") if isinstance(output, str) else ",".join(map(str, output)).encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()
