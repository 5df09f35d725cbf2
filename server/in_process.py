"""Requests to the server's application in this process, without a socket: every rule of the protocols holds.

In: an application, and a request's method, path and body. Out: the status, headers and body that a client would get,
the body in pieces as they are sent. `LocalServer` does it for callers without an event loop.
"""

import asyncio
import contextlib
import logging
import queue
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.types import Message

from jaxpage.server.app import build_app
from jaxpage.server_config import ServerConfig

if TYPE_CHECKING:
    from jaxpage.async_engine import AsyncEngine

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Answer:
    """A response whose head is there."""

    status: int
    headers: Headers
    pieces: AsyncIterator[bytes]
    """The body, as it is sent."""

    async def body(self) -> bytes:
        """The whole body."""
        return b"".join([piece async for piece in self.pieces])


@contextlib.asynccontextmanager
async def opened(app: Starlette, method: str, path: str, body: bytes = b"") -> AsyncIterator[Answer]:
    """The application's answer to one request. To leave before its end is to hang up: the request is aborted."""
    messages: asyncio.Queue[Message | None] = asyncio.Queue()
    hung_up = asyncio.Event()
    unread = [body]

    async def receive() -> Message:
        if unread:
            return {"type": "http.request", "body": unread.pop(), "more_body": False}
        await hung_up.wait()
        return {"type": "http.disconnect"}

    async def serve() -> None:
        try:
            await app(_scope(app, method, path), receive, messages.put)
        except Exception:  # the client has been answered with a 500 that says to look here
            logger.exception("%s %s failed", method, path)
        finally:
            messages.put_nowait(None)

    async def pieces() -> AsyncIterator[bytes]:
        while (message := await messages.get()) is not None:
            if piece := message.get("body"):
                yield piece

    serving = asyncio.create_task(serve())
    try:
        start = await messages.get()
        assert start is not None, "an application answers"
        yield Answer(start["status"], Headers(raw=start["headers"]), pieces())
    finally:
        hung_up.set()
        await asyncio.wait({serving})


def _scope(app: Starlette, method: str, path: str) -> dict[str, Any]:
    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    keys = app.state.service.config.api_keys()  # which the environment may hold
    if keys:
        headers.append((b"authorization", f"Bearer {min(keys)}".encode()))
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": headers,
        "client": None,
        "server": ("localhost", None),
    }


@contextlib.asynccontextmanager
async def loaded_app(engine: "AsyncEngine", config: ServerConfig) -> AsyncIterator[Starlette]:
    """The application of an engine that is loaded first and shut down in the end. Raises what keeps it from loading."""
    try:
        app = build_app(engine, config)
        await engine.start()
        await engine.wait_ready()
        _ = app.state.service.dialect  # raises for a parser that the model cannot have
        yield app
    finally:
        await engine.close()


class LocalReply:
    """A response that is read without an event loop: iterating gives the pieces of its body as they come."""

    def __init__(self, loop: asyncio.AbstractEventLoop, app: Starlette, method: str, path: str, body: bytes) -> None:
        self._pieces: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        head: Future[int] = Future()
        self._pumping = asyncio.run_coroutine_threadsafe(self._pump(app, method, path, body, head), loop)
        self.status = head.result()

    def __iter__(self) -> Iterator[bytes]:
        while (piece := self._pieces.get()) is not None:
            yield piece

    def close(self) -> None:
        """Hang up, if the answer is still going on."""
        self._pumping.cancel()

    async def _pump(self, app: Starlette, method: str, path: str, body: bytes, head: "Future[int]") -> None:
        try:
            async with opened(app, method, path, body) as answer:
                head.set_result(answer.status)
                async for piece in answer.pieces:
                    self._pieces.put(piece)
        finally:
            head.cancel()
            self._pieces.put(None)


class LocalServer:
    """An engine and its application, on an event loop in a thread of its own, for as long as a `with` lasts."""

    def __init__(self, make_engine: Callable[[], "AsyncEngine"], config: ServerConfig) -> None:
        """`make_engine` is called on the event loop that the engine then belongs to."""
        self._make_engine, self._config = make_engine, config
        self._running: Future[tuple[asyncio.AbstractEventLoop, asyncio.Task[None]]] = Future()
        self._loaded: Future[Starlette] = Future()
        self._thread = threading.Thread(target=asyncio.run, args=(self._run(),), name="server")

    def __enter__(self) -> Self:
        """Load the engine. Raises what keeps it from loading."""
        self._thread.start()
        try:
            self._loaded.result()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def request(self, method: str, path: str, body: bytes = b"") -> LocalReply:
        """The answer to one request, once its head is there."""
        loop, _ = self._running.result()
        return LocalReply(loop, self._loaded.result(), method, path, body)

    def close(self) -> None:
        """Shut the engine down, also while it loads. Idempotent."""
        loop, task = self._running.result()
        if self._thread.is_alive():
            with contextlib.suppress(RuntimeError):  # it has just ended by itself
                loop.call_soon_threadsafe(task.cancel)
            self._thread.join()

    async def _run(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._running.set_result((asyncio.get_running_loop(), task))
        try:
            async with loaded_app(self._make_engine(), self._config) as app:
                self._loaded.set_result(app)
                await asyncio.Event().wait()
        except BaseException as error:  # for who waits; one that has been loaded is closed
            if not self._loaded.done():
                self._loaded.set_exception(error)
