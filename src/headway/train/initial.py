"""The weights training begins from: random ones with the target's words, or an earlier speculator's."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from headway.errors import ConfigError
from headway.models.decoder import Decoder
from headway.train.eagle3 import Eagle3Head, HeadShape
from headway.train.objective import Targets

_FILE = "model.safetensors"


def new_head(shape: HeadShape, target: Decoder, target_ids: torch.Tensor, seed: int, init: str | None = None) -> Eagle3Head:
    """Random, but for what ends in words: final norm and output rows begin as the target's, the norm scaled to a mean of 1. As large as
    the target's, it would make random features sure of themselves.

    init  a speculator's directory: its weights, and its output rows for the tokens that both draft vocabularies have
    """
    torch.manual_seed(seed)
    head = Eagle3Head(shape, target.config, target_ids.cpu())
    with torch.no_grad():
        head.lm_head.weight.copy_(Targets.of(target, target_ids).output)
        head.norm.weight.copy_(target.norm.weight.float() / target.norm.weight.float().mean())
        if init is not None:
            _copy(head, Path(init))
    return head.to(target.device)


def check_init(init: str | None) -> None:
    """Raises ConfigError before hours of work when there is nothing to begin from."""
    if init is not None and not (Path(init) / _FILE).is_file():
        raise ConfigError(f"--init {init} has no model.safetensors; accepted: a directory that `headway train eagle3` wrote")


def keep_init(init: str | None, run: Path) -> str | None:
    """A copy of the speculator that training begins from: the one that is made may take its place."""
    if init is None:
        return None
    kept = run / "init"
    if not (kept / _FILE).exists():
        kept.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(Path(init) / _FILE, kept / (_FILE + ".part"))
        (kept / (_FILE + ".part")).replace(kept / _FILE)
    return str(kept)


@torch.no_grad()
def average(head: Eagle3Head, init: str) -> None:
    """The mean of what the head became and what it began as: knows the new texts nearly as well, and has not forgotten the old ones
    (Wortsman et al., arXiv:2109.01903). Output rows that it did not begin with stay."""
    _copy(head, Path(init), 0.5)


def _copy(head: Eagle3Head, directory: Path, share: float = 1.0) -> None:
    """Moves weights toward those of a speculator, all the way or by a share."""
    path = directory / _FILE
    try:
        state = load_file(path)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    own = head.state_dict()
    shapes = {name: tuple(tensor.shape) for name, tensor in own.items() if name != "lm_head.weight"}
    for name in (*shapes, "lm_head.weight", "d2t"):
        if name not in state:
            raise ConfigError(f"{path} lacks {name!r}; accepted: a speculator that `headway train eagle3` wrote")
    shapes["lm_head.weight"] = (len(state["d2t"]), head.shape.hidden_size)
    wrong = next((name for name, shape in shapes.items() if tuple(state[name].shape) != shape), None)
    if wrong is not None:
        raise ConfigError(f"{path}: {wrong} is {list(state[wrong].shape)}, a speculator of this target has {list(shapes[wrong])}")
    rows = {int(token): row for row, token in enumerate(torch.arange(len(state["d2t"])) + state["d2t"])}
    pairs = [(row, rows[token]) for row, token in enumerate(head.target_ids.tolist()) if token in rows]
    new, old = (list(column) for column in zip(*pairs, strict=True)) if pairs else ([], [])
    for name in own.keys() - {"lm_head.weight"}:
        own[name].lerp_(state[name].to(own[name]), share)
    output = own["lm_head.weight"]
    output[new] = torch.lerp(output[new], state["lm_head.weight"][old].to(output), share)
