"""Clients that people use besides OpenAI's own: Anthropic's, LangChain's, and curl."""

import asyncio
import json
import shutil
import subprocess
from collections.abc import Iterator

import anthropic
import pytest
from conftest import GUARD_SECONDS
from fake_engine import FakeEngine, Script
from langchain_openai import ChatOpenAI
from pydantic import SecretStr

TEXT = Script().text
HELLO: list[anthropic.types.MessageParam] = [{"role": "user", "content": "hello"}]


@pytest.fixture
def claude(url: str) -> Iterator[anthropic.Anthropic]:
    """Anthropic's client of the shared server."""
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=GUARD_SECONDS) as client:
        yield client


def test_anthropics_client_reads_a_message(claude: anthropic.Anthropic) -> None:
    message = claude.messages.create(model="fake", max_tokens=50, system="be brief", messages=HELLO)
    [block] = message.content
    assert block.type == "text"
    assert (block.text, message.stop_reason) == (TEXT, "end_turn")
    assert message.usage.input_tokens == len("<system>be brief<user>hello<bot>")
    counted = claude.messages.count_tokens(model="fake", system="be brief", messages=HELLO)
    assert counted.input_tokens == message.usage.input_tokens


def test_anthropics_client_streams_a_message(claude: anthropic.Anthropic) -> None:
    with claude.messages.stream(model="fake", max_tokens=50, messages=HELLO, stop_sequences=["漢"]) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == TEXT[: TEXT.index("漢")]
    assert (final.stop_reason, final.stop_sequence) == ("stop_sequence", "漢")
    assert final.usage.output_tokens == TEXT.index("漢") + 1


def test_anthropics_client_raises_its_own_errors(claude: anthropic.Anthropic, engine: FakeEngine) -> None:
    with pytest.raises(anthropic.NotFoundError) as unknown:
        claude.messages.create(model="no-such", max_tokens=5, messages=HELLO)
    assert unknown.value.request_id == unknown.value.response.headers["request-id"]
    with pytest.raises(anthropic.BadRequestError, match=r"tools\[0\] is of type 'bash_20250124'"):
        claude.messages.create(
            model="fake", max_tokens=5, messages=HELLO, tools=[{"name": "bash", "type": "bash_20250124"}]
        )
    engine.scripts["fault"] = Script(fail_after=2, delay=0.02)
    stream = claude.messages.create(
        model="fake", max_tokens=5, messages=[{"role": "user", "content": "fault"}], stream=True
    )
    with pytest.raises(anthropic.APIStatusError, match="internal server error"):
        list(stream)


def test_anthropics_async_client_streams_events(url: str) -> None:
    async def kinds() -> list[str]:
        async with anthropic.AsyncAnthropic(base_url=url, api_key="none", timeout=GUARD_SECONDS) as client:
            stream = await client.messages.create(model="fake", max_tokens=1, messages=HELLO, stream=True)
            return [event.type async for event in stream]

    assert asyncio.run(kinds()) == [
        *("message_start", "content_block_start", "content_block_delta", "content_block_stop"),
        *("message_delta", "message_stop"),
    ]


@pytest.mark.parametrize("use_responses_api", [False, True])
def test_langchain_invokes_and_streams(url: str, use_responses_api: bool) -> None:
    chat = ChatOpenAI(
        model="fake",
        base_url=f"{url}/v1",
        api_key=SecretStr("none"),
        use_responses_api=use_responses_api,
        stream_usage=True,
    )
    answer = chat.invoke([("system", "be brief"), ("human", "hello")])
    assert answer.text == TEXT
    assert answer.usage_metadata is not None
    assert answer.usage_metadata["output_tokens"] == len(TEXT)
    chunks = list(chat.stream("hello"))
    assert "".join(chunk.text for chunk in chunks) == TEXT
    assert sum(chunk.usage_metadata["output_tokens"] for chunk in chunks if chunk.usage_metadata) == len(TEXT)


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl")
def test_curl_needs_nothing_but_a_body_and_shows_a_stream_as_it_comes(url: str) -> None:
    def curl(path: str, body: dict[str, object]) -> str:
        command = ["curl", "--silent", "--no-buffer", "--fail-with-body", url + path, "-d", json.dumps(body)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=GUARD_SECONDS)
        assert done.returncode == 0, done.stdout
        return done.stdout

    answer = json.loads(curl("/v1/chat/completions", {"messages": HELLO}))
    assert answer["choices"][0]["message"]["content"] == TEXT
    lines = curl("/v1/completions", {"prompt": "hello", "max_tokens": 3, "stream": True}).split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
