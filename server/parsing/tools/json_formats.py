"""The formats whose calls are JSON objects: `{"name": "f", "arguments": {...}}`, or with `parameters`."""

import json
import secrets
from collections.abc import Callable, Sequence
from typing import Any

from jaxpage.server.openai.chat_protocol import Function
from jaxpage.server.parsing.reader import Reader, Reading
from jaxpage.server.parsing.splitter import Parts
from jaxpage.server.parsing.tools.format import Terminal, new_call_id, schema_rule, sequence
from jaxpage.server.parsing.tools.json_calls import any_name, known_name, read_call, stream_object

_ABOUT_OTHERS = frozenset(
    {"additionalProperties", "patternProperties", "unevaluatedProperties", "$ref", "allOf", "anyOf", "oneOf"}
)
"""Keywords of a schema that allow properties which `properties` does not name."""


class Hermes:
    """An object between two tags, which may stand anywhere in the text."""

    marks = ("<tool_call>", "</tool_call>")

    def read(self, reader: Reader, parts: Parts, names: frozenset[str]) -> Reading[None]:
        begin, end = self.marks
        while (yield from reader.until(begin, parts.content)):
            reader.back((yield from reader.past_blanks()))
            if (yield from read_call(reader, parts, any_name, end)):
                reader.back((yield from reader.past_blanks()))
                yield from reader.literal(end)
            else:
                if len(reader.taken) > len(begin):
                    reader.back(reader.taken[-1])  # it may begin the next tag
                parts.content(reader.taken)
            reader.forget()

    def rules(self, functions: Sequence[Function], terminal: Terminal, *, several: bool) -> str:
        begin, end = map(terminal, self.marks)
        return f'calls: {sequence(several, r"\n")}\ncall: {begin} "\\n" object "\\n" {end}\n{_objects(functions)}'

    def grammar_among_text(self, functions: Sequence[Function], terminal: Terminal, *, several: bool) -> str:
        """Of an answer that may call wherever it likes: what follows the first tag is a call."""
        begin, end = map(terminal, self.marks)
        lazily = "" if begin.startswith("<") else "[lazy]"  # a special token is part of no text
        lines = [f"start: call{'*' if several else '?'} rest", "rest: TEXT", r"TEXT: /(.|\n)*/"]
        lines += [f"opening{lazily}: TEXT {begin}", f'call: opening "\\n" object "\\n" {end}']
        anything = {"additionalProperties": True}
        checked = [one if one.strict else Function(name=one.name, parameters=anything) for one in functions]
        return "\n".join([*lines, _objects(checked)])

    new_call_id = staticmethod(new_call_id)


class JsonList:
    """Objects with nothing around them, or in a list."""

    marks: tuple[str, ...] = ()

    def read(self, reader: Reader, parts: Parts, names: frozenset[str]) -> Reading[None]:
        yield from _read_objects(reader, parts, known_name(names))
        parts.content(reader.taken)
        yield from reader.rest(parts.content)

    def rules(self, functions: Sequence[Function], terminal: Terminal, *, several: bool) -> str:
        return f'calls: "[" {sequence(several, ", ")} "]"\ncall: object\n{_objects(functions, "parameters")}'

    new_call_id = staticmethod(new_call_id)


class Llama3Json:
    """The same without a list, and perhaps behind a special token."""

    marks = ("<|python_tag|>",)

    def read(self, reader: Reader, parts: Parts, names: frozenset[str]) -> Reading[None]:
        reader.back((yield from reader.past_blanks()))
        yield from reader.literal(self.marks[0])
        yield from _read_objects(reader, parts, known_name(names))
        parts.content(reader.taken)
        yield from reader.rest(parts.content)

    def rules(self, functions: Sequence[Function], terminal: Terminal, *, several: bool) -> str:
        # Never several: Llama 3's chat templates take back no message that has more than one call.
        return f"calls: object\n{_objects(functions, 'parameters')}"

    new_call_id = staticmethod(new_call_id)


class Mistral:
    """Behind a special token: a list of objects, or the name of a function and its arguments."""

    marks = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")

    def read(self, reader: Reader, parts: Parts, names: frozenset[str]) -> Reading[None]:
        begin = self.marks[0]
        while (yield from reader.until(begin, parts.content)):
            character = yield from reader.past_blanks()
            reader.back(character)
            if character and character in "[{":
                yield from _read_objects(reader, parts, any_name)
            elif (yield from self._read_named(reader, parts)):
                reader.forget()
            parts.content(reader.taken)
            reader.forget()

    def _read_named(self, reader: Reader, parts: Parts) -> Reading[bool]:
        """Read `name{...}`, the name perhaps followed by `[CALL_ID]id` and `[ARGS]`. Returns whether it was that."""
        begin, before_arguments, before_id = self.marks
        name = ""
        while any_name(name + (character := (yield from reader.next()))) and character:
            name += character
        reader.back(character)
        if (yield from reader.literal(before_id)):
            while (character := (yield from reader.next())).isalnum():
                pass
            reader.back(character)
        yield from reader.literal(before_arguments)
        character = yield from reader.past_blanks()
        if not name or character != "{":
            reader.back(character)
            return False
        parts.call(name)
        yield from stream_object(reader, parts, begin)
        return True

    def rules(self, functions: Sequence[Function], terminal: Terminal, *, several: bool) -> str:
        begin, before_arguments, _ = map(terminal, self.marks)
        if before_arguments.startswith("<"):  # newer models have a token for it, and write no list
            names = " | ".join(f"named_{index}" for index in range(len(functions)))
            lines = [f"calls: {sequence(several, '')}", f"call: {begin} ({names})"]
            lines += [
                f"named_{index}: {json.dumps(function.name)} {before_arguments} arguments_{index}"
                for index, function in enumerate(functions)
            ]
            return "\n".join([*lines, *_arguments(functions)])
        return f'calls: {begin} "[" {sequence(several, ", ")} "]"\ncall: object\n{_objects(functions)}'

    def new_call_id(self) -> str:
        """Nine letters and digits, which Mistral's chat templates insist on."""
        return secrets.token_hex(5)[:9]


def _arguments(functions: Sequence[Function]) -> list[str]:
    """A rule for each function's arguments."""
    return [
        f"arguments_{index}: {schema_rule(_closed(function.parameters or {}))}"
        for index, function in enumerate(functions)
    ]


def _closed(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema of an object with no more properties than it names, unless it says something about others."""
    closed = {} if schema.keys() & _ABOUT_OTHERS else {"additionalProperties": False}
    return {"type": "object"} | schema | closed


def _objects(functions: Sequence[Function], key: str = "arguments") -> str:
    """Rules for `object`: the call of any function, its arguments under `key`."""
    lines = ["object: " + " | ".join(f"object_{index}" for index in range(len(functions)))]
    for index, function in enumerate(functions):
        begin = f'{{"name": {json.dumps(function.name)}, "{key}": '
        lines.append(f'object_{index}: {json.dumps(begin)} arguments_{index} "}}"')
    return "\n".join([*lines, *_arguments(functions)])


def _read_objects(reader: Reader, parts: Parts, is_name: Callable[[str], bool]) -> Reading[None]:
    """Read objects that are calls, alone, in a list or in a row. What is none stays in the reader's memory."""
    character = yield from reader.past_blanks()
    in_list, has_calls = character == "[", False
    if in_list:
        character = yield from reader.past_blanks()
    reader.back(character)
    while character == "{" and (yield from read_call(reader, parts, is_name)):
        has_calls = True
        reader.forget()
        character = yield from reader.past_blanks()
        if character and character in ",;":
            character = yield from reader.past_blanks()
        reader.back(character)
    if in_list and has_calls and (yield from reader.literal("]")):
        reader.forget()
