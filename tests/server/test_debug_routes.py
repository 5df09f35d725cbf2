"""Routes for those who run the server: only with --enable-debug-routes, and only while the engine serves."""

import asyncio
import json
from pathlib import Path

import httpx
import pytest
from conftest import asgi, wait_until
from fake_engine import FakeEngine, Script

ROUTES = [
    *(("GET", path) for path in ("/debug/kv_cache", "/is_paused", "/is_sleeping")),
    *(("POST", path) for path in ("/reset_prefix_cache", "/pause", "/resume", "/sleep", "/wake_up", "/debug/profile")),
]


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_they_are_not_there_unless_they_were_asked_for(method: str, path: str) -> None:
    engine = FakeEngine()
    engine.is_ready = True
    response = asgi(engine, method, path)
    assert response.status_code == 404
    assert response.json().keys() == {"error"}
    assert engine.num_resets == 0
    assert engine.calls == []


@pytest.mark.parametrize(("method", "path"), ROUTES)
@pytest.mark.parametrize(("state", "code"), [("loading", "loading"), ("dead", "engine_dead")])
def test_they_are_unavailable_while_the_engine_loads_or_is_dead(method: str, path: str, state: str, code: str) -> None:
    engine = FakeEngine()
    engine.is_ready = engine.is_dead = state == "dead"
    response = asgi(engine, method, path, enable_debug_routes=True)
    assert response.status_code == 503
    assert response.json()["error"]["code"] == code


def test_the_snapshot_is_the_engines_own(client: httpx.Client) -> None:
    assert client.get("/debug/kv_cache").json() == asyncio.run(FakeEngine().kv_cache_snapshot())


def test_a_reset_is_refused_while_a_request_runs_and_done_when_none_does(
    client: httpx.Client, engine: FakeEngine, url: str
) -> None:
    engine.scripts["stuck"] = Script(stall_after=1)
    before = engine.num_resets
    with httpx.stream("POST", f"{url}/v1/completions", json={"prompt": "stuck", "stream": True}) as running:
        lines = running.iter_lines()
        first = json.loads(next(lines).removeprefix("data: "))
        [held] = client.get("/debug/kv_cache").json()["requests"]
        assert held["request_id"].startswith(first["id"])
        refused = client.post("/reset_prefix_cache")
        assert refused.status_code == 409
        assert refused.json()["error"]["code"] == "prefix_cache_in_use"
    wait_until(lambda: engine.num_open == 0, "the request is gone")
    done = client.post("/reset_prefix_cache")
    assert (done.status_code, done.content) == (200, b"")
    assert engine.num_resets == before + 1


@pytest.mark.parametrize("name", ["reset_running_requests", "reset_external"])
def test_vllms_options_of_a_reset_are_refused_when_they_ask_for_more(
    client: httpx.Client, engine: FakeEngine, name: str
) -> None:
    before = engine.num_resets
    response = client.post("/reset_prefix_cache", params={name: "true"})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == name
    assert engine.num_resets == before
    assert client.post("/reset_prefix_cache", params={name: "False"}).status_code == 200


def test_the_engine_is_paused_in_the_mode_that_was_asked_for(client: httpx.Client, engine: FakeEngine) -> None:
    engine.calls.clear()
    assert client.post("/pause").json() == {"status": "paused"}
    assert client.post("/pause", params={"mode": "keep"}).status_code == 200
    assert client.get("/is_paused").json() == {"is_paused": True}
    assert client.post("/resume").json() == {"status": "resumed"}
    assert client.get("/is_paused").json() == {"is_paused": False}
    assert engine.calls == [("pause", "abort"), ("pause", "keep"), ("resume",)]
    assert client.post("/pause", params={"mode": "sometimes"}).json()["error"]["param"] == "mode"


def test_sleep_moves_the_weights_unless_told_not_to(client: httpx.Client, engine: FakeEngine) -> None:
    engine.calls.clear()
    assert client.post("/sleep").status_code == 200
    assert client.get("/is_sleeping").json() == {"is_sleeping": True}
    assert client.post("/wake_up").status_code == 200
    assert client.post("/sleep", params={"level": "0"}).status_code == 200
    assert engine.calls == [("sleep", True), ("wake_up",), ("sleep", False)]
    assert client.post("/sleep", params={"level": "2"}).json()["error"]["param"] == "level"


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "61", "soon", ""])
def test_the_length_of_a_profile_is_checked(client: httpx.Client, engine: FakeEngine, seconds: str) -> None:
    engine.calls.clear()
    response = client.post("/debug/profile", params={"seconds": seconds})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "seconds"
    assert engine.calls == []


def test_a_profile_is_written_to_a_new_folder(client: httpx.Client, engine: FakeEngine) -> None:
    engine.calls.clear()
    folders = [client.post("/debug/profile", params={"seconds": "0.5"}).json()["folder"] for _ in range(2)]
    assert engine.calls == [("profile", 0.5, folder) for folder in folders]
    for folder in set(folders):
        Path(folder).rmdir()
    assert len(set(folders)) == 2
