"""From what a request asks of its text to a grammar as llguidance reads it.

In: `StructuredOutputsParams`. Out: the grammar, checked; what cannot be honoured is refused by name, never ignored.
"""

import functools
import json
from typing import Any

from llguidance import LLMatcher, LLTokenizer, grammar_from

from jaxpage.errors import RequestError
from jaxpage.sampling_params import STRUCTURE_KINDS, StructuredOutputsParams

WHITESPACE = r"[ \t\r\n]{0,16}"
"""Between the parts of JSON text: enough for pretty printing, and no way to write white space for ever."""
MAX_GRAMMAR_CHARS = 2**20
"""Longest text of a schema or grammar."""


def grammar_of(params: StructuredOutputsParams, special_tokens: frozenset[str]) -> str:
    """The grammar, checked but for what depends on the tokenizer.

    special_tokens: texts of the tokenizer's special tokens; a trigger of a structural tag may be one. Kept for the last
    ones that were asked for. Raises `RequestError` that names the option and what is wrong with it.
    """
    return _grammar_of(params, special_tokens)


@functools.lru_cache(maxsize=256)
def check_tokens(params: StructuredOutputsParams, grammar: str, tokenizer: LLTokenizer) -> None:
    """Raises `RequestError` if the grammar of `params` names what the tokenizer has no token for."""
    name, value = _given(params)
    text = "".join(value) if isinstance(value, tuple) else str(value)
    for character in sorted(set(text)):
        if not _unwritable_bytes(tokenizer).isdisjoint(character.encode("utf-8", "surrogatepass")):
            raise RequestError(f"{name} holds {character!r}, which no token of this model's can write", name)
    if message := LLMatcher.validate_grammar(grammar, tokenizer):
        raise RequestError(f"{name} cannot be used with this model: {_first_lines(message)}", name)


@functools.lru_cache(maxsize=8)
def _unwritable_bytes(tokenizer: LLTokenizer) -> frozenset[int]:
    """Bytes that are not among the tokens: none, for most models."""
    bytes_ = (bytes([byte]) for byte in range(256))
    return frozenset(byte[0] for byte in bytes_ if tokenizer.decode_bytes(tokenizer.tokenize_bytes(byte)) != byte)


def _given(params: StructuredOutputsParams) -> tuple[str, Any]:
    """The one kind that is given, and how."""
    name = next(name for name in STRUCTURE_KINDS if getattr(params, name) not in (None, False))
    return name, getattr(params, name)


@functools.lru_cache(maxsize=256)
def _grammar_of(params: StructuredOutputsParams, special_tokens: frozenset[str]) -> str:
    name, value = _given(params)
    if isinstance(value, str) and len(value) > MAX_GRAMMAR_CHARS:
        raise RequestError(f"{name} has {len(value)} characters: at most {MAX_GRAMMAR_CHARS}", name)
    try:
        grammar = _build(name, value, special_tokens)
        if params.preamble is not None:
            grammar = _behind(params.preamble, grammar)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{name} cannot be read: {_first_lines(str(error))}", name) from error
    is_error, messages = LLMatcher.validate_grammar_with_warnings(grammar)
    if is_error:
        raise RequestError(f"{name} cannot be honoured: {_first_lines(messages[0])}", name)
    return grammar


def _build(name: str, value: Any, special_tokens: frozenset[str]) -> str:
    match name:
        case "json":
            return _of_schema(json.loads(value))
        case "json_object":
            return _of_schema({"type": "object"})
        case "regex":
            return LLMatcher.grammar_from_regex(value)
        case "choice":
            return "start: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in value)
        case "grammar":
            return grammar_from("grammar", value)
        case _:
            return _of_structural_tag(json.loads(value), special_tokens)


def _behind(preamble: str, grammar: str) -> str:
    """The grammar of texts that begin with what the rules for `preamble` allow, and go on with `grammar`'s."""
    parts = json.loads(grammar)["grammars"] if grammar.lstrip().startswith("{") else [{"lark_grammar": grammar}]
    first = {"lark_grammar": f"start: preamble @answer\n{preamble}"}
    return json.dumps({"grammars": [first, {**parts[0], "name": "answer"}, *parts[1:]]})


def _of_schema(schema: Any) -> str:
    """Raises `ValueError` for what is no schema."""
    return LLMatcher.grammar_from_json_schema(json.dumps(_with_options(schema)))


def _with_options(schema: Any) -> dict[str, Any]:
    """The schema with how its text may be written. No keyword is passed over, whatever the schema itself says."""
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise ValueError(f"a schema that something satisfies is an object or true, and not {json.dumps(schema)[:50]}")
    return schema | {"x-guidance": {"whitespace_pattern": WHITESPACE, "lenient": False}}


def _of_structural_tag(tag: Any, special_tokens: frozenset[str]) -> str:
    """Of `{"type": "structural_tag", "structures": [{"begin", "schema", "end"}], "triggers": [...]}`."""
    if not isinstance(tag, dict) or tag.keys() - {"type"} != {"structures", "triggers"}:
        raise ValueError("a structural tag has `structures` and `triggers`, and nothing else")
    structures, triggers = tag["structures"], tag["triggers"]
    if not isinstance(triggers, list) or not all(isinstance(text, str) and text for text in triggers):
        raise ValueError("`triggers` is a list of texts that are not empty")
    if not isinstance(structures, list) or not structures:
        raise ValueError("`structures` is a list of objects with `begin`, `schema` and `end`")
    rules = [_tag_rule(f"tag_{index}", item, triggers, special_tokens) for index, item in enumerate(structures)]
    names = " | ".join(f"tag_{index}" for index in range(len(rules)))
    return "\n".join([f"start: ({names})* rest", "rest: TEXT", r"TEXT: /(.|\n)*/", *rules])


def _tag_rule(name: str, structure: Any, triggers: list[str], special_tokens: frozenset[str]) -> str:
    """Lark's rule for free text, then one structure, which its trigger begins."""
    if not isinstance(structure, dict) or structure.keys() != {"begin", "schema", "end"}:
        raise ValueError("each of `structures` has `begin`, `schema` and `end`, and nothing else")
    begin, end = structure["begin"], structure["end"]
    if not isinstance(begin, str) or not isinstance(end, str):
        raise ValueError("`begin` and `end` are texts")
    trigger = next((text for text in triggers if begin.startswith(text)), None)
    if trigger is None:
        raise ValueError(f"`begin` is {begin!r}, and none of `triggers` begins it")

    def terminal(text: str) -> str:
        """A special token is one token, and cannot be spelled."""
        if text not in special_tokens:
            return json.dumps(text, ensure_ascii=False) if text else ""
        if not (text.startswith("<") and text.endswith(">")):
            raise ValueError(f"{text!r} is a special token: only those that are written <...> can be used")
        return text

    body = f"{terminal(begin[len(trigger) :])} %json {json.dumps(_with_options(structure['schema']))} {terminal(end)}"
    if trigger in special_tokens:
        return f"{name}: TEXT {terminal(trigger)} {body}"
    return f"{name}_begin[lazy]: TEXT {terminal(trigger)}\n{name}: {name}_begin {body}"


def _first_lines(message: str) -> str:
    """Without the excerpt of the grammar that may follow, and without line breaks."""
    return " ".join(message.split("\n   1 |")[0].split())
