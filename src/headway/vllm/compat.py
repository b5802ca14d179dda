"""Which vLLM this was written for, and whether another one still has what it uses."""

from __future__ import annotations

import inspect
from typing import Any

TESTED = ("0.31", "0.32")

# What is overridden or called: method -> the parameters that must be there, by name.
METHODS = {
    "schedule": (),
    "update_from_output": ("scheduler_output", "model_runner_output"),
    "_update_after_schedule": ("scheduler_output",),
    "update_draft_token_ids": ("draft_token_ids",),
    "make_stats": (),
    "shutdown": (),
}


def is_tested(version: str) -> bool:
    return any(version == tested or version.startswith(tested + ".") for tested in TESTED)


def problems(version: str, scheduler: type[Any]) -> list[str]:
    """Why the plugin cannot work with this scheduler class; empty when it can. A version that was not tested is a warning only."""
    found = []
    for name, needed in METHODS.items():
        method = getattr(scheduler, name, None)
        if not callable(method):
            found.append(f"vLLM {version} has no {scheduler.__name__}.{name}")
            continue
        parameters = inspect.signature(method).parameters
        if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
            continue
        found += [f"{scheduler.__name__}.{name} of vLLM {version} takes no {needs}" for needs in needed if needs not in parameters]
    return found
