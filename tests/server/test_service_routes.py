"""/health, /v1/models and /version, and what all routes say before and after the engine's life."""

import asyncio

import httpx
import pytest
from conftest import asgi, ready_engine
from fake_engine import FakeEngine

from jaxpage.server.app import build_app
from jaxpage.server_config import ServerConfig

GET = ["/health", "/ping", "/v1/models", "/v1/models/fake"]
POST = ["/v1/chat/completions", "/v1/completions"]


@pytest.mark.parametrize(("state", "code"), [("loading", "loading"), ("dead", "engine_dead")])
def test_d02_nothing_is_served_while_loading_or_dead(state: str, code: str) -> None:
    engine = FakeEngine()
    engine.is_ready = state == "dead"
    engine.is_dead = state == "dead"
    responses = [asgi(engine, "GET", path) for path in GET]
    responses += [asgi(engine, "POST", path, json={"prompt": "a", "messages": []}) for path in POST]
    for response in responses:
        assert response.status_code == 503
        assert response.json()["error"]["code"] == code


def test_d02_a_ready_engine_is_healthy(client: httpx.Client) -> None:
    assert all(client.get(path).status_code == 200 for path in GET)
    assert client.post("/ping").status_code == 200


def test_the_served_model_is_listed(client: httpx.Client, engine: FakeEngine) -> None:
    listing = client.get("/v1/models").json()
    assert listing["object"] == "list"
    [card] = listing["data"]
    assert (card["id"], card["object"], card["max_model_len"]) == ("fake", "model", engine.max_model_len)
    assert client.get("/v1/models/fake").json() == card
    assert client.get("/v1/models/no-such").json()["error"]["code"] == "model_not_found"


def test_a24_an_id_that_is_a_path_can_be_used_with_and_without_its_last_slash() -> None:
    engine = FakeEngine("/dir/tiny")
    engine.is_ready = True
    [card] = asgi(engine, "GET", "/v1/models").json()["data"]
    for name in (card["id"], card["id"] + "/"):
        answer = asgi(engine, "POST", "/v1/completions", json={"model": name, "prompt": "a"})
        assert answer.json()["model"] == card["id"] == "/dir/tiny"
        assert asgi(engine, "GET", f"/v1/models/{name}").status_code == 200
    assert asgi(engine, "POST", "/v1/completions", json={"model": "", "prompt": "a"}).status_code == 404


def test_the_version_is_told(client: httpx.Client) -> None:
    assert client.get("/version").json()["version"].count(".") == 2


def test_a_draining_server_refuses_new_requests() -> None:
    engine = FakeEngine()
    engine.is_ready = True
    app = build_app(engine, ServerConfig())  # type: ignore[arg-type]
    app.state.service.draining = True

    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://fake") as client:
            return await client.post("/v1/completions", json={"prompt": "a"})

    assert asyncio.run(ask()).json()["error"]["code"] == "shutting_down"


def test_responses_are_counted_by_their_status() -> None:
    engine = ready_engine()
    app = build_app(engine, ServerConfig())  # type: ignore[arg-type]
    for path, body in (("/v1/completions", {"prompt": "a"}), ("/v1/completions", {}), ("/v1/nowhere", {})):
        asgi(engine, "POST", path, app=app, json=body)
    text = asgi(engine, "GET", "/metrics", app=app).text
    for status in (200, 400, 404):
        assert f'jaxpage:http_responses_total{{model_name="fake",status="{status}"}} 1.0' in text
