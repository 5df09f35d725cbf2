"""Answers taken apart as the server does it, whole or in pieces."""

import itertools
from collections.abc import Iterable

from jaxpage.server.reasoning import REASONING_FORMATS
from jaxpage.server.splitter import CallDelta, Delta, Parts, Splitter
from jaxpage.server.tools import TOOL_FORMATS

NAMES = frozenset({"f", "get_weather"})


def splitter(
    tools: str | None = None, reasoning: str | None = None, prompt_end: str = "", **options: object
) -> Splitter:
    """One for the formats of these names; call ids are "0", "1" and so on."""
    ids = itertools.count()
    parts = Parts(lambda: str(next(ids)), **options)  # type: ignore[arg-type]

    def read(reader, parts):  # type: ignore[no-untyped-def]
        if reasoning is not None:
            yield from REASONING_FORMATS[reasoning].read(reader, parts, prompt_end)
        if tools is not None:
            yield from TOOL_FORMATS[tools].read(reader, parts, NAMES)
        yield from reader.rest(parts.content)

    return Splitter(read, parts)


def in_pieces(one: Splitter, pieces: Iterable[str]) -> list[Delta]:
    """What each piece adds, and the end."""
    return [*(one.feed(piece) for piece in pieces), one.finish()]


def joined(deltas: Iterable[Delta]) -> Delta:
    """The message that the deltas make."""
    return sum(deltas, Delta())


def calls(*found: tuple[str, str]) -> list[CallDelta]:
    """Whole calls of these names and arguments."""
    return [CallDelta(index, str(index), name, arguments) for index, (name, arguments) in enumerate(found)]
