"""The devices that a plan can be made for: devices.json, one row each with its source, and this machine, measured."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from headway.errors import ConfigError, unknown_key

THIS_MACHINE = "this-machine"
GIB = float(1 << 30)


@dataclass(frozen=True, slots=True)
class Device:
    """memory_bytes         as a process sees it: less than the vendor's round number
    bandwidth               of its memory, bytes per second
    flops                   by type of the operands: dense, sums in float32
    link_bytes              per second to the other devices, one direction
    link_s                  until a message to them has arrived
    is_cpu                  memory is shared with everything else, and no graphs are recorded
    """

    name: str
    memory_bytes: float
    bandwidth: float
    flops: Mapping[str, float]
    link_bytes: float
    link_s: float
    source: str
    is_cpu: bool = False

    def peak(self, compute: str) -> float:
        """For operands of this type; those that it has no units for are widened to 16 bits."""
        return self.flops.get(compute, self.flops["bf16"])


@functools.cache
def table() -> Mapping[str, Device]:
    rows = json.loads((Path(__file__).parent / "devices.json").read_text(encoding="utf-8"))
    return {
        name: Device(
            name, row["memory_gib"] * GIB, row["bandwidth_gb_s"] * 1e9, {kind: value * 1e12 for kind, value in row["tflops"].items()},
            row["link_gb_s"] * 1e9, row["link_us"] * 1e-6, row["source"],
        )
        for name, row in rows.items()
    }  # fmt: skip


def find(name: str) -> Device:
    """By its name in the table, however it is written ("a100 80gb", "RTX 4090"). Raises ConfigError that lists what is known."""
    wanted = _plain(name)
    for known, device in table().items():
        if _plain(known) == wanted:
            return device
    raise ConfigError(unknown_key("device", name, [*table(), THIS_MACHINE]))


def _plain(name: str) -> str:
    return "".join(char for char in name.lower().removesuffix("gb") if char.isalnum()).removeprefix("nvidia").removesuffix("sxm")
