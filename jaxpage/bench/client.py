"""A client that costs next to nothing, for benches: one streamed completion per connection, and when its pieces came.

In: an URL and a request. Out: bytes with their moments, and, once nothing is measured any more, what they say. Reading
them at once would take the machine's time from a server that runs on it, as much as the server itself takes.
"""

import asyncio
import itertools
import json
import time
import urllib.parse
from dataclasses import dataclass, field
from typing import Any, cast

import httptools


@dataclass(slots=True)
class Answer:
    """What became of a request. Moments are seconds of `time.perf_counter`."""

    started: float
    ended: float = 0.0
    token_times: list[float] = field(default_factory=list)
    """When each piece of text came; the first is the first token."""
    num_output_tokens: int = 0
    num_input_tokens: int = 0
    text: str = ""
    status: int | None = None
    """Of the answer; None where none came."""
    error: str | None = None

    @property
    def ttft(self) -> float:
        """Seconds to the first token."""
        return self.token_times[0] - self.started

    @property
    def tpot(self) -> float:
        """Seconds per output token after the first."""
        return (self.latency - self.ttft) / max(self.num_output_tokens - 1, 1)

    @property
    def latency(self) -> float:
        """Seconds in all."""
        return self.ended - self.started

    @property
    def gaps(self) -> list[float]:
        """Seconds between two pieces."""
        return [late - early for early, late in itertools.pairwise(self.token_times)]


class Exchange(asyncio.Protocol):
    """One request, and the bytes of its answer up to the connection's end."""

    def __init__(self, request: bytes = b"") -> None:
        self.started = self.ended = time.perf_counter()
        self.pieces: list[tuple[float, bytes]] = []
        """In order, with their moments."""
        self.error: Exception | None = None
        self._request = request
        self._over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Ask."""
        cast(asyncio.WriteTransport, transport).write(self._request)

    def data_received(self, data: bytes) -> None:
        """Keep what comes for later."""
        self.ended = time.perf_counter()
        self.pieces.append((self.ended, data))

    def connection_lost(self, error: Exception | None) -> None:
        """The server closes the connection behind its answer, as it was asked to."""
        self.error = error
        self._over.set_result(None)

    async def over(self) -> None:
        """Return when it has."""
        await self._over


async def ask(url: str, body: dict[str, Any], headers: dict[str, str] | None = None) -> Exchange:
    """Send `body` with streaming and usage switched on; never raises for what the server does."""
    parts = urllib.parse.urlsplit(url)
    secure = parts.scheme == "https"
    content = json.dumps(body | {"stream": True, "stream_options": {"include_usage": True}}).encode()
    lines = [f"POST {parts.path} HTTP/1.1", f"Host: {parts.netloc}", "Content-Type: application/json"]
    lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
    lines += [f"Content-Length: {len(content)}", "Connection: close"]
    exchange = Exchange("\r\n".join(lines).encode() + b"\r\n\r\n" + content)
    try:
        await asyncio.get_running_loop().create_connection(
            lambda: exchange, parts.hostname or "", parts.port or (443 if secure else 80), ssl=secure or None
        )
        await exchange.over()
    except OSError as error:
        exchange.error, exchange.ended = error, time.perf_counter()
    return exchange


def read(exchange: Exchange) -> Answer:
    """What the bytes say; never raises."""
    answer = Answer(exchange.started, exchange.ended)
    try:
        _read_into(answer, exchange)
    except (OSError, EOFError, ValueError, LookupError, TypeError, httptools.HttpParserError) as error:
        answer.error = f"{type(error).__name__}: {error}"
    if answer.error is None and not answer.token_times:
        answer.error = "no text came"
    return answer


def _read_into(answer: Answer, exchange: Exchange) -> None:
    """One event per `data:` line, as all servers of OpenAI's protocol send them."""
    response = _Response()
    for response.now, data in exchange.pieces:
        response.parser.feed_data(data)
    answer.status = response.status
    if exchange.error is not None:
        raise exchange.error
    if not exchange.pieces:
        raise EOFError("the connection was closed without an answer")
    if answer.status != 200:
        raise ValueError(f"{answer.status} {b''.join(body for _, body in response.bodies).decode(errors='replace')}")
    pending = b""
    for now, body in response.bodies:
        *whole, pending = (pending + body).split(b"\n")
        for line in whole:
            if line.startswith(b"data:"):
                if (event := line[5:].strip()) == b"[DONE]":
                    return
                _take(answer, json.loads(event), now)
    if not response.is_complete:
        raise EOFError("the answer broke off")


def _take(answer: Answer, chunk: dict[str, Any], now: float) -> None:
    if "error" in chunk:
        raise ValueError(f"{chunk['error']}")
    if chunk["choices"] and (text := chunk["choices"][0].get("text")):
        answer.token_times.append(now)
        answer.text += text
    if usage := chunk.get("usage"):
        answer.num_output_tokens, answer.num_input_tokens = usage["completion_tokens"], usage["prompt_tokens"]


class _Response:
    """What the HTTP parser finds in an answer."""

    def __init__(self) -> None:
        self.parser = httptools.HttpResponseParser(self)
        self.now = 0.0
        """When what is being read came."""
        self.status: int | None = None
        self.bodies: list[tuple[float, bytes]] = []
        self.is_complete = False

    def on_headers_complete(self) -> None:
        self.status = self.parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        self.bodies.append((self.now, body))

    def on_message_complete(self) -> None:
        self.is_complete = True
