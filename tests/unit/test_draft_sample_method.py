"""Every drafter with a network: likeliest tokens for greedy requests, drawn ones for those that sample, unless asked not to."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from headway import plugins
from headway.drafters.core.chain import Prediction, draft_chain
from headway.drafters.drafter import DraftRequest, never_stop
from tests.unit.test_feature_chain import Argmax

WITH_A_NETWORK = ("cascade", "draft_model", "eagle", "layer_skip", "medusa", "mlp_speculator", "mtp")


def options_of(name: str) -> type[Any] | None:
    return getattr(plugins.load("drafter", name), "Options", None)


def test_every_drafter_that_may_sample_has_the_option() -> None:
    having = [
        name for name in plugins.names("drafter")
        if (options := options_of(name)) and "draft_sample_method" in {field.name for field in dataclasses.fields(options)}
    ]
    assert having == list(WITH_A_NETWORK)


@pytest.mark.parametrize("name", WITH_A_NETWORK)
def test_drafts_are_drawn_unless_the_likeliest_are_asked_for(name: str) -> None:
    options = options_of(name)
    assert options is not None
    assert not plugins.load("drafter", name)().deterministic
    assert not plugins.load("drafter", name)(options()).deterministic
    assert plugins.load("drafter", name)(options(draft_sample_method="greedy")).deterministic


@pytest.mark.parametrize("deterministic", [False, True])
def test_who_gets_drawn_drafts(deterministic: bool) -> None:
    torch.manual_seed(0)
    requests = [DraftRequest(i, [1, 2, 3], 2, 3, greedy=i % 2 == 0) for i in range(4)]
    logits = torch.randn(4, 320)

    def advance(going: list[int], tokens: list[int], state: Tensor, position: int, num: int) -> list[Prediction]:
        return [Prediction(logits[going] + position, state)]

    first = [Prediction(logits, torch.zeros(4, 1))]
    drafts = draft_chain(requests, never_stop, Argmax(), first, advance, None, deterministic=deterministic)
    likeliest = logits.argmax(-1).tolist()
    for request, draft, token in zip(requests, drafts, likeliest, strict=True):
        if request.greedy or deterministic:
            assert draft.probs is None
            assert draft.tokens == [token] * 3
        else:
            np.testing.assert_allclose(draft.probs.sum(-1).numpy(), np.ones(3), rtol=1e-5)   # type: ignore[union-attr]
            assert draft.tokens != [token] * 3
