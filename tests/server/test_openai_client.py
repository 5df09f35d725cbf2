"""OpenAI's own Python client against the server."""

import asyncio
from collections.abc import Iterator

import openai
import pytest
from conftest import GUARD_SECONDS, ready_engine
from fake_engine import FakeEngine, Script
from openai.types.chat import ChatCompletionMessageParam
from served import served

from jaxpage.server.app import build_app
from jaxpage.server_config import ServerConfig

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


def test_the_async_client_streams_several_chats_at_once(url: str) -> None:
    async def one(client: openai.AsyncOpenAI, seed: int) -> str:
        stream = await client.chat.completions.create(
            model="fake", messages=[{"role": "user", "content": "hello"}], seed=seed, stream=True
        )
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def all_of_them() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", timeout=GUARD_SECONDS) as client:
            return await asyncio.gather(*(one(client, seed) for seed in range(8)))

    assert asyncio.run(all_of_them()) == [f"{seed}:{TEXT}" for seed in range(8)]


def test_responses_are_created_continued_read_and_deleted(openai_client: openai.OpenAI) -> None:
    first = openai_client.responses.create(model="fake", input="one", instructions="be brief")
    assert (first.output_text, first.status) == (TEXT, "completed")
    second = openai_client.responses.create(model="fake", input="two", previous_response_id=first.id)
    assert second.usage is not None
    assert second.usage.input_tokens == len(f"<user>one<assistant>{TEXT}<user>two<bot>")
    assert openai_client.responses.retrieve(first.id) == first
    openai_client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        openai_client.responses.retrieve(first.id)


def test_the_responses_stream_helper_collects_the_final_response(openai_client: openai.OpenAI) -> None:
    with openai_client.responses.stream(model="fake", input="hello") as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert "".join(deltas) == final.output_text == TEXT
    assert final.usage is not None
    assert final.usage.output_tokens == len(TEXT)


def test_a_refusal_of_an_overloaded_server_is_tried_again(url: str, engine: FakeEngine) -> None:
    """The client waits as long as Retry-After says; a time-out, which says not to, it does not try again."""
    full = build_app(ready_engine(max_num_seqs=0), ServerConfig(max_num_waiting=0, log_requests=False))
    slow_engine = ready_engine()
    slow_engine.scripts["slow"] = Script(stall_after=0)
    slow = build_app(slow_engine, ServerConfig(request_timeout=0.05))
    with served(full) as full_url, served(slow) as slow_url:
        with openai.OpenAI(base_url=f"{full_url}/v1", api_key="none", max_retries=1) as client:
            with pytest.raises(openai.RateLimitError) as refused:
                client.completions.create(model="fake", prompt="a")
            assert refused.value.request.headers["x-stainless-retry-count"] == "1"
        with openai.OpenAI(base_url=f"{slow_url}/v1", api_key="none", max_retries=1) as client:
            with pytest.raises(openai.InternalServerError) as late:
                client.completions.create(model="fake", prompt="slow")
            assert late.value.request.headers["x-stainless-retry-count"] == "0"


def test_the_request_id_is_read_by_the_client(openai_client: openai.OpenAI) -> None:
    headers = {"X-Request-Id": "mine"}
    answer = openai_client.completions.create(model="fake", prompt="a", extra_headers=headers)
    assert answer._request_id == "mine"


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
