"""Small compiled CPU kernels for what PyTorch does slowly between the matrix products. Never required.

One C library per instruction set lies beside this file when a compiler was there at install time; the best one that this CPU can run is
chosen at run time. Tensors cross as pointers: shapes and types are checked here, in Python, so that a mistake is an exception.
`HEADWAY_NATIVE=0` turns all of it off, `HEADWAY_NATIVE=DIRECTORY` loads the libraries from there (a sanitized build); `headway config` says
which library runs and why.
"""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch

from headway.native.interface import checksum

SUFFIXES = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}
LANES = 16
INTERFACE = checksum()
VARIANTS = ("amx", "avx512_bf16", "avx512_vnni", "avx512", "avx2", "neon")
"""Best first."""
TILES = ("", "AMX tiles", "emulated tiles")


class Library:
    """One compiled library. Functions are looked up by name; its threads are its own, as many as PyTorch would use."""

    def __init__(self, path: Path, variant: str) -> None:
        """Raises OSError when the file is not a library for this machine, or one of another version of these sources."""
        self.path, self.variant = path, variant
        self._dll = ctypes.CDLL(str(path))
        if not hasattr(self._dll, "interface_number") or self._dll.interface_number() & 0xFFFFFFFF != INTERFACE:
            raise OSError("built from other sources than those beside it; install again")
        self._functions: dict[tuple[str, torch.dtype], Callable[[object], None]] = {}
        self.plan: Callable[[object], None] = self._dll.plan
        self._dll.plan.restype = None
        self.bf16_pack: int = self._dll.bf16_pack()
        self.linear_panel: int = self._dll.linear_panel()
        self.tiles = TILES[self._dll.linear_tiles()]
        if self.tiles and not self._dll.linear_tiles_permitted():
            raise OSError("this process is not permitted to use AMX tiles")
        self.linear_expands = bool(self._dll.linear_expands())
        self.tile_rows: int = self._dll.tile_rows()
        self.max_head_dim: int = self._dll.max_head_dim()
        self.max_nodes: int = self._dll.max_nodes()

    def function(self, name: str, dtype: torch.dtype) -> Callable[[object], None]:
        """A kernel for this element type; it takes a pointer to its argument record. KeyError for a type there is none for."""
        found = self._functions.get((name, dtype))
        if found is None:
            found = getattr(self._dll, f"{name}_{SUFFIXES[dtype]}")
            found.restype = None
            self._functions[name, dtype] = found
        return found


@dataclass(frozen=True, slots=True)
class Chosen:
    """What runs, and why in a few words."""

    library: Library | None
    reason: str


@lru_cache(maxsize=1)
def choose() -> Chosen:
    """The library this process uses. The environment is read once."""
    if os.environ.get("HEADWAY_NATIVE") == "0":
        return Chosen(None, "HEADWAY_NATIVE=0")
    supported = supported_variants()
    if not supported:
        return Chosen(None, f"no kernels for this CPU ({platform.machine()})")
    refused = ""
    for variant in supported:
        path = library_path(variant)
        if not path.exists():
            continue
        try:
            found = Library(path, variant)
        except OSError as error:
            if variant != "amx":    # without its tiles the CPU is still one with AVX-512
                return Chosen(None, f"{path.name} cannot be loaded: {error}")
            refused = f"; not amx: {error}"
            continue
        return Chosen(found, f"the best of {', '.join(supported)}, which this CPU has{found.tiles and f'; {found.tiles}'}{refused}")
    return Chosen(None, f"not built: no C compiler at install time{refused}")


def library() -> Library | None:
    return choose().library


def library_path(variant: str) -> Path:
    elsewhere = os.environ.get("HEADWAY_NATIVE", "1")
    return (Path(__file__).parent if elsewhere in ("0", "1") else Path(elsewhere)) / f"_kernels_{variant}.so"


def supported_variants() -> tuple[str, ...]:
    """The instruction sets this CPU has, best first."""
    if platform.machine() in ("aarch64", "arm64"):
        return ("neon",)
    capability = torch.backends.cpu.get_cpu_capability()
    if capability == "AVX512":
        bf16 = torch.cpu._is_avx512_bf16_supported()
        more = (("amx", bf16 and has_tiles()), ("avx512_bf16", bf16), ("avx512_vnni", torch.cpu._is_vnni_supported()))
        return (*(name for name, there in more if there), "avx512", "avx2")
    return ("avx2",) if capability == "AVX2" else ()



def has_tiles() -> bool:
    """Whether the CPU has AMX; every one that does multiplies bf16 by it."""
    return torch.cpu._is_amx_tile_supported()
