"""Many requests at once take turns with whatever else the event loop has to do."""

import asyncio
import contextlib
import functools
import itertools
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import uvicorn
from starlette.types import Receive, Scope, Send

from jaxpage.server.turnstile import MAX_HEAD_BYTES, ConnectionLimits, QueuedProtocol, Turnstile


def test_a_burst_is_let_in_one_per_turn_and_in_its_order() -> None:
    """Between two of it others have a turn; and who comes later is let in, too."""
    seen: list[tuple[int, int]] = []
    turns = itertools.count()
    turn = 0

    async def count_turns() -> None:
        nonlocal turn
        while True:
            turn = next(turns)
            await asyncio.sleep(0)

    async def bursts() -> None:
        turnstile = Turnstile()
        counting = asyncio.create_task(count_turns())
        for first in (0, 5):
            for index in range(first, first + 5):
                turnstile.join(lambda index=index: seen.append((index, turn)))
            while len(seen) < first + 5:
                await asyncio.sleep(0)
        counting.cancel()

    asyncio.run(bursts())
    assert [index for index, _ in seen] == [*range(10)]
    assert len({when for _, when in seen}) == 10


class Shut(Turnstile):
    """Lets in whom the test lets in."""

    def __init__(self) -> None:
        self.line: list[Callable[[], None]] = []

    def join(self, enter: Callable[[], None]) -> None:
        self.line.append(enter)

    async def wait_for(self, number: int) -> None:
        while len(self.line) < number:
            await asyncio.sleep(0.001)


class Site:
    """A server behind a shut turnstile, which says the length of what is sent to it."""

    def __init__(self, port: int, server: uvicorn.Server, turnstile: Shut) -> None:
        self._port, self.server, self.turnstile = port, server, turnstile
        self.seen: list[str] = []
        self._writers: list[asyncio.StreamWriter] = []

    async def app(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.seen.append(scope["path"])
        size, more = 0, True
        while more:
            message = await receive()
            size, more = size + len(message.get("body", b"")), message.get("more_body", False)
        answer = str(size).encode()
        headers = [(b"content-length", str(len(answer)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": answer})

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        self._writers.append(writer)
        return reader, writer

    async def close(self, serving: asyncio.Task[None]) -> None:
        for writer in self._writers:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()
        self.server.should_exit = True
        await serving


@contextlib.asynccontextmanager
async def site(limits: ConnectionLimits | None = None) -> AsyncIterator[Site]:
    turnstile = Shut()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        http: Any = functools.partial(QueuedProtocol, turnstile, limits)
        config = uvicorn.Config("", interface="asgi3", http=http, log_config=None, lifespan="off", ws="none")
        here = Site(listener.getsockname()[1], uvicorn.Server(config), turnstile)
        config.app = here.app
        serving = asyncio.create_task(here.server.serve(sockets=[listener]))
        while not here.server.started:
            await asyncio.sleep(0.001)
        try:
            yield here
        finally:
            await here.close(serving)


def post(path: str, body: bytes) -> bytes:
    return f"POST {path} HTTP/1.1\r\nHost: here\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


async def answer_of(reader: asyncio.StreamReader) -> int:
    head = await reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 "), head
    (length,) = (int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
    return int(await reader.readexactly(length))


def test_a_get_goes_before_all_posts_that_wait() -> None:
    async def run() -> None:
        async with site() as here:
            posts = [await here.connect() for _ in range(3)]
            for index, (_, writer) in enumerate(posts):
                writer.write(post(f"/{index}", b"x" * index))
            await here.turnstile.wait_for(3)
            reader, writer = await here.connect()
            writer.write(b"GET /health HTTP/1.1\r\nHost: here\r\n\r\n")
            assert await answer_of(reader) == 0
            assert here.seen == ["/health"]
            for enter in here.turnstile.line:
                enter()
            assert [await answer_of(reader) for reader, _ in posts] == [0, 1, 2]

    asyncio.run(run())


def test_a_request_that_waited_is_read_whole_and_the_next_of_its_connection_waits_again() -> None:
    size = 3_000_000  # more than the sockets hold between the two

    async def run() -> None:
        async with site() as here:
            reader, writer = await here.connect()
            for number in (1, 2):
                writer.write(post(f"/{number}", b"x" * size))
                await here.turnstile.wait_for(number)
                assert len(here.seen) == number - 1
                here.turnstile.line[-1]()
                assert await answer_of(reader) == size
            writer.write(post("/3", b"x") + post("/4", b"xx"))  # one behind the other without waiting
            await here.turnstile.wait_for(3)
            here.turnstile.line[-1]()
            assert [await answer_of(reader), await answer_of(reader)] == [1, 2]

    asyncio.run(run())


@pytest.mark.parametrize("begins", [b"GET /", b"GET / HTTP/1.1\r\nA: ", b"GET / HTTP/1.1\r\nA: 1\r\n"])
def test_a_head_without_an_end_is_refused(begins: bytes) -> None:
    """In its line, in one header, or in many."""
    piece = b"B: 2\r\n" * 1000 if begins.endswith(b"\n") else b"x" * 6000

    async def run() -> None:
        async with site() as here:
            reader, writer = await here.connect()
            writer.write(begins)
            answer = asyncio.create_task(reader.read())
            num_sent = 0
            while not answer.done():
                assert num_sent < 4 * MAX_HEAD_BYTES, "it is still read"
                writer.write(piece)
                num_sent += len(piece)
                await asyncio.wait((answer,), timeout=0.01)
            assert num_sent > MAX_HEAD_BYTES
            assert (await answer).startswith(b"HTTP/1.1 431 ")
            assert here.seen == []

    asyncio.run(run())


def test_long_heads_that_end_are_served_one_after_the_other() -> None:
    head = b"GET /%d HTTP/1.1\r\nHost: here\r\nA: " + b"x" * (MAX_HEAD_BYTES - 1000)

    async def run() -> None:
        async with site() as here:
            reader, writer = await here.connect()
            for number in range(3):
                for piece in (head % number, b"\r\nB: 2\r", b"\n\r\n"):
                    writer.write(piece)
                    await asyncio.sleep(0.01)
                assert await answer_of(reader) == 0
            assert here.seen == ["/0", "/1", "/2"]

    asyncio.run(run())


def test_who_waits_when_the_server_stops_is_answered() -> None:
    async def run() -> None:
        async with site() as here:
            reader, writer = await here.connect()
            writer.write(post("/late", b"xyz"))
            await here.turnstile.wait_for(1)
            here.server.should_exit = True
            assert await answer_of(reader) == 3
            here.turnstile.line[0]()
            assert here.seen == ["/late"]

    asyncio.run(run())


def test_who_has_left_is_let_in_without_harm() -> None:
    async def run() -> None:
        async with site() as here:
            _, writer = await here.connect()
            writer.write(post("/gone", b"xyz"))
            await here.turnstile.wait_for(1)
            (connection,) = here.server.server_state.connections
            connection.transport.abort()
            while here.server.server_state.connections:
                await asyncio.sleep(0.001)
            here.turnstile.line[0]()
            await asyncio.sleep(0)
            assert here.seen == []

    asyncio.run(run())


@pytest.mark.parametrize("begins", [b"", b"GET / HT", b"GET / HTTP/1.1\r\nContent-Length: 5\r\n\r\nab"])
def test_a_client_that_stops_sending_is_cut_off(begins: bytes) -> None:
    """Before a head, in a head, or in a body."""

    async def run() -> None:
        async with site(ConnectionLimits(read_timeout=0.05)) as here:
            reader, writer = await here.connect()
            writer.write(begins)
            with contextlib.suppress(ConnectionError):
                await asyncio.wait_for(reader.read(), 30)
            assert reader.at_eof() or reader.exception() is not None, "the server has closed the connection"

    asyncio.run(run())


def test_a_client_that_reads_nothing_is_cut_off() -> None:
    async def run() -> None:
        async with site(ConnectionLimits(write_timeout=0.05)) as here:
            left = asyncio.Event()

            async def flood(scope: Scope, receive: Receive, send: Send) -> None:
                await send({"type": "http.response.start", "status": 200, "headers": []})
                while (await_disconnect := asyncio.ensure_future(receive())) and not left.is_set():
                    piece = {"type": "http.response.body", "body": b"x" * 2**20, "more_body": True}
                    await send(piece)
                    await asyncio.sleep(0)
                    if await_disconnect.done() and await_disconnect.result()["type"] == "http.disconnect":
                        left.set()

            here.app = flood  # type: ignore[method-assign]
            here.server.config.loaded_app = flood
            _, writer = await here.connect()
            writer.transport.pause_reading()  # type: ignore[attr-defined]
            writer.write(b"GET / HTTP/1.1\r\nHost: here\r\n\r\n")
            assert await asyncio.wait_for(left.wait(), 30), "the application hears that its client is gone"

    asyncio.run(run())


def test_a_connection_too_many_is_refused_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        async with site(ConnectionLimits(max_connections=1)) as here:
            first = await here.connect()
            second, _ = await here.connect()
            assert (await asyncio.wait_for(second.read(), 30)).startswith(b"HTTP/1.1 503 ")
            first[1].write(b"GET / HTTP/1.1\r\nHost: here\r\n\r\n")
            assert await answer_of(first[0]) == 0

    QueuedProtocol.last_refusal = -float("inf")
    asyncio.run(run())
    assert "--max-connections" in caplog.text


def test_a_client_of_http_1_0_gets_a_stream_without_chunks() -> None:
    async def run() -> None:
        async with site() as here:

            async def stream(scope: Scope, receive: Receive, send: Send) -> None:
                await send({"type": "http.response.start", "status": 200, "headers": []})
                for piece in (b"data: 1\n\n", b"data: 2\n\n"):
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
                await send({"type": "http.response.body", "body": b""})

            here.server.config.loaded_app = stream
            reader, writer = await here.connect()
            writer.write(b"GET / HTTP/1.0\r\nHost: here\r\n\r\n")
            head, _, body = (await asyncio.wait_for(reader.read(), 30)).partition(b"\r\n\r\n")
            assert b"chunked" not in head.lower()
            assert body == b"data: 1\n\ndata: 2\n\n"

    asyncio.run(run())
