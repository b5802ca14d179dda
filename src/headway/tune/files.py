"""What the emitters write, and what they are told about the server."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class File:
    """What one engine is given. `notes`: what its user has to know."""

    name: str
    text: str
    usage: str
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Serving:
    """How a server is to be started, where more than the drafts is planned.

    max_num_seqs    requests in flight
    max_model_len   tokens of the longest request
    kv_dtype        auto, bfloat16 or fp8
    quantization    of 16-bit weights, by the server; None: as the checkpoint has them
    least_accepted  share of all draft tokens below which plain decoding is faster; None: not known
    """

    model: str
    tp: int
    pp: int
    draft_tp: int
    max_num_seqs: int
    max_model_len: int
    kv_dtype: str
    utilization: float
    quantization: str | None = None
    least_accepted: float | None = None
