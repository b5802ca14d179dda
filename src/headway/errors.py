"""Every error a user can cause. All are also ValueError, so `except ValueError` keeps working.

    HeadwayError
      ConfigError            a flag, a config key or a combination that cannot work   (exit code 2)
      ModelError             a model that is missing, corrupt or not supported        (exit code 2)
      InvalidRequestError    one request's parameters                                 (HTTP 400)
      QueueFullError         the bounded queue is full; try again later               (HTTP 429)
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class HeadwayError(ValueError):
    """Base of all errors with a message meant for the user."""


class ConfigError(HeadwayError):
    pass


class ModelError(HeadwayError):
    pass


class InvalidRequestError(HeadwayError):
    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class QueueFullError(HeadwayError):
    pass


def unknown_key(kind: str, key: str, accepted: Iterable[str]) -> str:
    """The message for a name nobody knows: what was given, the nearest match, what is accepted."""
    names = sorted(accepted)
    near = difflib.get_close_matches(key, names, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return f"unknown {kind} {key!r}.{hint} Accepted: {', '.join(names)}"
