"""What a guide shows: its commands, and what stands below each."""

from __future__ import annotations

import re
from pathlib import Path

_PAIR = re.compile(r"```bash\n(headway .*?)```\n+(?:[^`]*?\n)?```text\n(.*?)```", re.DOTALL)


def commands(guide: Path) -> list[str]:
    return [re.sub(r"\\\n\s*", "", command).strip() for command, _ in _PAIR.findall(guide.read_text(encoding="utf-8"))]


def outputs(guide: Path) -> list[str]:
    """The text under each command; a line of three dots stands for what is left out."""
    return [text for _, text in _PAIR.findall(guide.read_text(encoding="utf-8"))]
