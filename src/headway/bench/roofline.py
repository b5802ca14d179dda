"""The ceiling before the measurement: at batch 1 a plain decoding step reads every weight once.

    tokens/s <= memory bandwidth / (weight bytes read per step + K/V bytes of the context)

Speculation lifts the ceiling by the tokens a step writes; batching shares the weights, not the K/V.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import Any

import torch

from headway.engine.memory import available_cpu_bytes
from headway.models.attention import KVCache
from headway.models.decoder import Decoder

# Several times the last-level cache of today's servers, so that memory is measured and not cache.
PROBE_BYTES = 1 << 28
PROBE_REPEATS = 10
# Square matrices whose product keeps all units busy, and is done in a fraction of a second.
CPU_PRODUCT, GPU_PRODUCT = 1024, 8192


@dataclass(frozen=True, slots=True)
class Roofline:
    """Sizes in bytes, bandwidth in bytes per second, ceilings in tokens per second at batch 1."""

    weight_bytes: int
    bytes_per_token: int            # weights that one decoding step reads
    kv_bytes_per_token: int         # one token of context, all layers
    bandwidth: float
    ceiling_empty_context: float
    ceiling_context_1024: float

    def share(self, tpot_ms: float, num_context_tokens: float) -> float:
        """How much of the ceiling plain decoding of one request reached, at this many tokens of context on average."""
        num_bytes = self.bytes_per_token + num_context_tokens * self.kv_bytes_per_token
        return num_bytes / (tpot_ms * 1e-3) / self.bandwidth

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def lines(self) -> list[str]:
        return [
            f"weights {self.weight_bytes / 1e6:.0f} MB, read per step {self.bytes_per_token / 1e6:.0f} MB; "
            f"K/V {self.kv_bytes_per_token / 1e3:.1f} kB per token of context",
            f"memory bandwidth {self.bandwidth / 1e9:.1f} GB/s (measured, reading): plain decoding of one request can reach at most "
            f"{self.ceiling_empty_context:.0f} tokens/s, {self.ceiling_context_1024:.0f} with 1,024 tokens of context",
        ]


def measure(model: Decoder, at_least: float = 0.0) -> Roofline:
    """Reads the model's sizes and measures the memory; takes about a second. at_least: a bandwidth that was seen before."""
    config = model.config
    kv_bytes = KVCache.bytes_per_block(config, 1, model.dtype)
    # An input table that is not the output layer's as well is looked up row by row, not read.
    shared = config.tie_word_embeddings and not model.int8
    per_step = model.weight_bytes - (0 if shared else model.embedding.nbytes)
    per_step -= round(model.weight_bytes * config.num_idle_parameters / config.num_parameters)
    bandwidth = max(read_bandwidth(model.device), at_least)
    return Roofline(model.weight_bytes, per_step, kv_bytes, bandwidth, bandwidth / per_step, bandwidth / (per_step + 1024 * kv_bytes))


@dataclass(frozen=True, slots=True)
class MeasuredDevice:
    """memory_bytes: free now on a CPU, in all on a GPU; bandwidth: bytes per second; flops: of products of bfloat16, per second."""

    memory_bytes: int
    bandwidth: float
    flops: float
    is_cpu: bool


def measure_device() -> MeasuredDevice:
    """The GPU of this machine, or its CPU; takes about a second."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    is_cpu = device.type == "cpu"
    memory = available_cpu_bytes() if is_cpu else torch.cuda.mem_get_info(device)[1]
    return MeasuredDevice(memory, read_bandwidth(device), _product_rate(device, CPU_PRODUCT if is_cpu else GPU_PRODUCT), is_cpu)


def _product_rate(device: torch.device, size: int) -> float:
    """Floating-point operations per second of the best of a few square products."""
    a, b = (torch.ones(size, size, dtype=torch.bfloat16, device=device) for _ in range(2))

    def seconds() -> float:
        start = time.perf_counter()
        (a @ b)[0, 0].item()
        return time.perf_counter() - start

    return 2.0 * size**3 / min(seconds() for _ in range(PROBE_REPEATS))


def read_bandwidth(device: torch.device, num_bytes: int = PROBE_BYTES) -> float:
    """Bytes per second of the best of a few sums over a large tensor."""
    data = torch.ones(num_bytes // 4, dtype=torch.float32, device=device)

    def seconds() -> float:
        start = time.perf_counter()
        data.sum().item()   # .item() waits for the device
        return time.perf_counter() - start

    return data.nbytes / min(seconds() for _ in range(PROBE_REPEATS))
