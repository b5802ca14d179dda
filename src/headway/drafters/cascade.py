"""A draft model whose own drafts are sped up by another drafter: the cascade of speculative decoding.

A draft model spends a pass of its own on each token. Here a drafter that costs next to nothing (suffix, ngram) guesses what the draft model
will say; the guesses enter the pass that it makes anyway, and those that it would have drafted itself are kept. The drafts
are the draft model's, token for token, and where the text repeats itself they take a fraction of the passes.

Source: cascade speculative drafting (Chen et al. 2023, arXiv 2312.11462), its vertical cascade.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from headway import plugins
from headway.config import option
from headway.drafters.draft_model import DraftModel


class Cascade(DraftModel):
    @dataclass(frozen=True)
    class Options(DraftModel.Options):
        cascade_helper: Literal["suffix", "ngram"] = option("suffix", "drafter that guesses what the draft model will draft")

    def __init__(self, options: Options | None = None) -> None:
        options = options or self.Options()
        super().__init__(options)
        self.helper = plugins.load("drafter", options.cascade_helper)()
