"""EAGLE: a small head continues the target's hidden states (EAGLE-1: arXiv:2401.15077, EAGLE-3: arXiv:2503.01840)."""

from __future__ import annotations

from pathlib import Path

from headway.drafters.core.eagle_network import EagleFile
from headway.drafters.core.feature_chain import FeatureChain
from headway.models.config import ModelConfig


class Eagle(FeatureChain):
    """`model` names the head: a speculators-format directory, one in the EAGLE repository's layout, or a hub id of either."""

    def read(self, directory: Path, target: ModelConfig) -> EagleFile:
        return EagleFile(directory, target)
