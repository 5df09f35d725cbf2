"""Log-probabilities and echoes as OpenAI's clients read them, through real HTTP, whole and streamed."""

import json
from itertools import accumulate
from typing import Any

import httpx
import openai
import pytest
from conftest import events
from fake_engine import FakeEngine, Script

from jaxpage.sampling_params import SamplingParams

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
TEXT = Script().text
LISTS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
Fields = dict[str, Any]


def strict(response: httpx.Response) -> Fields:
    """The answer, which must be JSON without NaN and Infinity."""
    assert response.status_code == 200, response.text

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    answer: Fields = json.loads(response.text, parse_constant=refuse)
    return answer


def complete(client: httpx.Client, **fields: object) -> httpx.Response:
    return client.post(COMPLETIONS, json={"prompt": "hello", "max_tokens": 3, **fields})


def chat(client: httpx.Client, **fields: object) -> httpx.Response:
    return client.post(CHAT, json={"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, **fields})


def joined(response: httpx.Response) -> tuple[str, Fields | None]:
    """Text and log-probabilities of a streamed completion, put together."""
    text, logprobs = "", None
    for chunk in events(response):
        [choice] = chunk["choices"]
        text += choice["text"]
        if (new := choice["logprobs"]) is not None:
            logprobs = logprobs or {name: [] for name in LISTS}
            for name in LISTS:
                logprobs[name] += new[name]
    return text, logprobs


def test_a_completions_log_probabilities_have_openais_shape(client: httpx.Client) -> None:
    [choice] = strict(complete(client, logprobs=2))["choices"]
    assert choice["logprobs"] == {
        "tokens": list(TEXT[:3]),
        "token_logprobs": [-1.5] * 3,
        "top_logprobs": [{letter: -1.5, "A": -0.5, "B": -1.0} for letter in TEXT[:3]],
        "text_offset": [0, 1, 2],
    }


def test_a07_no_alternatives_are_not_no_log_probabilities(client: httpx.Client) -> None:
    [choice] = strict(complete(client, logprobs=0))["choices"]
    assert choice["logprobs"]["token_logprobs"] == [-1.5] * 3
    assert choice["logprobs"]["top_logprobs"] == [{letter: -1.5} for letter in TEXT[:3]]
    for fields in ({}, {"logprobs": None}, {"logprobs": False}):
        assert complete(client, **fields).json()["choices"][0]["logprobs"] is None


@pytest.mark.parametrize("fields", [{}, {"echo": True}, {"stop": ["ör"], "max_tokens": 30}, {"max_tokens": 30}])
@pytest.mark.parametrize("prompt", ["hello", [ord(letter) for letter in "hello"]])
def test_a07_streamed_lists_joined_are_the_whole_ones(client: httpx.Client, fields: Fields, prompt: object) -> None:
    fields = {"prompt": prompt, "logprobs": 1, **fields}
    [whole] = strict(complete(client, **fields))["choices"]
    text, logprobs = joined(complete(client, stream=True, **fields))
    assert (text, logprobs) == (whole["text"], whole["logprobs"])
    assert logprobs is not None
    assert logprobs["text_offset"] == [0, *accumulate(map(len, logprobs["tokens"]))][:-1]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("max_tokens", [0, 1, 5])
def test_a07_an_echo_has_the_prompts_tokens_the_first_without_a_value(
    client: httpx.Client, max_tokens: int, stream: bool
) -> None:
    fields: Fields = {"max_tokens": max_tokens, "echo": True, "logprobs": 1}
    if stream:
        text, logprobs = joined(complete(client, stream=True, stream_options={}, **fields))
    else:
        answer = strict(complete(client, **fields))
        [choice] = answer["choices"]
        text, logprobs = choice["text"], choice["logprobs"]
        assert choice["finish_reason"] == "length"
        assert answer["usage"]["completion_tokens"] == max_tokens
        assert answer["usage"]["total_tokens"] == 5 + max_tokens
    assert text == "hello" + TEXT[:max_tokens]
    assert logprobs is not None
    assert logprobs["tokens"] == list(text)
    assert logprobs["token_logprobs"] == [None, *[-1.5] * (4 + max_tokens)]
    assert logprobs["top_logprobs"][:2] == [None, {"e": -1.5, "A": -0.5}]
    assert logprobs["text_offset"] == list(range(5 + max_tokens))


def test_an_echo_alone_is_counted_so_at_the_end_of_a_stream_too(client: httpx.Client) -> None:
    chunks = events(complete(client, echo=True, max_tokens=0, stream=True, stream_options={"include_usage": True}))
    assert [choice["text"] for chunk in chunks for choice in chunk["choices"]] == ["hello"]
    assert chunks[0]["choices"][0]["finish_reason"] == "length"
    assert chunks[-1]["usage"]["completion_tokens"] == 0


def test_a04_each_choice_echoes_its_own_prompt(client: httpx.Client) -> None:
    prompts = ["red", "green blue", "one two three"]
    ids = [[ord(letter) for letter in prompt] for prompt in prompts]
    for given in (prompts, ids):
        fields: Fields = {"prompt": given, "n": 2, "seed": 1, "temperature": 0.8, "echo": True}
        choices = strict(complete(client, **fields))["choices"]
        texts = [prompts[i // 2] + f"{1 + i % 2}:{TEXT}"[:3] for i in range(6)]
        assert [choice["text"] for choice in choices] == texts
        streamed = [""] * 6
        for chunk in events(complete(client, stream=True, **fields)):
            streamed[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
        assert streamed == texts


def test_a_chats_log_probabilities_have_openais_shape(client: httpx.Client) -> None:
    [choice] = strict(chat(client, logprobs=True, top_logprobs=2))["choices"]
    tops = [{"token": "A", "logprob": -0.5, "bytes": [65]}, {"token": "B", "logprob": -1.0, "bytes": [66]}]
    content = [
        {"token": letter, "logprob": -1.5, "bytes": list(letter.encode()), "top_logprobs": tops} for letter in TEXT[:3]
    ]
    assert choice["logprobs"] == {"content": content, "refusal": None}
    [choice] = strict(chat(client, logprobs=True))["choices"]
    assert [token["top_logprobs"] for token in choice["logprobs"]["content"]] == [[], [], []]
    assert chat(client).json()["choices"][0]["logprobs"] is None


@pytest.mark.parametrize("fields", [{}, {"stop": ["ör"]}])
def test_a_chats_streamed_tokens_joined_are_the_whole_ones(client: httpx.Client, fields: Fields) -> None:
    fields = {"logprobs": True, "top_logprobs": 1, "max_tokens": 30, **fields}
    [whole] = strict(chat(client, **fields))["choices"]
    content, text = [], ""
    for chunk in events(chat(client, stream=True, **fields)):
        [choice] = chunk["choices"]
        text += choice["delta"].get("content", "")
        content += (choice["logprobs"] or {"content": []})["content"]
    assert text == whole["message"]["content"]
    assert content == whole["logprobs"]["content"]


def test_prompt_log_probabilities_have_vllms_shape(client: httpx.Client) -> None:
    [choice] = strict(complete(client, prompt_logprobs=1))["choices"]
    found = choice["prompt_logprobs"]
    assert found[0] is None
    assert found[1] == {
        str(ord("e")): {"logprob": -1.5, "rank": 3, "decoded_token": "e"},
        "65": {"logprob": -0.5, "rank": 1, "decoded_token": "A"},
    }
    assert len(found) == 5
    assert "prompt_logprobs" not in complete(client).json()["choices"][0]
    assert "prompt_logprobs" not in complete(client, echo=True, logprobs=1).json()["choices"][0]
    answer = strict(chat(client, prompt_logprobs=0))
    assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]
    assert "prompt_logprobs" not in chat(client).json()


def test_openais_client_reads_log_probabilities(client: httpx.Client, url: str) -> None:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as openai_client:
        answer = openai_client.chat.completions.create(
            model="fake", messages=[{"role": "user", "content": "hi"}], max_tokens=2, logprobs=True, top_logprobs=1
        )
        completion = openai_client.completions.create(model="fake", prompt="hi", max_tokens=2, logprobs=1, echo=True)
    assert answer.choices[0].logprobs is not None
    assert [token.token for token in answer.choices[0].logprobs.content or ()] == list(TEXT[:2])
    assert completion.choices[0].logprobs is not None
    assert completion.choices[0].logprobs.tokens == ["h", "i", *TEXT[:2]]


def test_options_reach_the_engine_as_they_were_given(client: httpx.Client, engine: FakeEngine) -> None:
    options: Fields = {
        "repetition_penalty": 1.1, "presence_penalty": -0.5, "frequency_penalty": 2, "bad_words": ["a", "b c"],
        "allowed_token_ids": [5, 7], "min_tokens": 2, "min_p": 0.5, "top_k": 7,
    }  # fmt: skip
    for post in (complete, chat):
        strict(post(client, logit_bias={"5": 1000, "7": -0.5}, **options))
        [params] = engine.seen_params
        assert params == SamplingParams(max_tokens=3, logit_bias={5: 100, 7: -0.5}, **options)
        engine.seen_params.clear()
