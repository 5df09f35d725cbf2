"""JSON as it arrives, character by character: where a value ends, and whether it still is JSON.

In: characters. Out: whether the value goes on, has ended, or was none (RFC 8259).
"""

import enum
import json
import re
from typing import Any, NoReturn

from jaxpage.server.parsing.reader import Reader, Reading

_WORD = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?|true|false|null")
_BLANKS = frozenset(" \t\r\n")


class Progress(enum.Enum):
    """What a character means to the value."""

    MORE = enum.auto()
    """The value goes on."""
    DONE = enum.auto()
    """It ends with this character."""
    PAST = enum.auto()
    """It ended before this character, which is not part of it."""
    BROKEN = enum.auto()
    """It is no JSON."""


class JsonScanner:
    """Follows one value from its first character, which is no white space."""

    def __init__(self) -> None:
        self._closers: list[str] = []
        """Of the objects and arrays that are open."""
        self._expects = "value"
        self._is_key = False
        self._word = ""
        self._num_hex_digits = 0

    def add(self, character: str) -> Progress:
        """The next character; "" for the end of the text."""
        match self._expects:
            case "string":
                return self._in_string(character)
            case "escape":
                self._expects, self._num_hex_digits = ("hex", 4) if character == "u" else ("string", 0)
                return Progress.MORE if character and character in '"\\/bfnrtu' else Progress.BROKEN
            case "hex":
                self._num_hex_digits -= 1
                if not self._num_hex_digits:
                    self._expects = "string"
                return Progress.MORE if character and character in "0123456789abcdefABCDEF" else Progress.BROKEN
            case "word":
                if character.isalnum() or character in ("+", "-", "."):
                    self._word += character
                    return Progress.MORE
                if not _WORD.fullmatch(self._word):
                    return Progress.BROKEN
                if self._ended() is Progress.DONE:
                    return Progress.PAST
        if character in _BLANKS:
            return Progress.MORE
        return self._between(character)

    def _in_string(self, character: str) -> Progress:
        if character == '"':
            if not self._is_key:
                return self._ended()
            self._expects, self._is_key = "colon", False
        elif character == "\\":
            self._expects = "escape"
        elif character < " ":
            return Progress.BROKEN
        return Progress.MORE

    def _between(self, character: str) -> Progress:
        """A character outside of strings and words."""
        may_close = self._expects in ("first key", "first item", "next")
        if may_close and character == self._closers[-1]:
            self._closers.pop()
            return self._ended()
        match self._expects, character:
            case (("first key" | "key"), '"'):
                self._expects, self._is_key = "string", True
            case "colon", ":":
                self._expects = "value"
            case "next", ",":
                self._expects = "key" if self._closers[-1] == "}" else "value"
            case (("value" | "first item"), "{"):
                self._closers.append("}")
                self._expects = "first key"
            case (("value" | "first item"), "["):
                self._closers.append("]")
                self._expects = "first item"
            case (("value" | "first item"), '"'):
                self._expects = "string"
            case (("value" | "first item"), _) if character.isalnum() or character == "-":
                self._expects, self._word = "word", character
            case _:
                return Progress.BROKEN
        return Progress.MORE

    def _ended(self) -> Progress:
        """A value has ended."""
        self._expects = "next"
        return Progress.MORE if self._closers else Progress.DONE


def read_value(reader: Reader, first: str) -> Reading[str | None]:
    """The text of the value that begins with `first`, which has been read; None if it is no JSON."""
    scanner, text, character = JsonScanner(), "", first
    while True:
        match scanner.add(character):
            case Progress.MORE:
                text += character
            case Progress.DONE:
                return text + character
            case Progress.PAST:
                reader.back(character)
                return text
            case Progress.BROKEN:
                return None
        character = yield from reader.next()


def parse(text: str) -> Any:
    """The value of a JSON text. Raises `ValueError`, also for what is nested too deeply."""
    try:
        return json.loads(text, parse_constant=_no_constant)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def compose(value: Any) -> str:
    """The JSON text of a value, which can be sent as UTF-8. Raises `ValueError` for what JSON has no text for."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        return text if text.isascii() or _is_unicode(text) else json.dumps(value)
    except (TypeError, RecursionError) as error:
        raise ValueError(f"no JSON: {error}") from error


def _is_unicode(text: str) -> bool:
    """Whether there is no half of a character in it."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")
