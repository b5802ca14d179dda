"""Gemma 3: Gemma 2 with norms of queries and keys; layers with a window have a rotation of their own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from headway.models.families import gemma2
from headway.models.traits import Traits


def describe(hf: Any) -> Traits:
    return replace(gemma2.describe(hf), qk_norm=True)
