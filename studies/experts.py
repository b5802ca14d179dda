"""What verification costs where every row has experts of its own: milliseconds of a pass of one request with n rows.

    python studies/experts.py [--layers 2] [--rounds 40] [--output results/experts/MACHINE.json]

Two networks with random weights: a mixture in the proportions of Qwen3-30B-A3B (128 experts of 768, 8 for each token, hidden size 2,048),
and a dense one whose MLP is as wide as the experts of one token together. Rows are tokens all over the vocabulary. The last line is
one JSON document.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from record import origin, publish

from headway.models import hub
from headway.models.attention import KVCache
from headway.models.config import ModelConfig
from headway.models.decoder import Decoder
from headway.models.loader import make_decoder
from headway.models.traits import ExpertTraits, Traits

TOKENIZER = "smollm2-135m"   # text does not matter, but there has to be some
ROWS = (1, 2, 3, 5, 9, 17)


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


def make(kind: str, layers: int) -> Decoder:
    directory = hub.resolve(TOKENIZER)
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    found: dict[str, Any] = {}
    for kind in ("experts", "dense"):
        times = steps(make(kind, args.layers), args.rounds)
        found[kind] = {"steps": times, "times_one_row": {rows: ms / times["1"] for rows, ms in times.items()}}
        print(kind, {rows: f"{ratio:.2f}" for rows, ratio in found[kind]["times_one_row"].items()}, flush=True)
    publish({**origin(), "layers": args.layers, **found}, args.output)


if __name__ == "__main__":
    main()
