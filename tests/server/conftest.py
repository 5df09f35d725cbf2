"""A real uvicorn on a free port around the fake engine, and what tests need to talk to it."""

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
import uvicorn
from fake_engine import FakeEngine

from jaxpage.server.app import build_app

GUARD_SECONDS = 30.0
"""Only so that a hang fails: nothing here takes a second."""


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Returns once `condition` holds; fails if it never does."""
    deadline = time.monotonic() + GUARD_SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"never happened: {what}"
        time.sleep(0.005)


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """The chunks of a whole stream, which must end with [DONE]."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in response.text.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def asgi(
    engine: FakeEngine, method: str, path: str, *, enable_debug_routes: bool = False, **kwargs: Any
) -> httpx.Response:
    """The answer of an application of its own to one request, without a socket."""
    app = build_app(engine, engine.model_name, enable_debug_routes=enable_debug_routes)  # type: ignore[arg-type]

    async def ask() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://fake") as client:
            return await client.request(method, path, **kwargs)

    return asyncio.run(ask())


@pytest.fixture(scope="session")
def shared_server() -> Iterator[tuple[FakeEngine, str]]:
    """A fake engine that is ready, and the URL under which it is served."""
    engine = FakeEngine()
    engine.is_ready = True
    app = build_app(engine, "fake", enable_debug_routes=True)  # type: ignore[arg-type]
    config = uvicorn.Config(app, log_config=None, log_level="warning", access_log=False, lifespan="off")
    server = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            wait_until(lambda: server.started, "uvicorn started")
            yield engine, f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(GUARD_SECONDS)
    assert not thread.is_alive()


@pytest.fixture
def engine(shared_server: tuple[FakeEngine, str]) -> Iterator[FakeEngine]:
    """The shared server's engine. After every test it must hold nothing: no request may leak."""
    engine, _ = shared_server
    yield engine
    engine.scripts.clear()
    engine.seen_params.clear()
    engine.seen_options.clear()
    engine.encoding_threads.clear()
    engine.max_num_seqs = 1000
    wait_until(lambda: engine.num_open == 0, "the engine holds no request")


@pytest.fixture
def url(engine: FakeEngine, shared_server: tuple[FakeEngine, str]) -> str:
    """Where the shared server listens."""
    return shared_server[1]


@pytest.fixture(scope="session")
def shared_client(shared_server: tuple[FakeEngine, str]) -> Iterator[httpx.Client]:
    """One client for all tests, as making one takes longer than most of them."""
    with httpx.Client(base_url=shared_server[1], timeout=GUARD_SECONDS) as client:
        yield client


@pytest.fixture
def client(engine: FakeEngine, shared_client: httpx.Client) -> httpx.Client:
    """An HTTP client of the shared server, whose engine must be empty when the test ends."""
    return shared_client
