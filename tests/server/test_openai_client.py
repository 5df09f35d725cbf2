"""OpenAI's own Python client against the server."""

from collections.abc import Iterator

import openai
import pytest
from conftest import GUARD_SECONDS
from fake_engine import FakeEngine, Script
from openai.types.chat import ChatCompletionMessageParam

TEXT = Script().text


@pytest.fixture
def openai_client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=GUARD_SECONDS) as client:
        yield client


def test_chat_whole_and_streamed(openai_client: openai.OpenAI) -> None:
    whole = openai_client.chat.completions.create(model="fake", messages=[{"role": "user", "content": "hello"}])
    assert whole.choices[0].message.content == TEXT
    with openai_client.chat.completions.stream(
        model="fake", messages=[{"role": "user", "content": "hello"}], stream_options={"include_usage": True}
    ) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.content == TEXT
    assert final.choices[0].message.role == "assistant"
    assert final.choices[0].finish_reason == "stop"
    assert final.usage == whole.usage


def test_completions_whole_and_streamed(openai_client: openai.OpenAI) -> None:
    whole = openai_client.completions.create(model="fake", prompt=["a", "b"], max_tokens=4)
    assert [choice.text for choice in whole.choices] == [TEXT[:4]] * 2
    stream = openai_client.completions.create(model="fake", prompt=[97, 98], max_tokens=4, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == TEXT[:4]


def test_cached_tokens_are_read_by_the_client(openai_client: openai.OpenAI, engine: FakeEngine) -> None:
    engine.scripts["hello"] = Script(num_cached_tokens=4)
    create = openai_client.chat.completions.create
    messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": "hello"}]
    whole = create(model="fake", messages=messages)
    streamed = list(
        create(model="fake", messages=messages, stream=True, stream_options={"include_usage": True}),
    )
    completed = openai_client.completions.create(model="fake", prompt=["hello", "bye"])
    for usage in (whole.usage, streamed[-1].usage, completed.usage):
        assert usage is not None
        assert usage.prompt_tokens_details is not None
        assert usage.prompt_tokens_details.cached_tokens == 4


def test_models_can_be_listed_and_looked_up(openai_client: openai.OpenAI) -> None:
    [model] = openai_client.models.list().data
    assert openai_client.models.retrieve(model.id).id == "fake"


def test_errors_become_the_clients_own(openai_client: openai.OpenAI, engine: FakeEngine) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        openai_client.completions.create(model="no-such", prompt="a")
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as refused:
        openai_client.completions.create(model="fake", prompt="a", logprobs=30)
    assert refused.value.param == "logprobs"
    engine.scripts["faulty"] = Script(fail_after=2, delay=0.02)
    with pytest.raises(openai.APIError, match="internal server error"):
        list(openai_client.completions.create(model="fake", prompt="faulty", stream=True))
