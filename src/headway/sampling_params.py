"""What one request asks for: how it is sampled, and what it wants of speculation. Standard library only."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields

from headway.errors import InvalidRequestError
from headway.structured_outputs import StructuredOutputsParams

# Bounds of what a request may list. With this many, a token costs about what sampling it from its logits does. OpenAI takes 300 biases
# and 4 stop strings; vLLM has no bounds.
MAX_LIST = 1024             # entries of logit_bias, bad_words and stop_token_ids, each
MAX_STOP_STRINGS = 64
MAX_STRING_LENGTH = 256     # characters of a stop string or of a bad word


@dataclass(frozen=True, slots=True)
class RequestSpeculation:
    """What one request asks of speculation: off (`enabled=False`), at most `max_tokens` drafts per step, or a time per output token that
    the policy should keep to (`tpot_slo_ms`; of the policies, `goodput` does)."""

    enabled: bool = True
    max_tokens: int | None = None
    tpot_slo_ms: float | None = None

    def __post_init__(self) -> None:
        if self.max_tokens is not None and self.max_tokens < 0:
            raise InvalidRequestError(f"speculative.max_tokens must be >= 0, got {self.max_tokens}", param="speculative")
        if self.tpot_slo_ms is not None and not 0.0 < self.tpot_slo_ms < math.inf:
            raise InvalidRequestError(f"speculative.tpot_slo_ms must be > 0 and finite, got {self.tpot_slo_ms}", param="speculative")


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request is sampled; names and defaults are vLLM's.

    Raises InvalidRequestError (a ValueError) for a value out of range.
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | tuple[str, ...] | list[str] | None = None
    stop_token_ids: tuple[int, ...] | list[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    logit_bias: Mapping[int, float] | None = None
    bad_words: tuple[str, ...] | list[str] | None = None
    structured_outputs: StructuredOutputsParams | None = None
    speculative: RequestSpeculation = RequestSpeculation()

    def __post_init__(self) -> None:
        def check(ok: bool, name: str, accepted: str) -> None:
            if not ok:
                raise InvalidRequestError(f"{name} must be {accepted}, got {getattr(self, name)!r}", param=name)

        self._check_lists()
        for spec in fields(self):
            value = getattr(self, spec.name)
            if isinstance(value, float) and not math.isfinite(value):
                check(False, spec.name, "a finite number")
        check(self.n >= 1, "n", ">= 1")
        check(-2.0 <= self.presence_penalty <= 2.0, "presence_penalty", "in [-2, 2]")
        check(-2.0 <= self.frequency_penalty <= 2.0, "frequency_penalty", "in [-2, 2]")
        check(self.repetition_penalty > 0.0, "repetition_penalty", "> 0")
        check(self.temperature >= 0.0, "temperature", ">= 0")
        check(0.0 < self.top_p <= 1.0, "top_p", "in (0, 1]")
        check(self.top_k >= -1, "top_k", ">= -1 (0 and -1 switch it off)")
        check(0.0 <= self.min_p <= 1.0, "min_p", "in [0, 1]")
        check(self.max_tokens is None or self.max_tokens >= 1, "max_tokens", ">= 1 or None")
        check(self.min_tokens >= 0, "min_tokens", ">= 0")
        check(self.max_tokens is None or self.min_tokens <= self.max_tokens, "min_tokens", f"<= max_tokens ({self.max_tokens})")
        check(self.logprobs is None or 0 <= self.logprobs <= 20, "logprobs", "in [0, 20] or None")
        check(self.prompt_logprobs is None or 0 <= self.prompt_logprobs <= 20, "prompt_logprobs", "in [0, 20] or None")
        check("" not in self.stop_strings, "stop", "non-empty strings")
        check(all(math.isfinite(bias) for bias in (self.logit_bias or {}).values()), "logit_bias", "finite numbers by token id")

    def _check_lists(self) -> None:
        """Before anything walks through them."""
        strings = {"stop": self.stop_strings, "bad_words": self.bad_words or ()}
        for name, entries, most in (
            ("logit_bias", self.logit_bias or (), MAX_LIST),
            ("stop_token_ids", self.stop_token_ids or (), MAX_LIST),
            ("bad_words", strings["bad_words"], MAX_LIST),
            ("stop", strings["stop"], MAX_STOP_STRINGS),
        ):
            if len(entries) > most:
                raise InvalidRequestError(f"{name} has {len(entries)} entries; at most {most} are accepted", param=name)
        for name, texts in strings.items():
            longest = max(map(len, texts), default=0)
            if longest > MAX_STRING_LENGTH:
                raise InvalidRequestError(
                    f"{name} holds a string of {longest} characters; at most {MAX_STRING_LENGTH} are accepted", param=name
                )

    @property
    def greedy(self) -> bool:
        return self.temperature < 1e-5

    @property
    def stop_strings(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
