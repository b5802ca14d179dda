"""One k for the whole batch by goodput, from one global acceptance average: SmartSpec as its authors published it.

Every `update_interval` steps, for k = 0, 1, 2, ... until it falls:

    tokens(k)  = B * (1 - a^(k+1)) / (1 - a);   of a drafter that is often silent only the share that proposes gets this
    goodput(k) = tokens(k) / (T_draft(k) + T_target(B, B (1 + k), context));   k = 0 is multiplied by 1.1

a is one moving average over all requests, 0.7 at the start, a <- 0.85 a + 0.15 * (accepted / verified of a step). Times come from
the cost model of this machine, in the place of the authors' tables.

Source: Liu et al., "Optimizing Speculative Decoding for Serving Large Language Models Using Goodput" (arXiv 2406.14066) and the code
published with it, whose k is the same for the whole batch. While k is 0 nothing is learned: as there, the average then stays what
it was, and only a change of load can bring speculation back.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from headway.config import option
from headway.control.policies.static import same_for_all
from headway.control.policy import BatchView, Policy, Setup
from headway.errors import ConfigError
from headway.types import Choice, Feedback

FIRST = 0.7
KEPT = 0.85
PLAIN_BONUS = 1.1


class Smartspec(Policy):
    needs_costs = True

    @dataclass(frozen=True)
    class Options:
        update_interval: int = option(20, "steps between two decisions, >= 1")

        def __post_init__(self) -> None:
            if self.update_interval < 1:
                raise ConfigError(f"update_interval must be >= 1, got {self.update_interval}")

    def __init__(self, options: Options | None = None) -> None:
        self._interval = (options or self.Options()).update_interval
        self._acceptance = FIRST
        self._proposing = 1.0     # share of the asked requests that got a draft
        self._k: int | None = None
        self._next = 0            # steps until the next decision

    def start(self, setup: Setup) -> None:
        self._costs = setup.costs
        self._drafter = setup.drafters[0].name

    def plan(self, view: BatchView) -> Mapping[int, Choice]:
        decoding = [seq for seq in view.sequences if seq.decoding]
        if not decoding:
            return {}
        if self._k is None or self._next <= 0:
            k = self._best(len(decoding), sum(seq.num_context for seq in decoding), view.max_k)
            if k != self._k:
                self.reason = f"k = {k}: acceptance {self._acceptance:.2f}, {len(decoding)} requests"
            self._k, self._next = k, self._interval
        self._next -= 1
        return same_for_all(view, self._k)

    def observe(self, feedback: Feedback) -> None:
        self._costs.observe(feedback)
        asked = [seq for seq in feedback.sequences if seq.k > 0]
        num_drafts = sum(seq.num_drafts for seq in asked)
        if asked:
            self._proposing = KEPT * self._proposing + (1.0 - KEPT) * sum(seq.num_drafts > 0 for seq in asked) / len(asked)
        if num_drafts:
            self._acceptance = KEPT * self._acceptance + (1.0 - KEPT) * sum(seq.num_accepted for seq in asked) / num_drafts

    def _best(self, num_rows: int, num_context: int, max_k: int) -> int:
        a = min(self._acceptance, 0.999)
        proposing = self._proposing * num_rows
        verified = num_rows + np.rint(proposing * np.arange(max_k + 1))
        target_ms = self._costs.predict(num_rows, verified, num_context)
        best, found = PLAIN_BONUS * num_rows / float(target_ms[0]), 0
        for k in range(1, max_k + 1):
            tokens = proposing * (1.0 - a ** (k + 1)) / (1.0 - a) + (num_rows - proposing)
            goodput = tokens / (float(target_ms[k]) + self._costs.predict_draft(self._drafter, num_rows, k))
            if goodput < best:
                break
            best, found = goodput, k
        return found
