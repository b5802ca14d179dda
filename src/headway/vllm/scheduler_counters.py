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

    def describe(self, policy: str, drafter: str, max_k: int) -> None:
        """What is at work."""
        self.policy, self.drafter, self.max_k = policy, drafter, max_k

    def turn_off(self, reason: str, *, error: bool = False) -> None:
        """The controller is not at work from now on; "" where it is. error: because of an exception inside it."""
        self.off = reason
        self.num_errors += error

    def observe_draft(self, draft_ms: float) -> None:
        """Drafting took so long, in a step that was counted as verification."""
        self.draft_ms += draft_ms
        self.verify_ms -= draft_ms

    def observe_plugin(self, ms: float) -> None:
        self.plugin_ms += ms

    def observe_fallback(self) -> None:
        self.num_fallback_steps += 1

    def observe_stale_output(self) -> None:
        self.num_stale_outputs += 1

    def observe_invalid_request(self) -> None:
        self.num_invalid_requests += 1
