"""All or nothing: speculate while at most N requests decode, decode plainly while more do.

vLLM's first engine had the option under this name. Its documentation said "larger than", its code switched off at N already; here
N requests still speculate. Prefill chunks do not count, and the decision is made anew at each step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from headway.config import option
from headway.control.policies.static import same_for_all
from headway.control.policy import BatchView, Policy
from headway.errors import ConfigError
from headway.types import Choice


class DisableByBatchSize(Policy):
    @dataclass(frozen=True)
    class Options:
        disable_by_batch_size: int = option(0, "largest number of decoding requests that still speculate, >= 1")

        def __post_init__(self) -> None:
            if self.disable_by_batch_size < 1:
                raise ConfigError(f"disable_by_batch_size is needed and must be >= 1, got {self.disable_by_batch_size}")

    def __init__(self, options: Options) -> None:
        self._largest = options.disable_by_batch_size

    def plan(self, view: BatchView) -> Mapping[int, Choice]:
        return same_for_all(view, view.max_k) if view.num_decoding <= self._largest else {}
