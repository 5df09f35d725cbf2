"""What a format of tool calls is, and what the formats share.

A format without marks of its own is a call only where the text begins with one, of a function that was given.
"""

import secrets
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from jaxpage.server.openai.chat_protocol import Function
from jaxpage.server.parsing.reader import Reader, Reading
from jaxpage.server.parsing.splitter import Parts
from jaxpage.server.parsing.tools.json_text import compose

type Terminal = Callable[[str], str]
"""How a grammar names a mark: a text in quotes, or a special token."""

_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": ", "lenient": False}
"""Arguments are written as Python's `json` does, which models have read most of."""


class ToolFormat(Protocol):
    """One of them."""

    @property
    def marks(self) -> tuple[str, ...]:
        """What begins and ends calls; where it is a special token, the text must show it."""

    def read(self, reader: Reader, parts: Parts, names: frozenset[str]) -> Reading[None]:
        """Read a whole answer. `names`: the functions that were given."""

    def rules(self, functions: Sequence[Function], terminal: Terminal, *, several: bool) -> str:
        """Lark's rules for `calls`: one call, or `several` in sequence, as `read` understands them."""

    def new_call_id(self) -> str:
        """An id for a call."""


def new_call_id() -> str:
    """An id for a call, like OpenAI's."""
    return f"call_{secrets.token_hex(12)}"


def schema_rule(schema: Any) -> str:
    """The grammar of a schema's JSON text, to stand in a Lark rule. Raises `ValueError` for what is no schema."""
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise ValueError(f"a schema that something satisfies is an object or true, and not {compose(schema)[:50]}")
    return f"%json {compose(schema | {'x-guidance': _STYLE})}"


def sequence(several: bool, separator: str) -> str:
    """One `call`, or more of them."""
    if not several:
        return "call"
    return f'call ("{separator}" call)*' if separator else "call+"
