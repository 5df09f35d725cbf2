"""Beam search over HTTP, in vLLM's words: `n` is the width, and options that a search has no use for are refused."""

from typing import Any

import httpx
import pytest
from conftest import events
from fake_engine import FakeEngine, Script

from jaxpage.sampling_params import MAX_BEAM_WIDTH, BeamSearchParams

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
TEXT = Script().text


def search(client: httpx.Client, path: str = COMPLETIONS, **fields: object) -> httpx.Response:
    body = {"prompt": "hello", "messages": [{"role": "user", "content": "hello"}], "use_beam_search": True}
    return client.post(path, json={**body, **fields})


def text_of(choice: dict[str, Any]) -> str:
    text: str = choice["message"]["content"] if "message" in choice else choice["text"]
    return text


def error_of(response: httpx.Response) -> dict[str, Any]:
    assert response.status_code == 400, response.text
    error: dict[str, Any] = response.json()["error"]
    return error


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_the_choices_are_the_sequences_found_best_first(client: httpx.Client, path: str) -> None:
    answer = search(client, path, n=3, max_tokens=6).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert [text_of(choice) for choice in answer["choices"]] == [f"{rank}:{TEXT}"[:6] for rank in range(3)]
    assert answer["usage"]["completion_tokens"] == 18


def test_one_beam_is_kept_unless_told_otherwise(client: httpx.Client, engine: FakeEngine) -> None:
    assert len(search(client).json()["choices"]) == 1
    assert engine.seen_params == [BeamSearchParams(beam_width=1, max_tokens=16)]


def test_every_option_of_beam_search_reaches_the_engine(client: httpx.Client, engine: FakeEngine) -> None:
    options = {
        "max_tokens": 5,
        "length_penalty": 0.5,
        "early_stopping": "never",
        "stop_token_ids": [4],
        "ignore_eos": True,
        "skip_special_tokens": False,
    }
    for path in (CHAT, COMPLETIONS):
        assert search(client, path, n=2, **options).status_code == 200
    assert engine.seen_params == [BeamSearchParams(beam_width=2, **options)] * 2  # type: ignore[arg-type]


def test_a_chat_without_a_cap_is_searched_to_the_end_of_the_context(client: httpx.Client, engine: FakeEngine) -> None:
    search(client, CHAT)
    assert engine.seen_params == [BeamSearchParams(beam_width=1, max_tokens=engine.max_model_len)]


def test_a04_the_beams_of_several_prompts_are_ordered_by_prompt(client: httpx.Client, engine: FakeEngine) -> None:
    engine.scripts = {"red": Script(text="RED"), "blue": Script(text="BLUE")}
    answer = search(client, prompt=["red", "blue"], n=2).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert [choice["text"] for choice in answer["choices"]] == ["0:RED", "1:RED", "0:BLUE", "1:BLUE"]


@pytest.mark.parametrize("stream", [False, True])
def test_sequences_that_were_not_found_leave_their_index_free(
    client: httpx.Client, engine: FakeEngine, stream: bool
) -> None:
    engine.scripts["few"] = Script(num_beams=2)
    response = search(client, prompt=["few", "few"], n=3, stream=stream)
    chunks = events(response) if stream else [response.json()]
    assert [choice["index"] for chunk in chunks for choice in chunk["choices"]] == [0, 1, 3, 4]


def test_a_streamed_completion_gives_each_choice_in_one_chunk(client: httpx.Client) -> None:
    whole = search(client, n=2).json()
    chunks = events(search(client, n=2, stream=True, stream_options={"include_usage": True}))
    assert [chunk["choices"][0] for chunk in chunks[:-1]] == whole["choices"]
    assert chunks[-1]["usage"] == whole["usage"]


def test_a_streamed_chat_gives_the_text_of_each_choice_at_once(client: httpx.Client) -> None:
    whole = [text_of(choice) for choice in search(client, CHAT, n=2).json()["choices"]]
    choices = [chunk["choices"][0] for chunk in events(search(client, CHAT, n=2, stream=True))]
    expected = [{"role": "assistant", "content": ""}, {"content": whole[0]}, {}]
    assert [choice["delta"] for choice in choices if choice["index"] == 0] == expected
    expected[1] = {"content": whole[1]}
    assert [choice["delta"] for choice in choices if choice["index"] == 1] == expected
    assert [choice["finish_reason"] for choice in choices] == [None, None, "stop"] * 2


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", 0.7), ("temperature", 1), ("top_p", 0.9), ("top_k", 5), ("min_p", 0.1), ("min_tokens", 1),
        ("stop", "x"), ("stop", ["x"]), ("stop", ""), ("include_stop_str_in_output", True), ("logit_bias", {"5": 1}),
        ("presence_penalty", 0.5), ("repetition_penalty", 1.1), ("logprobs", True), ("bad_words", ["x"]),
        ("logprobs", 0), ("frequency_penalty", -1), ("allowed_token_ids", [1]), ("prompt_logprobs", 0),
    ],
)  # fmt: skip
def test_what_a_search_has_no_use_for_is_refused_never_ignored(
    client: httpx.Client, engine: FakeEngine, path: str, field: str, value: object
) -> None:
    assert error_of(search(client, path, **{field: value}))["param"] == field
    assert engine.seen_params == []


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_values_that_change_nothing_are_accepted_in_a_search(client: httpx.Client, path: str) -> None:
    neutral = {
        "temperature": 0, "top_p": 1.0, "top_k": -1, "min_p": 0, "min_tokens": 0, "stop": [], "seed": 7,
        "include_stop_str_in_output": False, "logit_bias": {}, "priority": 1, "cache_salt": "mine",
    }  # fmt: skip
    answer = search(client, path, **neutral)
    assert answer.json()["choices"] == search(client, path, **dict.fromkeys(neutral)).json()["choices"]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("n", [0, -1, MAX_BEAM_WIDTH + 1])
def test_a_width_that_cannot_be_is_refused_under_the_name_that_clients_know(
    client: httpx.Client, path: str, n: int
) -> None:
    error = error_of(search(client, path, n=n))
    assert error["param"] == "n"
    assert error["message"].startswith(f"n is {n}:")


@pytest.mark.parametrize(("field", "value"), [("length_penalty", 11), ("early_stopping", "soon"), ("max_tokens", 0)])
def test_a_wrong_value_is_refused_by_the_fields_name(client: httpx.Client, field: str, value: object) -> None:
    assert error_of(search(client, **{field: value}))["param"] == field


def test_several_greedy_choices_are_still_refused_outside_of_a_search(client: httpx.Client) -> None:
    assert error_of(search(client, use_beam_search=False, n=2, temperature=0))["param"] == "n"
