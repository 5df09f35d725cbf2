"""Request ids, and the log's line for each request."""

import json
import logging
from typing import Any

import pytest
from conftest import asgi, ready_engine
from fake_engine import FakeEngine, Script

from jaxpage.server.app import build_app
from jaxpage.server_config import ServerConfig

SECRET = "tell nobody"


def logged(
    caplog: pytest.LogCaptureFixture, method: str = "POST", path: str = "/v1/completions", **request: Any
) -> list[dict[str, Any]]:
    """What is logged while an engine of its own answers one request."""
    engine = ready_engine()
    engine.scripts = {"cached": Script(num_cached_tokens=3), "fault": Script(fail_after=2)}
    caplog.clear()
    with caplog.at_level(logging.INFO, "jaxpage.server.request_log"):
        asgi(engine, method, path, **request)
    return [json.loads(record.message) for record in caplog.records if record.name == "jaxpage.server.request_log"]


def test_a_clients_request_id_is_echoed_and_names_the_answer() -> None:
    answer = asgi(ready_engine(), "POST", "/v1/completions", json={"prompt": "a"}, headers={"X-Request-Id": "mine-1"})
    assert answer.headers["x-request-id"] == "mine-1"
    assert answer.json()["id"] == "cmpl-mine-1"


@pytest.mark.parametrize("given", [None, b"", b"two words", b"x" * 129, b"caf\xc3\xa9", b"a\tb"])
def test_a_request_without_a_usable_id_gets_one(given: bytes | None) -> None:
    headers = {} if given is None else {"X-Request-Id": given}
    ids = {asgi(ready_engine(), "GET", "/health", headers=headers).headers["x-request-id"] for _ in range(2)}
    assert len(ids) == 2
    assert all(len(request_id) == 32 for request_id in ids)


def test_errors_carry_the_id_too() -> None:
    engine = FakeEngine()
    for path in ("/v1/completions", "/nowhere"):
        answer = asgi(engine, "POST", path, json={}, headers={"X-Request-Id": "mine"})
        assert answer.status_code >= 400
        assert answer.headers["x-request-id"] == "mine"


def test_a_finished_request_is_one_line_without_any_text(caplog: pytest.LogCaptureFixture) -> None:
    body = {"prompt": f"cached {SECRET}", "max_tokens": 4, "n": 2}
    for stream in (False, True):
        [line] = logged(caplog, json=body | {"stream": stream}, headers={"X-Request-Id": "mine"})
        assert 0 <= line.pop("ttft_s") <= line.pop("total_s")
        assert line == {
            "id": "mine",
            "method": "POST",
            "path": "/v1/completions",
            "status": 200,
            "prompt_tokens": len(body["prompt"]),  # type: ignore[arg-type]
            "cached_tokens": 3,
            "generated_tokens": 8,
            "finish_reason": "length",
        }
        assert SECRET not in caplog.text
        assert Script().text[:4] not in caplog.text


def test_a_refused_or_failed_request_is_a_line_with_its_status(caplog: pytest.LogCaptureFixture) -> None:
    [refused] = logged(caplog, json={"prompt": "", "n": SECRET})
    assert (refused["status"], "prompt_tokens" in refused) == (400, False)
    [unknown] = logged(caplog, "GET", "/nowhere%0A%22" + "x" * 1000)
    assert (unknown["status"], len(unknown["path"])) == (404, 200)


def test_a_stream_that_fails_has_no_finish_reason(caplog: pytest.LogCaptureFixture) -> None:
    [line] = logged(caplog, json={"prompt": "fault", "stream": True})
    assert (line["status"], line["generated_tokens"], line["finish_reason"]) == (200, 2, None)


@pytest.mark.parametrize("path", ["/health", "/metrics", "/live", "/", "/web/app.js"])
def test_what_machines_poll_is_not_logged(caplog: pytest.LogCaptureFixture, path: str) -> None:
    assert logged(caplog, "GET", path) == []


def test_the_log_can_be_switched_off(caplog: pytest.LogCaptureFixture) -> None:
    engine = ready_engine()
    app = build_app(engine, ServerConfig(log_requests=False))
    assert logged(caplog, app=app, json={"prompt": "a"}) == []
