"""/v1/embeddings and /score around an engine whose embeddings are a prompt's length and its last token."""

import base64
import struct
from typing import Any

import httpx
import pytest
from conftest import asgi, ready_engine
from fake_engine import FakeEngine
from openai import OpenAI

from jaxpage.sampling_params import PoolingParams


def embed(client: httpx.Client, **body: Any) -> dict[str, Any]:
    answer = client.post("/v1/embeddings", json={"normalize": False, **body})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def refused(client: httpx.Client, path: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = client.post(path, json=body)
    assert answer.status_code == 400, answer.text
    found: dict[str, Any] = answer.json()["error"]
    return found


def test_an_embedding_is_answered_in_openais_shape(client: httpx.Client) -> None:
    assert embed(client, model="fake", input="hé") == {
        "object": "list",
        "data": [{"object": "embedding", "index": 0, "embedding": [2.0, 233.0]}],
        "model": "fake",
        "usage": {"prompt_tokens": 2, "total_tokens": 2},
    }


@pytest.mark.parametrize(
    ("given", "expected", "num_tokens"),
    [
        (["a", "bcd"], [[1.0, 97.0], [3.0, 100.0]], 4),
        ([5, 6, 7], [[3.0, 7.0]], 3),
        ([[5, 6, 7], [9]], [[3.0, 7.0], [1.0, 9.0]], 4),
        ([chr(97 + i) for i in range(20)], [[1.0, 97.0 + i] for i in range(20)], 20),
    ],
)
def test_texts_and_token_ids_are_embedded_in_their_order(
    client: httpx.Client, given: list[Any], expected: list[list[float]], num_tokens: int
) -> None:
    answer = embed(client, input=given)
    assert [one["embedding"] for one in answer["data"]] == expected
    assert [one["index"] for one in answer["data"]] == list(range(len(expected)))
    assert answer["usage"] == {"prompt_tokens": num_tokens, "total_tokens": num_tokens}


def test_base64_holds_the_same_numbers_as_little_endian_float32(client: httpx.Client) -> None:
    [one] = embed(client, input="hé", encoding_format="base64")["data"]
    assert struct.unpack("<2f", base64.b64decode(one["embedding"])) == (2.0, 233.0)
    assert embed(client, input="hé", encoding_format="float") == embed(client, input="hé")


def test_options_of_pooling_reach_the_engine(client: httpx.Client, engine: FakeEngine) -> None:
    assert embed(client, input="ac", pooling="mean", dimensions=2)["data"][0]["embedding"] == [2.0, 98.0]
    assert engine.seen_params[-1] == PoolingParams(pooling="mean", dimensions=2, normalize=False)
    client.post("/v1/embeddings", json={"input": "a", "priority": 3, "cache_salt": "s"})
    assert engine.seen_params[-1] == PoolingParams()
    assert engine.seen_options[-1] == {"priority": 3, "cache_salt": "s"}


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ({}, "input", "input"),
        ({"input": 5}, "input", "input"),
        ({"input": []}, "input", "input is an empty list"),
        ({"input": ["a", 5]}, "input", "input mixes texts"),
        ({"input": ""}, "input", "no tokens"),
        ({"input": [[]]}, "input", "no tokens"),
        ({"input": [-1]}, "input", "token id"),
        ({"input": ["a"] * 2049}, "input", "2049 texts: at most 2048"),
        ({"input": "a", "dimensions": 0}, "dimensions", "dimensions is 0"),
        ({"input": "a", "pooling": "max"}, "pooling", "'last' or 'mean'"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format", "int8"),
        ({"input": "a", "truncate_prompt_tokens": 5}, "truncate_prompt_tokens", "not supported"),
        ({"input": "a", "messages": [{"role": "user", "content": "a"}]}, "messages", "not supported"),
        ({"input": "a" * 64}, "input", "max_model_len is 64"),
    ],
)
def test_what_cannot_be_embedded_is_refused_by_name(
    client: httpx.Client, body: dict[str, Any], param: str, says: str
) -> None:
    error = refused(client, "/v1/embeddings", body)
    assert error["param"] == param
    assert says in error["message"]


def test_the_model_must_be_the_served_one(client: httpx.Client) -> None:
    assert client.post("/v1/embeddings", json={"model": "other", "input": "a"}).status_code == 404
    assert client.post("/score", json={"model": "other", "text_1": "a", "text_2": "b"}).status_code == 404


def test_openais_client_reads_what_is_sent(url: str) -> None:
    """It asks for base64 unless it is told otherwise."""
    with OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        answer = client.embeddings.create(model="fake", input=["hé", "a"], extra_body={"normalize": False})
    assert [one.embedding for one in answer.data] == [[2.0, 233.0], [1.0, 97.0]]
    assert answer.usage.total_tokens == 3


def test_a_prompt_gets_special_tokens_unless_they_are_unwanted() -> None:
    counts = [
        asgi(ready_engine(bos=True), "POST", "/v1/embeddings", json={"input": "a", **options}).json()["usage"]
        for options in ({}, {"add_special_tokens": False})
    ]
    assert [usage["prompt_tokens"] for usage in counts] == [2, 1]


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ("a", "a", [1.0]),
        ("\x03\x04", "\x03", [0.9899]),  # (2, 4) and (1, 3)
        ("a", ["a", "\x03"], [1.0, 0.9519]),
        (["\x03\x04", "a"], ["\x03", "a"], [0.9899, 1.0]),
    ],
)
def test_a_score_is_the_cosine_of_two_embeddings(
    client: httpx.Client, first: str | list[str], second: str | list[str], expected: list[float]
) -> None:
    answer = client.post("/score", json={"text_1": first, "text_2": second}).json()
    assert [one["score"] for one in answer["data"]] == pytest.approx(expected, abs=1e-4)
    assert [(one["index"], one["object"]) for one in answer["data"]] == [(i, "score") for i in range(len(expected))]
    assert answer["object"] == "list"
    assert client.post("/v1/score", json={"text_1": first, "text_2": second}).json()["data"] == answer["data"]


def test_a_text_of_several_pairs_is_embedded_once(client: httpx.Client, engine: FakeEngine) -> None:
    answer = client.post("/score", json={"text_1": "ab", "text_2": ["c", "ab", "c"], "pooling": "mean"}).json()
    assert engine.seen_prompts == [[97, 98], [99]]
    assert engine.seen_params[-1] == PoolingParams(pooling="mean")
    assert answer["usage"] == {"prompt_tokens": 3, "total_tokens": 3}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"text_1": "a"}, "text_2"),
        ({"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_1"),
        ({"text_1": ["a", "b"], "text_2": "a"}, "text_1"),
        ({"text_1": [], "text_2": "a"}, "text_1"),
        ({"text_1": "a", "text_2": [1]}, "text_2"),
    ],
)
def test_texts_that_make_no_pairs_are_refused_by_name(client: httpx.Client, body: dict[str, Any], param: str) -> None:
    assert refused(client, "/score", body)["param"] == param
