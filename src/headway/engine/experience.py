"""What one run leaves to the next: measured costs, and what the policy learned. Kept in the process and, when there was enough to learn,
beside the profile on disk (per model, dtype, device and threads). It is a first guess only: policies test it and go on learning.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.config import SpeculativeConfig
from headway.control.costs import CostModel
from headway.control.policy import DrafterView, Policy, Setup
from headway.engine import profile

if TYPE_CHECKING:
    from headway.engine.engine import Engine

LEAST_STEPS = 200     # observed, before they are worth a file
SAVE_EVERY_S = 60.0

logger = logging.getLogger("headway.profile")


class Experience:
    def __init__(self) -> None:
        self._path: Path | None = None
        self._costs: CostModel | None = None
        self._found: dict[str, Any] = {}      # on disk, by what policies were told to do
        self._policies: dict[str, Any] = {}   # learned in this process, likewise
        self._policy: Policy | None = None
        self._key = ""
        self._num_saved = 0
        self._saved_at = time.monotonic()

    def start(self, engine: Engine, speculative: SpeculativeConfig) -> Policy:
        """The policy of `speculative`, started with what is known. The one before it hands over what it learned."""
        self.keep()
        policy: Policy = speculative.build_policy()
        views = tuple(DrafterView(name, drafter.deterministic, stepwise=drafter.stepwise) for name, drafter in engine.drafters.items())
        if not (policy.needs_costs and engine.config.profile):
            policy.start(Setup(views, engine.scheduler.max_k, CostModel()))
            return policy
        if self._costs is None:
            self._path = profile.path_of(engine)
            self._costs = profile.cost_model(engine)
            self._found = _read(self._policies_path)
            self._num_saved = self._costs.num_observed
        self._key = f"{speculative.policy} {[(name, speculative.model_of(name)) for name in speculative.methods]}"
        try:
            policy.start(Setup(views, engine.scheduler.max_k, self._costs, (self._found | self._policies).get(self._key)))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            logger.warning("what the policy %s learned earlier cannot be read: %r", speculative.policy, error)
            policy = speculative.build_policy()
            policy.start(Setup(views, engine.scheduler.max_k, self._costs))
        self._policy = policy
        return policy

    def keep(self) -> None:
        """Takes over what the running policy has learned."""
        if self._policy is not None and (learned := self._policy.learned()):
            self._policies[self._key] = learned
        self._policy = None

    def rest(self) -> None:
        """The engine has no work: time to save, now and then."""
        if time.monotonic() - self._saved_at >= SAVE_EVERY_S:
            self.save()

    def save(self) -> None:
        """Never raises: a disk that is full or read-only costs the next start some time, nothing else."""
        self._saved_at = time.monotonic()
        if self._costs is None or self._path is None or self._costs.num_observed < self._num_saved + LEAST_STEPS:
            return
        policy, self._num_saved = self._policy, self._costs.num_observed
        self.keep()
        self._policy = policy
        try:
            self._costs.save(self._path)
            partial = self._policies_path.with_suffix(".partial")
            known = _read(self._policies_path) | self._policies   # other engines learn, too
            partial.write_text(json.dumps(known), encoding="utf-8")
            partial.replace(self._policies_path)
        except OSError as error:
            logger.warning("cannot keep what was learned beside %s: %s", self._path, error.strerror)

    @property
    def _policies_path(self) -> Path:
        assert self._path is not None
        return self._path.with_name(f"{self._path.stem}-policies.json")


def _read(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return {str(key): value for key, value in document.items() if isinstance(value, Mapping)} if isinstance(document, dict) else {}
