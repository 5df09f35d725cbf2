"""GET /live: how the engine stands, for anyone who may see the page; counts and block states, and nothing more."""

import asyncio
import json
import time
from typing import Any

import httpx
import pytest
from conftest import asgi, wait_until
from fake_engine import BLOCK_SIZE, KEPT_BLOCK_IDS, NUM_BLOCKS, FakeEngine, Script

from jaxpage.server import live
from jaxpage.server.app import build_app
from jaxpage.server.live import blocks_of, short_id
from jaxpage.server_config import ServerConfig


def snapshot(num_blocks: int, tables: dict[str, list[list[int]]], cached: list[int]) -> dict[str, Any]:
    """As the engine gives it, but for the counts that its pool keeps."""
    requests = [
        {"request_id": name, "num_tokens": 10, "num_cached_tokens": 4, "block_tables": of_groups}
        for name, of_groups in tables.items()
    ]
    counts = {"num_blocks": num_blocks, "num_used": 0, "num_cached": len(cached)}
    return {"null_block_id": 0, "cached_block_ids": cached, "requests": requests, **counts}


def cells(runs: list[list[int]]) -> list[tuple[int, int, int]]:
    return [(owner, references, cached) for length, owner, references, cached in runs for _ in range(length)]


def test_runs_say_of_every_block_who_holds_it_how_often_and_whether_it_is_cached() -> None:
    blocks = blocks_of(snapshot(8, {"chatcmpl-aaaaaaaaaa-0": [[1, 2, 4]], "chatcmpl-bbbbbbbbbb-0": [[1, 5]]}, [1, 7]))
    assert cells(blocks.runs) == [
        (0, 2, 1),
        (0, 1, 0),
        (-1, 0, 0),
        (0, 1, 0),
        (1, 1, 0),
        (-1, 0, 0),
        (-1, 0, 1),
        (-1, 0, 0),
    ]
    assert (blocks.num_shared, blocks.num_cached) == (1, 2)
    assert [(request.id, request.num_blocks) for request in blocks.requests] == [("aaaaaaaa", 3), ("bbbbbbbb", 2)]


def test_blocks_alike_are_one_run_however_many_they_are() -> None:
    assert blocks_of(snapshot(4000, {}, [])).runs == [[4000, -1, 0, 0]]


def test_the_null_block_is_nobodys() -> None:
    blocks = blocks_of(snapshot(3, {"cmpl-a": [[0, 0, 3], [0, 1]]}, []))
    assert cells(blocks.runs) == [(0, 1, 0), (-1, 0, 0), (0, 1, 0)]
    assert blocks.requests[0].num_blocks == 2


def test_the_choices_of_a_request_are_one_request_whose_blocks_count_once() -> None:
    blocks = blocks_of(snapshot(5, {"cmpl-0123456789-0-7": [[1, 2]], "cmpl-0123456789-0-7#1": [[1, 3]]}, []))
    [request] = blocks.requests
    assert (request.num_sequences, request.num_tokens, request.num_cached_tokens, request.num_blocks) == (2, 20, 8, 3)
    assert cells(blocks.runs)[:3] == [(0, 2, 0), (0, 1, 0), (0, 1, 0)]


def test_a_request_that_holds_nothing_yet_is_told() -> None:
    assert blocks_of(snapshot(5, {"cmpl-a": [[], []]}, [])).requests[0].num_blocks == 0


def test_a_huge_pool_is_counted_whole_and_told_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "MAX_BLOCKS_TOLD", 4)
    blocks = blocks_of(snapshot(9, {"cmpl-a": [[3, 8]], "cmpl-b": [[8]]}, [9]))
    assert cells(blocks.runs) == [(-1, 0, 0), (-1, 0, 0), (0, 1, 0), (-1, 0, 0)]
    assert (blocks.num_blocks, blocks.num_shared, blocks.requests[0].num_blocks) == (9, 1, 2)


@pytest.mark.parametrize(
    ("request_id", "short"), [("chatcmpl-0123456789abcdef-0-3-77777777", "01234567"), ("longer than eight", "longer t")]
)
def test_ids_are_cut_short(request_id: str, short: str) -> None:
    assert short_id(request_id) == short


@pytest.mark.parametrize("state", ["loading", "dead", "stopping"])
def test_it_answers_whatever_state_the_engine_is_in(state: str) -> None:
    engine = FakeEngine()
    engine.is_ready = state == "stopping"
    engine.is_dead = state == "dead"
    app = build_app(engine, ServerConfig())  # type: ignore[arg-type]
    app.state.service.draining = state == "stopping"

    async def ask() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://fake") as client:
            return await client.get("/live")

    response = asyncio.run(ask())
    assert (response.status_code, response.json()["state"]) == (200, state)
    assert (response.json()["blocks"] is None) == (state != "stopping")


def test_a_running_request_shows_in_counts_and_blocks_without_its_text(
    client: httpx.Client, engine: FakeEngine, url: str
) -> None:
    engine.scripts["stuck"] = Script(text="an answer of its own", stall_after=9)
    prompt = "stuck with a secret prompt"
    before = client.get("/live").json()
    with httpx.stream("POST", f"{url}/v1/completions", json={"prompt": prompt, "stream": True}) as running:
        lines = running.iter_lines()
        request_id = json.loads(next(lines).removeprefix("data: "))["id"]
        wait_until(lambda: any(held.num_tokens == 9 for held in engine.running), "it stalls")
        num_blocks = -(-(len(prompt) + 9) // BLOCK_SIZE)
        wait_until(lambda: client.get("/live").json()["blocks"]["num_used"] == num_blocks, "the map has followed")
        response = client.get("/live")
    told = response.json()
    assert (told["state"], told["model"], told["num_running"], told["num_waiting"]) == ("ready", "fake", 1, 0)
    assert (told["prefix_cache_hits"], told["prefix_cache_queries"]) == (2, 8)
    assert told["generation_tokens"] - before["generation_tokens"] == 9
    assert told["first_tokens"] - before["first_tokens"] == 1
    assert told["first_token_seconds"] - before["first_token_seconds"] == pytest.approx(0.25)
    assert told["seconds"] > before["seconds"]
    blocks = told["blocks"]
    assert blocks["num_blocks"] == NUM_BLOCKS
    assert blocks["num_cached"] == len(KEPT_BLOCK_IDS)
    assert blocks["num_used"] == blocks["requests"][0]["num_blocks"] == num_blocks
    assert blocks["requests"][0]["id"] == request_id.split("-")[1][:8]
    for secret in (request_id, "secret", "answer"):
        assert secret not in response.text
    assert response.headers["cache-control"] == "no-store"


def test_all_who_look_share_a_snapshot() -> None:
    engine = FakeEngine()
    engine.is_ready = True
    engine.snapshot_seconds = 0.05
    app = build_app(engine, ServerConfig())  # type: ignore[arg-type]

    async def look() -> list[httpx.Response]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://fake") as client:
            crowd = await asyncio.gather(*(client.get("/live") for _ in range(20)))
            return [*crowd, await client.get("/live")]

    started = time.monotonic()
    answers = asyncio.run(look())
    most = 1 + (time.monotonic() - started) / live.SNAPSHOT_SECONDS
    assert all(answer.json()["blocks"]["num_blocks"] == NUM_BLOCKS for answer in answers)
    assert 1 <= engine.num_snapshots <= most


def test_a_snapshot_that_takes_long_to_read_is_taken_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(snapshot: dict[str, Any]) -> live.Blocks:
        time.sleep(0.05)
        return blocks_of(snapshot)

    monkeypatch.setattr(live, "blocks_of", read)
    engine = FakeEngine()
    engine.is_ready = True
    app = build_app(engine, ServerConfig())  # type: ignore[arg-type]

    async def look_twice() -> None:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://fake") as client:
            await client.get("/live")
            await asyncio.sleep(live.SNAPSHOT_SECONDS + 0.05)
            await client.get("/live")

    asyncio.run(look_twice())
    assert engine.num_snapshots == 1


def test_an_engine_in_a_long_step_does_not_hold_up_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "WAIT_SECONDS", 0.01)
    engine = FakeEngine()
    engine.is_ready = True
    engine.snapshot_seconds = 60
    told = asgi(engine, "GET", "/live").json()
    assert (told["state"], told["blocks"], told["blocks_age"]) == ("ready", None, None)


def test_a_death_while_it_is_asked_is_no_failure() -> None:
    engine = FakeEngine()
    engine.is_ready = engine.is_dead = True
    told = asgi(engine, "GET", "/live").json()
    assert (told["state"], told["blocks"]) == ("dead", None)
