"""The load that is put on an engine or a server."""

from __future__ import annotations

from dataclasses import dataclass

from headway.config import option
from headway.errors import ConfigError, unknown_key

PATTERNS = ("closed", "poisson", "ramp", "rollout")


@dataclass(frozen=True)
class LoadOptions:
    """The load of one run; the command-line flags are made from these fields."""

    workload: str = option("code-edit", "code-edit, summarize, chat, reasoning, mixed, drift, random or jsonl:PATH")
    num_prompts: int = option(32, "requests to measure")
    output_len: int = option(128, "tokens to write per request")
    output_range_ratio: float = option(0.0, "lengths spread between output-len * (1 - ratio) and output-len * (1 + ratio); in [0, 1)")
    concurrency: int = option(8, "requests in flight (ramp: at its height)")
    arrivals: str = option(
        "closed", "when requests start: closed loop, poisson, ramp (up and down) or rollout (all at once, long tail)", choices=PATTERNS
    )
    request_rate: float | None = option(None, "poisson: requests per second, however many are in flight; chooses poisson by itself")
    seed: int = option(0, "chooses the prompts, the arrival times and, with a temperature, the samples")
    temperature: float = option(0.0, "0: greedy")
    ignore_eos: bool = option(True, "write exactly output-len tokens, so that two runs write the same number")
    warmup: int = option(2, "requests before the clock starts; their prompts are not measured again")

    def __post_init__(self) -> None:
        for name, least in (("num_prompts", 1), ("output_len", 1), ("concurrency", 1), ("warmup", 0)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name} must be >= {least}, got {getattr(self, name)}")
        if not 0.0 <= self.temperature < float("inf"):
            raise ConfigError(f"temperature must be a finite number >= 0, got {self.temperature}")
        if not 0.0 <= self.output_range_ratio < 1.0:
            raise ConfigError(f"output_range_ratio must be >= 0 and < 1, got {self.output_range_ratio}")
        if self.arrivals not in PATTERNS:
            raise ConfigError(unknown_key("arrivals", self.arrivals, PATTERNS))
        if self.request_rate is not None:
            if not 0.0 < self.request_rate < float("inf"):
                raise ConfigError(f"request_rate must be a finite number > 0, got {self.request_rate}")
            if self.arrivals not in ("closed", "poisson"):
                raise ConfigError(f"request_rate is for poisson arrivals, not for {self.arrivals}")
            object.__setattr__(self, "arrivals", "poisson")
        elif self.arrivals == "poisson":
            raise ConfigError("poisson arrivals need a request_rate")

    def __str__(self) -> str:
        """What was asked of the engine, in words for a table's title."""
        pace = {
            "closed": f"{self.concurrency} in flight",
            "poisson": f"{self.request_rate} requests/s",
            "ramp": f"1 to {self.concurrency} in flight and back",
            "rollout": f"{self.num_prompts} at once, every eighth four times as long",
        }
        spread = f"{self.output_len} tokens each"
        if self.output_range_ratio:
            low, high = (round(self.output_len * (1.0 + sign * self.output_range_ratio)) for sign in (-1, 1))
            spread = f"{low} to {high} tokens each"
        return f"{self.workload}, {pace[self.arrivals]}, {spread}"
