"""The tensors of a model directory by name, whatever files hold them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from headway.errors import ModelError
from headway.json_object import JsonObject
from headway.models.lora import LoraAdapter
from headway.models.quantized import Scheme, is_plain


class Weights:
    """Read when they are asked for. A language model inside a larger one has its names without that one's."""

    def __init__(self, directory: Path, scheme: Scheme | None = None, adapter: LoraAdapter | None = None) -> None:
        """`scheme`: how they are quantised, where they are."""
        self.directory, self.scheme, self.adapter = directory, scheme, adapter
        self._sources: dict[str, tuple[Any, str]] = {}   # our name -> (open file, name in it)

    def __enter__(self) -> Weights:
        for path in self._paths():
            if not path.exists():
                raise ModelError(f"{self.directory}: the weight file {path.name} is missing")
            from safetensors import SafetensorError, safe_open

            try:
                file: Any = safe_open(path, framework="pt")
            except (SafetensorError, OSError) as error:
                raise ModelError(f"{path} is not a readable safetensors file (truncated or corrupt?): {error}") from error
            self._sources.update({_of_text(name): (file, name) for name in file.keys()})   # noqa: SIM118 (not a dict)
        return self

    def __exit__(self, *_: object) -> None:
        self._sources.clear()

    def check(self) -> None:
        """Raises ModelError where an adapter has more than what was taken."""
        if self.adapter is not None:
            self.adapter.check()

    def _paths(self) -> Iterator[Path]:
        index = self.directory / "model.safetensors.index.json"
        if index.exists():
            document = JsonObject.read(index, ModelError)
            if not document.has("weight_map"):
                raise ModelError(f"{index} is not a valid index: it has no weight_map")
            files = document.child("weight_map")
            yield from (self.directory / name for name in sorted({files.text(tensor) for tensor in files.values}))
        elif (single := self.directory / "model.safetensors").exists():
            yield single
        else:
            raise ModelError(f"{self.directory} has no model.safetensors[.index.json]. Supported: safetensors, GGUF files")

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The tensor as plain numbers, with what an adapter adds to it."""
        tensor = self._read(name)
        if tensor is None or not is_plain(tensor):
            tensor = self._dequantized(name, tensor)
        if tuple(tensor.shape) != shape:
            raise ModelError(f"{self.directory}: {name} has shape {tuple(tensor.shape)}, the configuration says {shape}")
        return tensor if self.adapter is None else self.adapter.merged(name, tensor)

    def _read(self, name: str) -> Tensor | None:
        if name not in self._sources:
            return None
        file, stored = self._sources[name]
        tensor: Tensor = file.get_tensor(stored)
        return tensor

    def _dequantized(self, name: str, stored: Tensor | None) -> Tensor:
        try:
            tensor = None if self.scheme is None else self.scheme.weight(name, self._read)
        except (ModelError, RuntimeError, IndexError, ValueError) as error:   # shapes that do not belong together
            raise ModelError(f"{self.directory}: {name} cannot be dequantised: {error}") from error
        if tensor is None:
            if stored is None:
                raise ModelError(f"{self.directory}: the weights lack {name}")
            raise ModelError(f"{self.directory}: {name} is {stored.dtype}; supported: float32, bfloat16, float16")
        return tensor


def _of_text(name: str) -> str:
    """The name as a model of text alone has it: models that see as well put `language_model.` before or behind `model.`."""
    return name.replace("language_model.", "", 1) if name.startswith(("language_model.", "model.language_model.")) else name
