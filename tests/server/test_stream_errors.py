"""A25 and D02 inside one request: a fault ends that request, visibly, and no other."""

import logging
import threading

import httpx
import pytest
from conftest import asgi, events, wait_until
from fake_engine import FakeEngine, Script

from jaxpage.errors import EngineDeadError

ROUTES = ["/v1/chat/completions", "/v1/completions"]


def body(content: str, **fields: object) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": content}], "prompt": content, **fields}


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("script", "status"),
    [
        (Script(fail_after=0), 500),
        (Script(fail_after=0, error=EngineDeadError("the engine process is gone")), 503),
        (Script(end_after=1), 500),
        (Script(end_after=1, end_reason="abort"), 500),
    ],
)
def test_a25_a_fault_before_the_first_token_has_a_status_of_its_own(
    client: httpx.Client, engine: FakeEngine, path: str, stream: bool, script: Script, status: int,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    engine.scripts["faulty"] = script
    is_unexpected = script.fail_after == 0 and isinstance(script.error, RuntimeError)
    with caplog.at_level(logging.ERROR):
        response = client.post(path, json=body("faulty", stream=stream))
        wait_until(lambda: any(r.exc_info for r in caplog.records) == is_unexpected, "a traceback is logged, or none")
    assert response.status_code == status
    assert response.json()["error"]["type"] == "server_error"
    assert "fault of the engine's own" not in response.text
    assert client.post(path, json=body("fine")).status_code == 200


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("script", [Script(fail_after=2, delay=0.02), Script(end_after=3, delay=0.02)])
def test_a25_a_fault_after_two_tokens_is_an_event_and_hurts_no_other_stream(
    client: httpx.Client, url: str, engine: FakeEngine, path: str, script: Script, caplog: pytest.LogCaptureFixture
) -> None:
    engine.scripts["faulty"] = script
    engine.scripts["healthy"] = Script(delay=0.02)
    healthy: list[httpx.Response] = []
    fields = {"stream": True, "stream_options": {"include_usage": True}, "max_tokens": 20}
    other = threading.Thread(target=lambda: healthy.append(httpx.post(url + path, json=body("healthy", **fields))))
    other.start()
    wait_until(lambda: engine.num_open == 1, "the healthy stream runs")
    with caplog.at_level(logging.ERROR, "jaxpage"):
        chunks = events(client.post(path, json=body("faulty", **fields)))
    other.join()

    assert chunks[-1].keys() == {"error"}
    assert chunks[-1]["error"]["type"] == "server_error"
    assert all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks[:-1])
    told = [record for record in caplog.records if record.exc_info]
    assert len(told) == (1 if script.fail_after == 2 else 0)  # only a fault of our own has a traceback
    whole = client.post(path, json=body("fine", max_tokens=20)).json()
    assert events(healthy[0])[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]


def test_a25_one_faulty_choice_ends_its_request_and_frees_the_others(client: httpx.Client, engine: FakeEngine) -> None:
    engine.scripts["stuck"] = Script(stall_after=1)
    engine.scripts["faulty"] = Script(fail_after=2, delay=0.02)
    fields = {"prompt": ["stuck", "faulty"], "stream": True}
    chunks = events(client.post("/v1/completions", json=fields))
    assert "error" in chunks[-1]
    wait_until(lambda: engine.num_open == 0, "the stuck choice is freed")
    assert client.post("/v1/completions", json={**fields, "stream": False}).status_code == 500


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("fields", [{"n": 3, "seed": 1}, {"use_beam_search": True, "n": 3}])
def test_a25_a_sequence_that_the_engine_ends_early_ends_all_choices(
    client: httpx.Client, engine: FakeEngine, path: str, fields: dict[str, object]
) -> None:
    engine.scripts["faulty"] = Script(end_after=3)
    response = client.post(path, json=body("faulty", **fields))
    assert response.status_code == 500
    assert response.json()["error"]["code"] == "engine_error"
    wait_until(lambda: engine.num_open == 0, "the other sequences are freed")
    streamed = client.post(path, json=body("faulty", stream=True, **fields))
    if "use_beam_search" in fields:  # nothing was sent before
        assert streamed.status_code == 500
    else:
        chunks = events(streamed)
        assert chunks[-1]["error"]["code"] == "engine_error"
        assert all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks[:-1])


def test_d02_a_request_that_is_open_when_the_engine_dies_ends_with_an_error() -> None:
    engine = FakeEngine()
    engine.is_ready = True
    engine.scripts["x"] = Script(stall_after=3)
    threading.Timer(0.1, lambda: setattr(engine, "is_dead", True)).start()
    response = asgi(engine, "POST", "/v1/completions", json={"prompt": "x"})
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "engine_dead"
