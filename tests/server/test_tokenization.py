"""/tokenize and /detokenize, in vLLM's shapes."""

from typing import Any

import httpx
import pytest
from conftest import asgi, ready_engine
from fake_engine import FakeEngine

HELLO = [{"role": "user", "content": "hé"}]


def test_a_prompt_becomes_ids_and_ids_its_text(client: httpx.Client, engine: FakeEngine) -> None:
    answer = client.post("/tokenize", json={"model": "fake", "prompt": "hé"})
    assert answer.json() == {
        "count": 2,
        "max_model_len": engine.max_model_len,
        "tokens": [104, 233],
        "token_strs": None,
    }
    assert client.post("/detokenize", json={"tokens": [104, 233]}).json() == {"prompt": "hé"}
    assert client.post("/detokenize", json={"tokens": []}).json() == {"prompt": ""}
    assert client.post("/tokenize", json={"prompt": ""}).json()["count"] == 0


def test_texts_of_tokens_are_given_where_they_are_asked_for(client: httpx.Client) -> None:
    answer = client.post("/tokenize", json={"prompt": "hé", "return_token_strs": True})
    assert answer.json()["token_strs"] == ["h", "é"]


def test_a_chat_goes_through_the_template(client: httpx.Client, engine: FakeEngine) -> None:
    body = {"messages": HELLO, "chat_template_kwargs": {"enable_thinking": False}}
    assert client.post("/tokenize", json=body).json()["count"] == len("<user>hé<bot>")
    assert engine.seen_template_kwargs[-1] == {"enable_thinking": False}
    client.post("/tokenize", json={"messages": HELLO, "add_generation_prompt": False})
    assert engine.seen_template_kwargs[-1] == {"add_generation_prompt": False}


def test_a_chat_with_tools_has_the_tokens_that_it_would_have(client: httpx.Client, engine: FakeEngine) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    plain, with_tools = (
        client.post("/tokenize", json={"messages": HELLO} | more).json()["count"] for more in ({}, {"tools": tools})
    )
    assert with_tools > plain


@pytest.mark.parametrize("add_special_tokens", [None, True, False])
def test_special_tokens_are_added_unless_unwanted(add_special_tokens: bool | None) -> None:
    body = {"prompt": "hi", "add_special_tokens": add_special_tokens}
    answer = asgi(ready_engine(bos=True), "POST", "/tokenize", json=body)
    assert answer.json()["tokens"] == [1] * (add_special_tokens is not False) + [104, 105]


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": HELLO}, "prompt"),
        ("/tokenize", {"prompt": ["x"]}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": HELLO, "add_special_tokens": True}, "add_special_tokens"),
        ("/tokenize", {"messages": HELLO, "chat_template_kwargs": {"tools": []}}, "chat_template_kwargs"),
        ("/tokenize", {"messages": HELLO, "tools": [{}]}, "tools"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": ["x"]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [2**40]}, "tokens"),
    ],
)
def test_what_is_wrong_is_refused_by_name(client: httpx.Client, path: str, fields: dict[str, Any], param: str) -> None:
    answer = client.post(path, json=fields)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


def test_another_model_is_not_found(client: httpx.Client) -> None:
    assert client.post("/tokenize", json={"prompt": "x", "model": "other"}).status_code == 404
