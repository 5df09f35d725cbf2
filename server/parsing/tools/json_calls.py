"""Calls written as JSON objects: `{"name": "f", "arguments": {...}}`, with whatever a model puts around them.

Arguments are passed on while they are written, as soon as the name is known. Before that a text that turns out to be no
call is content; after it the call stays a call, and what is no JSON is part of its arguments, as it was written.
"""

import re
from collections.abc import Callable, Container

from jaxpage.server.parsing.reader import Reader, Reading
from jaxpage.server.parsing.splitter import Parts
from jaxpage.server.parsing.tools.json_text import JsonScanner, Progress, compose, parse, read_value

_ARGUMENTS = ('"arguments"', '"parameters"')
_KEYS = ('"name"', *_ARGUMENTS, '"type"', '"id"')
"""Of a call, until its arguments have come. An object that begins with another one is none: it is not held back."""
_NAME = re.compile(r"[\w.-]{1,64}", re.ASCII)


def read_call(reader: Reader, parts: Parts, is_name: Callable[[str], bool], end: str = "") -> Reading[bool]:
    """Read a call that begins here. Returns whether it was one; if not, nothing was put into `parts`.

    is_name: whether a name may be called. end: what comes behind the call; "" when only the text's end does.
    """
    if (yield from reader.next()) != "{":
        return False
    name = arguments = None
    character = yield from reader.past_blanks()
    while character == '"':
        key = yield from read_value(reader, character)
        if key not in _KEYS or (yield from reader.past_blanks()) != ":":
            return False
        character = yield from reader.past_blanks()
        is_arguments = key in _ARGUMENTS and arguments is None
        if is_arguments and character == "{" and name is not None:
            if not (yield from _stream_arguments(reader, parts, name, end)):
                return False
            yield from _rest_of_call(reader)
            return True
        value = yield from read_value(reader, character)
        if value is None:
            return False
        if is_arguments:
            if (arguments := _as_object(value)) is None:
                return False
        elif key == '"name"':
            name = value[1:-1]
            if character != '"' or not is_name(name):
                return False
        character = yield from reader.past_blanks()
        if character == ",":
            character = yield from reader.past_blanks()
            if character != '"':
                return False
    if character != "}" or name is None:
        return False
    parts.call(name)
    parts.arguments(arguments or "{}")
    return True


def any_name(name: str) -> bool:
    """Whether a function might be called so."""
    return _NAME.fullmatch(name) is not None


def known_name(names: Container[str]) -> Callable[[str], bool]:
    """Whether a function of these is called so."""
    return lambda name: name in names


def stream_object(reader: Reader, parts: Parts, end: str) -> Reading[bool]:
    """Pass on the arguments of a call, whose "{" has been read. Returns whether they were JSON to their end.

    What is none is passed on as it is, up to `end`, which stays unread.
    """
    scanner = JsonScanner()
    progress = scanner.add("{")
    parts.arguments("{")
    while progress is Progress.MORE:
        reader.forget()
        character = yield from reader.next()
        progress = scanner.add(character)
        if progress is Progress.BROKEN:
            reader.back(character)
            if end and (yield from reader.until(end, parts.arguments)):
                reader.back(end)
            elif not end:
                yield from reader.rest(parts.arguments)
            return False
        parts.arguments(character)
    return True


def _stream_arguments(reader: Reader, parts: Parts, name: str, end: str) -> Reading[bool]:
    """The call and its arguments, unless their first character shows that they are no JSON object."""
    character = yield from reader.past_blanks()
    reader.back(character)
    if not character or character not in '"}':
        return False
    parts.call(name)
    yield from stream_object(reader, parts, end)
    return True


def _rest_of_call(reader: Reader) -> Reading[None]:
    """Whatever an object has behind the arguments, such as an id. It changes nothing."""
    character = yield from reader.past_blanks()
    while character == ",":
        if (yield from reader.past_blanks()) != '"' or (yield from read_value(reader, '"')) is None:
            return
        if (yield from reader.past_blanks()) != ":":
            return
        if (yield from read_value(reader, (yield from reader.past_blanks()))) is None:
            return
        character = yield from reader.past_blanks()
    if character != "}":
        reader.back(character)


def _as_object(value: str) -> str | None:
    """The text of an object from what stands in its place: itself, the same in a string, or null."""
    try:
        parsed = parse(value)
        if isinstance(parsed, str):
            parsed = parse(parsed)
            value = compose(parsed)
    except ValueError:
        return None
    if parsed is None:
        return "{}"
    return value if isinstance(parsed, dict) else None
