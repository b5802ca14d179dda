"""Running the server as a process: load, listen, print a line to try, drain on SIGTERM."""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import logging
import os
import signal
import socket
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from types import FrameType

import uvicorn
from fastapi import FastAPI

from headway.config import EngineConfig
from headway.errors import ConfigError
from headway.server.app import build_app
from headway.server.connection import Connection
from headway.server.options import API_KEY_VARIABLE, ServerOptions

logger = logging.getLogger("headway.server")

# The default of 5 ms lets the loop hold the engine up in the middle of a step.
SWITCH_INTERVAL_S = 0.0005
CLOSE_S = 2      # for connections to close once their answers are written
SHUTDOWN_S = 5   # the last of the drain time: CLOSE_S, the engine's thread (STOP_S), and the interpreter


def serve(engine_config: EngineConfig, options: ServerOptions, *, progress: bool = True) -> None:
    """Loads the engine and serves until SIGTERM or SIGINT. Raises ConfigError when it cannot listen; exits with 1 when the engine dies."""
    listener = _bind(options.host, options.port)
    from headway.engine.engine import Engine  # not at the top: imports torch

    # Loading on a thread that ends lets its OpenMP workers end, too. Were they the main thread's, they would stay beside those
    # of the engine's thread: with more workers than cores OpenMP stops spinning, and each parallel operation of PyTorch's waits
    # to be woken.
    with ThreadPoolExecutor(1) as loader:
        engine = loader.submit(Engine, engine_config, progress=progress).result()
    if progress:
        print(engine.memory, file=sys.stderr)
    gc.collect()
    gc.freeze()   # what is loaded stays: later collections need not walk it
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    app = build_app(engine, options)
    server = Server(app, options)
    server.run(sockets=[listener])
    if app.state.bridge.hangs:   # the interpreter does not end beside a thread that is inside PyTorch
        logger.critical("the engine's thread hangs; the server ends without it")
        logging.shutdown()
        os._exit(1)
    if app.state.bridge.failure is not None:
        raise SystemExit(1)


class Server(uvicorn.Server):
    """uvicorn that answers 503 while it drains, instead of closing its port at once, and then exits with 0."""

    def __init__(self, app: FastAPI, options: ServerOptions) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=Connection,
                log_level="warning",
                access_log=False,
                lifespan="on",
                ws="none",
                server_header=False,
                timeout_keep_alive=75,   # longer than clients keep idle connections, or they meet a closed one
                timeout_graceful_shutdown=CLOSE_S,
            )
        )
        self.options = options
        self.bridge = app.state.bridge
        self.model = options.served_model_name or self.bridge.engine.config.model

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._running_loop = asyncio.get_running_loop()
        self.bridge.on_failure(self._stop)
        await super().startup(sockets)
        assert sockets is not None
        print(_hello(sockets[0], self.model, self.options, self.bridge.engine.sampling_defaults), flush=True)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """First signal: drain. A second one ends the process at once, as does a watchdog that needs no Python to run."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        faulthandler.dump_traceback_later(SHUTDOWN_S + self._time_to_finish, exit=True)
        self._running_loop.call_soon_threadsafe(self._on_signal, sig)

    @property
    def _time_to_finish(self) -> float:
        """Seconds that running requests have."""
        return max(0.0, self.options.drain_timeout_s - SHUTDOWN_S)

    def _on_signal(self, sig: int) -> None:
        logger.warning("%s: finishing %d running sequences", signal.Signals(sig).name, self.bridge.num_open)
        self._drain = asyncio.create_task(self._finish())

    async def _finish(self) -> None:
        await self.bridge.drain(self._time_to_finish)
        self._stop()

    def _stop(self) -> None:
        self.should_exit = True


def _bind(host: str, port: int) -> socket.socket:
    """A bound socket that does not listen yet, so that a taken port is known before a model is loaded."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except (OSError, OverflowError) as error:
        listener.close()
        raise ConfigError(f"cannot listen on {host}:{port}: {error}") from error
    return listener


def _own_key(options: ServerOptions) -> str:
    """What stands for a key on a command line: the variable where it holds the one key, never the key."""
    return f"${API_KEY_VARIABLE}" if options.api_key == (os.environ.get(API_KEY_VARIABLE),) else "YOUR_API_KEY"


def _hello(listener: socket.socket, model: str, options: ServerOptions, sampling: Mapping[str, float]) -> str:
    port = listener.getsockname()[1]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(options.host, options.host)
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    key = f' -H "Authorization: Bearer {_own_key(options)}"' if options.api_key else ""
    body = f'{{"model": "{model}", "messages": [{{"role": "user", "content": "What is speculative decoding?"}}]}}'
    call = f"curl {url}/v1/chat/completions -H 'Content-Type: application/json'{key} -d '{body}'"
    lines = [f"Serving {model} at {url}/v1. Try:\n", f"  {call}\n"]
    if sampling:
        values = ", ".join(f"{name} {value:g}" for name, value in sampling.items())
        lines.append(f"A request that leaves sampling open gets what the model's makers recommend: {values}.\n")
    return "\n".join(lines)
