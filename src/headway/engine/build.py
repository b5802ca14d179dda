"""From a configuration to what the engine decides with: the policy, started with what earlier runs learned."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from headway.config import SpeculativeConfig
from headway.control.costs import CostModel
from headway.control.policy import Policy, Setup
from headway.engine import profile
from headway.telemetry.learned_state import UNREADABLE, LearnedState

if TYPE_CHECKING:
    from headway.engine.engine import Engine

logger = logging.getLogger("headway.learned")


def open_learned(engine: Engine) -> LearnedState:
    """What is kept of this model on this machine, with costs that hold: measured where they are not known."""
    learned = LearnedState(profile.path_of(engine))
    costs = learned.costs
    if costs is None or not profile.holds(engine, costs):
        learned.measured(profile.measured(engine))
    return learned


def build_policy(engine: Engine, speculative: SpeculativeConfig, learned: LearnedState | None) -> Policy:
    """The policy of `speculative`, started; with `learned`, on its costs and followed by it."""
    views = engine.proposer.views
    policy: Policy = speculative.build_policy()
    if learned is None or learned.costs is None or not policy.needs_costs:
        policy.start(Setup(views, engine.scheduler.max_k, CostModel()))
        return policy
    key = f"{speculative.policy} {[(name, speculative.model_of(name)) for name in speculative.methods]}"
    try:
        policy.start(Setup(views, engine.scheduler.max_k, learned.costs, learned.learned(key)))
    except UNREADABLE as error:
        logger.warning("what the policy %s learned earlier cannot be read: %r", speculative.policy, error)
        policy = speculative.build_policy()
        policy.start(Setup(views, engine.scheduler.max_k, learned.costs))
    learned.follow(key, policy, learned.costs)
    return policy
