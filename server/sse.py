"""Server-sent events as bytes.

In: what makes a stream's events. Out: their frames. Completions and chat send `data:` lines that end with `[DONE]`,
also after an error, which is sent as an event of its own; newer protocols name their events, and have their own for an
error.
"""

import logging
from collections.abc import AsyncIterator, Callable
from typing import Protocol

import msgspec

from jaxpage.server.errors import describe, is_unexpected

logger = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"


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
