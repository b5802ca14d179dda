"""README.md of a speculator: how it was made and what it reaches."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch

from headway.train.data import Text
from headway.train.live import Live
from headway.train.objective import mean_acceptance_length
from headway.train.options import TrainOptions
from headway.train.trainer import Trainer


def write(
    out: Path, options: TrainOptions, command: str, texts: Sequence[Text], trainer: Trainer, rates: list[float], live: Live, log: Path
) -> None:
    shape = trainer.head.shape
    columns = max(len(rates), len(live.rates))
    size = sum(p.numel() for p in trainer.head.parameters())
    tokens = sum(text.num_answer for text in texts)
    begun = f"- went on from the speculator that was in `{options.init}`\n" if options.init else ""
    source = f"from `{options.data}`" if options.data else "written by the target itself (self-instruction)"
    (out / "README.md").write_text(f"""# EAGLE-3 speculator for {options.target}

Drafts tokens for `{options.target}` from its hidden states (after layers {', '.join(str(i + 1) for i in shape.layers)} of
{trainer.target.config.num_layers}) over {shape.draft_vocab_size} of its {trainer.target.config.vocab_size} tokens. {size / 1e6:.1f} million
parameters, speculators format.

    headway serve {options.target} --speculative-config '{{"method": "eagle", "model": "{out}"}}'

## How it was made

    {command}

{begun}- data: {len(texts)} texts, {tokens} answer tokens, {source}
- {trainer.step} steps of {options.batch_tokens} positions ({trainer.epoch + 1} epochs begun), loss `{options.loss}` over
  {options.ttt_steps} draft steps, {trainer.seconds / 60:.0f} minutes of training, seed {options.seed}, products in {trainer.dtype}
  on {trainer.target.device}, torch {torch.__version__}

## What it reaches

{NOTE}

| draft position | {' | '.join(str(j + 1) for j in range(columns))} | tokens per step |
|---|{'---|' * (columns + 1)}
| held-out texts | {cells(rates, columns)} | {mean_acceptance_length(rates):.2f} |
| in the engine | {cells(live.rates, columns)} | {live.stats.mean_acceptance_length:.2f} |

In the engine: {live.num_tokens} tokens, one request at a time, in {live.seconds:.1f} s; without speculation {live.plain_seconds:.1f} s.

Acceptance of the first draft over the steps of training:

```
{plot(log)}
```
""", encoding="utf-8")


NOTE = """Greedy, on prompts that were never trained on. Each number is the share of drafts at that position that the target accepted,
given that it accepted the ones before; the last column counts the target's own token too."""


def cells(rates: Sequence[float], columns: int) -> str:
    return " | ".join([*(f"{rate:.3f}" for rate in rates), *[""] * (columns - len(rates))])


def plot(log: Path, width: int = 50) -> str:
    """One bar per evaluation."""
    lines = []
    for line in log.read_text(encoding="utf-8").splitlines():
        value = json.loads(line)
        if value["acceptance"]:
            first = value["acceptance"][0]
            lines.append(f"{value['step']:>7} {'█' * round(width * first)} {first:.3f}")
    return "\n".join(lines)
