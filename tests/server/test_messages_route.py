"""/v1/messages: Anthropic's protocol, whole, streamed, counted, and its errors."""

import json
from typing import Any

import httpx
import pytest
from conftest import asgi, named_events, ready_engine
from fake_engine import FakeEngine, Script

from jaxpage.server.anthropic.protocol import MessagesRequest
from jaxpage.server.app import build_app
from jaxpage.server_config import ServerConfig

URL = "/v1/messages"
TEXT = Script().text
HELLO = [{"role": "user", "content": "hello"}]


def create(client: httpx.Client, **fields: Any) -> dict[str, Any]:
    answer = client.post(URL, json={"model": "fake", "max_tokens": 50, "messages": HELLO} | fields)
    assert answer.status_code == 200, answer.text
    message: dict[str, Any] = answer.json()
    return message


def test_a_message_is_a_block_of_text_with_its_usage(client: httpx.Client, engine: FakeEngine) -> None:
    engine.scripts["hello"] = Script(num_cached_tokens=4)
    message = create(client, system="be brief")
    assert message["id"].startswith("msg_")
    assert (message["type"], message["role"], message["model"]) == ("message", "assistant", "fake")
    assert message["content"] == [{"type": "text", "text": TEXT}]
    assert (message["stop_reason"], message["stop_sequence"]) == ("end_turn", None)
    assert message["usage"] == {
        "input_tokens": len("<system>be brief<user>hello<bot>") - 4,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 4,
        "output_tokens": len(TEXT),
    }


@pytest.mark.parametrize(
    ("fields", "reason", "sequence", "text"),
    [
        ({"max_tokens": 4}, "max_tokens", None, TEXT[:4]),
        ({"stop_sequences": ["xyz", "wör"]}, "stop_sequence", "wör", "Hello "),
        ({"messages": [{"role": "user", "content": "x" * 43}]}, "model_context_window_exceeded", None, TEXT[:10]),
    ],
)
def test_why_a_message_has_ended(
    client: httpx.Client, fields: dict[str, Any], reason: str, sequence: str | None, text: str
) -> None:
    message = create(client, **fields)
    assert (message["stop_reason"], message["stop_sequence"]) == (reason, sequence)
    assert message["content"] == [{"type": "text", "text": text}]


class Block(dict[str, Any]):
    """Is never compared with another."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        raise AssertionError("as many comparisons as there are pairs of blocks would keep the event loop for minutes")


def test_results_of_tools_are_told_from_other_blocks_without_comparing_each_with_all() -> None:
    result, text = Block(type="tool_result", tool_use_id="a"), Block(type="text", text="U")
    request = MessagesRequest(max_tokens=1, messages=[{"role": "user", "content": [result, text, result, text]}])
    assert [message["role"] for message in request.conversation()] == ["tool", "tool", "user"]


def test_blocks_of_text_are_a_conversation_and_thoughts_are_left_out(client: httpx.Client) -> None:
    block = {"type": "text", "cache_control": {"type": "ephemeral"}}
    messages = [
        {"role": "user", "content": [block | {"text": "U"}, block | {"text": "V"}]},
        {
            "role": "assistant",
            "content": [{"type": "thinking", "thinking": "T", "signature": ""}, block | {"text": "A"}],
        },
        {"role": "user", "content": "W"},
    ]
    fields = {"system": [block | {"text": "S"}], "messages": messages}
    expected = len("<system>S<user>U\nV<assistant>A<user>W<bot>")
    assert create(client, **fields)["usage"]["input_tokens"] == expected
    counted = client.post(f"{URL}/count_tokens", json=fields)
    assert counted.json() == {"input_tokens": expected}


def test_a_schema_for_the_text_reaches_the_engine(client: httpx.Client, engine: FakeEngine) -> None:
    schema = {"type": "object"}
    create(client, output_config={"format": {"type": "json_schema", "schema": schema}})
    asked = engine.seen_params[-1].structured_outputs  # type: ignore[union-attr]
    assert asked is not None
    assert json.loads(str(asked.json)) == schema


def test_a_stream_opens_grows_and_closes_in_order(client: httpx.Client) -> None:
    events = named_events(client.post(URL, json={"max_tokens": 50, "messages": HELLO, "stream": True}))
    kinds = [event["type"] for event in events]
    num_deltas = kinds.count("content_block_delta")
    assert kinds == [
        *("message_start", "content_block_start"),
        *["content_block_delta"] * num_deltas,
        *("content_block_stop", "message_delta", "message_stop"),
    ]
    assert "".join(event["delta"]["text"] for event in events[2 : 2 + num_deltas]) == TEXT
    head = events[0]["message"]
    assert (head["content"], head["stop_reason"]) == ([], None)
    assert events[-2]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert events[-2]["usage"] == create(client)["usage"]


def test_a_stream_that_fails_ends_with_an_error_event(client: httpx.Client, engine: FakeEngine) -> None:
    engine.scripts["fault"] = Script(fail_after=3, delay=0.01)
    body = {"max_tokens": 9, "messages": [{"role": "user", "content": "fault"}], "stream": True}
    answer = client.post(URL, json=body)
    last = named_events(answer)[-1]
    assert (last["type"], last["error"]["type"]) == ("error", "api_error")
    assert last["request_id"] == answer.headers["request-id"]


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"max_tokens": None}, "at `$.max_tokens`"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"messages": []}, "messages is empty"),
        ({"messages": [*HELLO, {"role": "assistant", "content": "A"}]}, "messages ends with"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role is 'tool'"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "type 'image'"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "whose tool_use_id is None"),
        (
            {"messages": [{"role": "system", "content": [{"id": "a", "name": "f", "input": {}}]}, *HELLO]},
            "has a block of type None",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "x"}]}]}, "'tool_use'"),
        ({"messages": [{"role": "user"}]}, "messages[0].content is neither"),
        ({"system": [{"type": "image"}]}, "system has a block"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name is 'a b'"),
        ({"tools": [{"name": "f", "input_schema": {"type": "array"}}]}, "tools[0].parameters.type is 'array'"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0] is of type 'bash_20250124'"),
        ({"tool_choice": {"type": "any"}}, "tool_choice asks for a call, and there are no tools"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.type is 'tool'"),
        ({"thinking": {"type": "maybe"}}, "thinking.type is 'maybe': it must be one of"),
        ({"stop": ["x"]}, "stop is not supported"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema is missing"),
        ({"output_config": {"effort": "huge"}}, "output_config.effort is 'huge': it must be one of"),
        ({"temperature": 3}, "temperature is 3"),
        ({"messages": [{"role": "user", "content": "x" * 100}]}, "max_model_len is 64"),
    ],
)
def test_what_is_wrong_is_told_in_anthropics_shape(client: httpx.Client, fields: dict[str, Any], says: str) -> None:
    answer = client.post(URL, json={"max_tokens": 5, "messages": HELLO} | fields)
    assert answer.status_code == 400
    error = answer.json()
    assert (error["type"], error["error"]["type"]) == ("error", "invalid_request_error")
    assert error["request_id"] == answer.headers["request-id"]
    assert says in error["error"]["message"]


def test_other_errors_have_anthropics_words_too() -> None:
    body = {"max_tokens": 5, "messages": HELLO}
    engine = ready_engine()
    guarded = build_app(engine, ServerConfig(api_key=("k",)))
    full = build_app(ready_engine(max_num_seqs=0), ServerConfig(max_num_waiting=0))
    cases = [
        (asgi(engine, "POST", URL, app=guarded, json=body), 401, "authentication_error"),
        (asgi(engine, "POST", URL, json=body | {"model": "no-such"}), 404, "not_found_error"),
        (asgi(engine, "POST", URL, app=full, json=body), 429, "rate_limit_error"),
        (asgi(FakeEngine(), "POST", f"{URL}/count_tokens", json=body), 503, "overloaded_error"),
    ]
    for answer, status, kind in cases:
        assert (answer.status_code, answer.json()["error"]["type"]) == (status, kind)


def test_counting_needs_no_max_tokens_and_starts_nothing(client: httpx.Client, engine: FakeEngine) -> None:
    assert client.post(f"{URL}/count_tokens", json={"messages": HELLO}).json() == {
        "input_tokens": len("<user>hello<bot>")
    }
    assert engine.seen_params == []


@pytest.mark.parametrize(
    ("fields", "variables"),
    [
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, {"thinking_budget": 1024}),
        ({"thinking": {"type": "adaptive"}}, {}),
        ({"thinking": {"type": "disabled"}}, {}),
        ({"output_config": {"effort": "high"}}, {"reasoning_effort": "high"}),
        (
            {"output_config": {"effort": "high"}, "chat_template_kwargs": {"reasoning_effort": "low"}},
            {"reasoning_effort": "low"},
        ),
    ],
)
def test_what_coding_agents_send_is_taken(
    client: httpx.Client, engine: FakeEngine, fields: dict[str, Any], variables: dict[str, Any]
) -> None:
    create(client, **fields)
    assert {name: engine.seen_template_kwargs[-1].get(name) for name in variables} == variables
    counted = client.post(f"{URL}/count_tokens", json={"messages": HELLO} | fields)
    assert counted.status_code == 200, counted.text


def test_many_tools_are_taken(client: httpx.Client) -> None:
    tools = [{"name": f"f{index}", "input_schema": {"type": "object"}} for index in range(300)]
    counted = client.post(f"{URL}/count_tokens", json={"messages": HELLO, "tools": tools})
    assert counted.json()["input_tokens"] > 300
