"""What `headway train` can be told; each field is a flag."""

from __future__ import annotations

from dataclasses import dataclass

from headway.config import DTYPES, option
from headway.errors import ConfigError, unknown_key

METHODS = ("eagle3", "confidence_head")
LOSSES = ("forward_kl", "jensen_shannon", "reverse_kl", "total_variation")


@dataclass(frozen=True)
class TrainOptions:
    target: str = option("smollm2-135m", "the model to make a speculator for: a built-in name, a directory, a hub id")
    out: str = option("", "directory of the speculator; run/ in it holds what a later run resumes from")
    minutes: float = option(75.0, "time for everything, data included; the number of steps is planned to fit")
    data: str | None = option(
        None, "JSONL: one {\"messages\": [...]}, {\"prompt\": ...} or {\"text\": ...} a line; default: the model writes its own"
    )
    init: str | None = option(
        None, "eagle3: directory of an earlier speculator to go on from, with new texts; the result is their mean. Default: from nothing"
    )
    num_tokens: int | None = option(None, "answer tokens to write at most; default: what 45 % of the time allows")
    num_steps: int | None = option(None, "optimizer steps; default: what the rest of the time allows")
    draft_vocab_size: int = option(8192, "the drafter predicts over the most frequent tokens of the data; fewer are faster")
    loss: str = option("forward_kl", "distance to the target's distribution", choices=LOSSES)
    ttt_steps: int = option(3, "draft steps trained, each on the features of the one before (EAGLE-3's training-time test)")
    on_policy: float = option(0.0, "share of the texts in which the drafter's own tokens replace some of the target's")
    learning_rate: float = option(1e-3, "peak of the cosine schedule")
    batch_tokens: int = option(2048, "positions per optimizer step")
    cache_bytes: int = option(8 << 30, "hidden states kept on disk; the texts beyond are computed again in every epoch")
    max_tokens: int = option(256, "answer tokens of one text at most")
    seed: int = option(0, "seeds data, initial weights and order")
    dtype: str = option("auto", "of the target and of matrix products in training", choices=DTYPES)
    device: str = option("auto", "cpu, cuda, cuda:N, or auto")
    num_threads: int | None = option(None, "CPU threads; default: torch's own choice")
    drafter: str | None = option(None, "confidence_head: the network it judges: a draft model, or the directory of an eagle or mtp head")
    num_blocks: int = option(3, "confidence_head: residual blocks")
    reject_weight: float = option(6.0, "confidence_head: what a rejection weighs, against 1 for an acceptance")
    token_mixing: float = option(0.15, "confidence_head: what a position behind a rejection weighs, where the text is the drafter's own")

    def __post_init__(self) -> None:
        def check(ok: bool, name: str, accepted: str) -> None:
            if not ok:
                raise ConfigError(f"{name} must be {accepted}, got {getattr(self, name)!r}")

        check(bool(self.out), "out", "a directory (--out DIR)")
        check(self.minutes > 0, "minutes", "> 0")
        check(self.num_tokens is None or self.num_tokens >= 1, "num_tokens", ">= 1")
        check(self.num_steps is None or self.num_steps >= 1, "num_steps", ">= 1")
        check(self.draft_vocab_size >= 16, "draft_vocab_size", ">= 16")
        check(1 <= self.ttt_steps <= 16, "ttt_steps", "in [1, 16]")
        check(0.0 <= self.on_policy <= 1.0, "on_policy", "in [0, 1]")
        check(0.0 < self.learning_rate < 1.0, "learning_rate", "in (0, 1)")
        check(self.batch_tokens >= 16, "batch_tokens", ">= 16")
        check(self.max_tokens >= 8, "max_tokens", ">= 8")
        check(self.num_blocks >= 0, "num_blocks", ">= 0")
        check(self.reject_weight > 0, "reject_weight", "> 0")
        check(0.0 <= self.token_mixing <= 1.0, "token_mixing", "in [0, 1]")
        check(self.cache_bytes >= 0, "cache_bytes", ">= 0")
        if self.loss not in LOSSES:
            raise ConfigError(unknown_key("loss", self.loss, LOSSES))
