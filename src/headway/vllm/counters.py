"""What the scheduler counts. It reaches /metrics in vLLM's own statistics: see telemetry.py."""

from __future__ import annotations

import time

from headway.telemetry.counters import StepCounters


class Counters(StepCounters):
    """`StepCounters` of every step, and what went wrong. `off` says why the controller is not at work; "" while it is."""

    def __init__(self, policy: str = "", drafter: str = "", max_k: int = 0) -> None:
        super().__init__()
        self.policy, self.drafter, self.max_k = policy, drafter, max_k
        self.started = time.time()
        self.off = ""
        self.plugin_ms = 0.0             # inside Headway's hooks: part of the steps
        self.num_errors = 0              # exceptions inside the controller
        self.num_fallback_steps = 0      # steps without the controller
        self.num_stale_outputs = 0       # outputs of requests that were preempted meanwhile: not learned from
        self.num_invalid_requests = 0    # vllm_xargs that were not understood, and so ignored
