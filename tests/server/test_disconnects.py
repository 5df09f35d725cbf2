"""A21: a client that hangs up frees what its request holds, at every moment of the request's life."""

import json
import logging
import socket

import httpx
import pytest
from conftest import wait_until
from fake_engine import FakeEngine, Script

ROUTES = ["/v1/chat/completions", "/v1/completions"]


def hang_up_later(url: str, path: str, **fields: object) -> socket.socket:
    """A connection on which a request has been sent and nothing read."""
    address = httpx.URL(url)
    body = json.dumps({"messages": [{"role": "user", "content": "stuck"}], "prompt": "stuck", **fields}).encode()
    connection = socket.create_connection((address.host, address.port))
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    connection.sendall(head.encode() + body)
    return connection


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("stall_after", [0, 3])
@pytest.mark.parametrize("fields", [{}, {"stream": True}, {"n": 3}, {"stream": True, "n": 3}])
def test_a21_a_running_request_is_aborted(
    url: str, engine: FakeEngine, path: str, stall_after: int, fields: dict[str, object],
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    engine.scripts["stuck"] = Script(stall_after=stall_after)
    connection = hang_up_later(url, path, **fields)
    wait_until(lambda: len(engine.running) == 1, "the request runs")
    if stall_after and fields.get("stream"):
        assert connection.recv(100)
    with caplog.at_level(logging.WARNING):
        connection.close()
        wait_until(lambda: engine.num_open == 0, "the engine is free again")
    assert caplog.records == []


@pytest.mark.parametrize("fields", [{"n": 2}, {"stream": True, "n": 2}, {"use_beam_search": True, "stream": True}])
def test_a21_all_prompts_of_a_request_are_aborted(url: str, engine: FakeEngine, fields: dict[str, object]) -> None:
    engine.scripts["stuck"] = Script(stall_after=2)
    connection = hang_up_later(url, "/v1/completions", prompt=["stuck", "stuck too", "brief"], **fields)
    wait_until(lambda: len(engine.seen_params) == 3 and len(engine.running) == 2, "one has ended and two run")
    connection.close()
    wait_until(lambda: engine.num_open == 0, "the engine is free again")
    assert (len(engine.running), len(engine.waiting)) == (0, 0)


def test_a21_twenty_requests_running_and_queued_are_aborted(
    url: str, engine: FakeEngine, client: httpx.Client, caplog: pytest.LogCaptureFixture
) -> None:
    engine.scripts["stuck"] = Script(stall_after=2)
    engine.max_num_seqs = 4
    connections = [hang_up_later(url, ROUTES[i % 2], stream=i % 4 < 2) for i in range(20)]
    wait_until(lambda: (len(engine.running), len(engine.waiting)) == (4, 16), "four run and sixteen wait")
    with caplog.at_level(logging.WARNING):
        for connection in connections:
            connection.close()
        wait_until(lambda: engine.num_open == 0, "the engine is free again")
    assert caplog.records == []
    assert client.post("/v1/completions", json={"prompt": "next"}).status_code == 200


def test_a21_hanging_up_inside_the_body_is_no_event(url: str, caplog: pytest.LogCaptureFixture) -> None:
    address = httpx.URL(url)
    with caplog.at_level(logging.WARNING):
        with socket.create_connection((address.host, address.port)) as connection:
            connection.sendall(b'POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{"prompt"')
        assert httpx.get(f"{url}/health").status_code == 200
    assert caplog.records == []


def test_a_client_that_stops_reading_gets_larger_steps_not_a_backlog(url: str, engine: FakeEngine) -> None:
    engine.max_model_len = 3000
    engine.scripts["stuck"] = Script(text="x" * 2000)
    try:
        with httpx.stream(
            "POST", f"{url}/v1/completions", json={"prompt": "stuck", "max_tokens": 2000, "stream": True}
        ) as response:
            wait_until(lambda: engine.num_open == 0, "the engine is done before the client reads")
            lines = [line for line in response.iter_lines() if line.startswith("data: {")]
    finally:
        engine.max_model_len = 64
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "x" * 2000
