"""Multi-token prediction: the module that a target was trained with drafts for it (DeepSeek-V3, arXiv:2412.19437)."""

from __future__ import annotations

from pathlib import Path

from headway.drafters.core.module_chain import ModuleChain
from headway.drafters.core.mtp_network import MTPFile
from headway.models.config import ModelConfig


class MTP(ModuleChain):
    """`model` names the directory of the module or modules; left out, they are in the target's own."""

    needs_model = False

    def read(self, directory: Path, target: ModelConfig) -> MTPFile:
        return MTPFile(directory, target)
