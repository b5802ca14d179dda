"""The OpenAI-compatible server: `build_app(engine, options)` and `serve(engine_config, options)`."""

from headway.server.options import ServerOptions

__all__ = ["ServerOptions"]
