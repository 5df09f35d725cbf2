"""A client that costs next to nothing, for benches: one streamed completion per connection, and when its pieces came.

In: an URL and a request. Out: moments and tokens. It reads HTTP/1.1 with or without chunks, and one event per `data:`
line, as all servers of OpenAI's protocol send them.
"""

import asyncio
import itertools
import json
import time
import urllib.parse
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

_LIMIT = 2**24
"""Longest line, in bytes."""


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


async def stream_completion(url: str, body: dict[str, Any], headers: dict[str, str] | None = None) -> Answer:
    """Send `body` with streaming and usage switched on; never raises for what the server does."""
    answer = Answer(time.perf_counter())
    try:
        body = body | {"stream": True, "stream_options": {"include_usage": True}}
        async for data in _events(url, body, headers or {}, answer):
            now = time.perf_counter()
            chunk = json.loads(data)
            if "error" in chunk:
                answer.error = str(chunk["error"])
                break
            if chunk["choices"] and (text := chunk["choices"][0].get("text")):
                answer.token_times.append(now)
                answer.text += text
            if usage := chunk.get("usage"):
                answer.num_output_tokens, answer.num_input_tokens = usage["completion_tokens"], usage["prompt_tokens"]
    except (OSError, EOFError, ValueError) as error:
        answer.error = f"{type(error).__name__}: {error}"
    answer.ended = time.perf_counter()
    if answer.error is None and not answer.token_times:
        answer.error = "no text came"
    return answer


async def _events(url: str, body: dict[str, Any], headers: dict[str, str], answer: Answer) -> AsyncIterator[bytes]:
    """The data of each event up to [DONE]; notes the status. Raises `ValueError` with what came if it is no stream."""
    parts = urllib.parse.urlsplit(url)
    secure = parts.scheme == "https"
    reader, writer = await asyncio.open_connection(
        parts.hostname, parts.port or (443 if secure else 80), ssl=secure or None, limit=_LIMIT
    )
    try:
        content = json.dumps(body).encode()
        lines = [f"POST {parts.path} HTTP/1.1", f"Host: {parts.netloc}", "Content-Type: application/json"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        lines += [f"Content-Length: {len(content)}", "Connection: close"]
        writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + content)
        answer.status = int((await reader.readline()).split()[1])
        is_chunked = False
        while (line := await reader.readline()) not in (b"\r\n", b""):
            is_chunked = is_chunked or line.lower().replace(b" ", b"").startswith(b"transfer-encoding:chunked")
        pieces = _chunks(reader) if is_chunked else _rest(reader)
        if answer.status != 200:
            raise ValueError(f"{answer.status} {b''.join([piece async for piece in pieces]).decode(errors='replace')}")
        pending = b""
        async for piece in pieces:
            *whole, pending = (pending + piece).split(b"\n")
            for line in whole:
                if line.startswith(b"data:"):
                    if (data := line[5:].strip()) == b"[DONE]":
                        return
                    yield data
    finally:
        writer.close()


async def _chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while size := int((await reader.readline()).split(b";")[0], 16):
        yield await reader.readexactly(size)
        await reader.readline()


async def _rest(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while piece := await reader.read(2**16):
        yield piece
