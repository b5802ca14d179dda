"""How long a step takes and what speculation gains: a roofline with corrections.

    step = fixed + (memory ^ 2 + products ^ 2) ^ 1/2 + communication

memory: bytes of weights (of the experts that the tokens choose) and of K/V, over the bandwidth that is reached; products: floating-point
operations over the rate that is reached. Where one dominates the step takes as long as it alone, and at the ridge between them, where they
share the chip, 1.4 times as long. The corrections are fitted to a recording where there is one (calibration.py).

A request writes 1 + a + a^2 + ... + a^k tokens in a step that verifies k drafts of which each is accepted with probability a, given that
the ones before it were. The time of the prompts is part of the throughput: long inputs leave speculation less to gain.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from headway.plan.drafting import Drafting
from headway.plan.memory import Deployment
from headway.plan.network import NetworkShape, Stage
from headway.plan.quantization import Quantization

LENGTHS = (0, 1, 2, 3, 4, 5, 6, 8)
# Tensor parallelism adds up two partial sums per layer, behind attention and behind the MLP.
SUMS_PER_LAYER = 2


@dataclass(frozen=True, slots=True)
class Corrections:
    """bandwidth, compute: shares of the device's figures that are reached. fixed_ms: of every pass of the target; lookup_ms: of a lookup.

    draft_scale: measured over predicted time of drafting. error: of predicted steps, relative: half of them are closer; source: in words.
    """

    bandwidth: float
    compute: float
    fixed_ms: float
    error: float
    source: str
    draft_scale: float = 1.0
    lookup_ms: float = 0.3


PUBLISHED = Corrections(
    bandwidth=0.80, compute=0.60, fixed_ms=0.7, error=0.25,
    source="general corrections, nothing was measured on this device",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Load:
    """num_requests are in flight, each with a prompt of input_len tokens and output_len tokens to write."""

    num_requests: int
    input_len: int
    output_len: int

    @property
    def context(self) -> float:
        """Tokens before a row, on average over a request's life."""
        return self.input_len + self.output_len / 2


@dataclass(frozen=True, slots=True)
class StepParts:
    """Milliseconds at the device's own figures: of its memory, of its products, of the sums between devices."""

    memory: float
    compute: float
    communication: float


@dataclass(frozen=True, slots=True)
class Machine:
    """Everything that predicts times: the networks on their devices."""

    target: NetworkShape
    drafting: Drafting | None
    quantization: Quantization | None
    deployment: Deployment
    corrections: Corrections = PUBLISHED

    def step_ms(self, load: Load, k: int) -> float:
        """One step that verifies k drafts of every request, drafting included."""
        return self.verify_ms(load.num_requests, load.num_requests * (1 + k), load.num_requests * load.context) + self.draft_ms(load, k)

    def verify_ms(self, num_rows: float, num_tokens: float, num_context: float, num_sampled: float | None = None) -> float:
        """One pass of the target: tokens of all rows together, and the context of all rows together; sampled: positions with logits."""
        parts = self.target_parts(num_rows, num_tokens, num_context, num_tokens if num_sampled is None else num_sampled)
        return self.corrections.fixed_ms + self._corrected(parts)

    def target_parts(self, num_rows: float, num_tokens: float, num_context: float, num_sampled: float) -> StepParts:
        """What the pass of `verify_ms` is made of. A pipeline works on as many parts of a batch as it has stages, at the slowest's pace."""
        pp = self.deployment.pp
        share = (num_rows / pp, num_tokens / pp, num_context / pp, num_sampled / pp)
        stages = [self._parts(self.target.stage(i, pp), self.deployment.tp, self.quantization, *share) for i in range(pp)]
        slowest = max(stages, key=lambda parts: parts.memory + parts.compute)
        return StepParts(pp * slowest.memory, pp * slowest.compute, pp * slowest.communication)

    def draft_ms(self, load: Load, k: int) -> float:
        """k draft tokens for every request."""
        if self.drafting is None or k == 0:
            return 0.0
        if self.drafting.network is None:
            return self.corrections.lookup_ms
        stage, batch = self.drafting.network.stage(0, 1), load.num_requests
        quantization = self.drafting.network.quantization
        each = self._corrected(self._parts(stage, self.deployment.draft_tp, quantization, batch, batch, batch * load.context, batch))
        launches = 0.1 * self.corrections.fixed_ms   # a small network in a graph: a fraction of what a step has around it
        return self.drafting.num_passes(k) * (each + launches) * self.corrections.draft_scale

    def prefill_ms(self, num_tokens: int, drafted: bool) -> float:
        """One prompt, in passes of its own: half of it is read as K/V on average. drafted: by the draft network, too."""
        whole = self.verify_ms(1, num_tokens, num_tokens / 2 * max(1.0, num_tokens / self.deployment.max_num_batched_tokens), 1)
        if drafted and self.drafting is not None and self.drafting.network is not None:
            network = self.drafting.network
            own = self._parts(network.stage(0, 1), self.deployment.draft_tp, network.quantization, 1, num_tokens, num_tokens / 2, 1)
            whole += self._corrected(own)
        return whole

    def _corrected(self, parts: StepParts) -> float:
        return math.hypot(parts.memory / self.corrections.bandwidth, parts.compute / self.corrections.compute) + parts.communication

    def _parts(
        self, stage: Stage, tp: int, quantization: Quantization | None, rows: float, tokens: float, context: float, sampled: float
    ) -> StepParts:
        """One pass of a stage, at the device's own figures."""
        device, network = self.deployment.device, stage.network
        kv_bytes = self.deployment.kv_bytes_per_value(network)
        each, attended = context / max(rows, 1e-9), tokens / max(rows, 1e-9)
        kept = [(layer.kv, layer.kv.num_tokens(each)) for layer in stage.layers]
        read = sum(kv.values_per_token(tp) * length for kv, length in kept) * rows * kv_bytes
        memory = (stage.bytes_read(tp, quantization, tokens) + read) / device.bandwidth
        products = 2.0 * stage.multiply_adds(tp, tokens, sampled)
        attention = 2.0 * sum(kv.attention_width * length for kv, length in kept) * rows * attended / tp
        compute = products / device.peak(quantization.compute if quantization else "bf16") + attention / device.peak("bf16")
        communication = 0.0
        if tp > 1:
            moved = 2 * (tp - 1) / tp * tokens * network.hidden_size * network.bytes_per_value
            communication = SUMS_PER_LAYER * len(stage.layers) * (device.link_s + moved / device.link_bytes)
        return StepParts(memory * 1e3, compute * 1e3, communication * 1e3)

    # -- what it means --------------------------------------------------------------------------------------------------

    def throughput(self, load: Load, k: int, acceptance: Sequence[float]) -> float:
        """Output tokens per second of all requests together, prompts included."""
        num_steps = load.output_len / tokens_per_step(k, acceptance)
        total_ms = num_steps * self.step_ms(load, k) + load.num_requests * self.prefill_ms(load.input_len, drafted=k > 0)
        return load.num_requests * load.output_len / total_ms * 1e3

    def time_per_token_ms(self, load: Load, k: int, acceptance: Sequence[float]) -> float:
        """Between two tokens of one request, prompts of others aside."""
        return self.step_ms(load, k) / tokens_per_step(k, acceptance)

    def break_even(self, load: Load, k: int) -> float | None:
        """The acceptance, the same at each position, from which on k drafts are faster than none; None: not even when all are accepted."""
        plain, goal = self.step_ms(load, 0), self.step_ms(load, k)
        if (k + 1) * plain <= goal:
            return None
        low, high = 0.0, 1.0
        for _ in range(40):
            middle = (low + high) / 2
            low, high = (low, middle) if tokens_per_step(k, [middle]) * plain >= goal else (middle, high)
        return high


def tokens_per_step(k: int, acceptance: Sequence[float]) -> float:
    """acceptance: of the first draft token, of the second given the first, ...; the last entry holds for all further ones."""
    total = reached = 1.0
    for position in range(k):
        reached *= acceptance[min(position, len(acceptance) - 1)]
        total += reached
    return total
