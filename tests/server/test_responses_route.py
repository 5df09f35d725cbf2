"""/v1/responses: one turn, the next one, streams and their order, what is stored, what is refused."""

import json
from typing import Any

import httpx
import pytest
from conftest import GUARD_SECONDS, asgi, named_events, ready_engine
from fake_engine import FakeEngine, Script
from served import served

from jaxpage.server.app import build_app
from jaxpage.server.errors import ApiError
from jaxpage.server.openai.response_store import MAX_BYTES, ResponseStore, StoredResponse
from jaxpage.server_config import ServerConfig

URL = "/v1/responses"
TEXT = Script().text


def create(client: httpx.Client, **fields: Any) -> dict[str, Any]:
    answer = client.post(URL, json=fields)
    assert answer.status_code == 200, answer.text
    response: dict[str, Any] = answer.json()
    return response


def text_of(response: dict[str, Any]) -> str:
    [item] = response["output"]
    [part] = item["content"]
    text: str = part["text"]
    return text


def test_a_response_holds_a_message_and_its_usage(client: httpx.Client, engine: FakeEngine) -> None:
    engine.scripts["hello"] = Script(num_cached_tokens=3)
    response = create(client, input="hello", instructions="be brief", metadata={"a": "b"}, temperature=0.5)
    assert (response["object"], response["status"], response["model"]) == ("response", "completed", "fake")
    assert text_of(response) == TEXT
    assert response["output"][0]["role"] == "assistant"
    prompt = "<system>be brief<user>hello<bot>"
    assert response["usage"] == {
        "input_tokens": len(prompt),
        "input_tokens_details": {"cached_tokens": 3},
        "output_tokens": len(TEXT),
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": len(prompt) + len(TEXT),
    }
    assert (response["metadata"], response["temperature"], response["instructions"]) == ({"a": "b"}, 0.5, "be brief")


def test_a_response_that_is_cut_is_incomplete(client: httpx.Client) -> None:
    response = create(client, input="hello", max_output_tokens=4)
    assert (response["status"], response["output"][0]["status"]) == ("incomplete", "incomplete")
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert text_of(response) == TEXT[:4]


def test_messages_of_all_kinds_are_a_conversation(client: httpx.Client, engine: FakeEngine) -> None:
    items = [
        {"role": "developer", "content": "D"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "U"}]},
        {"type": "reasoning", "id": "r", "summary": []},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "A", "annotations": []}]},
        {"role": "user", "content": "V"},
    ]
    usage = create(client, input=items)["usage"]
    assert usage["input_tokens"] == len("<system>D<user>U<assistant>A<user>V<bot>")


def test_a_stream_opens_grows_and_closes_in_order_with_numbers(client: httpx.Client) -> None:
    events = named_events(client.post(URL, json={"input": "hello", "stream": True, "temperature": 0}))
    kinds = [event["type"].removeprefix("response.") for event in events]
    deltas = [event["delta"] for event in events if event["type"] == "response.output_text.delta"]
    assert "".join(deltas) == TEXT
    assert kinds == [
        *("created", "in_progress", "output_item.added", "content_part.added"),
        *["output_text.delta"] * len(deltas),
        *("output_text.done", "content_part.done", "output_item.done", "completed"),
    ]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    [item_id] = {event["item_id"] for event in events if "item_id" in event}
    final = events[-1]["response"]
    assert final["output"][0]["id"] == events[2]["item"]["id"] == item_id
    assert events[0]["response"]["id"] == final["id"]
    whole = create(client, input="hello", temperature=0)
    ignored = {"id", "created_at", "completed_at", "output"}
    assert {k: v for k, v in final.items() if k not in ignored} == {k: v for k, v in whole.items() if k not in ignored}
    assert client.get(f"{URL}/{final['id']}").json() == final


def test_a_stream_that_fails_ends_with_a_failed_response(client: httpx.Client, engine: FakeEngine) -> None:
    engine.scripts["fault"] = Script(fail_after=3, delay=0.01)
    events = named_events(client.post(URL, json={"input": "fault", "stream": True}))
    assert events[-1]["type"] == "response.failed"
    assert events[-1]["response"]["error"]["code"] == "server_error"
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert client.get(f"{URL}/{events[-1]['response']['id']}").status_code == 404


def test_the_next_turn_goes_on_from_the_last_without_its_instructions(client: httpx.Client) -> None:
    first = create(client, input="one", instructions="be brief")
    second = create(client, input="two", previous_response_id=first["id"])
    assert second["previous_response_id"] == first["id"]
    assert second["usage"]["input_tokens"] == len(f"<user>one<assistant>{TEXT}<user>two<bot>")
    third = client.post(URL, json={"input": "three", "previous_response_id": second["id"]})
    assert third.status_code == 400, "the context holds no third turn"
    assert "max_model_len" in third.json()["error"]["message"]


def test_a_stored_response_can_be_read_and_deleted(client: httpx.Client) -> None:
    response = create(client, input="hello")
    assert client.get(f"{URL}/{response['id']}").json() == response
    deleted = client.delete(f"{URL}/{response['id']}")
    assert deleted.json() == {"id": response["id"], "object": "response", "deleted": True}
    for answer in (client.get(f"{URL}/{response['id']}"), client.delete(f"{URL}/{response['id']}")):
        assert answer.status_code == 404
    refused = client.post(URL, json={"input": "two", "previous_response_id": response["id"]})
    assert refused.status_code == 400
    assert refused.json()["error"]["code"] == "previous_response_not_found"
    assert refused.json()["error"]["param"] == "previous_response_id"


def test_what_is_not_to_be_stored_is_not(client: httpx.Client) -> None:
    response = create(client, input="hello", store=False)
    assert response["store"] is False
    assert client.get(f"{URL}/{response['id']}").status_code == 404


def test_old_responses_make_room_for_new_ones() -> None:
    app = build_app(ready_engine(), ServerConfig(max_stored_responses=2))
    with served(app) as url, httpx.Client(base_url=url, timeout=GUARD_SECONDS) as client:
        ids = [create(client, input="hello")["id"] for _ in range(3)]
        assert [client.get(f"{URL}/{one}").status_code for one in ids] == [404, 200, 200]


def test_a_server_that_stores_nothing_says_so() -> None:
    app = build_app(ready_engine(), ServerConfig(max_stored_responses=0))
    assert asgi(ready_engine(), "POST", URL, app=app, json={"input": "x"}).json()["store"] is False
    refused = asgi(ready_engine(), "POST", URL, app=app, json={"input": "x", "store": True})
    assert refused.json()["error"]["param"] == "store"


def test_the_store_holds_no_more_bytes_than_it_may_and_counts_right() -> None:
    store = ResponseStore(100)
    half = StoredResponse(b"{}", (), MAX_BYTES // 2)
    for name in "abc":
        store.put(name, half)
    assert len(store) == 2
    store.get("b")  # now newer than c
    store.put("d", half)
    with pytest.raises(ApiError):
        store.get("c")
    store.delete("b")
    store.put("e", half)
    assert store.get("d").num_bytes == store.get("e").num_bytes
    store.put("huge", StoredResponse(b"", (), MAX_BYTES + 1))
    assert len(store) == 0


def test_log_probabilities_come_where_they_are_included(client: httpx.Client) -> None:
    fields = {"input": "hello", "include": ["message.output_text.logprobs"], "top_logprobs": 2, "max_output_tokens": 3}
    [item] = create(client, **fields)["output"]
    logprobs = item["content"][0]["logprobs"]
    assert [one["token"] for one in logprobs] == list(TEXT[:3])
    assert {len(one["top_logprobs"]) for one in logprobs} == {2}
    events = named_events(client.post(URL, json=fields | {"stream": True}))
    streamed = [one for event in events if event["type"].endswith("text.delta") for one in event["logprobs"]]
    assert streamed == logprobs


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "input"),
        ({"input": 5}, "input"),
        ({"input": [{"type": "function_call_output", "call_id": "c", "output": 5}]}, "input"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input"),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "f"}]}, "input"),
        ({"input": [{"type": "computer_call"}]}, "input"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input"),
        ({"input": [{"role": "user"}]}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input"),
        ({"input": []}, "messages"),
        ({"input": "x", "tools": [{"type": "web_search"}]}, "tools"),
        ({"input": "x", "tools": [{"type": "function"}]}, "tools"),
        ({"input": "x", "tools": [{"type": "function", "name": "a b"}]}, "tools"),
        ({"input": "x", "tool_choice": "required"}, "tool_choice"),
        ({"input": "x", "tool_choice": {"type": "function", "name": "f"}}, "tool_choice"),
        ({"input": "x", "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}}, "tool_choice"),
        ({"input": "x", "max_tool_calls": 1}, "max_tool_calls"),
        ({"input": "x", "background": True}, "background"),
        ({"input": "x", "conversation": "c"}, "conversation"),
        ({"input": "x", "text": {"format": {"type": "banana"}}}, "text"),
        ({"input": "x", "text": {"format": {"type": "json_schema", "name": "n"}}}, "text"),
        ({"input": "x", "text": {"format": "json"}}, "text"),
        ({"input": "x", "text": {"format": {"type": "json_object"}}, "guided_regex": "a"}, "text"),
        ({"input": "x", "text": {"verbosity": "loud"}}, "text"),
        ({"input": "x", "reasoning": {"effort": "huge"}}, "reasoning"),
        ({"input": "x", "truncation": "auto"}, "truncation"),
        ({"input": "x", "n": 2}, "n"),
        ({"input": "x", "max_tokens": 2}, "max_tokens"),
        ({"input": "x", "max_output_tokens": 0}, "max_output_tokens"),
        ({"input": "x", "include": ["file_search_call.results"]}, "include"),
        ({"input": "x", "top_logprobs": 2}, "top_logprobs"),
        ({"input": "x", "temperature": 3}, "temperature"),
        ({"input": "x", "metadata": {"a": 1}}, "metadata"),
    ],
)
def test_what_is_not_supported_or_wrong_is_refused_by_name(
    client: httpx.Client, fields: dict[str, Any], param: str
) -> None:
    answer = client.post(URL, json=fields)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


@pytest.mark.parametrize(
    "fields",
    [
        {
            "tools": [],
            "tool_choice": "auto",
            "parallel_tool_calls": True,
            "truncation": "disabled",
            "background": False,
        },
        {"text": {"format": {"type": "text"}}, "reasoning": {"effort": None}, "user": "u", "service_tier": "auto"},
        {"stream_options": None, "include": [], "metadata": None, "instructions": None, "unknown": 1},
    ],
)
def test_what_changes_nothing_is_taken(client: httpx.Client, fields: dict[str, Any]) -> None:
    assert text_of(create(client, input="x", **fields)) == TEXT


def test_sampling_options_of_chat_are_taken(client: httpx.Client) -> None:
    assert text_of(create(client, input="x", seed=7, top_k=3, ignore_eos=True)) == f"7:{TEXT}"


def test_the_texts_format_reaches_the_engine_and_is_told(client: httpx.Client, engine: FakeEngine) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    text = {"format": {"type": "json_schema", "name": "n", "schema": schema, "strict": True}}
    assert create(client, input="x", text=text)["text"] == text
    asked = engine.seen_params[-1].structured_outputs  # type: ignore[union-attr]
    assert asked is not None
    assert json.loads(str(asked.json)) == schema
    assert create(client, input="x", text={"format": {"type": "text"}})["text"] == {"format": {"type": "text"}}
    assert engine.seen_params[-1].structured_outputs is None  # type: ignore[union-attr]


def test_before_the_engine_is_ready_there_is_no_response() -> None:
    answer = asgi(FakeEngine(), "POST", URL, content=json.dumps({"input": "x"}))
    assert answer.status_code == 503
