"""What a request asks of its text becomes a grammar, or is refused by name."""

import json
import re
from typing import Any

import pytest
from byte_tokenizer import TOOL, make_tokenizer
from llguidance import LLMatcher, LLTokenizer

from jaxpage.errors import RequestError
from jaxpage.sampling_params import SamplingParams, StructuredOutputsParams
from jaxpage.structured.grammar import MAX_GRAMMAR_CHARS, check_tokens, grammar_of

NO_SPECIAL: frozenset[str] = frozenset()


TOKENIZER = make_tokenizer()


def check(params: StructuredOutputsParams, tokenizer: LLTokenizer) -> None:
    check_tokens(params, grammar_of(params, NO_SPECIAL), tokenizer)


def accepts(params: StructuredOutputsParams, text: str | list[int], special: frozenset[str] = NO_SPECIAL) -> bool:
    """Whether the whole text fits."""
    matcher = LLMatcher(TOKENIZER, grammar_of(params, special), log_level=0)
    token_ids = list(text.encode()) if isinstance(text, str) else text
    return matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting()


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}


@pytest.mark.parametrize(
    ("params", "good", "bad"),
    [
        (StructuredOutputsParams(json=SCHEMA), '{"a": 1}', '{"a": "x"}'),
        (StructuredOutputsParams(json=json.dumps(SCHEMA)), '{ "a" :\n 17 }', '{"b": 1}'),
        (StructuredOutputsParams(json='{"enum": ["🦙漢字é"]}'), '"🦙漢字é"', '"🦙"'),
        (StructuredOutputsParams(json_object=True), '{"x": [1, {}]}', "[1]"),
        (StructuredOutputsParams(regex=r"[a-z]{2}\d"), "ab1", "ab1c"),
        (StructuredOutputsParams(choice=("yes", 'n"o\n', "ü")), 'n"o\n', "y"),
        (StructuredOutputsParams(choice=("yes", "ü")), "ü", "u"),
        (StructuredOutputsParams(grammar='start: "a" b*\nb: "b"'), "abb", "ba"),
        (StructuredOutputsParams(grammar='root ::= "a" b*\nb ::= "b"'), "abb", "ba"),
    ],
)
def test_each_kind_accepts_what_it_says_and_nothing_else(params: StructuredOutputsParams, good: str, bad: str) -> None:
    assert accepts(params, good)
    assert not accepts(params, bad)


def test_json_text_cannot_be_white_space_for_ever() -> None:
    params = StructuredOutputsParams(json=SCHEMA)
    assert accepts(params, "{" + " " * 16 + '"a":1}')
    assert not accepts(params, "{" + " " * 17 + '"a":1}')


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"type": "object", "unevaluatedProperties": False}, "unevaluatedProperties"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"not": {"type": "string"}}, "not"),
        ({"if": {"type": "string"}, "then": {}}, "if"),
        ({"properties": {"a": {"properties": {"b": {"type": "array", "contains": {}}}}}}, "contains"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf"),
        ({"type": "string", "format": "banana"}, "banana"),
        ({"type": "banana"}, "banana"),
        ({"type": "string", "pattern": "(?=a)b"}, "look-ahead"),
        ({"$ref": "http://example.com/x"}, "http://example.com/x"),
        ({"type": "integer", "minimum": 5, "maximum": 3}, "minimum"),
        ({"type": "array", "uniqueItems": True, "x-guidance": {"lenient": True}}, "uniqueItems"),
        (False, "false"),
        ([], r"\[\]"),
    ],
)
def test_a_schema_that_cannot_be_honoured_is_refused_by_the_keyword(schema: Any, named: str) -> None:
    with pytest.raises(RequestError, match=named) as caught:
        grammar_of(StructuredOutputsParams(json=json.dumps(schema)), NO_SPECIAL)
    assert caught.value.param == "json"
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (StructuredOutputsParams(json="{"), "json cannot be read"),
        (StructuredOutputsParams(regex="(a"), "regex cannot be honoured: .*unclosed group"),
        (StructuredOutputsParams(grammar="start: nothing"), "grammar cannot be honoured: .*nothing"),
        (StructuredOutputsParams(grammar="@@"), "grammar cannot be"),
        (StructuredOutputsParams(regex="a" * (MAX_GRAMMAR_CHARS + 1)), f"at most {MAX_GRAMMAR_CHARS}"),
        (StructuredOutputsParams(json="[" * 100_000), "json cannot be"),
        (StructuredOutputsParams(structural_tag='{"format": {}}'), "`structures` and `triggers`"),
        (StructuredOutputsParams(structural_tag='{"structures": [], "triggers": ["a"]}'), "`structures` is a list"),
        (
            StructuredOutputsParams(
                structural_tag={"structures": [{"begin": "<a>", "schema": {}, "end": ""}], "triggers": ["<b"]}
            ),
            "none of `triggers`",
        ),
    ],
)
def test_what_cannot_be_read_is_refused(params: StructuredOutputsParams, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        grammar_of(params, NO_SPECIAL)


TAG = {
    "type": "structural_tag",
    "structures": [{"begin": "<f=a>", "schema": SCHEMA, "end": "</f>"}],
    "triggers": ["<f="],
}


def test_a_structural_tag_leaves_text_free_and_binds_what_a_trigger_begins() -> None:
    params = StructuredOutputsParams(structural_tag=TAG)
    assert accepts(params, "free < text")
    assert accepts(params, 'free <f=a>{"a":1}</f> and <f=a>{"a":2}</f> on')
    assert not accepts(params, "free <f=b>")
    assert not accepts(params, 'free <f=a>{"a":"x"}</f>')


def test_a_trigger_may_be_a_special_token() -> None:
    tag = {"structures": [{"begin": "<tool>", "schema": SCHEMA, "end": ""}], "triggers": ["<tool>"]}
    params = StructuredOutputsParams(structural_tag=tag)
    special = frozenset({"<tool>"})
    assert accepts(params, [*b"text", TOOL, *b'{"a":1}'], special)
    assert not accepts(params, [*b"text", TOOL, *b"{}"], special)
    assert accepts(params, '<tool>{"a":1}')


def test_a_special_token_that_the_model_lacks_is_refused() -> None:
    check(StructuredOutputsParams(grammar="start: <tool>"), TOKENIZER)
    with pytest.raises(RequestError, match="nosuch"):
        check(StructuredOutputsParams(grammar="start: <nosuch>"), TOKENIZER)


@pytest.mark.parametrize(
    "params",
    [
        StructuredOutputsParams(choice=("yes", "grün")),
        StructuredOutputsParams(regex="grün+"),
        StructuredOutputsParams(json={"enum": ["grün"]}),
    ],
)
def test_what_no_token_of_the_model_can_write_is_refused(params: StructuredOutputsParams) -> None:
    check(params, TOKENIZER)
    with pytest.raises(RequestError, match=r"holds 'ü', which no token"):
        check(params, make_tokenizer(num_bytes=128))


def test_exactly_one_kind_is_given() -> None:
    with pytest.raises(RequestError, match="exactly one of"):
        StructuredOutputsParams()
    with pytest.raises(RequestError, match="exactly one of"):
        StructuredOutputsParams(json="{}", regex="a")


@pytest.mark.parametrize(
    "fields",
    [
        {"choice": ()},
        {"choice": ("",)},
        {"choice": "yes"},
        {"regex": ""},
        {"regex": 3},
        {"json": 3},
        {"json": {"a": float("nan")}},
        {"json_object": "yes"},
    ],
)
def test_a_wrong_value_is_refused_by_its_field(fields: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=re.escape(next(iter(fields)))):
        StructuredOutputsParams(**fields)


def test_params_take_nothing_else() -> None:
    with pytest.raises(RequestError, match="structured_outputs"):
        SamplingParams(structured_outputs={"json": "{}"})  # type: ignore[arg-type]
    params = SamplingParams(structured_outputs=StructuredOutputsParams(json=SCHEMA))
    assert hash(params) == hash(SamplingParams(structured_outputs=StructuredOutputsParams(json=json.dumps(SCHEMA))))
