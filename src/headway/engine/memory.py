"""How many K/V blocks, how long a sequence may grow, and what drafters take of the same budget."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from headway.config import EngineConfig
from headway.drafters.drafter import DrafterMemory
from headway.errors import ConfigError
from headway.models.attention import KVCache
from headway.models.decoder import Decoder

# On a CPU the pool shares memory with everything else: half of what is free, and no more than this unless asked.
_CPU_SHARE = 0.5
_CPU_LIMIT_BYTES = 4 << 30
# Left on a GPU for activations and logits of one step.
_GPU_RESERVE_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """`kv_cache_bytes` is all of it; `drafter_kv_bytes` is what each drafter keeps beside the target's blocks."""

    num_blocks: int
    max_model_len: int
    kv_cache_bytes: int
    drafter_kv_bytes: Mapping[str, int]
    drafter_weight_bytes: Mapping[str, int]

    @property
    def target_kv_bytes(self) -> int:
        return self.kv_cache_bytes - sum(self.drafter_kv_bytes.values())

    def __str__(self) -> str:
        takes = "".join(
            f"; {name} takes {_size(self.drafter_kv_bytes[name])} of K/V and {_size(weights)} of weights"
            for name, weights in self.drafter_weight_bytes.items()
            if weights or self.drafter_kv_bytes[name]
        )
        return f"K/V cache: {self.num_blocks} blocks, {_size(self.target_kv_bytes)} for the target{takes}"


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**28 else f"{num_bytes / 2**20:.1f} MiB"


def plan_memory(config: EngineConfig, model: Decoder, drafters: Mapping[str, DrafterMemory] | None = None) -> MemoryPlan:
    """Sizes the pool from free memory or the flag; one sequence of `max_model_len` tokens always fits.

    A drafter's K/V is laid out beside the target's, block for block, so a budget buys fewer blocks when drafters keep K/V. Their
    weights are loaded after this: they come out of free memory first.

    Raises ConfigError when not even a short sequence would fit, or when the asked-for context does not.
    """
    drafters = drafters or {}
    extra = {name: memory.kv_bytes_per_block for name, memory in drafters.items()}
    weights = {name: memory.weight_bytes for name, memory in drafters.items()}
    per_block = KVCache.bytes_per_block(model.config, config.block_size, model.dtype) + sum(extra.values())
    longest = config.max_model_len or model.config.max_position
    if longest > model.config.max_position:
        raise ConfigError(f"max_model_len {longest} is more than the model's context of {model.config.max_position} tokens")
    most_useful = config.max_num_seqs * -(-longest // config.block_size)
    asked = config.kv_cache_memory_bytes
    num_bytes = asked if asked is not None else min(_default_bytes(config, model.device, sum(weights.values())), most_useful * per_block)
    num_blocks = num_bytes // per_block
    if num_blocks < 2:
        raise ConfigError(
            f"the K/V cache would have {num_blocks} blocks of {per_block} bytes; give kv_cache_memory_bytes >= {2 * per_block}"
        )
    if num_blocks * config.block_size < longest:
        if config.max_model_len is not None:
            raise ConfigError(
                f"max_model_len {longest} needs {-(-longest // config.block_size) * per_block} bytes of K/V cache, there are {num_bytes}; "
                "lower max_model_len or raise kv_cache_memory_bytes"
            )
        longest = num_blocks * config.block_size
    return MemoryPlan(num_blocks, longest, num_blocks * per_block, {name: num_blocks * size for name, size in extra.items()}, weights)


def kv_bytes_each(config: EngineConfig, model: Decoder, num_engines: int) -> int:
    """Of the K/V cache of each of several engines around one model: what one alone would take, if there is as much for all."""
    alone = plan_memory(config, model).kv_cache_bytes
    if config.kv_cache_memory_bytes is not None:
        return config.kv_cache_memory_bytes
    room = alone if model.device.type == "cuda" else int(available_cpu_bytes() * _CPU_SHARE)
    return min(alone, room // num_engines)


def _default_bytes(config: EngineConfig, device: torch.device, to_be_loaded: int) -> int:
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return max(0, int(free - total * (1.0 - config.gpu_memory_utilization)) - _GPU_RESERVE_BYTES - to_be_loaded)
    return min(max(0, int((available_cpu_bytes() - to_be_loaded) * _CPU_SHARE)), _CPU_LIMIT_BYTES)


def available_cpu_bytes() -> int:
    """Free memory of the machine, or of the control group when that is less."""
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                available = int(line.split()[1]) * 1024
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.exists() and used.exists() and (text := limit.read_text().strip()) != "max":
        available = min(available, int(text) - int(used.read_text()))
    return available
