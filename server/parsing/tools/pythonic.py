"""Calls written as Python: `[f(city="Paris", days=3), g()]`, with nothing before them.

A call is passed on when it is complete, its arguments as JSON. What cannot be read so is content.
"""

import ast
import json
import re
import warnings
from collections.abc import Sequence
from typing import Any

from jaxpage.errors import RequestError
from jaxpage.server.openai.chat_protocol import Function
from jaxpage.server.parsing.reader import Reader, Reading
from jaxpage.server.parsing.splitter import Parts
from jaxpage.server.parsing.tools.format import Terminal, new_call_id, schema_rule, sequence
from jaxpage.server.parsing.tools.json_text import compose

_CONSTANTS = {"true": True, "false": False, "null": None}
"""JSON's, which models mix up with Python's."""
_ARGUMENT_NAME = re.compile(r"[\w-]+")
_DEFINITIONS = ("$defs", "definitions")


class Pythonic:
    """A list of calls with keyword arguments."""

    marks: tuple[str, ...] = ()

    def read(self, reader: Reader, parts: Parts, names: frozenset[str]) -> Reading[None]:
        character = yield from reader.past_blanks()
        if character == "[":
            while (yield from _read_call(reader, parts, names)):
                reader.forget()
                character = yield from reader.past_blanks()
                if character != ",":
                    break
            if character == "]" and not reader.taken.strip("]").strip():
                reader.forget()
        parts.content(reader.taken)
        yield from reader.rest(parts.content)

    def rules(self, functions: Sequence[Function], terminal: Terminal, *, several: bool) -> str:
        """Arguments come in the schemas' order, their values as JSON, which `read` understands, too."""
        lines = [f'calls: "[" {sequence(several, ", ")} "]"']
        lines.append("call: " + " | ".join(f"call_{index}" for index in range(len(functions))))
        for index, function in enumerate(functions):
            lines += _call_rules(f"call_{index}", function)
        return "\n".join(lines)

    new_call_id = staticmethod(new_call_id)


def _read_call(reader: Reader, parts: Parts, names: frozenset[str]) -> Reading[bool]:
    """Read one call. Returns whether it was one of a function in `names`."""
    name, character = "", (yield from reader.past_blanks())
    while character != "(":
        name += character
        if not character or not any(known.startswith(name) for known in names):
            return False
        character = yield from reader.next()
    arguments = yield from _read_arguments(reader)
    if name not in names or arguments is None:
        return False
    try:
        text = compose(dict(_argument(argument) for argument in arguments))
    except (ValueError, SyntaxError, RecursionError, MemoryError):  # whatever Python's parser makes of it
        return False
    parts.call(name)
    parts.arguments(text)
    return True


def _read_arguments(reader: Reader) -> Reading[list[str] | None]:
    """The arguments up to the parenthesis that closes the one that has been read; None if there is none."""
    arguments, text, num_open, quote = [], "", 1, ""
    while character := (yield from reader.next()):
        if quote:
            if character == "\\":
                character += yield from reader.next()
            elif character == quote:
                quote = ""
        elif character in "\"'":
            quote = character
        elif character in "([{":
            num_open += 1
        elif character in ")]}":
            num_open -= 1
        if num_open == 0 or (num_open == 1 and character == "," and not quote):
            arguments.append(text)
            text = ""
            if num_open == 0:
                return [argument for argument in arguments if argument.strip()]
        else:
            text += character
    return None


def _argument(text: str) -> tuple[str, Any]:
    """Name and value. Raises `ValueError` or what Python's parser raises."""
    name, equals, value = text.partition("=")
    if not equals:
        raise ValueError(f"{text!r} has no name")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)  # of wrong escapes
        return name.strip(), _value(ast.parse(value.strip(), mode="eval").body)


def _value(node: ast.expr) -> Any:
    """The value of a literal. Raises `ValueError` for anything else."""
    match node:
        case ast.Constant(value):
            return value
        case ast.UnaryOp(ast.USub(), ast.Constant(int() | float() as number)):
            return -number
        case ast.List(items) | ast.Tuple(items):
            return [_value(item) for item in items]
        case ast.Dict(keys, values):
            return {_key(key): _value(value) for key, value in zip(keys, values, strict=True)}
        case ast.Name(name) if name in _CONSTANTS:
            return _CONSTANTS[name]
    raise ValueError(f"{ast.dump(node)} is no literal")


def _key(node: ast.expr | None) -> str:
    """The key of a dictionary. Raises `ValueError` for what is no text."""
    match node:
        case ast.Constant(str() as key):
            return key
    raise ValueError("a key of a JSON object is a text")


def _call_rules(name: str, function: Function) -> list[str]:
    """Lark's rules for the call of one function."""
    schema = function.parameters or {}
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if not isinstance(properties, dict) or not isinstance(required, list):
        raise RequestError(f"tools: the parameters of {function.name!r} are no JSON schema", "tools")
    shared = {key: schema[key] for key in _DEFINITIONS if key in schema}
    lines = []
    for index, (argument, its_schema) in enumerate(properties.items()):
        if not _ARGUMENT_NAME.fullmatch(argument):
            raise RequestError(
                f"tools: {function.name!r} has a parameter {argument!r}, and this model writes calls as Python: "
                "name it with letters, digits, underscores and dashes",
                "tools",
            )
        if isinstance(its_schema, dict):
            its_schema = its_schema | shared
        lines.append(f"{name}_{index}: {json.dumps(argument + '=')} {schema_rule(its_schema)}")
    # Any argument that no required one precedes may be the first; those behind it have a comma in front.
    rest = [f'", " {name}_{i}' if p in required else f'(", " {name}_{i})?' for i, p in enumerate(properties)]
    firsts = []
    for index, argument in enumerate(properties):
        firsts.append(" ".join([f"{name}_{index}", *rest[index + 1 :]]))
        if argument in required:
            break
    else:
        firsts.append('""')
    return [
        f'{name}: {json.dumps(function.name + "(")} {name}_arguments ")"',
        f"{name}_arguments: {' | '.join(firsts)}",
        *lines,
    ]
