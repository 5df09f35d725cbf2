"""Connections: new requests one after the other, and an end to those that hold a connection and do nothing with it.

In: connections' bytes. Out: the same to uvicorn's HTTP parser, those that begin a POST in turns. Whatever arrives at
once is otherwise parsed, checked and admitted in one turn of the event loop, in which no token is sent and no /health
answered. A head or body that stops coming, and a client that stops reading, are cut off after a while.

`QueuedProtocol` builds on names inside uvicorn, so `pyproject.toml` bounds its version; the tests of this file fail
where a name is gone.
"""

import asyncio
import logging
import resource
import socket
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from starlette.types import Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 64 * 2**10
"""Longest line and headers of a request, which uvicorn would collect for as long as they come."""
_TOO_LONG = b"HTTP/1.1 431 Request Header Fields Too Large\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
_FULL = b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\nRetry-After: 1\r\nConnection: close\r\n\r\n"
SPARE_DESCRIPTORS = 64
"""Of the process's file descriptors, those that are not for connections: files, the engine's sockets."""
_KEEPALIVE_SECONDS = 60
"""Silence on a TCP connection after which the kernel asks whether the other side is still there."""
_LOG_SECONDS = 10
"""Least time between two lines about refused connections."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """What a connection may take."""

    read_timeout: float = 60.0
    """Seconds for the head of a request, and between two pieces of its body."""
    write_timeout: float = 60.0
    """Seconds for which a client may read nothing of what waits for it."""
    max_connections: int | None = None
    """Most connections at once; None: as many as the process has file descriptors for."""

    @property
    def most(self) -> int:
        """Most connections at once, below the limit of file descriptors."""
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        by_files = max(1, soft - SPARE_DESCRIPTORS)
        return by_files if self.max_connections is None else min(self.max_connections, by_files)


class Turnstile:
    """Lets one in per turn of the event loop, in order of arrival."""

    def __init__(self) -> None:
        self._line: deque[Callable[[], None]] = deque()

    def join(self, enter: Callable[[], None]) -> None:
        """Call `enter` when it is its turn."""
        self._line.append(enter)
        if len(self._line) == 1:
            asyncio.get_running_loop().call_soon(self._let_one_in)

    def _let_one_in(self) -> None:
        enter = self._line.popleft()
        if self._line:
            asyncio.get_running_loop().call_soon(self._let_one_in)
        enter()


class QueuedProtocol(HttpToolsProtocol):
    """uvicorn's HTTP connection, which waits at a turnstile before it reads a POST; other requests cost little.

    It closes on a request whose line and headers are longer than `MAX_HEAD_BYTES` and a packet or two.
    """

    last_refusal = -float("inf")
    """When a refused connection was last logged, of all connections."""

    def __init__(self, turnstile: Turnstile, limits: ConnectionLimits | None = None, **options: Any) -> None:
        super().__init__(**options)
        self._turnstile = turnstile
        self._limits = limits or ConnectionLimits()
        self._reading: asyncio.TimerHandle | None = None
        """Cuts off a client that should send."""
        self._writing: asyncio.TimerHandle | None = None
        """Cuts off a client that should read."""
        self._unread = b""
        """What has come of a request that waits."""
        self._is_in_head = False
        self._num_head_bytes = 0
        """That have come since the head of the request began."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client has connected; one too many is refused."""
        super().connection_made(transport)
        most = self._limits.most
        if len(self.connections) > most:
            self._log_refusal(most)
            transport.write(_FULL)
            transport.close()
            return
        _keep_alive(transport)
        self._await_data("a request's head")

    def connection_lost(self, exc: Exception | None) -> None:
        """The client has left, or was cut off."""
        for timer in (self._reading, self._writing):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """The client reads more slowly than it is sent to."""
        super().pause_writing()
        if self._writing is None:
            self._writing = self.loop.call_later(self._limits.write_timeout, self._cut_off, "it reads nothing")

    def resume_writing(self) -> None:
        """The client has read."""
        if self._writing is not None:
            self._writing.cancel()
            self._writing = None
        super().resume_writing()

    def timeout_keep_alive_handler(self) -> None:
        """The connection was idle for long; what its client has not read until now it will not read."""
        if self.transport.get_write_buffer_size():
            self.transport.abort()
        super().timeout_keep_alive_handler()

    def _await_data(self, what: str) -> None:
        """From now on the client has a while to send more."""
        self._stop_awaiting()
        self._reading = self.loop.call_later(self._limits.read_timeout, self._cut_off, f"{what} does not come")

    def _stop_awaiting(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None

    def _cut_off(self, why: str) -> None:
        logger.info("closing the connection of %s: %s", self.client[0] if self.client else "a client", why)
        self.transport.abort()

    def _log_refusal(self, most: int) -> None:
        now = time.monotonic()
        if now - QueuedProtocol.last_refusal >= _LOG_SECONDS:
            QueuedProtocol.last_refusal = now
            logger.warning(
                "%d connections are open, and no more may be: refusing others (raise --max-connections, or ulimit -n)",
                most,
            )

    def data_received(self, data: bytes) -> None:
        """More bytes, of a new request or of one that has begun."""
        if self._unread:
            self._unread += data
        elif data.startswith(b"POST "):
            self._unread = data
            self._unset_keepalive_if_required()
            self.flow.pause_reading()
            self._turnstile.join(self._read)
        else:
            self._parse(data)

    def _read(self) -> None:
        data, self._unread = self._unread, b""
        if data and not self.transport.is_closing():
            self.flow.resume_reading()
            self._parse(data)

    def _parse(self, data: bytes) -> None:
        headers = self.headers
        super().data_received(data)
        if self._is_in_head and self.headers is headers:  # all of it is of one head
            self._num_head_bytes += len(data)
            if self._num_head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
                if self.cycle is None or self.cycle.response_complete:
                    self.transport.write(_TOO_LONG)
                self.transport.close()

    def on_message_begin(self) -> None:
        """The parser has found a request."""
        super().on_message_begin()
        self._is_in_head, self._num_head_bytes = True, 0
        self._await_data("the rest of a request's head")

    def on_headers_complete(self) -> None:
        """The parser has found the end of its head."""
        self._is_in_head = False
        self._await_data("a request's body")
        if self.parser.get_http_version() == "1.0":
            served = self.app
            self.app = self._without_chunks(served)
            super().on_headers_complete()
            self.app = served
        else:
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """The parser has found a piece of a body."""
        self._await_data("the rest of a request's body")
        super().on_body(body)

    def on_message_complete(self) -> None:
        """The parser has found the end of a request."""
        self._stop_awaiting()
        super().on_message_complete()

    def _without_chunks(self, app: Any) -> Any:
        """`app` for a client of HTTP/1.0, which knows no chunks: the end of the connection is that of the answer."""

        async def served(scope: Scope, receive: Receive, send: Send) -> None:
            cycle = self.cycle

            async def send_plain(message: Message) -> None:
                if message["type"] == "http.response.start":
                    if not any(name.lower() == b"content-length" for name, _ in message["headers"]):
                        cycle.chunked_encoding = False
                elif cycle.chunked_encoding is False and not cycle.expected_content_length:
                    cycle.expected_content_length = len(message.get("body", b""))
                await send(message)

            await app(scope, receive, send_plain)

        return served

    def shutdown(self) -> None:
        """The server stops: who waits is told so, as a request."""
        self._read()
        super().shutdown()


def _keep_alive(transport: asyncio.Transport) -> None:
    """Let the kernel find out when the other side of a TCP connection is gone without a word."""
    connection = transport.get_extra_info("socket")
    if connection is None or connection.family == socket.AF_UNIX:
        return
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", _KEEPALIVE_SECONDS), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):  # which not every system has
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
