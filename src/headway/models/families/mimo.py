"""MiMo-7B: Qwen2's network, published with modules for multi-token prediction; its configuration is Qwen2's under another name."""

from __future__ import annotations

from headway.models.families.qwen2 import describe

READ_AS = "qwen2"

__all__ = ["READ_AS", "describe"]
