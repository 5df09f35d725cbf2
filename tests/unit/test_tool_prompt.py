"""Tools in words, for templates that have no place for them."""

import json
from typing import Any

import pytest

from jaxpage.errors import RequestError
from jaxpage.text.chat_template import ChatTemplates

ALTERNATING = """\
{%- for m in messages %}{% if m.role not in ("user", "assistant") or (m.role == "user") != (loop.index0 % 2 == 0) %}\
{{ raise_exception("roles must alternate") }}{% endif %}<{{ m.role }}>{{ m.content }}{% endfor %}"""
PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
TOOLS: list[dict[str, Any]] = [{"type": "function", "function": {"name": "größe", "parameters": {"type": "object"}}}]
CALLS = [
    {"id": "1", "type": "function", "function": {"name": "größe", "arguments": '{"of": "Ulm"}'}},
    {"id": "2", "type": "function", "function": {"name": "größe", "arguments": {"of": "Köln"}}},
]
HISTORY: list[dict[str, Any]] = [
    {"role": "user", "content": "How large?"},
    {"role": "assistant", "content": None, "tool_calls": CALLS},
    {"role": "tool", "tool_call_id": "1", "content": "small"},
    {"role": "tool", "tool_call_id": "2", "content": "large"},
]


def render(messages: list[dict[str, Any]], tools: Any = TOOLS, template: str = PLAIN) -> str:
    return ChatTemplates({"default": template}).render(messages, tools, {})


def test_tools_are_told_of_in_the_system_message_or_the_users_first() -> None:
    user, system = {"role": "user", "content": "Hi"}, {"role": "system", "content": "Be kind."}
    assert render([user]).startswith("<user>You can call")
    assert render([user]).endswith("\n\nHi")
    assert render([system, user]).startswith("<system>Be kind.\n\nYou can call")
    assert render([system, user]).endswith("<user>Hi")
    assert render([{"role": "assistant", "content": "Hi"}]).startswith("<user>You can call")
    for messages in ([user], [system, user]):
        assert json.dumps(TOOLS[0]["function"], ensure_ascii=False) in render(messages)


def test_calls_and_results_are_words_in_roles_that_alternate() -> None:
    calls = '[{"name": "größe", "parameters": {"of": "Ulm"}}, {"name": "größe", "parameters": {"of": "Köln"}}]'
    expected = f"<user>How large?<assistant>{calls}<user>größe returned: small\ngröße returned: large"
    assert render(HISTORY, None, ALTERNATING) == expected
    more = [*HISTORY, {"role": "user", "content": "So?"}]
    assert render(more, None, ALTERNATING) == f"{expected}\nSo?"
    assert render(HISTORY, TOOLS, ALTERNATING).endswith(expected.removeprefix("<user>"))


def test_a_template_that_takes_tools_gets_everything_as_it_is_with_arguments_as_objects() -> None:
    template = (
        "{{ tools[0].function.name }}|{{ messages[1].tool_calls[0].function.arguments.of }}|{{ messages[2].role }}"
    )
    assert render(HISTORY, template=template) == "größe|Ulm|tool"


def test_results_have_the_name_of_their_function_which_clients_leave_out() -> None:
    template = "{{ tools }}{{ messages[2].name }} {{ messages[3].name }}"
    assert render(HISTORY, None, template) == "Nonegröße größe"
    renamed = [*HISTORY[:3], {**HISTORY[3], "name": "own"}]
    assert render(renamed, None, template) == "Nonegröße own"


@pytest.mark.parametrize("template", [PLAIN, "{{ tools }}{{ messages }}"])
@pytest.mark.parametrize("identity", [5, [1], {}])
def test_what_is_no_id_of_a_call_is_refused_by_its_place(identity: Any, template: str) -> None:
    with pytest.raises(RequestError, match=r"messages\[1\]\.tool_calls\[0\]\.id"):
        render([HISTORY[0], {"role": "assistant", "tool_calls": [{**CALLS[0], "id": identity}]}], template=template)
    with pytest.raises(RequestError, match=r"messages\[1\]\.tool_call_id"):
        render([HISTORY[0], {"role": "tool", "tool_call_id": identity, "content": "x"}], template=template)


def test_earlier_words_of_the_assistant_stand_before_its_calls() -> None:
    messages = [*HISTORY[:1], {**HISTORY[1], "content": "I look."}]
    assert "<assistant>I look.\n[{" in render(messages, None)


def test_an_unknown_result_has_a_sender_all_the_same() -> None:
    messages = [*HISTORY[:1], {"role": "tool", "content": "small"}]
    assert render(messages, None) == "<user>How large?<user>The function returned: small"


@pytest.mark.parametrize("arguments", ["", None, "null", {}])
def test_calls_without_arguments_have_none(arguments: Any) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    rendered = render([*HISTORY[:1], {"role": "assistant", "tool_calls": [call]}], None)
    assert '[{"name": "f", "parameters": ' in rendered


@pytest.mark.parametrize(
    "calls",
    ["f", [5], [{}], [{"function": "f"}], [{"function": {"name": 5}}], [{"function": {"name": "f", "arguments": 5}}]],
)
def test_what_is_no_call_is_refused_by_its_place(calls: Any) -> None:
    with pytest.raises(RequestError, match=r"messages\[1\]\.tool_calls") as refused:
        render([*HISTORY[:1], {"role": "assistant", "tool_calls": calls}])
    assert refused.value.param == "messages"
