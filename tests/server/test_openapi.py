"""The document that the server gives of itself, and that it keeps to it."""

import os
from typing import Any

import pytest
from conftest import asgi, ready_engine
from fuzzing import fuzz
from served import served
from starlette.routing import Route

from jaxpage.server.app import build_app
from jaxpage.server.openapi import document as document_of
from jaxpage.server.routes import API
from jaxpage.server_config import ServerConfig

NOT_OF_THE_API = {"/v1/models/", "/metrics", "/openapi.json", "/", "/live"}
NUM_REQUESTS = int(os.environ.get("JAXPAGE_FUZZ_REQUESTS", "300"))


def document() -> dict[str, Any]:
    return document_of(API)


def test_every_route_is_in_the_document_and_nothing_else() -> None:
    app = build_app(ready_engine(), ServerConfig())
    routes = [route for route in app.routes if isinstance(route, Route) and route.path not in NOT_OF_THE_API]
    served_operations = {
        (method.lower(), route.path.replace(":path", "")) for route in routes for method in route.methods or ()
    }
    documented = {(method, path) for path, methods in document()["paths"].items() for method in methods}
    assert {(method, path) for method, path in served_operations if method != "head"} == documented


def test_the_document_is_served_before_the_engine_is_ready() -> None:
    engine = ready_engine()
    engine.is_ready = False
    answer = asgi(engine, "GET", "/openapi.json")
    assert answer.status_code == 200
    assert answer.json() == document()


@pytest.mark.parametrize(
    ("request_type", "has", "has_not"),
    [
        ("CompletionRequest", {"prompt", "best_of", "n", "logprobs"}, {"suffix", "messages"}),
        ("ResponsesRequest", {"input", "previous_response_id", "top_k"}, {"n", "logprobs", "max_tokens"}),
        ("MessagesRequest", {"messages", "stop_sequences"}, {"n", "stop", "stream_options"}),
    ],
)
def test_a_field_is_in_the_document_if_it_is_supported(request_type: str, has: set[str], has_not: set[str]) -> None:
    fields = document()["components"]["schemas"][request_type]["properties"].keys()
    assert has <= fields
    assert not has_not & fields


def test_requests_made_up_from_the_document_get_only_answers_that_it_promises() -> None:
    """As many as JAXPAGE_FUZZ_REQUESTS says."""
    engine = ready_engine()
    with served(build_app(engine, ServerConfig(log_requests=False))) as url:
        seen = fuzz(url, NUM_REQUESTS)
    assert seen.total() >= NUM_REQUESTS
    served_right = {label for label, status in seen if status == 200}
    assert {"POST /v1/chat/completions", "POST /v1/responses", "POST /tokenize"} <= served_right
    assert engine.num_open == 0
