"""What is known of a vLLM server before it starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Facts:
    """None: not known before the server starts."""

    version: str | None                      # of vLLM; None: not installed
    installed: bool = True
    refusal: str = ""                        # vLLM's own words, when it refuses these flags
    missing: tuple[str, ...] = ()            # what the plugin uses and this vLLM has not
    scheduler: str | None = None
    method: str | None = None
    model: str | None = None                 # of the speculative config: draft model or proposer class
    max_k: int | None = None
    table: Any = None
    rejection: str = "standard"
    adaptive: bool = False
    additional: Mapping[str, Any] = field(default_factory=dict)
    async_scheduling: bool | None = None
    async_asked: bool = False                # --async-scheduling was given
    v2_runner: bool | None = None
    cudagraphs: str | None = None            # name of vLLM's CUDAGraphMode
    device: str | None = None
    data_parallel: int = 1
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    api_servers: int = 1
    max_num_seqs: int | None = None
    kv_tokens: int | None = None             # how many tokens the K/V cache holds
    lora: bool = False
    ray: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)
