"""What verification costs where every row has experts of its own, and whether the default policy finds how much to draft there.

    python studies/experts.py [--layers 2] [--output results/experts/MACHINE.json]

Two networks with random weights: a mixture in the proportions of Qwen3-30B-A3B (128 experts of 768, 8 for each token, hidden size 2,048),
and a dense one whose MLP is as wide as the experts of one token together. `steps`: milliseconds of a pass of one request with n rows.
`text`: tokens a second with drafts of arbitrary tokens, which cost nothing and are accepted at the given rate whatever they are, by fixed
numbers of drafts and by the default policy, which starts knowing nothing and learns for LEARN_S seconds before it is measured. The last
line is one JSON document.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from record import origin, publish

from headway.config import EngineConfig, SpeculativeConfig
from headway.control.policy import ContinueDrafting
from headway.drafters.drafter import Drafter, DraftRequest
from headway.engine.engine import Engine
from headway.models import hub
from headway.models.attention import KVCache
from headway.models.config import ModelConfig
from headway.models.decoder import Decoder
from headway.models.loader import make_decoder
from headway.models.traits import ExpertTraits, Traits
from headway.types import Draft, Request, SamplingParams

TOKENIZER = "smollm2-135m"   # text does not matter, but there has to be some
ROWS = (1, 2, 3, 5, 9, 17)
RATES = (0.5, 0.7, 0.9)
FIXED = (0, 1, 2, 4, 8)
REQUESTS = (1, 4)
WARM_S, MEASURED_S, LEARN_S = 0.2, 1.0, 4.0


class Arbitrary(Drafter):
    """Tokens all over the vocabulary, as different as those of text."""

    def __init__(self, options: object = None) -> None:
        self.random = torch.Generator().manual_seed(0)

    def propose(self, requests: Sequence[DraftRequest], continue_drafting: ContinueDrafting) -> list[Draft]:
        return [Draft(torch.randint(1000, 40000, (request.k,), generator=self.random).tolist()) for request in requests]


class RandomWeights:
    """One random tensor of each shape: a layer copies it, and which values it has changes no time."""

    def __init__(self) -> None:
        self.made: dict[tuple[int, ...], torch.Tensor] = {}
        self.random = torch.Generator().manual_seed(0)

    def take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        if len(shape) == 1:
            return torch.ones(shape)
        if "embed_tokens" in name:   # what a token is says more than what was before it, as in text
            return torch.randn(shape, generator=self.random) * 4.0
        if shape not in self.made or "mlp.gate." in name:   # routers differ
            self.made[shape] = torch.randn(shape, generator=self.random) * shape[-1] ** -0.5
        return self.made[shape]


def make(kind: str, layers: int, directory: Path) -> Decoder:
    small = ModelConfig.from_directory(directory)
    experts = ExpertTraits(128, 8, 768, (True,) * layers) if kind == "experts" else None
    config = replace(
        small, hidden_size=2048, intermediate_size=8 * 768, num_layers=layers, num_heads=32, num_kv_heads=4, head_dim=128,
        max_position=8192, tie_word_embeddings=False, features=Traits(qk_norm=True, experts=experts),
    )   # fmt: skip
    return make_decoder(config, RandomWeights(), torch.bfloat16, torch.device("cpu"), directory)


def steps(model: Decoder, rounds: int) -> dict[str, float]:
    """Rows -> median milliseconds of a pass, other tokens every time."""
    cache = KVCache(model.config, 8, 64, model.dtype, model.device)
    first = torch.randint(0, model.config.vocab_size, (64,))
    model.forward(first, torch.arange(64), cache.plan([(list(range(8)), 0, 64)]), cache)
    times: dict[int, list[float]] = {rows: [] for rows in ROWS}
    for _ in range(rounds):
        for rows in ROWS:
            tokens = torch.randint(0, model.config.vocab_size, (rows,))
            plan = cache.plan([(list(range(8)), 64, rows)])
            began = time.perf_counter()
            model.logits(model.forward(tokens, torch.arange(64, 64 + rows), plan, cache)[0])
            times[rows].append((time.perf_counter() - began) * 1e3)
    return {str(rows): statistics.median(mine[1:]) for rows, mine in times.items()}


def text(model: Decoder, rate: float, policy: str, k: int, requests: int) -> tuple[float, float]:
    """(tokens a second, drafts verified for each request and step)"""
    speculative = SpeculativeConfig.parse({
        "method": "__main__:Arbitrary", "rejection_sample_method": "synthetic", "num_speculative_tokens": k,
        "synthetic_acceptance_rates": [rate ** (j + 1) for j in range(k)], "policy": policy,
    }) if k else None  # fmt: skip
    with tempfile.TemporaryDirectory() as home:   # nothing that another cell learned
        os.environ["HEADWAY_HOME"] = home
        config = EngineConfig(
            model=str(model.directory), speculative=speculative, max_model_len=8192, kv_cache_memory_bytes=1 << 28, seed=requests
        )   # fmt: skip
        return measured(Engine(config, model=model), policy, requests)


def measured(engine: Engine, policy: str, requests: int) -> tuple[float, float]:
    for i in range(requests):   # sampled, or the text would soon repeat one token, and its experts stay in the caches
        engine.add(Request(f"r{i}", [1000 + i] * 8, SamplingParams(temperature=1.0, seed=i, max_tokens=7000, ignore_eos=True)))
    warm = time.perf_counter() + (LEARN_S if policy == "goodput" else WARM_S)
    while time.perf_counter() < warm:
        engine.step()
    began, tokens, num_steps, verified = time.perf_counter(), 0, 0, engine.metrics.num_verified_drafts
    while time.perf_counter() < began + MEASURED_S and engine.has_work():
        tokens += sum(len(delta.token_ids) for delta in engine.step())
        num_steps += 1
    per_step = (engine.metrics.num_verified_drafts - verified) / num_steps / requests
    return tokens / (time.perf_counter() - began), per_step


WAYS = {**{f"k{k}": ("static", k) for k in FIXED}, "goodput": ("goodput", max(FIXED))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    directory = hub.resolve(TOKENIZER)
    found: dict[str, Any] = {}
    for kind in ("experts", "dense"):
        model = make(kind, args.layers, directory)
        times = steps(model, 12)
        found[kind] = {"steps": times, "times_one_row": {rows: ms / times["1"] for rows, ms in times.items()}, "text": {}}
        print(kind, {rows: f"{ratio:.2f}" for rows, ratio in found[kind]["times_one_row"].items()}, flush=True)
        for requests in REQUESTS:
            for rate in RATES:
                cell = {name: text(model, rate, *way, requests) for name, way in WAYS.items()}
                entries = {name: {"tokens_per_s": speed, "drafts": drafts} for name, (speed, drafts) in cell.items()}
                found[kind]["text"][f"{rate}@{requests}"] = entries
                print(kind, f"{rate}@{requests}", {name: f"{speed:.1f} ({k:.1f})" for name, (speed, k) in cell.items()}, flush=True)
        del model
    publish({**origin(), "layers": args.layers, **found}, args.output)


if __name__ == "__main__":
    main()
