"""What a format's grammar lets a model write is what its parser reads: calls with arguments of the given schemas."""

import json
import random
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer
from split_text import calls, splitter

from jaxpage.errors import RequestError
from jaxpage.sampling_params import SamplingParams
from jaxpage.server.openai.chat_protocol import ChatRequest, Function
from jaxpage.server.openai.protocol import decode
from jaxpage.server.parsing.conversation import converse
from jaxpage.server.parsing.dialect import Dialect
from jaxpage.server.parsing.reasoning import REASONING_FORMATS
from jaxpage.server.parsing.splitter import Delta
from jaxpage.server.parsing.tools import TOOL_FORMATS
from jaxpage.structured.grammar import grammar_of

MARKS = ["[TOOL_CALLS]", "[ARGS]", "</think>"]
EOS = 256
ENDS = {*b'"}])<', EOS}


class Bytes:
    """A tokenizer of single bytes, as llguidance takes one, with end of sequence and `MARKS` behind them."""

    eos_token_id = EOS
    bos_token_id = None
    tokens = (*(bytes([byte]) for byte in range(256)), b"<eos>", *(mark.encode() for mark in MARKS))
    special_token_ids = tuple(range(EOS, EOS + 1 + len(MARKS)))
    is_tokenizer_wrapper = True

    def __call__(self, text: str) -> list[int]:
        return list(text.encode())


TOKENIZER = LLTokenizer(Bytes())
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "days": {"type": "integer", "minimum": 0, "maximum": 9},
        "city": {"type": "string", "maxLength": 4},
        "unit": {"enum": ["c", "f", None]},
        "flags": {"$ref": "#/$defs/flags"},
    },
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"flags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2}},
}
FUNCTIONS = [Function(name="get_weather", parameters=SCHEMA), Function(name="f")]
SPECIAL = Dialect(special_token_ids={mark: EOS + 1 + index for index, mark in enumerate(MARKS)})
SPELLED = Dialect()


def grammar(name: str, dialect: Dialect = SPELLED, *, several: bool = True) -> str:
    return "start: calls\n" + TOOL_FORMATS[name].rules(FUNCTIONS, dialect.terminal, several=several)


def matcher(lark: str) -> LLMatcher:
    made = LLMatcher(TOKENIZER, lark, log_level=0)
    assert not made.get_error(), made.get_error()
    return made


def text_of(token_ids: list[int]) -> str:
    return b"".join(Bytes.tokens[token_id] for token_id in token_ids).decode()


def written(lark: str, seed: int) -> str | None:
    """What a model that draws at random, and rather closes than opens, writes; None if it comes to no end."""
    draw, one = random.Random(seed), matcher(lark)
    token_ids: list[int] = []
    while len(token_ids) < 500:
        allowed = [token_id for token_id, bias in enumerate(one.compute_logit_bias()) if bias]
        ends = [token_id for token_id in allowed if token_id in ENDS]
        token_id = draw.choice(ends if ends and draw.random() < 0.4 else allowed)
        if token_id == EOS:
            return text_of(token_ids)
        assert one.consume_token(token_id)
        token_ids.append(token_id)
    return None


def accepts(lark: str, text: str, marks: tuple[str, ...] = ()) -> bool:
    """Whether the whole text fits; `marks` in it are special tokens."""
    token_ids: list[int] = []
    while text:
        mark = next((mark for mark in marks if text.startswith(mark)), None)
        piece = mark or text[0]
        token_ids += [EOS + 1 + MARKS.index(mark)] if mark else list(piece.encode())
        text = text[len(piece) :]
    one = matcher(lark)
    return one.try_consume_tokens(token_ids) == len(token_ids) and one.is_accepting()


@pytest.mark.parametrize("several", [True, False])
@pytest.mark.parametrize(
    ("name", "dialect"), [*((name, SPELLED) for name in sorted(TOOL_FORMATS)), ("mistral", SPECIAL)]
)
def test_whatever_the_grammar_allows_is_read_as_calls(name: str, dialect: Dialect, several: bool) -> None:
    lark = grammar(name, dialect, several=several)
    texts = [text for seed in range(12) if (text := written(lark, seed)) is not None]
    assert len(texts) > 6
    numbers = set()
    for text in texts:
        found = splitter(name).split(text)
        assert found.calls, text
        assert not found.content, text
        numbers.add(len(found.calls))
        for call in found.calls:
            arguments = json.loads(call.arguments)
            if call.name == "f":
                assert arguments == {}
            else:
                jsonschema.validate(arguments, SCHEMA)
    assert (numbers == {1}) == (not several or name == "llama3_json")


def test_whoever_may_call_once_cannot_call_twice() -> None:
    call = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    for several in (True, False):
        assert accepts(grammar("hermes", several=several), call)
        assert accepts(grammar("hermes", several=several), f"{call}\n{call}") == several


def test_arguments_are_written_as_models_have_read_them() -> None:
    spaced = '{"name": "get_weather", "parameters": {"days": 3, "city": "Bonn", "flags": [true, false]}}'
    assert accepts(grammar("llama3_json"), spaced)
    assert not accepts(grammar("llama3_json"), spaced.replace(": ", ":"))
    assert not accepts(grammar("llama3_json"), spaced.replace('"Bonn"', '\n"Bonn"'))


@pytest.mark.parametrize(
    ("parameters", "is_open"),
    [
        (None, False),
        ({}, False),
        ({"type": "object"}, False),
        ({"properties": {"a": {"type": "integer"}}}, False),
        ({"properties": {"a": True}, "additionalProperties": {"type": "integer"}}, True),
        ({"additionalProperties": True}, True),
        ({"$ref": "#/$defs/any", "$defs": {"any": {"type": "object"}}}, True),
    ],
)
def test_arguments_that_a_schema_does_not_name_are_written_only_where_it_allows_them(
    parameters: dict[str, Any] | None, is_open: bool
) -> None:
    lark = "start: calls\n" + TOOL_FORMATS["json"].rules(
        [Function(name="f", parameters=parameters)], SPELLED.terminal, several=False
    )
    assert accepts(lark, '[{"name": "f", "parameters": {}}]')
    assert accepts(lark, '[{"name": "f", "parameters": {"b": 1}}]') == is_open


def test_optional_python_arguments_may_be_left_out_anywhere() -> None:
    for text in (
        'city="a"',
        'days=1, city="a"',
        'city="a", unit="c"',
        'days=1, city="a", unit=null, flags=[true, false]',
    ):
        assert accepts(grammar("pythonic"), f"[get_weather({text})]")
    for text in ("", "days=1", 'city="a", days=1', ', city="a"', 'city="a",'):
        assert not accepts(grammar("pythonic"), f"[get_weather({text})]")


def test_python_calls_take_names_that_python_has_not_but_none_that_end_nowhere() -> None:
    def rules(argument: str) -> str:
        function = Function(name="get-it", parameters={"properties": {argument: True}, "required": [argument]})
        return "start: calls\n" + TOOL_FORMATS["pythonic"].rules([function], SPELLED.terminal, several=False)

    assert accepts(rules("the-class"), '[get-it(the-class={"x": 1})]')
    with pytest.raises(RequestError, match="a=b") as refused:
        rules("a=b")
    assert refused.value.param == "tools"


class Engine:
    """Just enough of one for `converse`."""

    max_model_len = 100

    def __init__(self, prompt: str) -> None:
        self.prompt = prompt

    def encode_chat(self, messages: object, **_: object) -> list[int]:
        return list(self.prompt.encode())

    def decode(self, token_ids: list[int], skip_special_tokens: bool) -> str:
        return bytes(token_ids).decode()


def forced_grammar(reasoning: str | None, prompt: str, special: Dialect = SPELLED, **fields: Any) -> str:
    """Of a call of "f", or of what else is asked for, behind whatever reasoning the prompt leaves room for."""
    call = {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "required"}
    request = ChatRequest(messages=[], **(fields or call))
    formats = TOOL_FORMATS["hermes"], REASONING_FORMATS.get(reasoning or "")
    dialect = Dialect(*formats, special.special_token_ids)
    params = converse(Engine(prompt), dialect, request).params  # type: ignore[arg-type]
    assert isinstance(params, SamplingParams)
    assert params.structured_outputs is not None
    return grammar_of(params.structured_outputs, frozenset())


CALL = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
THOUGHT = "Hm: <tool_call>?\n</think>\n\n"


@pytest.mark.parametrize(
    ("reasoning", "prompt", "good", "bad"),
    [
        (None, "<bot>", [CALL], [f"<think>\n{THOUGHT}{CALL}", THOUGHT + CALL]),
        ("qwen3", "<bot>", [CALL, f"<think>\n{THOUGHT}{CALL}"], [THOUGHT + CALL, f"<think>\n{THOUGHT}no"]),
        ("qwen3", "<bot><think>\n", [THOUGHT + CALL], [CALL, THOUGHT + "no"]),
        ("qwen3", "<bot><think>\n\n</think>\n\n", [CALL], [f"<think>\n{THOUGHT}{CALL}"]),
        ("deepseek_r1", "<bot>", [f"<think>\n{THOUGHT}{CALL}", THOUGHT + CALL], [CALL]),
    ],
)  # fmt: skip
def test_a_forced_call_may_follow_reasoning_and_the_parser_reads_both(
    reasoning: str | None, prompt: str, good: list[str], bad: list[str]
) -> None:
    lark = forced_grammar(reasoning, prompt)
    for text in good:
        assert accepts(lark, text)
        thought = "Hm: <tool_call>?" if "Hm" in text else ""
        assert splitter("hermes", reasoning, prompt).split(text) == Delta(thought, calls=calls(("f", "{}")))
    assert not any(accepts(lark, text) for text in bad)


@pytest.mark.parametrize(
    ("fields", "answer"),
    [
        ({"response_format": {"type": "json_object"}}, '{"a": 1}'),
        ({"guided_regex": "[0-9]+"}, "42"),
        ({"guided_choice": ["yes", "no"]}, "no"),
        ({"guided_grammar": 'start: "a" tail\ntail: "b"'}, "ab"),
        ({"guided_grammar": 'root ::= "a" "b"'}, "ab"),
    ],
)
def test_c12_a_structure_is_that_of_the_answer_and_leaves_room_for_reasoning(
    fields: dict[str, Any], answer: str
) -> None:
    lark = forced_grammar("qwen3", "<bot>", **fields)
    assert accepts(lark, f"<think>\n{THOUGHT}{answer}")
    assert accepts(lark, answer)
    assert not accepts(lark, f"<think>\n{THOUGHT}")
    assert not accepts(lark, f"<think>\n{THOUGHT}?")
    assert not accepts(forced_grammar("qwen3", "<think>\n\n</think>\n\n", **fields), f"<think>\n{THOUGHT}{answer}")


def test_marks_that_are_special_tokens_cannot_be_spelled() -> None:
    lark = forced_grammar("qwen3", "<bot><think>\n", SPECIAL)
    assert accepts(lark, THOUGHT + CALL, marks=("</think>",))
    assert not accepts(lark, THOUGHT + CALL)
    named = "[TOOL_CALLS]f[ARGS]{}"
    assert accepts(grammar("mistral", SPECIAL), named, marks=("[TOOL_CALLS]", "[ARGS]"))
    assert not accepts(grammar("mistral", SPECIAL), named)


STRICT = {
    "tools": [
        {"type": "function", "function": {"name": "strict", "parameters": SCHEMA, "strict": True}},
        {"type": "function", "function": {"name": "f", "parameters": SCHEMA}},
    ]
}


@pytest.mark.parametrize(
    ("name", "arguments", "fits"),
    [
        ("strict", '{"city": "Bonn"}', True),
        ("strict", '{"city": "Bonn", "days": 10}', False),
        ("strict", '{"day', False),
        ("f", '{"days": 10, "x": [null]}', True),
        ("g", "{}", False),
    ],
)
def test_a_strict_function_that_the_model_may_call_gets_arguments_of_its_schema(
    name: str, arguments: str, fits: bool
) -> None:
    lark = forced_grammar(None, "<bot>", **STRICT)
    call = f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
    for text in (call, f"Well.\n{call}", f"<tool {call}\nand {call} so"):
        assert accepts(lark, text) == fits
    assert accepts(lark, "It rains: <tool_call or <tools>.")
    assert not accepts(lark, "It rains: <tool_call>.")


def test_a_strict_call_that_is_the_only_one_may_follow_reasoning() -> None:
    lark = forced_grammar("qwen3", "<bot>", **STRICT, parallel_tool_calls=False)
    call = '<tool_call>\n{"name": "strict", "arguments": {"city": "Bonn"}}\n</tool_call>'
    thought = "<think>\nHm.\n</think>\n\n"
    assert accepts(lark, f"{thought}Well. {call}")
    assert accepts(lark, f"Well. {call}")
    assert not accepts(lark, f"{thought}Well. {call[:-20]}")


def test_a_schema_that_cannot_be_enforced_is_refused_where_it_is_strict() -> None:
    function = {"name": "f", "parameters": {"properties": {"a": 5}}, "strict": True}
    with pytest.raises(RequestError) as refused:
        forced_grammar(None, "<bot>", tools=[{"type": "function", "function": function}])
    assert refused.value.param in ("tools", "grammar")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.sampled_from(["object", "a=b"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["type", "properties", "required", "$defs", "$ref", "anyOf", "a"]) | st.text(max_size=5),
            inner,
            max_size=3,
        )
    ),
    max_leaves=6,
)
SCHEMAS = st.dictionaries(st.sampled_from(["properties", "required", "$defs", "anyOf"]), JSON, max_size=3)
VALID_TOOLS = st.builds(
    lambda schema, name: {"type": "function", "function": {"name": name, "parameters": schema}},
    SCHEMAS,
    st.sampled_from(["f", "g-h"]),
)
ANY_TOOLS = st.fixed_dictionaries({"type": JSON}, optional={"function": st.fixed_dictionaries({"name": JSON}) | JSON})


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    tools=st.lists(VALID_TOOLS, min_size=1, max_size=2) | st.lists(ANY_TOOLS, min_size=1, max_size=2) | JSON,
    choice=st.just("required") | JSON,
    name=st.sampled_from(sorted(TOOL_FORMATS)),
)
def test_a11_any_tools_end_in_a_grammar_or_a_request_error(tools: Any, choice: Any, name: str) -> None:
    body = {"messages": [], "tools": tools, "tool_choice": choice}
    try:
        request = decode(json.dumps(body).encode(errors="surrogatepass"), ChatRequest)
        params = converse(Engine(""), Dialect(TOOL_FORMATS[name]), request).params  # type: ignore[arg-type]
        assert isinstance(params, SamplingParams)
        if params.structured_outputs is not None:
            grammar_of(params.structured_outputs, frozenset())
    except RequestError:
        pass
