"""`headway train confidence_head`: an acceptance head (drafters/core/confidence_head.py) for a drafter, from real verification.

The drafter drafts while the target answers, as it will when it serves. At each drafted position the head is to say, from the state before
the token is chosen, how likely the target accepts it. What it learns is that probability: whether the target says the likeliest token,
where that is proposed, else sum over x of min(p(x), q(x)). Up to the first rejection these are the positions a head is asked about. Behind
it the text is the drafter's own, a mixture of both models' tokens as a long draft has; those count `token_mixing` each.

Binary cross-entropy on soft labels, rejections weighted `reject_weight` times (SpecDec++, arXiv:2405.19715): a draft stopped too late costs
more than one stopped too early.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from headway.config import EngineConfig, SpeculativeConfig
from headway.drafters.core.confidence_head import ACCEPTED, REFUSED
from headway.engine.engine import Engine
from headway.engine.runner import ForwardOutput
from headway.errors import ConfigError
from headway.models import hub
from headway.models.config import read_json
from headway.train import data
from headway.train.data import TextFile
from headway.train.options import TrainOptions
from headway.train.run_record import check, interruptible, open_record
from headway.train.screen import Screen
from headway.train.trainer import TrainingError
from headway.types import Draft, Row, Verdict

DATA_SHARE = 0.7        # of the time: a head of a few hundred thousand numbers learns in seconds
EPOCHS = 3
NUM_DRAFTS = 6
HELD_OUT = 0.1          # of the positions, the last ones: of texts that are not learned
CHECKPOINT_SECONDS = 60.0
FILE = "confidence_head.safetensors"


def train(options: TrainOptions, command: str, screen: Screen) -> dict[str, float]:
    """Returns what the head reaches on positions never learned. Raises as `run.train` does; the same command goes on where it stopped."""
    out, run = Path(options.out), Path(options.out) / "run"
    plan = open_record(run, options)
    with interruptible() as stopped:
        path = run / "positions.safetensors"
        if not path.exists():
            save_file(_collect(options, run, screen, stopped), path.with_suffix(".part"))
            path.with_suffix(".part").replace(path)
        positions = load_file(path)
        trainer = HeadTrainer(positions, options, run)
        trainer.load()
        num_steps = plan.number("num_steps", lambda: options.num_steps or EPOCHS * trainer.steps_per_epoch)
        screen.say(f"{len(positions['states'])} drafted positions, {float(positions['labels'].mean()):.2f} accepted; {num_steps} steps")
        with screen.bar("steps", num_steps) as advance:
            advance(trainer.step)
            saved = time.monotonic()
            while trainer.step < num_steps and not stopped():
                trainer.train_step(num_steps)
                advance(1)
                if time.monotonic() - saved > CHECKPOINT_SECONDS:
                    trainer.save()
                    saved = time.monotonic()
        trainer.save()
        check(stopped)
    save_file({f"model.{name}": tensor.contiguous() for name, tensor in trainer.head.state_dict().items()}, out / FILE)
    found = trainer.evaluate()
    _write_card(out, options, command, trainer, found)
    screen.say(f"on positions never learned: loss {found['loss']:.3f} (constant: {found['constant']:.3f}), AUC {found['auc']:.3f}")
    return found


# -- positions ------------------------------------------------------------------------------------------------------


class _Witness:
    """Stands in for a head: keeps the states it is asked about, and answers with their numbers, by which labels find them."""

    def __init__(self) -> None:
        self.states: list[Tensor] = []
        self.count = 0
        self.labelled: list[tuple[list[int], Tensor, int]] = []   # (numbers of the states, labels, how many are not behind a rejection)

    def __call__(self, state: Tensor) -> Tensor:
        first, self.count = self.count, self.count + len(state)
        self.states.append(state.to("cpu", torch.bfloat16))
        return torch.arange(first, self.count, device=state.device, dtype=torch.float32)

    def judge(self, logits: Tensor, rows: Sequence[Row], drafts: Sequence[Draft | None], verdicts: Sequence[Verdict]) -> None:
        at = 0
        for row, draft, verdict in zip(rows, drafts, verdicts, strict=True):
            if draft is not None and draft.confidence is not None:
                labels = _labels(logits[at : at + len(draft)].float(), draft, row.seq.params.temperature)
                self.labelled.append(([int(number) for number in draft.confidence], labels.cpu(), verdict.num_accepted + 1))
            at += 1 + (len(draft) if draft is not None else 0)

    def positions(self, mixing: float) -> dict[str, Tensor]:
        """states bf16 [n, hidden], labels and weights f32 [n], in the order in which they were drafted."""
        numbers = torch.tensor([number for part, _, _ in self.labelled for number in part])
        if len(numbers) == 0:
            raise ConfigError("nothing was drafted in the time: give more --minutes, or --data with prompts that are answered at length")
        weights = [1.0 if j < clean else mixing for part, _, clean in self.labelled for j in range(len(part))]
        return {
            "states": torch.cat(self.states)[numbers], "labels": torch.cat([labels for _, labels, _ in self.labelled]),
            "weights": torch.tensor(weights),
        }


class _WitnessedEngine(Engine):
    """An engine whose drafter asks a witness, which then sees what was verified."""

    def __init__(self, config: EngineConfig, *, progress: bool) -> None:
        super().__init__(config, progress=progress)
        self.witness = _Witness()
        for drafter in self.drafters.values():
            drafter.judge_by(self.witness)   # type: ignore[attr-defined]

    def _verify(
        self, out: ForwardOutput, rows: Sequence[Row], drafts: Sequence[Draft | None]
    ) -> list[Verdict | None]:
        verdicts = super()._verify(out, rows, drafts)
        sampling = [i for i, row in enumerate(rows) if row.samples]
        self.witness.judge(
            out.logits, [rows[i] for i in sampling], [drafts[i] for i in sampling], [v for v in verdicts if v is not None]
        )
        return verdicts


def _labels(logits: Tensor, draft: Draft, temperature: float) -> Tensor:
    """P(accepted) [len(draft)] of what the drafter proposes at each position."""
    tokens = torch.tensor(draft.tokens, device=logits.device)
    if temperature < 1e-5:
        return (logits.argmax(-1) == tokens).float()
    p = torch.softmax(logits / temperature, -1)
    return p.gather(-1, tokens[:, None])[:, 0] if draft.probs is None else torch.minimum(p, draft.probs).sum(-1)


def _collect(options: TrainOptions, run: Path, screen: Screen, stopped: Any) -> dict[str, Tensor]:
    """Answers texts with speculation; what is drafted is judged as it is verified. Begins anew when it was interrupted."""
    method = drafter_of(options.drafter)
    speculative = SpeculativeConfig.parse({
        "method": method, "model": options.drafter, "num_speculative_tokens": NUM_DRAFTS, "policy": "static",
    })  # fmt: skip
    engine = _WitnessedEngine(EngineConfig(
        model=options.target, dtype=options.dtype, device=options.device, seed=options.seed, num_threads=options.num_threads,
        speculative=speculative,
    ), progress=True)  # fmt: skip
    (run / "texts.jsonl").unlink(missing_ok=True)
    file = TextFile(run / "texts.jsonl", [])
    prompts: Iterator[list[int]] | None = None
    if options.data is not None:
        asked, complete = data.read_user_file(Path(options.data), engine, engine.max_model_len - options.max_tokens)
        prompts = iter([*asked, *(text.token_ids[: text.num_prompt] for text in complete)])
    deadline = time.monotonic() + DATA_SHARE * options.minutes * 60.0
    with screen.bar("texts (answer tokens)", options.num_tokens) as advance:
        data.write_texts(engine, file, prompts, max_tokens=options.max_tokens, seed=options.seed, deadline=deadline,
                         num_tokens=options.num_tokens, advance=advance, stopped=stopped)  # fmt: skip
    check(stopped)
    return engine.witness.positions(options.token_mixing)


def drafter_of(model: str | None) -> str:
    """Which drafter runs the network called `model`. Raises ConfigError or ModelError."""
    if model is None:
        raise ConfigError("a confidence head is trained for a drafter: give its network with --drafter")
    config = read_json(hub.resolve(model, weights=hub.SPECULATOR_WEIGHTS) / "config.json")
    kind = config.get("speculators_model_type") or ""
    named = " ".join([kind, *(config.get("architectures") or [])]).lower()
    if "mtp" in named:
        return "mtp"
    if "eagle" in named:
        return "eagle"
    if kind or "medusa" in named or "mlpspeculator" in named:
        raise ConfigError(f"{model}: {kind or named} drafts without a state to judge. Accepted: draft models, eagle, mtp")
    return "draft_model"


# -- the head -------------------------------------------------------------------------------------------------------


class _Block(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.silu(self.linear(x))


class HeadTrainer:
    """Weights, optimizer and place in the data; all of it is in the checkpoint, so a resumed run is an uninterrupted one."""

    def __init__(self, positions: dict[str, Tensor], options: TrainOptions, run: Path) -> None:
        self.options, self.checkpoint = options, run / "checkpoint.pt"
        self.states, self.labels, self.weights = positions["states"], positions["labels"], positions["weights"]
        self.num_learned = max(1, int(len(self.labels) * (1.0 - HELD_OUT)))
        torch.manual_seed(options.seed)
        size = self.states.shape[1]
        self.head = nn.Sequential(*(_Block(size) for _ in range(options.num_blocks)), nn.Linear(size, 2))
        self.optimizer = torch.optim.AdamW(self.head.parameters(), lr=options.learning_rate, weight_decay=0.01)
        self.step = 0

    @property
    def steps_per_epoch(self) -> int:
        return -(-self.num_learned // self.options.batch_tokens)

    def save(self) -> None:
        part = self.checkpoint.with_suffix(".part")
        torch.save({"step": self.step, "head": self.head.state_dict(), "optimizer": self.optimizer.state_dict()}, part)
        part.replace(self.checkpoint)

    def load(self) -> None:
        if not self.checkpoint.exists():
            return
        try:
            state = torch.load(self.checkpoint, weights_only=True)
            self.head.load_state_dict(state["head"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.step = state["step"]
        except Exception as error:   # torch raises many kinds for a damaged file
            raise TrainingError(f"{self.checkpoint} cannot be resumed from: {error}; delete it to start again") from error

    def train_step(self, num_steps: int) -> float:
        epoch, index = divmod(self.step, self.steps_per_epoch)
        order = torch.randperm(self.num_learned, generator=torch.Generator().manual_seed(self.options.seed + epoch))
        rows = order[index * self.options.batch_tokens : (index + 1) * self.options.batch_tokens]
        for group in self.optimizer.param_groups:
            group["lr"] = self.options.learning_rate * (1.0 - self.step / num_steps)
        loss = self.loss(rows)
        if not bool(torch.isfinite(loss)):
            raise TrainingError(f"the loss is not a number at step {self.step + 1}; {self.checkpoint} holds the last good state")
        self.optimizer.zero_grad()
        loss.backward()   # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.head.parameters(), 1.0)
        self.optimizer.step()
        self.step += 1
        return float(loss.detach())

    def loss(self, rows: Tensor) -> Tensor:
        return self._cross_entropy(torch.log_softmax(self.head(self.states[rows].float()), -1), rows)

    def _cross_entropy(self, logs: Tensor, rows: Tensor) -> Tensor:
        label, weight = self.labels[rows], self.weights[rows]
        each = label * logs[:, ACCEPTED] + self.options.reject_weight * (1.0 - label) * logs[:, REFUSED]
        return -(weight * each).sum() / weight.sum()

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """On the positions held out: the loss, that of the best constant, and how well accepted are told from rejected (AUC)."""
        rows = torch.arange(min(self.num_learned, len(self.labels) - 1), len(self.labels))
        logs = torch.log_softmax(self.head(self.states[rows].float()), -1)
        label, weight = self.labels[rows], self.weights[rows]
        accepted, refused = (weight * label).sum(), self.options.reject_weight * (weight * (1.0 - label)).sum()
        share = (accepted / (accepted + refused)).clamp(1e-6, 1 - 1e-6)
        constant = torch.stack([torch.log1p(-share), torch.log(share)]).expand(len(rows), 2)
        return {
            "loss": float(self._cross_entropy(logs, rows)), "constant": float(self._cross_entropy(constant, rows)),
            "auc": _auc(logs[:, ACCEPTED], label * weight, (1.0 - label) * weight), "acceptance": float(label[weight == 1.0].mean()),
        }


def _auc(scores: Tensor, positive: Tensor, negative: Tensor) -> float:
    """P(an accepted position has a higher score than a rejected one), soft labels as weights; 0.5 where there is only one kind."""
    order = scores.argsort()
    below = negative[order].cumsum(0) - 0.5 * negative[order]
    total = positive.sum() * negative.sum()
    return float((positive[order] * below).sum() / total) if total > 0 else 0.5


def _write_card(out: Path, options: TrainOptions, command: str, trainer: HeadTrainer, found: dict[str, float]) -> None:
    method = drafter_of(options.drafter)
    use = {"method": method, "model": options.drafter, "confidence_head": str(out / FILE), "policy": "confidence"}
    (out / "README.md").write_text(f"""# Acceptance head for {options.drafter} under {options.target}

Says how likely the token to be drafted is to be accepted, so that drafting stops before a rejection. Layout: SpecDec++ (arXiv:2405.19715).

    headway serve {options.target} --speculative-config '{json.dumps(use)}'

## How it was made

    {command}

- {len(trainer.labels)} drafted positions, judged as they were verified; {HELD_OUT:.0%} of them held out
- {trainer.step} steps of {options.batch_tokens}, {options.num_blocks} blocks, rejections weighted {options.reject_weight:g} times,
  positions behind a rejection {options.token_mixing:g}, seed {options.seed}, torch {torch.__version__}

## What it reaches

On positions never learned: loss {found['loss']:.3f}, the best constant {found['constant']:.3f}; AUC {found['auc']:.3f};
acceptance {found['acceptance']:.3f}.
""", encoding="utf-8")
