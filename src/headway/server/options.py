"""The server's own settings; the command-line flags are made from these fields. Standard library only."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from headway.config import option
from headway.errors import ConfigError

API_KEY_VARIABLE = "HEADWAY_API_KEY"
API_KEY_HELP = (
    "clients must send this as a bearer token; may be repeated, or several with commas: the clients of one find nothing of the others' in "
    f"the caches. /health, /version and /metrics stay open (default: ${API_KEY_VARIABLE})"
)
LISTS = ("api_key", "allowed_hosts", "allowed_origins", "allowed_methods", "allowed_headers")


@dataclass(frozen=True)
class ServerOptions:
    """Where and how to serve. Raises ConfigError for a value that cannot work.

    A list may be given as a sequence, as text with commas or spaces, or as JSON.
    """

    host: str = option("127.0.0.1", "address to listen on")
    port: int = option(8000, "port to listen on; 0: any free one")
    served_model_name: str | None = option(None, "name of the model in the API; default: the model's own")
    # Not shown when the options are.
    api_key: tuple[str, ...] = field(default=(), repr=False, metadata={"help": API_KEY_HELP})
    allowed_hosts: tuple[str, ...] = option(
        (), "Host header to accept besides localhost, addresses and names without a dot; '*.name' for all below it, '*' for any; may be "
        "repeated. Default: any on a network address or with an API key, else none",
    )  # fmt: skip
    allowed_origins: tuple[str, ...] = option(
        (), "web page whose scripts may use the server (CORS), such as https://example.com; '*' for any; may be repeated. Default: none"
    )
    allowed_methods: tuple[str, ...] = option(("*",), "methods such pages may use (default: all)")
    allowed_headers: tuple[str, ...] = option(("*",), "request headers such pages may send (default: all)")
    allow_credentials: bool = option(False, "such pages may send cookies")
    max_queue: int = option(1024, "sequences that may wait to run; more are answered with 429")
    max_body_bytes: int = option(4 * 2**20, "largest request body; larger ones are answered with 413")
    drain_timeout_s: float = option(30.0, "on SIGTERM: the server has ended after so long; running requests have all but 5 s of it")

    def __post_init__(self) -> None:
        for name in LISTS:
            object.__setattr__(self, name, _words(name, getattr(self, name)))
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port must be in [0, 65535], got {self.port}")
        if self.max_queue < 0:
            raise ConfigError(f"max_queue must be >= 0, got {self.max_queue}")
        if self.max_body_bytes < 1:
            raise ConfigError(f"max_body_bytes must be >= 1, got {self.max_body_bytes}")
        if not 0.0 <= self.drain_timeout_s < float("inf"):
            raise ConfigError(f"drain_timeout_s must be a finite number >= 0, got {self.drain_timeout_s}")
        if self.served_model_name == "":
            raise ConfigError("served_model_name must not be empty; leave it out to use the model's own name")


def _words(name: str, given: str | Iterable[str]) -> tuple[str, ...]:
    """Each once, in order. Raises ConfigError, which never shows what was given: it may be a key."""
    found: list[str] = []
    for text in (given,) if isinstance(given, str) else given:
        try:
            words = json.loads(text) if text.lstrip().startswith("[") else re.split(r"[,\s]+", text.strip(", \t\n"))
        except ValueError:
            words = None
        if not isinstance(words, list) or not all(isinstance(word, str) and word for word in words) or not words:
            raise ConfigError(f"{name} must be text that is not empty, several with commas, or a JSON array; leave it out for the default")
        found += words
    return tuple(dict.fromkeys(found))
