"""A real server around a tiny real model: one for the whole session, or one made to order."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn

from headway.config import EngineConfig, SpeculativeConfig
from headway.engine.engine import Engine
from headway.server.app import build_app
from headway.server.async_engine import AsyncEngine
from headway.server.connection import Connection
from headway.server.options import ServerOptions
from tests.tiny import tiny_model_dir

MODEL = "tiny"


@dataclass
class LiveServer:
    """A server on a real port, in threads of this process."""

    engine: Engine
    bridge: AsyncEngine
    url: str
    client: httpx.Client

    def on_engine(self, function: Callable[[], Any]) -> Any:
        """Runs on the engine's thread, between two steps."""
        assert self.bridge.loop is not None
        return asyncio.run_coroutine_threadsafe(self.bridge.call(function), self.bridge.loop).result(60)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """No step is made and no request is accepted inside the block."""
        held, resume = threading.Event(), threading.Event()

        def hold() -> None:
            held.set()
            resume.wait(60)

        assert self.bridge.loop is not None
        future = asyncio.run_coroutine_threadsafe(self.bridge.call(hold), self.bridge.loop)
        assert held.wait(60)
        try:
            yield
        finally:
            resume.set()
            future.result(60)

    def wait_until(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < deadline, f"never happened: {what}"
            time.sleep(0.005)

    def assert_idle(self) -> None:
        """Nothing runs, every block is free, every invariant holds."""
        self.wait_until(lambda: self.bridge.num_open == 0, "all sequences are finished")

        def check() -> None:
            assert not self.engine.has_work()
            self.engine.check()
            pool = self.engine.scheduler.pool
            assert pool.num_free == pool.num_blocks

        self.on_engine(check)

    def complete(self, **body: Any) -> dict[str, Any]:
        response = self.client.post("/v1/completions", json=body)
        assert response.status_code == 200, response.text
        return dict(response.json())


@contextlib.contextmanager
def live_server(directory: Path, options: ServerOptions | None = None, **config: Any) -> Iterator[LiveServer]:
    # Always drafting: a policy that learns would rightly leave a random model alone.
    speculative = SpeculativeConfig.parse({"method": "ngram", "policy": "static"})
    settings = {"dtype": "float32", "kv_cache_memory_bytes": 4 * 2**20, "speculative": speculative, **config}
    engine = Engine(EngineConfig(model=str(directory), **settings))
    app = build_app(engine, options or ServerOptions(served_model_name=MODEL))
    server = uvicorn.Server(uvicorn.Config(app, http=Connection, port=0, log_level="warning"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.01)
    url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    with httpx.Client(base_url=url, timeout=120) as client:
        live = LiveServer(engine, app.state.bridge, url, client)
        yield live
        server.should_exit = True
        thread.join(60)
        assert not thread.is_alive()


@pytest.fixture(scope="session")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_dir(tmp_path_factory.mktemp("server"), vocab_size=300)


@pytest.fixture(scope="session")
def _session_server(tiny_dir: Path) -> Iterator[LiveServer]:
    with live_server(tiny_dir) as live:
        yield live


@pytest.fixture
def server(_session_server: LiveServer) -> Iterator[LiveServer]:
    """The shared server; idle again and whole after every test."""
    yield _session_server
    _session_server.assert_idle()


@pytest.fixture
def make_server(tiny_dir: Path) -> Iterator[Callable[..., LiveServer]]:
    """make_server(options, **engine_config): a server of one's own, stopped at the end of the test."""
    with contextlib.ExitStack() as stack:
        yield lambda options=None, **config: stack.enter_context(live_server(tiny_dir, options, **config))
