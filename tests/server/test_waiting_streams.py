"""A stream that waits for its first token: its head comes early, and comments keep it open."""

import asyncio
import contextlib
import json

import pytest
from conftest import ready_engine
from fake_engine import FakeEngine, Script

from jaxpage.server.app import build_app
from jaxpage.server.in_process import opened
from jaxpage.server_config import ServerConfig

BODIES = {
    "/v1/completions": {"prompt": "PROMPT", "max_tokens": 4},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "PROMPT"}], "max_tokens": 4},
    "/v1/responses": {"input": "PROMPT", "max_output_tokens": 4},
    "/v1/messages": {"messages": [{"role": "user", "content": "PROMPT"}], "max_tokens": 4},
}


def body(path: str, prompt: str) -> bytes:
    return json.dumps(BODIES[path] | {"stream": True}).replace("PROMPT", prompt).encode()


@pytest.mark.parametrize("path", BODIES)
def test_a_stream_that_waits_for_its_turn_has_its_head_and_comments_at_once(path: str) -> None:
    engine: FakeEngine = ready_engine(max_num_seqs=1)
    engine.scripts["stuck"] = Script(stall_after=1)

    async def ask() -> None:
        app = build_app(engine, ServerConfig(heartbeat_interval=0.01))  # type: ignore[arg-type]
        async with contextlib.AsyncExitStack() as first:
            running = await first.enter_async_context(opened(app, "POST", path, body(path, "stuck")))
            assert running.status == 200
            async with opened(app, "POST", path, body(path, "waits")) as waiting:
                assert waiting.status == 200
                assert waiting.headers["content-type"].startswith("text/event-stream")
                seen = await anext(waiting.pieces)
                while not seen.startswith(b":"):  # the events that begin a response
                    seen = await anext(waiting.pieces)
                assert seen == b": waiting\n\n"
                await first.aclose()
                rest = await waiting.body()
                assert b"error" not in rest.replace(b'"error":null', b"")
                assert b'"H"' in rest

    asyncio.run(asyncio.wait_for(ask(), 30))
    assert engine.num_open == 0


def test_a_stream_whose_first_token_is_late_is_kept_open_by_comments() -> None:
    engine: FakeEngine = ready_engine()
    engine.scripts["stuck"] = Script(stall_after=0)

    async def ask() -> None:
        app = build_app(engine, ServerConfig(heartbeat_interval=0.01))  # type: ignore[arg-type]
        async with opened(app, "POST", "/v1/completions", body("/v1/completions", "stuck")) as answer:
            assert [await anext(answer.pieces) for _ in range(3)] == [b": waiting\n\n"] * 3

    asyncio.run(asyncio.wait_for(ask(), 30))
    assert engine.num_open == 0


def test_an_answer_that_is_done_holds_no_place_of_the_waiting_line_while_its_client_reads() -> None:
    engine: FakeEngine = ready_engine(max_num_seqs=1)
    path = "/v1/completions"

    async def ask() -> None:
        app = build_app(engine, ServerConfig(max_num_waiting=0))  # type: ignore[arg-type]
        scope_done = asyncio.Event()

        async def slow_send(message: dict[str, object]) -> None:
            await scope_done.wait()

        sent = [{"type": "http.request", "body": body(path, "brief"), "more_body": False}]

        async def receive() -> dict[str, object]:
            if sent:
                return sent.pop()
            await asyncio.Event().wait()
            raise AssertionError

        scope = {
            "type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "root_path": "",
            "query_string": b"", "headers": [], "http_version": "1.1", "scheme": "http", "server": ("x", 1),
        }  # fmt: skip
        unread = asyncio.create_task(app(scope, receive, slow_send))  # type: ignore[arg-type]
        while not engine.seen_params or engine.num_open:
            await asyncio.sleep(0.001)
        async with opened(app, "POST", path, body(path, "next")) as answer:
            assert answer.status == 200
            await answer.body()
        scope_done.set()
        await unread

    asyncio.run(asyncio.wait_for(ask(), 30))
