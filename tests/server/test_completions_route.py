"""/v1/completions as OpenAI's clients know it, through real HTTP."""

import httpx
import pytest
from conftest import asgi, events
from fake_engine import FakeEngine, Script

from jaxpage.server.service import LONG_BODY_BYTES

PROMPTS = ["red", "green blue", "one two three"]
TEXT = Script().text


def complete(client: httpx.Client, **fields: object) -> httpx.Response:
    return client.post("/v1/completions", json={"prompt": "hello", **fields})


def test_a_completion_has_openais_shape(client: httpx.Client) -> None:
    answer = complete(client, max_tokens=3).json()
    assert answer["id"].startswith("cmpl-")
    assert answer["object"] == "text_completion"
    assert answer["choices"] == [
        {"index": 0, "text": TEXT[:3], "logprobs": None, "finish_reason": "length", "stop_reason": None}
    ]
    assert answer["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 3,
        "total_tokens": 8,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def test_sixteen_tokens_unless_told_otherwise(client: httpx.Client) -> None:
    for fields in ({}, {"max_tokens": None}):
        assert complete(client, **fields).json()["usage"]["completion_tokens"] == 16


def test_text_and_ids_are_the_same_prompt(client: httpx.Client) -> None:
    ids = [ord(character) for character in "hello"]
    answers = [complete(client, prompt=prompt).json() for prompt in ("hello", ["hello"], ids, [ids])]
    assert all(answer["choices"] == answers[0]["choices"] for answer in answers)
    assert all(answer["usage"] == answers[0]["usage"] for answer in answers)


@pytest.mark.parametrize("prompts", [PROMPTS, [[ord(c) for c in prompt] for prompt in PROMPTS]])
def test_a04_choices_are_ordered_by_prompt_and_counted_once(
    client: httpx.Client, engine: FakeEngine, prompts: object
) -> None:
    for prompt in PROMPTS:
        engine.scripts[prompt] = Script(text=prompt.upper())
    fields = {"prompt": prompts, "n": 2, "seed": 1, "temperature": 0.8, "max_tokens": 5}
    answer = complete(client, **fields).json()
    expected = [f"{1 + i % 2}:{PROMPTS[i // 2].upper()}"[:5] for i in range(6)]
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    assert [choice["text"] for choice in answer["choices"]] == expected
    assert answer["usage"]["prompt_tokens"] == sum(map(len, PROMPTS))
    assert answer["usage"]["completion_tokens"] == sum(map(len, expected))

    joined = [""] * 6
    chunks = events(complete(client, stream=True, stream_options={"include_usage": True}, **fields))
    for chunk in chunks[:-1]:
        joined[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert joined == expected
    assert chunks[-1]["usage"] == answer["usage"]
    assert len(engine.seen_params) == 2 * len(PROMPTS)  # one request a prompt: it is computed once


def test_cached_tokens_are_summed_over_prompts_and_counted_once_per_prompt(
    client: httpx.Client, engine: FakeEngine
) -> None:
    engine.scripts = {"red": Script(num_cached_tokens=2), "green": Script(num_cached_tokens=8)}
    fields = {"prompt": PROMPTS, "n": 2, "max_tokens": 2}
    usage = complete(client, **fields).json()["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 10}
    chunks = events(complete(client, stream=True, stream_options={"include_usage": True}, **fields))
    assert chunks[-1]["usage"] == usage


def test_a04_equal_choices_are_refused(client: httpx.Client) -> None:
    response = complete(client, n=2, temperature=0)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "n"


@pytest.mark.parametrize("prompt", ["", [""], [], [[]], ["ok", ""], [[111], []]])
@pytest.mark.parametrize("stream", [False, True])
def test_a18_prompts_without_tokens_are_refused(client: httpx.Client, prompt: object, stream: bool) -> None:
    response = complete(client, prompt=prompt, stream=stream)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "prompt"
    assert complete(client).status_code == 200


def test_a18_a_bos_token_makes_an_empty_prompt_servable() -> None:
    engine = FakeEngine(bos=True)
    engine.is_ready = True
    assert asgi(engine, "POST", "/v1/completions", json={"prompt": ""}).status_code == 200
    body = {"prompt": "", "add_special_tokens": False}
    assert asgi(engine, "POST", "/v1/completions", json=body).status_code == 400


@pytest.mark.parametrize("prompt", [["a", 1], [1, [2]], ["a", [1]], [[1], "a"], [True], [[1.5]], {"a": 1}, None, 5])
def test_prompts_of_mixed_or_unknown_kinds_are_refused(client: httpx.Client, prompt: object) -> None:
    response = complete(client, prompt=prompt)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "prompt"


@pytest.mark.parametrize("stream", [False, True])
def test_a14_zero_tokens_are_refused_as_echo_is_not_there(client: httpx.Client, stream: bool) -> None:
    response = complete(client, max_tokens=0, stream=stream)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "max_tokens"


def test_a15_the_cap_is_lowered_to_what_room_there_is(client: httpx.Client) -> None:
    for max_tokens in (None, 1, 60):
        answer = complete(client, prompt=["a" * 63, "a" * 61], max_tokens=max_tokens).json()
        assert [len(choice["text"]) for choice in answer["choices"]] == [1, min(max_tokens or 3, 3)]
        assert {choice["finish_reason"] for choice in answer["choices"]} == {"length"}


@pytest.mark.parametrize(("num_tokens", "max_tokens"), [(64, None), (64, 1), (200, None)])
@pytest.mark.parametrize("stream", [False, True])
def test_a15_what_does_not_fit_is_refused_before_the_stream_starts(
    client: httpx.Client, num_tokens: int, max_tokens: int | None, stream: bool
) -> None:
    response = complete(client, prompt=[97] * num_tokens, max_tokens=max_tokens, stream=stream)
    assert response.status_code == 400
    message = response.json()["error"]["message"]
    assert f"{num_tokens} tokens" in message
    assert "max_model_len is 64" in message


def test_best_of_keeps_the_choices_that_are_most_probable_per_token_and_counts_all(
    client: httpx.Client, engine: FakeEngine
) -> None:
    answer = complete(client, prompt=["ab", "c"], n=2, best_of=3, seed=5, max_tokens=2, echo=True).json()
    # The fake's first choice has a log-probability of 0 per token, the second of -1, the third of -2.
    found = [(choice["index"], choice["text"], choice["logprobs"]) for choice in answer["choices"]]
    assert found == [(0, "ab5:", None), (1, "ab6:", None), (2, "c5:", None), (3, "c6:", None)]
    assert answer["usage"]["completion_tokens"] == 2 * 3 * 2
    with_logprobs = complete(client, best_of=2, max_tokens=2, logprobs=1).json()["choices"]
    assert [len(choice["logprobs"]["tokens"]) for choice in with_logprobs] == [2]
    assert complete(client, best_of=1, max_tokens=2).json()["choices"][0]["text"] == Script().text[:2]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"best_of": 2, "n": 3}, "best_of"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"best_of": 2, "use_beam_search": True}, "best_of"),
        ({"best_of": 2, "temperature": 0}, "n"),
        ({"best_of": 1000}, "n"),
    ],
)
def test_best_of_is_refused_where_there_is_nothing_to_choose_from(
    client: httpx.Client, fields: dict[str, object], param: str
) -> None:
    answer = complete(client, **fields)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


def test_too_many_choices_are_refused_before_any_is_started(client: httpx.Client, engine: FakeEngine) -> None:
    response = complete(client, prompt=["a"] * 100, n=100)
    assert response.status_code == 400
    assert "10000 choices" in response.json()["error"]["message"]
    assert engine.seen_params == []
    assert engine.encoding_threads == []


def test_a_long_body_is_encoded_off_the_event_loop(client: httpx.Client, engine: FakeEngine) -> None:
    complete(client)
    engine.max_model_len = LONG_BODY_BYTES + 100
    try:
        answer = complete(client, prompt="x" * LONG_BODY_BYTES, max_tokens=3).json()
    finally:
        engine.max_model_len = 64
    assert answer["usage"]["prompt_tokens"] == LONG_BODY_BYTES
    assert engine.encoding_threads[-1] != engine.encoding_threads[-2]
