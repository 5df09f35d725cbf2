"""/v1/chat/completions as OpenAI's clients know it, through real HTTP."""

import json

import httpx
import pytest
from conftest import events
from fake_engine import FakeEngine, Script

CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello"}]
TEXT = Script().text


def chat(client: httpx.Client, **fields: object) -> httpx.Response:
    return client.post(CHAT, json={"messages": HELLO, **fields})


def test_an_answer_has_openais_shape(client: httpx.Client) -> None:
    answer = chat(client).json()
    assert answer["id"].startswith("chatcmpl-")
    assert answer["object"] == "chat.completion"
    assert answer["model"] == "fake"
    assert answer["created"] > 1_700_000_000
    [choice] = answer["choices"]
    assert choice == {
        "index": 0,
        "message": {"role": "assistant", "content": TEXT},
        "logprobs": None,
        "finish_reason": "stop",
        "stop_reason": None,
    }
    num_prompt_tokens = len("<user>hello<bot>")
    assert answer["usage"] == {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": len(TEXT),
        "total_tokens": num_prompt_tokens + len(TEXT),
        "prompt_tokens_details": {"cached_tokens": 0},
    }


@pytest.mark.parametrize("stream_options", [None, {}, {"include_usage": False}])
def test_a01_no_usage_unless_asked_for(client: httpx.Client, stream_options: object) -> None:
    chunks = events(chat(client, stream=True, max_tokens=4, stream_options=stream_options))
    assert all("usage" not in chunk for chunk in chunks)
    assert all(len(chunk["choices"]) == 1 for chunk in chunks)


def test_a01_usage_is_the_last_chunk_when_asked_for(client: httpx.Client) -> None:
    chunks = events(chat(client, stream=True, max_tokens=4, stream_options={"include_usage": True}))
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == chat(client, max_tokens=4).json()["usage"]
    assert all(chunk["usage"] is None and chunk["choices"] for chunk in chunks[:-1])


@pytest.mark.parametrize("fields", [{}, {"stream": False}, {"stream": None}])
@pytest.mark.parametrize("stream_options", [{}, {"include_usage": True}])
def test_a01_stream_options_without_stream_are_refused(
    client: httpx.Client, fields: dict[str, object], stream_options: object
) -> None:
    response = chat(client, stream_options=stream_options, **fields)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "stream_options"


@pytest.mark.parametrize(("max_tokens", "reason"), [(4, "length"), (None, "stop")])
def test_a02_role_comes_first_and_the_finish_reason_last(
    client: httpx.Client, max_tokens: int | None, reason: str
) -> None:
    chunks = events(chat(client, stream=True, max_tokens=max_tokens))
    choices = [chunk["choices"][0] for chunk in chunks]
    assert choices[0]["delta"] == {"role": "assistant", "content": ""}
    assert all("role" not in choice["delta"] for choice in choices[1:])
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + [reason]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    for name in ("id", "created", "model"):
        assert len({chunk[name] for chunk in chunks}) == 1


def test_a02_a_stream_of_many_choices_opens_and_closes_each_once(client: httpx.Client) -> None:
    chunks = events(chat(client, stream=True, n=3, seed=5, max_tokens=6))
    for index in range(3):
        choices = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert [choice["delta"].get("role") for choice in choices] == ["assistant"] + [None] * (len(choices) - 1)
        assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["length"]
        assert "".join(choice["delta"].get("content", "") for choice in choices) == f"{5 + index}:{TEXT}"[:6]


@pytest.mark.parametrize("fields", [{}, {"max_tokens": 3}, {"stop": ["漢字"]}, {"stop": "🦙!"}, {"n": 2, "seed": 1}])
def test_a09_a_joined_stream_equals_the_whole_answer(client: httpx.Client, fields: dict[str, object]) -> None:
    whole = chat(client, **fields).json()["choices"]
    joined = [""] * len(whole)
    for chunk in events(chat(client, stream=True, **fields)):
        joined[chunk["choices"][0]["index"]] += chunk["choices"][0]["delta"].get("content", "")
    assert joined == [choice["message"]["content"] for choice in whole]


def test_held_back_text_makes_no_empty_chunks(client: httpx.Client) -> None:
    chunks = events(chat(client, stream=True, stop=["lo wörld"]))
    contents = [chunk["choices"][0]["delta"].get("content") for chunk in chunks]
    assert contents[0] == ""  # with the role
    assert contents[-1] is None  # with the finish reason
    assert all(contents[1:-1])
    assert chunks[-1]["choices"][0]["stop_reason"] == "lo wörld"


@pytest.mark.parametrize(
    ("fields", "num_tokens"),
    [
        ({"max_completion_tokens": 1}, 1),
        ({"max_tokens": 1}, 1),
        ({"max_completion_tokens": 2, "max_tokens": 9}, 2),
        ({"max_completion_tokens": None, "max_tokens": 2}, 2),
    ],
)
def test_a14_the_token_cap_is_kept(client: httpx.Client, fields: dict[str, object], num_tokens: int) -> None:
    answer = chat(client, **fields).json()
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == num_tokens


def test_a14_null_runs_to_the_end_of_the_context(client: httpx.Client, engine: FakeEngine) -> None:
    engine.scripts["hello"] = Script(text="x" * 1000)
    answer = chat(client, max_tokens=None).json()
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["total_tokens"] == engine.max_model_len


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
@pytest.mark.parametrize("value", [0, -1])
@pytest.mark.parametrize("stream", [False, True])
def test_a14_no_tokens_at_all_are_refused(client: httpx.Client, name: str, value: int, stream: bool) -> None:
    response = chat(client, stream=stream, **{name: value})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == name
    assert str(value) in response.json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_a15_what_does_not_fit_is_refused_before_the_stream_starts(client: httpx.Client, stream: bool) -> None:
    response = chat(client, stream=stream, messages=[{"role": "user", "content": "x" * 100}])
    assert response.status_code == 400
    assert response.headers["content-type"] == "application/json"
    assert "max_model_len is 64" in response.json()["error"]["message"]


def test_a18_no_messages_are_refused(client: httpx.Client) -> None:
    response = chat(client, messages=[])
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "messages"


def test_a18_empty_content_is_served(client: httpx.Client) -> None:
    assert chat(client, messages=[{"role": "user", "content": ""}]).status_code == 200


def test_a19_content_reaches_the_template_as_it_was_sent(client: httpx.Client) -> None:
    part = {"type": "text", "text": "hello"}
    assert chat(client, messages=[{"role": "user", "content": [part]}]).json()["usage"] == chat(client).json()["usage"]
    two = chat(client, messages=[{"role": "user", "content": [part, part]}]).json()
    assert two["usage"]["prompt_tokens"] == len("<user>hello\nhello<bot>")
    history = [*HELLO, {"role": "assistant", "content": None}, *HELLO]
    assert chat(client, messages=history).status_code == 200
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}
    assert chat(client, messages=[{"role": "user", "content": [picture]}]).status_code == 400


def test_template_variables_are_passed_on_but_never_the_servers_own(client: httpx.Client, engine: FakeEngine) -> None:
    assert chat(client, chat_template_kwargs={"enable_thinking": False}).status_code == 200
    assert engine.seen_template_kwargs[-1] == {"enable_thinking": False}
    response = chat(client, chat_template_kwargs={"messages": []})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "chat_template_kwargs"


def test_every_sampling_option_reaches_the_engine(client: httpx.Client, engine: FakeEngine) -> None:
    fields = {
        "n": 2,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "seed": 3,
        "min_tokens": 1,
        "max_tokens": 5,
        "stop": ["a", "b"],
        "stop_token_ids": [4],
        "include_stop_str_in_output": True,
        "ignore_eos": True,
        "skip_special_tokens": False,
    }
    assert chat(client, **fields).status_code == 200
    [params] = engine.seen_params
    for name, value in fields.items():
        assert getattr(params, name) == (tuple(value) if isinstance(value, list) else value)


def test_priority_and_cache_salt_reach_the_engine(client: httpx.Client, engine: FakeEngine) -> None:
    chat(client, priority=-3, cache_salt="tenant")
    chat(client)
    assert engine.seen_options == [{"priority": -3, "cache_salt": "tenant"}, {"priority": 0, "cache_salt": None}]


@pytest.mark.parametrize("effort", ["none", "minimal", "low", "medium", "high", "xhigh"])
def test_how_much_to_reason_is_a_variable_of_the_template(
    client: httpx.Client, engine: FakeEngine, effort: str
) -> None:
    body = {"model": "fake", "messages": [{"role": "user", "content": "hello"}], "verbosity": "low"}
    answer = client.post("/v1/chat/completions", json=body | {"reasoning_effort": effort})
    assert answer.status_code == 200, answer.text
    assert engine.seen_template_kwargs[-1]["reasoning_effort"] == effort
    answer = client.post("/v1/responses", json={"input": "hello", "reasoning": {"effort": effort, "summary": "auto"}})
    assert answer.status_code == 200, answer.text
    assert engine.seen_template_kwargs[-1]["reasoning_effort"] == effort


def test_each_chunk_carries_the_usage_so_far_where_that_is_asked_for(client: httpx.Client) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"messages": [{"role": "user", "content": "hello"}], "stream": True, "stream_options": options}
    lines = client.post("/v1/chat/completions", json=body).text.split("\n\n")
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] > 0
    assert chunks[-1]["choices"] == []
