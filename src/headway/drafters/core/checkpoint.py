"""A published speculator on disk: its config.json and its tensors by name, whatever file holds them.

Read here: safetensors (one file or shards), and PyTorch files (`pytorch_model.bin`, `*.pt`), the latter as plain tensors only
(`weights_only`): a checkpoint never runs code.
"""

from __future__ import annotations

import math
import pickle
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headway.errors import ModelError
from headway.models.config import ModelConfig, read_json

EXPECTED = "a speculator is a directory with config.json and its weights"

_PYTORCH_ENDINGS = (".bin", ".pt", ".pth")


class Checkpoint:
    """`config` as written, tensors read when they are taken. Raises ModelError for whatever is missing or does not fit."""

    def __init__(self, directory: Path, *, prefixes: Iterable[str] = ()) -> None:
        """`prefixes`: what some publishers put before every name (`model.`, `speculator.`); taken off here."""
        self.directory = directory
        if not directory.is_dir():
            raise ModelError(f"{directory} is not a directory; a speculator is a directory with config.json and its weights")
        self.config = read_json(directory / "config.json", EXPECTED)
        self._tensors: dict[str, Any] = {}
        for path in self._files():
            for name, source in _open(path).items():
                self._tensors[_without(name, prefixes)] = source
        self._taken: set[str] = set()

    def _files(self) -> list[Path]:
        for index in ("model.safetensors.index.json", "pytorch_model.bin.index.json"):
            if (self.directory / index).exists():
                weight_map = read_json(self.directory / index, EXPECTED).get("weight_map")
                if not isinstance(weight_map, dict):
                    raise ModelError(f"{self.directory / index} is not a valid index: it has no weight_map")
                paths = [self.directory / name for name in sorted(set(weight_map.values()))]
                missing = [path.name for path in paths if not path.exists()]
                if missing:
                    raise ModelError(f"{self.directory}: the weight file {missing[0]} is missing")
                return paths
        found = sorted(self.directory.glob("*.safetensors"))
        found = found or sorted(path for path in self.directory.iterdir() if path.suffix in _PYTORCH_ENDINGS)
        if not found:
            raise ModelError(f"{self.directory} has no weights. Accepted: *.safetensors, *.bin, *.pt")
        return found

    def check_type(self, accepted: str | None, reads: str) -> None:
        """Raises ModelError for a directory of the speculators package that is of another type; `reads`: what to give instead."""
        kind = self.config.get("speculators_model_type")
        if kind not in (None, accepted):
            raise ModelError(f"{self.directory} is a speculator of type {kind!r}; {reads}")

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    @property
    def names(self) -> set[str]:
        return set(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        source = self._source(name)
        return tuple(source.shape if isinstance(source, Tensor) else source[0].get_slice(source[1]).get_shape())

    def num_elements(self, prefixes: tuple[str, ...] = ("",)) -> int:
        """Of all tensors whose names begin so."""
        return sum(math.prod(self.shape(name)) for name in self._tensors if name.startswith(prefixes))

    def take(self, name: str, shape: tuple[int, ...], kind: str = "float") -> Tensor:
        """The tensor, which must have this shape and be of this kind: float, int or bool."""
        source = self._source(name)
        tensor: Tensor = source if isinstance(source, Tensor) else source[0].get_tensor(source[1])
        if tuple(tensor.shape) != shape:
            raise ModelError(f"{self.directory}: {name} has shape {tuple(tensor.shape)}, expected {shape}")
        actual = "float" if tensor.is_floating_point() else "bool" if tensor.dtype == torch.bool else "int"
        if actual != kind:
            raise ModelError(f"{self.directory}: {name} is {tensor.dtype}, expected a tensor of kind {kind}")
        self._taken.add(name)
        return tensor

    def _source(self, name: str) -> Any:
        if name not in self._tensors:
            raise ModelError(f"{self.directory}: the weights lack {name}; they have {_some(self._tensors)}")
        return self._tensors[name]

    def finish(self, ignored: Iterable[str] = ()) -> None:
        """Raises ModelError when tensors were not used: they mean something this reader does not know. `ignored` may be left."""
        left = self.names - self._taken - set(ignored)
        if left:
            raise ModelError(f"{self.directory}: weights of an unknown layout: {_some(left)} would be ignored")

    def number(self, key: str, config: Mapping[str, Any] | None = None, default: int | None = None) -> int:
        """A positive integer of config.json (or of a part of it)."""
        value = (self.config if config is None else config).get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ModelError(f"{self.directory / 'config.json'}: {key} must be a positive integer, got {value!r}")
        return value


def decoder_shape(checkpoint: Checkpoint, config: Mapping[str, Any], target: ModelConfig, num_layers: int) -> ModelConfig:
    """The dimensions of a draft network's decoder layers, from a Hugging Face-style mapping. Vocabulary and context are the target's."""
    where = checkpoint.directory / "config.json"
    if config.get("hidden_act", "silu") != "silu":
        raise ModelError(f"{where}: hidden_act {config['hidden_act']!r} is not supported. Supported: silu")
    vocab = config.get("vocab_size", target.vocab_size)
    if vocab != target.vocab_size:
        raise ModelError(f"{where}: made for a vocabulary of {vocab} tokens, the target's has {target.vocab_size}")
    hidden = checkpoint.number("hidden_size", config)
    heads = checkpoint.number("num_attention_heads", config)
    kv_heads = checkpoint.number("num_key_value_heads", config, heads)
    if heads % kv_heads:
        raise ModelError(f"{where}: {heads} heads cannot share {kv_heads} KV heads evenly")
    return ModelConfig(
        model_type=str(config.get("model_type", "llama")),
        vocab_size=target.vocab_size,
        hidden_size=hidden,
        intermediate_size=checkpoint.number("intermediate_size", config),
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=checkpoint.number("head_dim", config, hidden // heads),
        max_position=target.max_position,
        rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        rope=rope_of(config),
        tie_word_embeddings=False,
        eos_token_ids=frozenset(),
    )


def rope_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """`rope_parameters` as today's configurations write it, also from `rope_theta` and `rope_scaling` of older ones."""
    shared = {"partial_rotary_factor": config["partial_rotary_factor"]} if config.get("partial_rotary_factor") else {}
    if isinstance(config.get("rope_parameters"), Mapping):
        return {**shared, "rope_theta": config.get("rope_theta", 10000.0), **config["rope_parameters"]}
    return {**shared, "rope_theta": config.get("rope_theta") or 10000.0, **(config.get("rope_scaling") or {})}


def _open(path: Path) -> dict[str, Any]:
    """name -> tensor, or (open safetensors file, name)."""
    if path.suffix == ".safetensors":
        from safetensors import SafetensorError, safe_open

        try:
            file: Any = safe_open(path, framework="pt")
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{path} is not a readable safetensors file (truncated or corrupt?): {error}") from error
        return {name: (file, name) for name in file.keys()}   # noqa: SIM118 (not a dict)
    try:
        value = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, OSError, zipfile.BadZipFile, ValueError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ModelError(f"{path} is not a readable file of plain tensors (truncated, corrupt, or with code inside?): {reason}") from error
    if isinstance(value, dict) and isinstance(value.get("state_dict"), dict):
        value = value["state_dict"]
    if not isinstance(value, dict) or not all(isinstance(tensor, Tensor) for tensor in value.values()):
        raise ModelError(f"{path} must hold tensors by name")
    return value


def _without(name: str, prefixes: Iterable[str]) -> str:
    for prefix in prefixes:
        if name.startswith(prefix):
            return name[len(prefix) :]
    return name


def _some(names: Iterable[str]) -> str:
    ordered = sorted(names)
    return ", ".join(ordered[:4]) + (f", … ({len(ordered)} in all)" if len(ordered) > 4 else "") if ordered else "nothing"
