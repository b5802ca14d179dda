"""What the exported speculator reaches in the engine itself, on prompts never trained on."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from headway.config import SpeculativeConfig
from headway.engine.engine import Engine
from headway.sampling_params import SamplingParams
from headway.spec_decode_metrics import SpecDecodeMetrics
from headway.train.options import TrainOptions
from headway.train.screen import Screen
from headway.types import Request

NUM_PROMPTS = 8
NUM_DRAFTS = 4


@dataclass
class Live:
    """One request at a time, greedy."""

    stats: SpecDecodeMetrics = field(default_factory=SpecDecodeMetrics)
    num_tokens: int = 0
    seconds: float = 0.0
    plain_seconds: float = 0.0

    @property
    def rates(self) -> list[float]:
        """P(accepted | the ones before were) by position."""
        judged = [self.stats.num_spec_steps, *self.stats.num_accepted_per_pos]
        return [hit / tried if tried else 0.0 for tried, hit in zip(judged, self.stats.num_accepted_per_pos, strict=False)]


def accept_live(engine: Engine, speculator: Path, prompts: Sequence[list[int]], options: TrainOptions, screen: Screen) -> Live:
    live = Live()
    prompts = prompts[:NUM_PROMPTS]
    with screen.bar("live acceptance (prompts)", 2 * len(prompts)) as advance:
        eagle = {"method": "eagle", "model": str(speculator), "num_speculative_tokens": NUM_DRAFTS, "policy": "static"}
        for speculative in (None, eagle):
            engine.speculate(SpeculativeConfig.parse(speculative))
            began = time.perf_counter()
            for number, prompt in enumerate(prompts):
                params = SamplingParams(temperature=0.0, max_tokens=options.max_tokens)
                num_tokens = _run(engine, Request(str(number), prompt, params), live)
                live.num_tokens += num_tokens if speculative else 0
                advance(1)
            if speculative:
                live.seconds = time.perf_counter() - began
            else:
                live.plain_seconds = time.perf_counter() - began
    return live


def _run(engine: Engine, request: Request, live: Live) -> int:
    engine.add(request)
    written = 0
    while engine.has_work():
        for delta in engine.step():
            written += len(delta.token_ids)
            if delta.stats is not None and delta.stats.num_spec_steps:
                live.stats.add(delta.stats)
    return written
