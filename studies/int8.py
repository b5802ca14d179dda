"""What int8 weights gain and cost: the matrix products of a step by number of rows, and how well the model still predicts.

    python studies/int8.py [--model smollm2-135m] [--rounds 20] [--output results/int8/MACHINE.json]

Products: all of a pass in turn, bf16 and int8 interleaved, medians in milliseconds. Prediction: perplexity, share of equal likeliest
tokens and KL divergence to float32, on sources and prose of Python's own library. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sysconfig
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from record import origin, publish

from headway.engine.tokenizer import Tokenizer
from headway.models.attention import KVCache
from headway.models.decoder import Decoder
from headway.models.loader import load_model

ROWS = (1, 2, 4, 8, 16, 32, 80, 160, 512)
BLOCK = 64
WAYS: dict[str, dict[str, Any]] = {
    "bf16": {"dtype": "bfloat16"}, "int8": {"dtype": "bfloat16", "quantization": "int8"}, "float32": {"dtype": "float32"},
}


def products_ms(models: dict[str, Decoder], rounds: int) -> dict[str, dict[str, float]]:
    """Rows -> way -> milliseconds of all products of a pass."""
    found: dict[str, dict[str, float]] = {}
    for rows in ROWS:
        config = models["bf16"].config
        hidden, wide, inner = (
            torch.randn(rows, size).to(torch.bfloat16)
            for size in (config.hidden_size, config.num_heads * config.head_dim, config.intermediate_size)
        )
        times: dict[str, list[float]] = {way: [] for way in models}
        for _ in range(max(3, rounds if rows < 64 else rounds // 4)):
            for way, model in models.items():
                began = time.perf_counter()
                for layer in model.layers:
                    layer.qkv(hidden), layer.o(wide), layer.mlp.gate_up(hidden), layer.mlp.down(inner)
                model.logits(hidden)
                times[way].append((time.perf_counter() - began) * 1e3)
        found[str(rows)] = {way: statistics.median(mine[1:]) for way, mine in times.items()}
        print(f"{rows:>4} rows  " + "  ".join(f"{way} {ms:8.2f} ms" for way, ms in found[str(rows)].items()), flush=True)
    return found


def logits_of(model: Decoder, token_ids: list[int]) -> torch.Tensor:
    blocks = list(range(-(-len(token_ids) // BLOCK)))
    cache = KVCache(model.config, len(blocks), BLOCK, model.dtype, model.device)
    hidden, _ = model.forward(torch.tensor(token_ids), torch.arange(len(token_ids)), cache.plan([(blocks, 0, len(token_ids))]), cache)
    return model.logits(hidden).float()


def texts() -> list[str]:
    from pydoc_data.topics import topics

    library = Path(sysconfig.get_paths()["stdlib"])
    return [(library / name).read_text() for name in ("textwrap.py", "heapq.py")] + [topics["compound"], topics["specialnames"]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=900, help="of each text")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    models = {way: load_model(args.model, device="cpu", progress=False, **WAYS[way]) for way in ("bf16", "int8")}
    speed = products_ms(models, args.rounds)
    tokenizer = Tokenizer(models["bf16"].directory)
    documents = [tokenizer.encode(text)[: args.tokens] for text in texts()]
    models["float32"] = load_model(args.model, device="cpu", progress=False, **WAYS["float32"])
    sums = {way: torch.zeros(3, dtype=torch.float64) for way in models}   # loss, equal likeliest tokens, divergence
    for token_ids in documents:
        exact = logits_of(models["float32"], token_ids)[:-1]
        for way, model in models.items():
            logits = logits_of(model, token_ids)[:-1]
            divergence = F.kl_div(logits.log_softmax(-1), exact.log_softmax(-1), reduction="sum", log_target=True)
            loss = F.cross_entropy(logits, torch.tensor(token_ids[1:]), reduction="sum")
            sums[way] += torch.stack([loss, (logits.argmax(-1) == exact.argmax(-1)).sum(), divergence]).double()
        gc.collect()
    count = sum(len(token_ids) - 1 for token_ids in documents)
    quality = {
        way: {"perplexity": float((loss / count).exp()), "likeliest_equal": float(equal / count), "kl": float(divergence / count)}
        for way, (loss, equal, divergence) in sums.items()
    }
    for way, of in quality.items():
        print(f"{way:>8}  perplexity {of['perplexity']:.3f}  likeliest token equal {of['likeliest_equal']:.1%}  KL {of['kl']:.5f}")
    document = {
        "benchmark": "int8", "products_ms": speed, "quality": quality, "num_tokens": count,
        "weight_bytes": {way: model.weight_bytes for way, model in models.items()},
        **origin(),
    }  # fmt: skip
    publish(document, args.output)


if __name__ == "__main__":
    main()
