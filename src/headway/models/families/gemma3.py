"""Gemma 3 with a vision tower, of which the language model is read: it answers to text."""

from __future__ import annotations

from headway.models.families.gemma3_text import describe

__all__ = ["describe"]
