"""From a generation to an HTTP response: whole, or as server-sent events.

In: a `Generation` and what makes events, or one reply, of it. Out: a response that closes the generation, whatever
happens. Completions and chat send `data:` lines that end with `[DONE]`, also after an error, which is sent as an event
of its own; newer protocols name their events, and have their own for an error.
"""

import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from typing import Protocol

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from jaxpage.outputs import SequenceDelta
from jaxpage.server.errors import describe, is_unexpected
from jaxpage.server.generation import Generation, unless_disconnected

logger = logging.getLogger(__name__)

HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
DONE = b"data: [DONE]\n\n"


async def whole_response(
    http_request: Request, generation: Generation, reply: Callable[[list[tuple[int, SequenceDelta]]], msgspec.Struct]
) -> Response:
    """The reply made from the final outputs. Raises what ends the request early, the client's leaving included."""
    with contextlib.closing(generation):
        outputs = await unless_disconnected(http_request.receive, generation.finished())
        return Response(msgspec.json.encode(reply(outputs)), media_type="application/json")


async def event_response(http_request: Request, generation: Generation, frames: AsyncIterator[bytes]) -> Response:
    """A stream of `frames`, once the first token is there: what fails before it still gets a status of its own."""
    try:
        await unless_disconnected(http_request.receive, generation.started())
    except BaseException:
        generation.close()
        raise
    return EventStream(frames, generation)


class EventStream(StreamingResponse):
    """Sends `frames` and closes `generation` after the last, or when the client has left."""

    def __init__(self, frames: AsyncIterator[bytes], generation: Generation) -> None:
        super().__init__(frames, headers=HEADERS, media_type="text/event-stream")
        self._generation = generation

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI application that a response is."""
        with contextlib.closing(self._generation), contextlib.suppress(ClientDisconnect):
            await unless_disconnected(receive, self.stream_response(send))


async def data_frames(chunks: AsyncIterator[msgspec.Struct]) -> AsyncIterator[bytes]:
    """`chunks` as events without names. An exception becomes an error event, as the status line is long gone."""
    try:
        async for chunk in chunks:
            yield _data(chunk)
    except Exception as error:
        _note(error)
        yield _data(describe(error)[1])
    yield DONE


class NamedEvent(Protocol):
    """An event that is sent under its type's name."""

    @property
    def type(self) -> str: ...


async def named_frames(
    events: AsyncIterator[NamedEvent], last_after: Callable[[Exception], NamedEvent]
) -> AsyncIterator[bytes]:
    """`events` under their names; `last_after` makes the last one of an exception."""
    try:
        async for event in events:
            yield _named(event)
    except Exception as error:
        _note(error)
        yield _named(last_after(error))


def _note(error: Exception) -> None:
    if is_unexpected(error):
        logger.exception("a stream ended with an error")


def _data(event: object) -> bytes:
    return b"data: " + msgspec.json.encode(event) + b"\n\n"


def _named(event: NamedEvent) -> bytes:
    return b"event: " + event.type.encode() + b"\n" + _data(event)
