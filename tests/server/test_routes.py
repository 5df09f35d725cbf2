"""The table of routes: what it says of each is what the server does."""

import logging

import pytest
from conftest import asgi, ready_engine
from starlette.routing import Mount, Route

from jaxpage.server.app import build_app
from jaxpage.server.openapi import document
from jaxpage.server.routes import API, ServedRoute, routes_of
from jaxpage.server_config import ServerConfig

CONFIG = ServerConfig(enable_debug_routes=True, api_key=("key",))


def test_a_server_has_the_routes_of_the_table_and_no_others() -> None:
    app = build_app(ready_engine(), CONFIG)
    served = [(route.path, route.methods) for route in app.routes if isinstance(route, Route)]
    assert [path for path, _ in served] == [one.path for one in routes_of(CONFIG) if not one.holds_path]
    mounted = [route.path for route in app.routes if isinstance(route, Mount)]
    assert mounted == [one.path for one in routes_of(CONFIG) if one.holds_path]


@pytest.mark.parametrize("one", routes_of(CONFIG), ids=lambda one: f"{one.method} {one.path}")
def test_the_table_says_who_needs_a_key_and_what_is_logged(one: ServedRoute, caplog: pytest.LogCaptureFixture) -> None:
    app = build_app(ready_engine(), CONFIG)
    path = one.path.replace("{model_id:path}", "fake").replace("{response_id}", "resp_1")
    with caplog.at_level(logging.INFO, "jaxpage.server.request_log"):
        answer = asgi(ready_engine(), one.method, path + "/app.js" * one.holds_path, app=app)
    assert (answer.status_code != 401) == one.is_open
    assert bool(caplog.records) == one.is_logged


def test_a_route_is_documented_by_its_line_alone() -> None:
    line = ServedRoute("GET", "/new", None, "A new one", API[0].answer)
    assert document((*API, line))["paths"]["/new"]["get"]["summary"] == "A new one"


def test_models_are_listed_with_a_slash_at_the_end_as_well() -> None:
    assert asgi(ready_engine(), "GET", "/v1/models/").json() == asgi(ready_engine(), "GET", "/v1/models").json()
