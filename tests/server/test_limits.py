"""What one server takes at a time, and for how long: the queue's limit, a request's time, a body's length. A26."""

import asyncio
import json

import httpx
import pytest
from conftest import GUARD_SECONDS, asgi, events, ready_engine
from fake_engine import FakeEngine, Script
from served import served

from jaxpage.server.app import build_app
from jaxpage.server_config import ServerConfig

COMPLETIONS = "/v1/completions"


async def raw_answer(url: str, body: dict[str, object] | None, path: str = COMPLETIONS) -> tuple[int, list[str]]:
    """Status and `data:` lines of the answer to one request on a connection of its own, cheap enough for hundreds."""
    reader, writer = await asyncio.open_connection(httpx.URL(url).host, httpx.URL(url).port)
    content = b"" if body is None else json.dumps(body).encode()
    method = "GET" if body is None else "POST"
    head = f"{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(content)}\r\n\r\n"
    writer.write(head.encode() + content)
    answer = (await asyncio.wait_for(reader.read(), GUARD_SECONDS)).decode()
    writer.close()
    return int(answer.split()[1]), [line.removeprefix("data: ") for line in answer.splitlines() if line[:6] == "data: "]


def test_a26_beyond_the_queues_limit_requests_are_refused_at_once_and_those_within_are_served() -> None:
    engine = ready_engine(max_num_seqs=4)
    engine.scripts["hold"] = Script(stall_after=1)
    with served(build_app(engine, ServerConfig(max_num_waiting=6))) as url:

        async def overload() -> list[httpx.Response]:
            async with httpx.AsyncClient(base_url=url, timeout=GUARD_SECONDS) as client:
                held = [asyncio.create_task(client.post(COMPLETIONS, json={"prompt": "hold"})) for _ in range(10)]
                while (await client.get("/load")).json()["server_load"] < 10:
                    await asyncio.sleep(0.002)
                refused = [await client.post(COMPLETIONS, json={"prompt": "late"}) for _ in range(3)]
                for request in held:
                    request.cancel()
                while (await client.get("/load")).json()["server_load"]:
                    await asyncio.sleep(0.002)
                served_again = [client.post(COMPLETIONS, json={"prompt": "one", "max_tokens": 3}) for _ in range(10)]
                assert {answer.status_code for answer in await asyncio.gather(*served_again)} == {200}
                return refused

        for answer in asyncio.run(overload()):
            assert answer.status_code == 429
            assert answer.headers["retry-after"] == "1"
            error = answer.json()["error"]
            assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")


def test_a26_health_answers_while_five_hundred_streams_run_and_each_is_right_or_refused() -> None:
    engine = ready_engine(max_num_seqs=8)
    with served(build_app(engine, ServerConfig(max_num_waiting=400))) as url:

        async def flood() -> tuple[list[tuple[int, list[str]]], list[int]]:
            body = {"prompt": "one of many", "max_tokens": 6, "stream": True}
            answers = asyncio.gather(*(raw_answer(url, body | {"seed": i}) for i in range(500)))
            checks = []
            while not answers.done():
                checks.append((await raw_answer(url, None, "/health"))[0])
                await asyncio.sleep(0.02)
            return await answers, checks

        answers, checks = asyncio.run(flood())
    assert set(checks) == {200}
    assert {status for status, _ in answers} <= {200, 429}
    right = [i for i, (status, _) in enumerate(answers) if status == 200]
    assert len(right) >= 408
    for i in right:
        *chunks, done = answers[i][1]
        assert "".join(json.loads(chunk)["choices"][0]["text"] for chunk in chunks) == f"{i}:{Script().text}"[:6]
        assert done == "[DONE]"
    assert engine.num_open == 0


def test_a_request_with_more_sequences_than_places_is_served_when_it_is_alone() -> None:
    engine = ready_engine(max_num_seqs=1)
    app = build_app(engine, ServerConfig(max_num_waiting=0))
    answer = asgi(engine, "POST", COMPLETIONS, app=app, json={"prompt": ["a", "b", "c"], "max_tokens": 1})
    assert answer.status_code == 200


@pytest.mark.parametrize("script", [Script(stall_after=0), Script(stall_after=3)])
@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_takes_too_long_ends_with_a_504_or_an_error_event(script: Script, stream: bool) -> None:
    engine = ready_engine()
    engine.scripts["slow"] = script
    app = build_app(engine, ServerConfig(request_timeout=0.05))
    answer = asgi(engine, "POST", COMPLETIONS, app=app, json={"prompt": "slow", "stream": stream})
    if stream and script.stall_after:
        assert events(answer)[-1]["error"]["code"] == "request_timeout"
    else:
        assert answer.status_code == 504
        assert answer.headers["x-should-retry"] == "false"
        assert answer.json()["error"]["code"] == "request_timeout"
        assert "0.05 s" in answer.json()["error"]["message"]
    assert engine.num_open == 0


def test_a_request_in_time_is_not_ended() -> None:
    engine: FakeEngine = ready_engine()
    app = build_app(engine, ServerConfig(request_timeout=3600.0))
    assert asgi(engine, "POST", COMPLETIONS, app=app, json={"prompt": "quick"}).status_code == 200


def test_a_bodys_longest_length_is_an_option() -> None:
    engine = ready_engine()
    app = build_app(engine, ServerConfig(max_request_bytes=100))
    assert asgi(engine, "POST", COMPLETIONS, app=app, json={"prompt": "x"}).status_code == 200
    refused = asgi(engine, "POST", COMPLETIONS, app=app, json={"prompt": "x" * 100})
    assert refused.status_code == 413
    assert "--max-request-bytes" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    ("most", "wanted", "status"), [(20, 20, 200), (20, -1, 400), (5, 6, 400), (5, 5, 200), (-1, -1, 200)]
)
@pytest.mark.parametrize("field", ["logprobs", "prompt_logprobs"])
def test_a_request_gets_no_more_log_probabilities_than_the_server_gives(
    field: str, most: int, wanted: int, status: int
) -> None:
    engine = ready_engine()
    app = build_app(engine, ServerConfig(max_logprobs=most))  # type: ignore[arg-type]
    answer = asgi(engine, "POST", "/v1/completions", app=app, json={"prompt": "hello", field: wanted})
    assert answer.status_code == status, answer.text
    if status == 400:
        assert answer.json()["error"]["param"] == field
        assert "raise --max-logprobs" in answer.json()["error"]["message"]
