"""From a generation to an HTTP response: whole, or as server-sent events in OpenAI's framing.

In: a `Generation` and what makes chunks, or one reply, of it. Out: a response that closes the generation, whatever
happens. A stream is `data:` lines that end with `[DONE]`, also after an error, which is sent as an event of its own.
"""

import contextlib
import logging
from collections.abc import AsyncIterator, Callable

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from jaxpage.outputs import CompletionOutput
from jaxpage.server.errors import describe, is_unexpected
from jaxpage.server.generation import Generation, unless_disconnected

logger = logging.getLogger(__name__)

HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
DONE = b"data: [DONE]\n\n"


async def whole_response(
    http_request: Request, generation: Generation, reply: Callable[[list[tuple[int, CompletionOutput]]], msgspec.Struct]
) -> Response:
    """The reply made from the final outputs. Raises what ends the request early, the client's leaving included."""
    with contextlib.closing(generation):
        outputs = await unless_disconnected(http_request, generation.finished())
        return Response(msgspec.json.encode(reply(outputs)), media_type="application/json")


async def event_response(
    http_request: Request, generation: Generation, chunks: AsyncIterator[msgspec.Struct]
) -> Response:
    """A stream of `chunks`, once the first token is there: what fails before it still gets a status of its own."""
    try:
        await unless_disconnected(http_request, generation.started())
    except BaseException:
        generation.close()
        raise
    return EventStream(chunks, generation)


class EventStream(StreamingResponse):
    """Sends `chunks` and closes `generation` after the last, or when the client has left."""

    def __init__(self, chunks: AsyncIterator[msgspec.Struct], generation: Generation) -> None:
        super().__init__(frames(chunks), headers=HEADERS, media_type="text/event-stream")
        self._generation = generation

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI application that a response is."""
        with contextlib.closing(self._generation):
            await super().__call__(scope, receive, send)


async def frames(chunks: AsyncIterator[msgspec.Struct]) -> AsyncIterator[bytes]:
    """`chunks` as events. An exception becomes an error event, as the status line is long gone."""
    try:
        async for chunk in chunks:
            yield _frame(chunk)
    except Exception as error:
        if is_unexpected(error):
            logger.exception("a stream ended with an error")
        yield _frame(describe(error)[1])
    yield DONE


def _frame(event: msgspec.Struct) -> bytes:
    return b"data: " + msgspec.json.encode(event) + b"\n\n"
