"""The server's own settings; the command-line flags are made from these fields. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass

from headway.config import option
from headway.errors import ConfigError


@dataclass(frozen=True)
class ServerOptions:
    """Where and how to serve. Raises ConfigError for a value that cannot work."""

    host: str = option("127.0.0.1", "address to listen on")
    port: int = option(8000, "port to listen on; 0: any free one")
    served_model_name: str | None = option(None, "name of the model in the API; default: the model's own")
    api_key: str | None = option(None, "clients must send this as a bearer token; /health, /version and /metrics stay open")
    max_queue: int = option(1024, "sequences that may wait to run; more are answered with 429")
    max_body_bytes: int = option(4 * 2**20, "largest request body; larger ones are answered with 413")
    drain_timeout_s: float = option(30.0, "on SIGTERM: how long running requests may take to finish")

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port must be in [0, 65535], got {self.port}")
        if self.max_queue < 0:
            raise ConfigError(f"max_queue must be >= 0, got {self.max_queue}")
        if self.max_body_bytes < 1:
            raise ConfigError(f"max_body_bytes must be >= 1, got {self.max_body_bytes}")
        if not 0.0 <= self.drain_timeout_s < float("inf"):
            raise ConfigError(f"drain_timeout_s must be a finite number >= 0, got {self.drain_timeout_s}")
        if self.api_key == "":
            raise ConfigError("api_key must not be empty; leave it out to serve without a key")
        if self.served_model_name == "":
            raise ConfigError("served_model_name must not be empty; leave it out to use the model's own name")
