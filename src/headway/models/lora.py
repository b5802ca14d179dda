"""A LoRA adapter (arXiv:2106.09685), merged into the weights that it changes: W + scale * B A. Format: PEFT's."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

from torch import Tensor

from headway.errors import ModelError
from headway.json_object import JsonObject

EXPECTED = "an adapter is a directory with adapter_config.json and adapter_model.safetensors"
PREFIX = "base_model.model."
_KNOWN = re.compile(r"(?P<module>.+)\.lora_(?P<side>[AB])(\.default)?\.weight")


class LoraAdapter:
    """Raises ModelError for one that is missing, broken, or does what cannot be merged."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        config = JsonObject.read(directory / "adapter_config.json", ModelError, EXPECTED)
        kind = config.text("peft_type", "LORA")
        if kind != "LORA":
            raise ModelError(f"{directory}: adapters of type {kind} are not supported. Supported: LORA")
        for key in ("use_dora", "fan_in_fan_out", "lora_bias"):
            if config.values.get(key):
                raise ModelError(f"{directory}: {key} is not supported. Merge the adapter with PEFT and give the merged model")
        self._config = config
        self._layers = self._read(directory / "adapter_model.safetensors")
        self._merged: set[str] = set()

    def _read(self, path: Path) -> dict[str, dict[str, Tensor]]:
        """Module -> its A [rank, in] and B [out, rank]."""
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            tensors = load_file(path)
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{path} is not a readable safetensors file; {EXPECTED}: {error}") from error
        layers: dict[str, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            found = _KNOWN.fullmatch(name.removeprefix(PREFIX))
            if found is None:
                raise ModelError(f"{path}: {name} cannot be merged. Merge the adapter with PEFT and give the merged model")
            layers.setdefault(found["module"], {})[found["side"]] = tensor
        for module, sides in layers.items():
            if sides.keys() != {"A", "B"} or sides["A"].dim() != 2 or sides["B"].dim() != 2 or len(sides["A"]) != sides["B"].shape[1]:
                raise ModelError(f"{path}: {module} has no pair of matrices A [rank, in] and B [out, rank]")
        return layers

    def merged(self, name: str, weight: Tensor) -> Tensor:
        """The tensor `name` of the model with what the adapter adds to it, float32; as it is where that is nothing."""
        module = name.removesuffix(".weight")
        if module not in self._layers:
            return weight
        a, b = self._layers[module]["A"], self._layers[module]["B"]
        if (len(b), a.shape[1]) != tuple(weight.shape):
            raise ModelError(f"{self.directory}: made for another model: {name} is {tuple(weight.shape)}, B A {(len(b), a.shape[1])}")
        self._merged.add(module)
        return weight.float() + (b.float() @ a.float()) * self._scale(module, len(a))

    def _scale(self, module: str, rank: int) -> float:
        alpha = self._config.number("lora_alpha", 8.0)
        patterns: dict[str, Any] = dict(self._config.child("alpha_pattern").values)
        alpha = next((float(value) for pattern, value in patterns.items() if re.fullmatch(rf"(.*\.)?{pattern}", module)), alpha)
        return alpha / (math.sqrt(rank) if self._config.flag("use_rslora", False) else rank)

    def check(self) -> None:
        """Raises ModelError where part of it changed nothing."""
        left = sorted(self._layers.keys() - self._merged)
        if left:
            raise ModelError(f"{self.directory}: made for another model: it has no {', '.join(left[:3])} ({len(left)} in all)")
