"""A real uvicorn on a free port around the fake engine, and what tests need to talk to it."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fake_engine import FakeEngine
from served import GUARD_SECONDS, served, wait_until
from starlette.applications import Starlette

from jaxpage.server.app import build_app
from jaxpage.server_config import ServerConfig


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """The chunks of a whole stream, which must end with [DONE]."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in response.text.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def named_events(response: httpx.Response) -> list[dict[str, Any]]:
    """The events of a whole stream of a protocol that names them, each under its own type."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    found = []
    for block in filter(None, response.text.split("\n\n")):
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def ready_engine(**options: Any) -> Any:
    """A fake engine that is ready; to the type checker, whatever a test takes it for."""
    engine = FakeEngine(**options)
    engine.is_ready = True
    return engine


def asgi(
    engine: FakeEngine,
    method: str,
    path: str,
    *,
    app: Starlette | None = None,
    enable_debug_routes: bool = False,
    **kwargs: Any,
) -> httpx.Response:
    """The answer of `app`, or of an application of its own, to one request, without a socket."""
    app = app or build_app(engine, ServerConfig(enable_debug_routes=enable_debug_routes))  # type: ignore[arg-type]

    async def ask() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://fake") as client:
            return await client.request(method, path, **kwargs)

    return asyncio.run(ask())


@pytest.fixture(scope="session")
def shared_server() -> Iterator[tuple[FakeEngine, str]]:
    """A fake engine that is ready, and the URL under which it is served."""
    engine = FakeEngine()
    engine.is_ready = True
    with served(build_app(engine, ServerConfig(enable_debug_routes=True))) as url:  # type: ignore[arg-type]
        yield engine, url


@pytest.fixture
def engine(shared_server: tuple[FakeEngine, str]) -> Iterator[FakeEngine]:
    """The shared server's engine. After every test it must hold nothing: no request may leak."""
    engine, _ = shared_server
    yield engine
    engine.scripts.clear()
    engine.seen_params.clear()
    engine.seen_prompts.clear()
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
