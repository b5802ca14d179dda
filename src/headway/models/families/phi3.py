"""Phi-3, Phi-3.5 and Phi-4 (mini): weights published fused, part of a head turned, longer contexts by `longrope`."""

from __future__ import annotations

from typing import Any

from headway.models.traits import Traits


def describe(hf: Any) -> Traits:
    return Traits(windows=(hf.sliding_window,) * hf.num_hidden_layers, fused_qkv=True, fused_gate_up=True)
