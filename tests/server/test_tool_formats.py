"""What the parsers of tool calls make of answers, right and wrong ones, however they arrive."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from split_text import calls, in_pieces, joined, splitter

from jaxpage.server.parsing.splitter import Delta
from jaxpage.server.parsing.tools import TOOL_FORMATS

PARIS = ("get_weather", '{"city": "Paris"}')
NOTHING = ("f", "{}")
CALLS = [
    ("hermes", '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>', "", [PARIS]),
    ("hermes", 'Let me see.\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>', "Let me see.", [NOTHING]),
    (
        "hermes",
        '<tool_call>{"name": "f"}</tool_call>\n<tool_call>{"name": "unknown", "arguments": {}}</tool_call>\n',
        "",
        [NOTHING, ("unknown", "{}")],
    ),
    ("hermes", '<tool_call>{"name": "f", "arguments": {}}</tool_call>\n\nDone.', "Done.", [NOTHING]),
    ("hermes", 'a <tool_call>{"name": "f"}</tool_call> b', "a b", [NOTHING]),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"text": "</tool_call> }\\" \\u00e9"}}</tool_call>',
        "",
        [("f", '{"text": "</tool_call> }\\" \\u00e9"}')],
    ),
    ("hermes", '<tool_call>{"arguments": {"city": "Paris"}, "name": "get_weather"}</tool_call>', "", [PARIS]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {}, "id": "x"}</tool_call>', "", [NOTHING]),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("f", '{"a": 1}')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": null}</tool_call>', "", [NOTHING]),
    ("llama3_json", '{"name": "get_weather", "parameters": {"city": "Paris"}}', "", [PARIS]),
    ("llama3_json", '<|python_tag|>{"type": "function", "name": "f", "parameters": {}}', "", [NOTHING]),
    ("llama3_json", '\n{"name": "f", "parameters": {}}; {"name": "f", "parameters": {}}\n', "", [NOTHING] * 2),
    ("json", '[{"name": "get_weather", "parameters": {"city": "Paris"}}, {"name": "f"}]', "", [PARIS, NOTHING]),
    ("json", '{"name": "f", "parameters": {}}', "", [NOTHING]),
    ("mistral", '[TOOL_CALLS][{"name": "f"}, {"name": "f", "arguments": {}, "id": "1"}]', "", [NOTHING] * 2),
    ("mistral", '[TOOL_CALLS] [{"arguments": {"city": "Paris"}, "name": "get_weather"}]', "", [PARIS]),
    ("mistral", 'Hm. [TOOL_CALLS]f[ARGS]{}[TOOL_CALLS]get_weather{"city": "Paris"}', "Hm.", [NOTHING, PARIS]),
    ("mistral", "[TOOL_CALLS]f[CALL_ID]a1b2c3d4e[ARGS]{}", "", [NOTHING]),
    ("pythonic", "[get_weather(city='Paris'), f()]", "", [PARIS, NOTHING]),
    ("pythonic", '\n[f( a = [1, -2.5, (True, None)], class = {"k": "x)]"}, b=false,)]\n', "", [
        ("f", '{"a": [1, -2.5, [true, null]], "class": {"k": "x)]"}, "b": false}'),
    ]),
    (
        "pythonic", r"""[f(a='it\'s', b="\ud83d\ude00", c="\d")]""", "",
        [("f", r"""{"a": "it's", "b": "\ud83d\ude00", "c": "\\d"}""")],
    ),
]  # fmt: skip
PLAIN = [
    ("hermes", "Just words, with <tool> and <tool_call"),
    ("hermes", "  \n<tool_call>\nno JSON\n</tool_call>\n"),
    ("hermes", '<tool_call>{"name": 5, "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "two words", "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'),
    ("hermes", "<tool_call>{'name': 'f', 'arguments': {}}</tool_call>"),
    ("hermes", '<tool_call>{"name": "f", "arguments": {\'a\': 1}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": "no object"}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": ' + "[" * 5000),
    ("hermes", '<tool_call>{"name": "f", "arguments": "' + "[" * 5000 + '"}'),
    ("hermes", '<tool_call>{"id": ' + "1" * 5000 + ', "name": 1}'),
    ("llama3_json", '{"city": "Paris"}'),
    ("llama3_json", '{"name": "unknown", "parameters": {}}'),
    ("llama3_json", 'The answer: {"name": "f", "parameters": {}}'),
    ("llama3_json", "<|python_tag|>print(1)"),
    ("json", "[]"),
    ("json", "[1, 2]"),
    ("json", '[{"name": "unknown"}]'),
    ("mistral", "[TOOL_CALLS] and words"),
    ("mistral", "[TOOL_CALL"),
    ("pythonic", "[]"),
    ("pythonic", "[f]"),
    ("pythonic", "[f(a=1)"[:5]),
    ("pythonic", "[unknown(a=1)]"),
    ("pythonic", "[f(1)]"),
    ("pythonic", "[f(a=open('x'))]"),
    ("pythonic", "[f(a={1: 2})]"),
    ("pythonic", "[f(a=b'x')]"),
    ("pythonic", "[f(a=1e999)]"),
    ("pythonic", "[f(a=" + "(" * 500 + ")" * 500 + ")]"),
    ("pythonic", "Call [f(a=1)]"),
]


@pytest.mark.parametrize(("name", "text", "content", "found"), CALLS)
def test_calls_are_told_from_content(name: str, text: str, content: str, found: list[tuple[str, str]]) -> None:
    assert splitter(name).split(text) == Delta(content=content, calls=calls(*found))


@pytest.mark.parametrize(("name", "text"), PLAIN)
def test_what_is_no_call_is_content_to_the_letter(name: str, text: str) -> None:
    assert splitter(name).split(text) == Delta(content=text)


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, text, *_ in CALLS] + PLAIN)
def test_an_answer_that_comes_in_characters_is_the_same(name: str, text: str) -> None:
    assert joined(in_pieces(splitter(name), text)) == splitter(name).split(text)


FRAGMENTS = [
    *("<tool_call>", "</tool_call>", "<tool_", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>"),
    *('"name": ', '"arguments": ', '"f"', '{"name": "f", "arguments": {', '{"name": "f", "parameters": {"'),
    *("f(", "get_weather(", "a=", ")", "[", "]", "{", "}", ", ", "; ", ": ", '"', "'", "\\", "\\u12"),
    *("1e5", "-", "true", "null", "x", " ", "\n", "é🦙"),
]
ANSWERS = st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=3), max_size=14).map("".join)


@settings(max_examples=150, deadline=None)
@given(data=st.data(), name=st.sampled_from(sorted(TOOL_FORMATS)))
def test_any_answer_is_the_same_message_however_it_is_cut(data: st.DataObject, name: str) -> None:
    text = data.draw(ANSWERS | st.sampled_from([text for kind, text, *_ in CALLS if kind == name]))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    deltas = in_pieces(splitter(name), pieces)
    whole = joined(deltas)
    assert whole == splitter(name).split(text)
    for position, call in enumerate(whole.calls):
        assert (call.index, call.id) == (position, str(position))
        assert call.name
    named = [call.index for delta in deltas for call in delta.calls if call.name is not None]
    assert named == list(range(len(whole.calls)))  # name and id come once, first
    if not whole.calls:
        assert whole.content == text


@pytest.mark.parametrize("name", ["hermes", "llama3_json", "mistral", "json"])
def test_arguments_are_passed_on_while_they_are_written(name: str) -> None:
    one = splitter(name)
    begin = {"hermes": "<tool_call>", "mistral": "[TOOL_CALLS]["}.get(name, "")
    assert one.feed(begin + '{"name": "f", "arguments": {') == Delta()
    assert one.feed('"text": "') == Delta(calls=calls(("f", '{"text": "')))
    [more] = one.feed("once upon").calls
    assert (more.index, more.id, more.name, more.arguments) == (0, None, None, "once upon")


def test_content_is_held_back_only_as_long_as_it_may_begin_a_call() -> None:
    one = splitter("hermes")
    assert [one.feed(piece).content for piece in ("Hi ", "<tool", "s> ", "x")] == ["Hi", "", " <tools>", " x"]


@pytest.mark.parametrize(
    ("name", "text", "arguments", "content"),
    [
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1,}}</tool_call>ok', '{"a": 1,}}', "ok"),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1</tool_call>ok', '{"a": 1', "ok"),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "never ends', '{"a": "never ends', ""),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call>ok', '{"a": 1}', "ok"),
        ("llama3_json", '{"name": "f", "parameters": {"a": 01}}', '{"a": 01}}', ""),
        ("mistral", '[TOOL_CALLS]f{"a": nul}[TOOL_CALLS] x', '{"a": nul}', "[TOOL_CALLS] x"),
    ],
)
def test_a_call_that_has_begun_stays_one_with_its_arguments_as_they_were_written(
    name: str, text: str, arguments: str, content: str
) -> None:
    assert splitter(name).split(text) == Delta(content=content, calls=calls(("f", arguments)))


def test_surplus_calls_are_dropped() -> None:
    text = '<tool_call>{"name": "f"}</tool_call>' * 3 + " Done."
    one = splitter("hermes", max_num_calls=1)
    assert joined(in_pieces(one, text)) == Delta(content="Done.", calls=calls(NOTHING))
    assert one.has_calls


def test_ids_are_what_chat_templates_take() -> None:
    for name, one in TOOL_FORMATS.items():
        first, second = one.new_call_id(), one.new_call_id()
        assert first != second
        assert (len(first) == 9 and first.isalnum()) if name == "mistral" else first.startswith("call_")


def test_whole_calls_have_arguments_that_are_json() -> None:
    for name, text, *_ in CALLS:
        for call in splitter(name).split(text).calls:
            assert isinstance(json.loads(call.arguments), dict)
