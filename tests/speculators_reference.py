"""Numbers of the `speculators` package (vllm-project) for tiny EAGLE-3 checkpoints, to compare ours with.

`python -m tests.speculators_reference` in an environment with that package writes tests/fixtures/eagle3_speculators.json; where the
package is importable the test asks it again.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tests.heads import eagle3_dir, mtp_dir, target_config
from tests.tiny import tiny_model_dir

# By its distribution: the folder speculators/ of a checkout imports as an empty package of the same name.
INSTALLED = any(importlib.metadata.distributions(name="speculators"))
FIXTURE = Path(__file__).parent / "fixtures" / "eagle3_speculators.json"
MTP_FIXTURE = Path(__file__).parent / "fixtures" / "mtp_speculators.json"
NUM_TOKENS = 9
NUM_STEPS = 2
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "norms": {"norm_before_residual": True, "fc_norm": True, "norm_output": True},
    "input_norm": {"norm_before_fc": True, "draft_vocab": None},
    "two_layers": {"num_layers": 2},
    "qwen3": {"model_type": "qwen3", "norm_before_residual": True},
}


def make_directories(folder: Path, variant: str) -> tuple[Path, Path]:
    """(target, checkpoint)"""
    target = tiny_model_dir(folder, "llama", seed=11, num_hidden_layers=4, tie_word_embeddings=False)
    return target, eagle3_dir(folder / f"eagle3-{variant}", target, seed=5, draft_vocab=VARIANTS[variant].get("draft_vocab", 60),
                              layer_ids=(1, 2, 4), **{k: v for k, v in VARIANTS[variant].items() if k != "draft_vocab"})


def make_mtp_directories(folder: Path) -> tuple[Path, Path]:
    """(target, checkpoint)"""
    target = tiny_model_dir(folder, "llama", seed=11, num_hidden_layers=4, tie_word_embeddings=False)
    return target, mtp_dir(folder / "mtp", target, seed=5)


def inputs(target: Path) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Token ids [NUM_TOKENS + 1] and three hidden states [NUM_TOKENS, hidden]: pair i is (token i + 1, hidden states i)."""
    random = torch.Generator().manual_seed(21)
    config = target_config(target)
    tokens = torch.randint(3, config["vocab_size"], (NUM_TOKENS + 1,), generator=random)
    return tokens, [torch.randn(NUM_TOKENS, config["hidden_size"], generator=random) for _ in range(3)]


def ask_speculators(variant: str) -> list[list[list[float]]]:
    """Logits [steps][tokens][draft vocabulary]: step 0 after the pairs, step 1 after one more token on its own output."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig

    with tempfile.TemporaryDirectory() as folder:
        target, directory = make_directories(Path(folder), variant)
        config = Eagle3SpeculatorConfig.from_pretrained(str(directory))
        config.transformer_layer_config._attn_implementation = "eager"
        model = Eagle3DraftModel.from_pretrained(str(directory), config=config).float().eval()
        model.embed_tokens.weight.data.fill_(torch.nan)   # NaN asks for the target's; some transformers versions leave garbage there
        model.load_verifier_weights()
        seen: list[torch.Tensor] = []
        model.lm_head.register_forward_hook(lambda _module, _input, output: seen.append(output[0].float()))
        tokens, hidden = inputs(target)
        with torch.no_grad():
            model(
                torch.cat(hidden, -1)[None], tokens[None, 1:], torch.zeros(1, NUM_TOKENS, dtype=torch.long),
                position_ids=torch.arange(NUM_TOKENS)[None], ttt_steps=NUM_STEPS,
            )
    return [logits.tolist() for logits in seen[:NUM_STEPS]]


def ask_speculators_mtp() -> list[list[float]]:
    """Logits [tokens][vocabulary] of the first step."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    from speculators.models.mtp import MTPDraftModel, MTPSpeculatorConfig

    with tempfile.TemporaryDirectory() as folder:
        target, directory = make_mtp_directories(Path(folder))
        config = MTPSpeculatorConfig.from_pretrained(str(directory))
        config.transformer_layer_config._attn_implementation = "eager"
        model = MTPDraftModel.from_pretrained(str(directory), config=config).float().eval()
        weights = load_file(target / "model.safetensors")
        model.embed_tokens.weight.data = weights["model.embed_tokens.weight"]
        model.lm_head.weight.data = weights["lm_head.weight"]
        tokens, hidden = inputs(target)
        with torch.no_grad():
            logits = model(tokens[None], torch.cat([hidden[0], hidden[1][:1]])[None])[0][0]
    return logits[0].tolist()   # type: ignore[no-any-return]


def record() -> None:
    MTP_FIXTURE.write_text(json.dumps([[round(x, 5) for x in row[::20]] for row in ask_speculators_mtp()]))
    numbers = {name: [[[round(x, 5) for x in row] for row in step] for step in ask_speculators(name)] for name in VARIANTS}
    # Enough to tell one network from another: every fifth logit.
    FIXTURE.parent.mkdir(exist_ok=True)
    FIXTURE.write_text(json.dumps({name: [[row[::5] for row in step] for step in steps] for name, steps in numbers.items()}))


if __name__ == "__main__":
    sys.exit(record())
