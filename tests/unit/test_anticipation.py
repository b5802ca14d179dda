"""The trap in trimming drafts: when drafts are sampled, dropping x_j because of x_j itself changes what is written.

If unlikely draws are dropped, an unlikely token comes out only when the target picks it afresh, while a likely one gets two
chances: as a draft, and afresh. `Policy.select` therefore sees confidences only, and they must be functions of the prefix.
Here one and the same policy is fed an honest confidence and a leaked one. False alarm: 1e-6 for each audit that must pass; what must be
detected is detected at odds below 1e-30.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from headway.config import SpeculativeConfig
from headway.control.policy import BatchView, DraftView, Policy
from headway.engine.verify import Verifier
from headway.sampling_params import SamplingParams
from headway.types import Choice, Draft
from headway.types import Sequence as DecodingSequence
from tests.sampling import DraftMaker, FloatArray, Markov, chi_square, likely_drafts, sampled_drafts, simulate

VOCAB, K, LENGTH, TRIALS = 4, 3, 3, 12000
TARGET = Markov.random(VOCAB, seed=2)
SHARPER = np.exp(1.5 * TARGET.table) / np.exp(1.5 * TARGET.table).sum(-1, keepdims=True)
PARAMS = SamplingParams(max_tokens=None)


class DropUnsure(Policy):
    """Verifies a draft up to the first position whose confidence is below the threshold."""

    name = "drop_unsure"

    def __init__(self, threshold: float) -> None:
        self.threshold = threshold
        self.dropped = 0

    def plan(self, view: BatchView) -> Mapping[int, Choice]:
        return {seq.seq_id: Choice("any", K) for seq in view.sequences}

    def select(self, drafts: Sequence[DraftView], view: BatchView) -> Mapping[int, int]:
        lengths = {}
        for draft in drafts:
            assert draft.confidence is not None
            sure = [confidence >= self.threshold for confidence in draft.confidence]
            lengths[draft.seq_id] = sure.index(False) if False in sure else draft.length
            self.dropped += draft.length - lengths[draft.seq_id]
        return lengths


def selected(drafts: DraftMaker, policy: Policy) -> DraftMaker:
    """Drafts after `Policy.select`, as the engine applies it."""
    view = BatchView(0, (), 0, 0, 0, ("any",), K)

    def make(seqs: list[DecodingSequence]) -> list[Draft | None]:
        made = drafts(seqs)
        views = [
            DraftView(seq.seq_id, "any", len(d), d.probs is None, None if d.confidence is None else tuple(d.confidence))
            for seq, d in zip(seqs, made, strict=True)
            if d is not None
        ]
        lengths = policy.select(views, view)
        return [None if d is None else d.truncated(lengths.get(seq.seq_id, len(d))) for seq, d in zip(seqs, made, strict=True)]

    return make


def honest(q: FloatArray, tokens: NDArray[np.int64]) -> FloatArray:
    """The draft distribution's maximum: known before the token is drawn."""
    largest: FloatArray = q.max(-1)
    return largest


def leaked(q: FloatArray, tokens: NDArray[np.int64]) -> FloatArray:
    """The probability of the very token that was drawn."""
    return np.take_along_axis(q, tokens[..., None], -1).squeeze(-1)


def audit(method: str, drafts: DraftMaker, threshold: float) -> float:
    policy = DropUnsure(threshold)
    verifier = Verifier(SpeculativeConfig(rejection_sample_method=method), VOCAB, "cpu")
    run = simulate(verifier, TARGET, PARAMS, selected(drafts, policy), length=LENGTH, trials=TRIALS)
    assert policy.dropped > TRIALS // 10, "the policy must drop drafts for the audit to say anything"
    return chi_square(run.counts, TARGET.joint(PARAMS, LENGTH))


def test_dropping_by_the_drawn_token_is_detected() -> None:
    for method in ("standard", "block"):
        assert audit(method, sampled_drafts(SHARPER, K, confidence=leaked), 0.4) < 1e-30


def test_dropping_by_prefix_only_confidence_is_lossless() -> None:
    for method in ("standard", "block"):
        assert audit(method, sampled_drafts(SHARPER, K, confidence=honest), 0.8) > 1e-6


def test_deterministic_drafts_may_be_dropped_for_any_reason() -> None:
    """There the draft is itself a function of the prefix, so even its tokens may be looked at."""
    chains = likely_drafts(SHARPER, K)

    def judged_by_token(seqs: list[DecodingSequence]) -> list[Draft | None]:
        return [Draft(d.tokens, confidence=[float(t % 2) for t in d.tokens]) for d in chains(seqs) if d is not None]

    assert audit("standard", judged_by_token, 0.5) > 1e-6
