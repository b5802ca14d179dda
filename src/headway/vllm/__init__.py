"""Headway inside vLLM: the same policies, where one machine is not enough.

    vllm serve MODEL --scheduler-cls headway.vllm.Scheduler --speculative-config '{"method": "ngram", ...}'
    vllm serve MODEL --speculative-config '{"method": "custom_class", "model": "headway.vllm.Proposer", ...}'   (and the scheduler, or not)

`settings.py` is what a user may say, `adapter.py` what decides (no vLLM in it), `scheduler.py` and `proposer.py` what vLLM loads,
`counters.py` how the numbers reach the process that serves /metrics.
"""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    """What vLLM loads needs vLLM; the rest of this package does not."""
    if name == "Scheduler":
        from headway.vllm.scheduler import Scheduler

        return Scheduler
    if name == "Proposer":
        from headway.vllm.proposer import Proposer

        return Proposer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
