"""Mistral: Llama with a sliding window on every layer (none since v0.2)."""

from __future__ import annotations

from typing import Any

from headway.models.config import Features


def describe(hf: Any) -> Features:
    return Features(windows=(hf.sliding_window,) * hf.num_hidden_layers)
