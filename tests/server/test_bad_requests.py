"""A11, A16, A24, A26: whatever a client sends, it gets OpenAI's error object and the server goes on."""

import json
from typing import Any

import httpx
import pytest
from conftest import events
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxpage.errors import RequestError
from jaxpage.sampling_params import BeamSearchParams, SamplingParams
from jaxpage.server.openai.chat_protocol import ChatRequest
from jaxpage.server.openai.protocol import CompletionRequest, decode
from jaxpage.server_config import ServerConfig

MAX_BODY_BYTES = ServerConfig().max_request_bytes

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
VALID: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2},
    COMPLETIONS: {"prompt": "hi", "max_tokens": 2},
}
DEEP = 100_000


def refusal(response: httpx.Response, status: int = 400) -> dict[str, Any]:
    """The error object of a refused request."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert body.keys() == {"error"}
    assert body["error"].keys() == {"message", "type", "param", "code"}
    assert isinstance(body["error"]["message"], str)
    assert body["error"]["message"]
    error: dict[str, Any] = body["error"]
    return error


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(
    "body",
    [
        b'{"model":"M",x}', b"[]", b'"hi"', b"null", b"123", b"", b"\xff", b'{"prompt":"\xff"}',
        b'{"prompt":"\\ud800"}',
        b"{} x", b'{"seed":NaN}', b'{"temperature":1e999}', b"[" * DEEP, b'{"a":' * DEEP + b"1" + b"}" * DEEP, b"{}",
    ],
    ids=lambda body: repr(body[:20]),
)  # fmt: skip
def test_a11_a_body_that_is_no_request_is_refused(client: httpx.Client, path: str, body: bytes) -> None:
    assert refusal(client.post(path, content=body))["type"] == "invalid_request_error"
    assert client.get("/health").status_code == 200


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a11_no_content_type_is_needed(client: httpx.Client, path: str) -> None:
    response = client.post(path, content=json.dumps(VALID[path]).encode())
    assert "content-type" not in response.request.headers
    assert response.status_code == 200


@pytest.mark.parametrize(
    ("path", "field", "value"),
    [
        (path, field, value)
        for path in (CHAT, COMPLETIONS)
        for field, value in [
            ("temperature", "hot"), ("temperature", 3), ("temperature", -1), ("temperature", True), ("top_p", 0),
            ("top_k", -2), ("min_p", 2), ("n", 0), ("n", 1000), ("n", "2"), ("max_tokens", "5"), ("max_tokens", 2.5),
            ("min_tokens", -1), ("min_tokens", 3), ("seed", 2**70), ("seed", 1.5), ("stop", ""), ("stop", [1]),
            ("stop", [""]), ("stop", {}), ("stop_token_ids", [-1]), ("stop_token_ids", ["a"]), ("stream", "yes"),
            ("stream", 1), ("model", 5), ("ignore_eos", "no"), ("top_k", 10**30), ("stop_token_ids", [10**30]),
            ("priority", "high"), ("priority", 1.5), ("priority", 2**63), ("cache_salt", 5), ("use_beam_search", 1),
            ("length_penalty", "long"), ("early_stopping", "always"),
            ("repetition_penalty", 0), ("repetition_penalty", "1"), ("presence_penalty", 2.1),
            ("frequency_penalty", -3), ("logit_bias", {"5": "x"}), ("logit_bias", {"AI": -100}),
            ("logit_bias", {"-1": 5}), ("logit_bias", {"1.5": 5}), ("logit_bias", [5]), ("bad_words", [""]),
            ("bad_words", [" "]), ("bad_words", "x"), ("bad_words", [5]), ("allowed_token_ids", []),
            ("allowed_token_ids", [-1]), ("allowed_token_ids", 5), ("prompt_logprobs", 21), ("prompt_logprobs", -2),
            ("logprobs", "yes"), ("logprobs", 1.5),
        ]
    ],
)  # fmt: skip
def test_a11_a_wrong_value_is_refused_by_the_fields_name(
    client: httpx.Client, path: str, field: str, value: object
) -> None:
    assert refusal(client.post(path, json={**VALID[path], field: value}))["param"] == field


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (COMPLETIONS, {"max_tokens": 1}, "prompt"), (CHAT, {"max_tokens": 1}, "messages"),
        (CHAT, {"messages": "hi"}, "messages"),
        (CHAT, {"messages": ["hi"]}, "messages"), (CHAT, {"messages": {"role": "user"}}, "messages"),
        (COMPLETIONS, {"prompt": [10**30]}, "prompt"), (COMPLETIONS, {"prompt": [-1]}, "prompt"),
        (COMPLETIONS, {"prompt": "a", "stream": True, "stream_options": []}, "stream_options"),
        (COMPLETIONS, {"prompt": "a", "logprobs": True}, "logprobs"),
        (COMPLETIONS, {"prompt": "a", "logprobs": 21}, "logprobs"),
        (COMPLETIONS, {"prompt": "a", "logprobs": -2}, "logprobs"),
        (COMPLETIONS, {"prompt": "a", "max_tokens": 0}, "max_tokens"),
        (COMPLETIONS, {"prompt": "a", "echo": "yes"}, "echo"),
        (COMPLETIONS, {"prompt": "a", "echo": True, "logprobs": 1, "prompt_logprobs": 2}, "prompt_logprobs"),
        (COMPLETIONS, {"prompt": "a", "stream": True, "prompt_logprobs": 2}, "prompt_logprobs"),
        (CHAT, {**VALID[CHAT], "logprobs": 1}, "logprobs"),
        (CHAT, {**VALID[CHAT], "top_logprobs": 3}, "top_logprobs"),
        (CHAT, {**VALID[CHAT], "logprobs": False, "top_logprobs": 3}, "top_logprobs"),
        (CHAT, {**VALID[CHAT], "logprobs": True, "top_logprobs": 21}, "logprobs"),
        (CHAT, {**VALID[CHAT], "logprobs": True, "top_logprobs": "3"}, "top_logprobs"),
        (CHAT, {**VALID[CHAT], "stream": True, "prompt_logprobs": 2}, "prompt_logprobs"),
    ],
)  # fmt: skip
def test_a11_missing_and_misshapen_fields_are_named(
    client: httpx.Client, path: str, body: dict[str, Any], param: str
) -> None:
    assert refusal(client.post(path, json=body))["param"] == param


@pytest.mark.parametrize(
    ("path", "field", "value"),
    [
        *[
            (path, field, value)
            for path in (CHAT, COMPLETIONS)
            for field, value in [
                ("length_penalty", 2), ("early_stopping", True), ("early_stopping", "never"),
                ("structured_outputs", {}), ("structured_outputs", {"regex": "a", "choice": ["b"]}),
                ("structured_outputs", {"regex": "(a"}), ("structured_outputs", {"json": {"not": {}}}),
                ("structured_outputs", {"regex": "a", "disable_any_whitespace": True}),
                ("structured_outputs", []), ("structured_outputs", "json"),
                ("guided_json", {"type": "array", "uniqueItems": True}), ("guided_json", ""), ("guided_json", 3),
                ("guided_regex", "["), ("guided_choice", []), ("guided_choice", "ab"), ("guided_grammar", "x ::="),
                ("response_format", {"type": "json_schema", "schema": {"type": "object"}}),
                ("response_format", {"type": "banana"}), ("response_format", "text"),
                ("response_format", {}), ("response_format", {"type": "json_schema", "json_schema": "x"}),
                ("response_format", {"type": "json_schema", "json_schema": {"name": "x", "schema": []}}),
                ("response_format", {"type": "json_schema", "json_schema": {"schema": {"not": {"type": "null"}}}}),
                ("response_format", {"type": "structural_tag", "format": {}}),
            ]
        ],
        (COMPLETIONS, "suffix", "end"),
        (COMPLETIONS, "best_of", 0),
        (CHAT, "tools", {}),
        (CHAT, "tool_choice", "required"),
        (CHAT, "tool_choice", {"type": "function", "function": {"name": "f"}}), (CHAT, "echo", True),
        (CHAT, "functions", [{"name": "f"}]), (CHAT, "continue_final_message", True),
        (CHAT, "add_generation_prompt", False),
        (CHAT, "reasoning_effort", "huge"), (CHAT, "verbosity", "loud"), (CHAT, "modalities", ["text", "audio"]),
    ],
)  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
def test_a11_what_is_not_implemented_is_refused_never_ignored(
    client: httpx.Client, path: str, field: str, value: object, stream: bool
) -> None:
    assert refusal(client.post(path, json={**VALID[path], field: value, "stream": stream}))["param"] == field


def test_a11_neutral_values_extra_fields_and_nulls_are_accepted(client: httpx.Client) -> None:
    both = {
        "foo": 1, "user": "me", "response_format": {"type": "text"}, "logit_bias": {}, "presence_penalty": 0,
        "frequency_penalty": 0.0, "repetition_penalty": 1, "logprobs": False, "n": 1, "stop": [], "bad_words": [],
        "use_beam_search": False, "length_penalty": 1.0, "early_stopping": False, "priority": 0, "echo": False,
    }  # fmt: skip
    chat = {"tools": [], "tool_choice": "none", "parallel_tool_calls": True, "top_logprobs": 0, "functions": []}
    completion = {"suffix": "", "best_of": 1}
    assert client.post(CHAT, json={**VALID[CHAT], **both, **chat}).status_code == 200
    assert client.post(COMPLETIONS, json={**VALID[COMPLETIONS], **both, **completion}).status_code == 200
    for path, request_type in ((CHAT, ChatRequest), (COMPLETIONS, CompletionRequest)):
        fields = {*request_type.__struct_fields__, *request_type.neutral} - VALID[path].keys()
        assert client.post(path, json={**VALID[path], **dict.fromkeys(fields)}).status_code == 200


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a24_an_unknown_model_is_not_found_and_an_absent_one_is_the_served_one(client: httpx.Client, path: str) -> None:
    error = refusal(client.post(path, json={**VALID[path], "model": "no-such"}), 404)
    assert error["code"] == "model_not_found"
    assert error["param"] == "model"
    assert "no-such" in error["message"]
    assert client.post(path, json=VALID[path]).json()["model"] == "fake"
    assert client.post(path, json={**VALID[path], "model": "fake"}).status_code == 200


def test_a26_a_huge_body_is_refused_and_others_are_served(client: httpx.Client) -> None:
    body = json.dumps({"prompt": "x" * 20_000_000}).encode()
    assert len(body) > MAX_BODY_BYTES
    assert refusal(client.post(COMPLETIONS, content=body), 413)["code"] == "request_too_large"
    assert client.post(COMPLETIONS, json=VALID[COMPLETIONS]).status_code == 200


def test_unknown_paths_and_methods_get_the_error_object(client: httpx.Client) -> None:
    refusal(client.get("/v2/anything"), 404)
    response = client.get(CHAT)
    refusal(response, 405)
    assert "POST" in response.headers["allow"]


def test_a_refused_stream_does_not_disturb_one_that_runs(client: httpx.Client, url: str) -> None:
    with httpx.stream("POST", f"{url}{CHAT}", json={**VALID[CHAT], "max_tokens": 20, "stream": True}) as running:
        refusal(client.post(CHAT, json={**VALID[CHAT], "temperature": 9, "stream": True}))
        running.read()
        assert events(running)[-1]["choices"][0]["finish_reason"] == "stop"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data(), request_type=st.sampled_from([ChatRequest, CompletionRequest]))
def test_a11_decoding_any_json_ends_in_a_request_or_a_request_error(
    data: st.DataObject, request_type: type[ChatRequest | CompletionRequest]
) -> None:
    names = st.sampled_from([*request_type.__struct_fields__, *request_type.neutral])
    body = data.draw(JSON | st.dictionaries(names, JSON, max_size=4))
    try:
        params = decode(json.dumps(body).encode(errors="surrogatepass"), request_type).engine_params(5, max_model_len=9)
    except RequestError:
        return
    assert isinstance(params, SamplingParams | BeamSearchParams)
