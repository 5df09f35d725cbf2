"""New requests one after the other: a burst of them must not keep everybody else waiting.

In: connections' bytes. Out: the same to uvicorn's HTTP parser, those that begin a POST in turns. Whatever arrives at
once is otherwise parsed, checked and admitted in one turn of the event loop, in which no token is sent and no /health
answered.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 64 * 2**10
"""Longest line and headers of a request, which uvicorn would collect for as long as they come."""
_TOO_LONG = b"HTTP/1.1 431 Request Header Fields Too Large\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


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

    def __init__(self, turnstile: Turnstile, **options: Any) -> None:
        super().__init__(**options)
        self._turnstile = turnstile
        self._unread = b""
        """What has come of a request that waits."""
        self._is_in_head = False
        self._num_head_bytes = 0
        """That have come since the head of the request began."""

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

    def on_headers_complete(self) -> None:
        """The parser has found the end of its head."""
        self._is_in_head = False
        super().on_headers_complete()

    def shutdown(self) -> None:
        """The server stops: who waits is told so, as a request."""
        self._read()
        super().shutdown()
