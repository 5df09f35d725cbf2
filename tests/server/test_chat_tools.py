"""Tools in chats, over HTTP: what the model reads of them, calls in answers, and what is refused."""

import json
from typing import Any

import openai
import pytest
from chats import CHAT, HELLO, ask, both, engine, function, prompt_of, streamed
from conftest import asgi
from fake_engine import FakeEngine
from served import GUARD_SECONDS, served

from jaxpage.sampling_params import SamplingParams
from jaxpage.server.app import build_app
from jaxpage.server_config import ServerConfig

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln"}}\n</tool_call>'
WEATHER = {"name": "get_weather", "arguments": '{"city": "Köln"}'}
TOOLS = [function()]
PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<bot>"


def functions(choice: dict[str, Any]) -> list[dict[str, str]]:
    return [call["function"] for call in choice["message"]["tool_calls"]]


def grammar(one: FakeEngine) -> str:
    params = one.seen_params[-1]
    assert isinstance(params, SamplingParams)
    assert params.structured_outputs is not None
    return params.structured_outputs.grammar or ""


def test_a_call_is_no_content_and_ends_for_its_own_reason() -> None:
    choice = both(engine(f"One moment.\n{CALL}"), tools=TOOLS)
    assert choice == {
        "index": 0,
        "message": {
            "role": "assistant",
            "content": "One moment.",
            "tool_calls": [{"type": "function", "function": WEATHER}],
        },
        "logprobs": None,
        "finish_reason": "tool_calls",
        "stop_reason": None,
    }
    assert both(engine(CALL), tools=TOOLS)["message"]["content"] is None


def test_ids_of_calls_differ_and_keep_their_form() -> None:
    message = ask(engine(f"{CALL}\n{CALL}"), tools=TOOLS).json()["choices"][0]["message"]
    first, second = (call["id"] for call in message["tool_calls"])
    assert first != second
    assert first.startswith("call_")


def test_an_answer_without_calls_is_plain_content() -> None:
    choice = both(engine("It rains. <tool_call> is how I call."), tools=TOOLS)
    assert choice["message"] == {"role": "assistant", "content": "It rains. <tool_call> is how I call."}
    assert choice["finish_reason"] == "stop"


def test_arguments_are_streamed_as_they_are_written() -> None:
    response = ask(engine(CALL), tools=TOOLS, stream=True)
    pieces = [line for line in response.text.split("\n\n") if '"tool_calls"' in line]
    assert len(pieces) > 10


def test_a02_usage_and_logprobs_count_every_token() -> None:
    one = engine(f"<think>\nHm.\n</think>\n\nWell. {CALL}")
    choice = both(one, tools=TOOLS, logprobs=True, top_logprobs=1)
    whole = ask(one, tools=TOOLS, logprobs=True).json()
    text = "".join(entry["token"] for entry in choice["logprobs"]["content"])
    assert text == f"<think>\nHm.\n</think>\n\nWell. {CALL}"
    assert whole["usage"]["completion_tokens"] == len(text)


@pytest.mark.parametrize("arguments", ['{"city":', '{"city": "Köl'])
def test_a_call_that_is_cut_off_is_one_of_length(arguments: str) -> None:
    choice = both(engine(CALL), tools=TOOLS, max_tokens=CALL.index(arguments) + len(arguments))
    assert functions(choice) == [{"name": "get_weather", "arguments": arguments}]
    assert choice["finish_reason"] == "length"


def test_each_of_several_choices_is_read_on_its_own() -> None:
    choices = streamed(ask(engine(CALL), tools=TOOLS, n=3, stream=True))
    assert [functions(choices[index]) for index in range(3)] == [[WEATHER]] * 3


def test_parallel_calls_can_be_declined() -> None:
    assert len(functions(both(engine(f"{CALL}\n{CALL}"), tools=TOOLS))) == 2
    assert len(functions(both(engine(f"{CALL}\n{CALL}"), tools=TOOLS, parallel_tool_calls=False))) == 1


def test_the_model_reads_tools_as_they_came_but_for_what_is_the_servers() -> None:
    one = engine(CALL)
    tool = function(strict=True, description=None)
    tool["function"]["x-extra"] = 1
    ask(one, tools=[tool])
    told = function()
    told["function"]["x-extra"] = 1
    assert json.dumps(told) in prompt_of(one)


def test_with_choice_none_the_model_is_told_of_no_tools_and_its_text_is_content() -> None:
    one = engine(CALL)
    choice = both(one, tools=TOOLS, tool_choice="none")
    assert choice["message"] == {"role": "assistant", "content": CALL}
    assert choice["finish_reason"] == "stop"
    assert "get_weather" not in prompt_of(one)


def test_a_server_that_reads_no_free_calls_gives_them_as_content() -> None:
    choice = both(engine(CALL), ServerConfig(enable_auto_tool_choice=False), tools=TOOLS)
    assert choice["message"]["content"] == CALL
    forced = both(engine(CALL), ServerConfig(enable_auto_tool_choice=False), tools=TOOLS, tool_choice="required")
    assert functions(forced) == [WEATHER]


def test_a_required_call_is_enforced_by_a_grammar_of_all_functions() -> None:
    one = engine(CALL)
    choice = both(one, tools=[*TOOLS, function("other")], tool_choice="required")
    assert functions(choice) == [WEATHER]
    assert choice["finish_reason"] == "tool_calls"
    assert "get_weather" in grammar(one)
    assert "other" in grammar(one)
    several = grammar(one)
    both(one, tools=[*TOOLS, function("other")], tool_choice="required", parallel_tool_calls=False)
    assert grammar(one) != several


def test_a_named_call_is_enforced_by_a_grammar_of_that_function_and_ends_with_stop_as_at_openai() -> None:
    one = engine(CALL)
    named = {"type": "function", "function": {"name": "get_weather"}}
    choice = both(one, tools=[*TOOLS, function("other")], tool_choice=named)
    assert functions(choice) == [WEATHER]
    assert choice["finish_reason"] == "stop"
    assert "get_weather" in grammar(one)
    assert "other" not in grammar(one)


def test_without_tools_in_its_template_any_model_is_told_of_them_in_words_and_answers_in_json() -> None:
    text = '[{"name": "get_weather", "parameters": {"city": "Köln"}}]'
    one = engine(text, chat_template=PLAIN)
    for choice in ("auto", "required"):
        assert functions(both(one, tools=TOOLS, tool_choice=choice)) == [WEATHER]
    prompt = prompt_of(one)
    assert json.dumps(TOOLS[0]["function"]) in prompt
    assert prompt.endswith("hello<bot>")


def test_a_template_that_takes_tools_in_an_unknown_way_leaves_free_calls_in_the_content() -> None:
    text = '[{"name": "get_weather", "parameters": {"city": "Köln"}}]'
    one = engine(text, chat_template=PLAIN + "{{ tools }}")
    assert both(one, tools=TOOLS)["message"]["content"] == text
    assert functions(both(one, tools=TOOLS, tool_choice="required")) == [WEATHER]


def test_the_parser_can_be_named() -> None:
    one = engine("[get_weather(city='Köln')]", chat_template=PLAIN + "{{ tools }}")
    assert functions(both(one, ServerConfig(tool_call_parser="pythonic"), tools=TOOLS)) == [WEATHER]


def test_a19_calls_and_results_reach_the_template_with_arguments_as_objects() -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"größe": [1, "x"]}'}}
    history = [
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "3 °C"}]},
    ]
    one = engine("Cold.")
    assert both(one, messages=history, tools=TOOLS)["message"]["content"] == "Cold."
    prompt = prompt_of(one)
    assert '<tool_call>\n{"name": "f", "arguments": {"größe": [1, "x"]}}\n</tool_call><|im_end|>' in prompt
    assert "<|im_start|>tool\n3 °C<|im_end|>" in prompt


@pytest.mark.parametrize("arguments", ["no JSON", "[1]", '{"a": ', "[" * 100_000])
def test_an_earlier_call_whose_arguments_are_no_object_does_not_end_the_conversation(arguments: str) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    one = engine("Hm.")
    one.max_model_len = 200_000
    response = ask(one, messages=[*HELLO, {"role": "assistant", "tool_calls": [call]}, *HELLO])
    assert response.status_code == 200


@pytest.mark.parametrize("fields", [{"tools": []}, {"tools": None}, {"tool_choice": "none"}, {"tool_choice": "auto"}])
def test_a11_no_tools_are_no_tools(fields: dict[str, Any]) -> None:
    assert both(engine(CALL), **fields)["message"]["content"] == CALL


NAMED = {"type": "function", "function": {"name": "unknown"}}
BAD_CALLS: list[Any] = [
    "f",
    [5],
    [{}],
    [{"function": {}}],
    [{"function": {"name": 5}}],
    [{"function": {"name": "f", "arguments": 5}}],
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("param", "fields", "named"),
    [
        ("tool_choice", {"tool_choice": "required"}, "tools"),
        ("tool_choice", {"tool_choice": "required", "tools": []}, "tools"),
        ("tool_choice", {"tool_choice": NAMED}, "tools"),
        ("tool_choice", {"tool_choice": NAMED, "tools": TOOLS}, "unknown"),
        ("tool_choice", {"tool_choice": "always", "tools": TOOLS}, "always"),
        ("tool_choice", {"tool_choice": {"type": "banana"}, "tools": TOOLS}, "banana"),
        ("tool_choice", {"tool_choice": {"type": "function"}, "tools": TOOLS}, "function"),
        ("tool_choice", {"tool_choice": 5, "tools": TOOLS}, "int"),
        ("tool_choice", {"tool_choice": "required", "tools": TOOLS, "guided_regex": "a"}, "call"),
        ("tool_choice", {"tool_choice": "required", "tools": TOOLS, "use_beam_search": True}, "beam search"),
        ("tools", {"tools": [{"type": "banana", "function": {"name": "f"}}]}, "banana"),
        ("tools", {"tools": [{"function": {"name": "f"}}]}, "type"),
        ("tools", {"tools": [{"type": "function"}]}, "function"),
        ("tools", {"tools": [{"type": "function", "function": {}}]}, "name"),
        ("tools", {"tools": [function("two words")]}, "two words"),
        ("tools", {"tools": [function("")]}, "name"),
        ("tools", {"tools": [function("x" * 65)]}, "64"),
        ("tools", {"tools": [function(), function()]}, "get_weather"),
        ("tools", {"tools": [function(parameters=[])]}, "array"),
        ("tools", {"tools": [function(parameters={"type": "string"})]}, "string"),
        ("tools", {"tools": [function(description=5)]}, "int"),
        ("tools", {"tools": [function(f"f{index}") for index in range(1025)]}, "1024"),
        ("tools", {"tools": ["f"]}, "str"),
        ("tools", {"tools": [function(parameters={"$ref": "#/nowhere"})], "tool_choice": "required"}, "enforced"),
        ("tools", {"tools": [function(parameters={"anyOf": [5]})], "tool_choice": "required"}, "enforced"),
        ("parallel_tool_calls", {"parallel_tool_calls": "no"}, "bool"),
        ("include_reasoning", {"include_reasoning": 1}, "bool"),
        *(
            ("messages", {"messages": [*HELLO, {"role": "assistant", "tool_calls": calls}]}, "tool_calls")
            for calls in BAD_CALLS
        ),
    ],
)  # fmt: skip
def test_a11_wrong_tools_are_refused_before_anything_is_sent(
    param: str, fields: dict[str, Any], named: str, stream: bool
) -> None:
    response = ask(engine(CALL), stream=stream, **fields)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param
    assert named in error["message"]


def test_a_number_in_a_schema_that_is_too_long_for_python_is_refused() -> None:
    body = b'{"messages": [{"role": "user", "content": "hi"}], "tool_choice": "required", "tools": [%s]}'
    tool = b'{"type": "function", "function": {"name": "f", "parameters": {"maxProperties": %s}}}' % (b"1" * 5000)
    response = asgi(engine(CALL), "POST", CHAT, content=body % tool)
    assert response.status_code == 400, response.text


def test_openais_client_reads_calls_whole_and_streamed() -> None:
    app = build_app(engine(f"Well.\n{CALL}\n{CALL}"), ServerConfig())  # type: ignore[arg-type]
    with (
        served(app) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=GUARD_SECONDS) as client,
    ):
        fields: dict[str, Any] = {"model": "fake", "messages": HELLO, "tools": TOOLS}
        whole = client.chat.completions.create(**fields).choices[0]
        with client.chat.completions.stream(**fields) as stream:
            final = stream.get_final_completion().choices[0]
    for choice in (whole, final):
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content == "Well."
        assert [call.function.name for call in choice.message.tool_calls or []] == ["get_weather"] * 2
        assert [json.loads(call.function.arguments) for call in choice.message.tool_calls or []] == [
            {"city": "Köln"}
        ] * 2
