"""`make test` runs every drafter under the policies of QUICK_POLICIES and every policy over the drafters of QUICK_DRAFTERS; the rest of the
matrix is in `make test-heavy`. A new drafter or policy is therefore in both from the moment it exists."""

from __future__ import annotations

import pytest

from tests import drafter_models

QUICK_POLICIES = {"static", "goodput"}
QUICK_DRAFTERS = {"suffix", "draft_model"}     # a function of the prefix; a network with state of its own, whose drafts are sampled


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--drafter", metavar="MODULE:CLASS", help="test this drafter alone, under every policy")
    parser.addoption("--policy", metavar="MODULE:CLASS", help="test this policy alone, over every drafter")


def pytest_configure(config: pytest.Config) -> None:
    """Before the tests are collected, which list what there is."""
    for kind in drafter_models.ONLY:
        if (name := config.getoption(f"--{kind}")) is not None:
            drafter_models.ONLY[kind] = [name]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if any(drafter_models.ONLY.values()):
        return
    for item in items:
        params = getattr(getattr(item, "callspec", None), "params", {})
        if {"drafter", "engine"} <= params.keys() and params["engine"] not in QUICK_POLICIES and params["drafter"] not in QUICK_DRAFTERS:
            item.add_marker("heavy")
