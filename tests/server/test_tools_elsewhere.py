"""Tools and reasoning in OpenAI's responses and Anthropic's messages: whole, streamed, and in conversations."""

import json
from typing import Any

import anthropic
import openai
import pytest
from chats import QWEN3, engine, function, prompt_of
from conftest import asgi, named_events
from fake_engine import FakeEngine
from served import served

from jaxpage.sampling_params import SamplingParams
from jaxpage.server.app import build_app
from jaxpage.server_config import ServerConfig

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln"}}\n</tool_call>'
ARGUMENTS = '{"city": "Köln"}'
THOUGHTFUL = f"<think>\nHm.\n</think>\n\nWell.\n{CALL}\n{CALL}"
SCHEMA = function()["function"]["parameters"]
FLAT = [{"type": "function", "name": "get_weather", "parameters": SCHEMA, "strict": None}]
CLAUDES = [{"name": "get_weather", "input_schema": SCHEMA, "description": "d"}]
LATER: list[dict[str, Any]] = [
    {"role": "user", "content": "U"},
    {"type": "reasoning", "id": "r", "summary": []},
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "A"}]},
    {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"a": 1}'},
    {"type": "function_call", "call_id": "c2", "name": "g", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c1", "output": "R"},
    {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "S"}]},
]
CLAUDES_LATER: list[dict[str, Any]] = [
    {"role": "user", "content": "U"},
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "T", "signature": ""},
            {"type": "text", "text": "A"},
            {"type": "tool_use", "id": "c1", "name": "f", "input": {"a": 1}},
            {"type": "tool_use", "id": "c2", "name": "g", "input": {}},
        ],
    },
    {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": "c1", "content": "R"},
            {"type": "tool_result", "tool_use_id": "c2", "content": [{"type": "text", "text": "S"}]},
        ],
    },
]
TALK = (
    "{% for m in messages %}<{{ m.role }} {{ m.name }}>{{ m.content }}{{ m.tool_calls | tojson if m.tool_calls }}\n"
    "{% endfor %}{{ tools }}"
)


def post(one: FakeEngine, path: str, **body: Any) -> Any:
    app = build_app(one, ServerConfig())  # type: ignore[arg-type]
    return asgi(one, "POST", path, app=app, json=body)


def respond(one: FakeEngine, **fields: Any) -> dict[str, Any]:
    """A response, which is the same whole and streamed but for what is new each time."""
    whole: dict[str, Any] = post(one, "/v1/responses", **({"input": "x"} | fields)).json()
    events = named_events(post(one, "/v1/responses", stream=True, **({"input": "x"} | fields)))
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    final = events[-1]["response"]
    for made in (whole, final):
        for item in made["output"]:
            assert item.pop("id")
            assert item.pop("call_id", "c")
    assert whole["output"] == final["output"]
    assert whole["usage"] == final["usage"]
    check_items(events)
    return whole


def check_items(events: list[dict[str, Any]]) -> None:
    """Each item is added, grows, and is done before the next one; its pieces are what it is in the end."""
    index, open_item, text = -1, None, ""
    for event in events:
        kind = event["type"].removeprefix("response.")
        if "output_index" in event:
            index += kind == "output_item.added"
            assert event["output_index"] == index
        if kind == "output_item.added":
            assert open_item is None
            open_item, text = event["item"], ""
            assert not open_item.get("content")
            assert open_item["status"] == "in_progress"
        elif kind.endswith("delta"):
            text += event["delta"]
        elif kind in ("output_text.done", "reasoning_text.done"):
            assert event["text"] == text
        elif kind == "function_call_arguments.done":
            assert event["arguments"] == text
        elif kind == "output_item.done":
            assert open_item is not None
            assert event["item"]["id"] == open_item["id"]
            open_item = None
    assert open_item is None


def test_a_response_has_an_item_for_reasoning_text_and_each_call() -> None:
    response = respond(engine(THOUGHTFUL), tools=FLAT)
    call = {"type": "function_call", "status": "completed", "name": "get_weather", "arguments": ARGUMENTS}
    assert response["output"] == [
        {
            "type": "reasoning",
            "status": "completed",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "Hm."}],
        },
        {
            "type": "message",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": "Well.", "annotations": [], "logprobs": []}],
        },
        call,
        call,
    ]
    assert (response["tools"], response["tool_choice"], response["parallel_tool_calls"]) == (FLAT, "auto", True)
    assert response["usage"]["output_tokens_details"] == {"reasoning_tokens": len("Hm.")}


def test_arguments_of_a_response_are_streamed_as_they_are_written() -> None:
    events = named_events(post(engine(CALL), "/v1/responses", input="x", tools=FLAT, stream=True))
    deltas = [event["delta"] for event in events if event["type"] == "response.function_call_arguments.delta"]
    assert len(deltas) > 10
    assert "".join(deltas) == ARGUMENTS
    [item] = events[-1]["response"]["output"]
    assert item["call_id"].startswith("call_")


def test_a_response_that_is_cut_within_a_call_or_a_thought_is_incomplete() -> None:
    arguments = '{"city": "Kö'
    response = respond(engine(CALL), tools=FLAT, max_output_tokens=CALL.index(arguments) + len(arguments))
    [item] = response["output"]
    assert (response["status"], item["status"], item["arguments"]) == ("incomplete", "incomplete", arguments)
    [item] = respond(engine(THOUGHTFUL), max_output_tokens=9)["output"]
    assert (item["type"], item["status"], item["content"][0]["text"]) == ("reasoning", "incomplete", "H")


def test_a_response_tells_log_probabilities_of_every_token() -> None:
    fields = {"include": ["message.output_text.logprobs"], "tools": FLAT}
    output = respond(engine("<think>Hm.</think>Well."), **fields)["output"]
    logprobs = output[-1]["content"][0]["logprobs"]
    assert "".join(one["token"] for one in logprobs) == "<think>Hm.</think>Well."


def test_calls_and_their_results_are_a_conversation_in_both_protocols() -> None:
    first = engine("ok", chat_template=TALK)
    post(first, "/v1/responses", input=LATER)
    other = engine("ok", chat_template=TALK)
    post(other, "/v1/messages", messages=CLAUDES_LATER, max_tokens=5)
    calls = [
        {"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}},
        {"id": "c2", "type": "function", "function": {"name": "g", "arguments": {}}},
    ]
    expected = f"<user >U\n<assistant >A{json.dumps(calls)}\n<tool f>R\n<tool g>S\n"
    assert prompt_of(first).startswith(expected)
    assert prompt_of(other).startswith(expected)


def test_the_next_response_goes_on_from_calls() -> None:
    one = engine(f"Well. {CALL}", chat_template=QWEN3)
    app = build_app(one, ServerConfig())  # type: ignore[arg-type]
    first = asgi(one, "POST", "/v1/responses", app=app, json={"input": "x", "tools": FLAT}).json()
    call_id = first["output"][-1]["call_id"]
    result = {"type": "function_call_output", "call_id": call_id, "output": "rain"}
    body = {"input": [result], "previous_response_id": first["id"], "tools": FLAT}
    assert asgi(one, "POST", "/v1/responses", app=app, json=body).status_code == 200
    said = f"assistant\nWell.{CALL}<|im_end|>\n<|im_start|>tool\nrain<|im_end|>"
    assert said in prompt_of(one)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/responses", {"input": "x", "tools": FLAT, "tool_choice": {"type": "function", "name": "get_weather"}}),
        ("/v1/responses", {"input": "x", "tools": FLAT, "tool_choice": "required", "parallel_tool_calls": False}),
        ("/v1/messages", {"tools": CLAUDES, "tool_choice": {"type": "tool", "name": "get_weather"}}),
        ("/v1/messages", {"tools": CLAUDES, "tool_choice": {"type": "any", "disable_parallel_tool_use": True}}),
    ],
)
def test_a_forced_call_is_enforced_by_a_grammar(path: str, body: dict[str, Any]) -> None:
    one = engine(CALL)
    if path == "/v1/messages":
        body = body | {"messages": [{"role": "user", "content": "x"}], "max_tokens": 500}
    answer = post(one, path, **body).json()
    params = one.seen_params[-1]
    assert isinstance(params, SamplingParams)
    assert params.structured_outputs is not None
    assert "get_weather" in (params.structured_outputs.grammar or "")
    assert "call+" not in (params.structured_outputs.grammar or "")
    [item] = answer["output"] if path == "/v1/responses" else answer["content"]
    assert item["name"] == "get_weather"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/responses", {"input": "x", "tools": FLAT, "tool_choice": "none"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 500, "tools": CLAUDES}),
    ],
)
def test_with_choice_none_the_model_is_told_of_no_tools(path: str, body: dict[str, Any]) -> None:
    one = engine(CALL)
    choice = {} if path == "/v1/responses" else {"tool_choice": {"type": "none"}}
    answer = post(one, path, **body, **choice).json()
    assert "get_weather" not in prompt_of(one)
    text = answer["output"][0]["content"][0] if path == "/v1/responses" else answer["content"][0]
    assert text["text"] == CALL


def message(one: FakeEngine, **fields: Any) -> dict[str, Any]:
    """A message of Anthropic's, which is the same whole and streamed but for the ids of its calls."""
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 500, **fields}
    whole: dict[str, Any] = post(one, "/v1/messages", **body).json()
    events = named_events(post(one, "/v1/messages", stream=True, **body))
    blocks = blocks_of(events)
    for made in (whole["content"], blocks):
        for block in made:
            assert block.pop("id", "id")
    assert blocks == whole["content"]
    assert events[-2]["delta"]["stop_reason"] == whole["stop_reason"]
    return whole


def blocks_of(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The blocks that a stream makes; each must stop before the next one starts."""
    blocks: list[dict[str, Any]] = []
    text, is_open = "", False
    fields = {"text_delta": "text", "thinking_delta": "thinking", "input_json_delta": "partial_json"}
    for event in events:
        if event["type"] == "content_block_start":
            assert not is_open
            blocks.append(event["content_block"])
            assert event["index"] == len(blocks) - 1
            assert not any(blocks[-1].get(name) for name in ("text", "thinking", "input"))
            text, is_open = "", True
        elif event["type"] == "content_block_delta":
            text += event["delta"][fields[event["delta"]["type"]]]
        elif event["type"] == "content_block_stop":
            kind = blocks[-1]["type"]
            if kind == "tool_use":
                blocks[-1]["input"] = json.loads(text)
            else:
                blocks[-1][kind] = text
            is_open = False
    assert not is_open
    return blocks


def test_a_message_has_a_block_for_thoughts_text_and_each_call() -> None:
    made = message(engine(THOUGHTFUL), tools=CLAUDES)
    call = {"type": "tool_use", "name": "get_weather", "input": {"city": "Köln"}}
    assert made["content"] == [
        {"type": "thinking", "thinking": "Hm.", "signature": ""},
        {"type": "text", "text": "Well."},
        call,
        call,
    ]
    assert made["stop_reason"] == "tool_use"


def test_thoughts_of_a_message_can_be_left_out() -> None:
    made = message(engine("<think>Hm.</think>Well."), thinking={"type": "disabled"})
    assert made["content"] == [{"type": "text", "text": "Well."}]
    assert made["stop_reason"] == "end_turn"


@pytest.mark.parametrize("arguments", ['{"city": "Kö', '{"city": "\\ud800"}', '{"city": 1e999'])
def test_a_call_whose_arguments_are_no_object_is_one_without_input(arguments: str) -> None:
    text = f'<tool_call>\n{{"name": "get_weather", "arguments": {arguments}'
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 500, "tools": CLAUDES}
    [block] = post(engine(text), "/v1/messages", **body).json()["content"]
    assert (block["name"], block["input"]) == ("get_weather", {})


def test_tools_count_among_the_input_tokens() -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 5}
    one = engine("ok")
    plain = post(one, "/v1/messages/count_tokens", **body).json()["input_tokens"]
    counted = post(one, "/v1/messages/count_tokens", **body, tools=CLAUDES).json()["input_tokens"]
    assert counted > plain
    usage = post(one, "/v1/messages", **body, tools=CLAUDES).json()["usage"]
    assert usage["input_tokens"] == counted


def test_the_clients_of_both_protocols_read_calls() -> None:
    one = engine(THOUGHTFUL)
    with served(build_app(one, ServerConfig(log_requests=False))) as url:  # type: ignore[arg-type]
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client:
            tools: Any = FLAT
            with client.responses.stream(model="fake", input="x", tools=tools) as stream:
                response = stream.get_final_response()
            assert [item.type for item in response.output] == [
                *("reasoning", "message", "function_call", "function_call")
            ]
            assert response.output_text == "Well."
        claudes: Any = CLAUDES
        with (
            anthropic.Anthropic(base_url=url, api_key="none") as claude,
            claude.messages.stream(
                model="fake", max_tokens=500, messages=[{"role": "user", "content": "x"}], tools=claudes
            ) as events,
        ):
            made = events.get_final_message()
        assert [block.type for block in made.content] == ["thinking", "text", "tool_use", "tool_use"]
        assert [block.input for block in made.content if block.type == "tool_use"] == [{"city": "Köln"}] * 2
