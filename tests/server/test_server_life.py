"""From binding the port to the exit code: `serve` in a process of its own, with the fake engine behind it."""

import contextlib
import json
import signal
import socket
import ssl
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from conftest import events
from server_process import ServerProcess, server_process

from jaxpage.errors import ConfigError
from jaxpage.server.serve import bind_path
from jaxpage.server_config import ServerConfig

GUARD_SECONDS = 30.0
CERTIFICATE = Path(__file__).parent / "tls" / "localhost.pem"
"""A key, and a certificate signed with it, for localhost and 127.0.0.1 until the year 2126."""


@contextlib.contextmanager
def serving(**options: Any) -> Iterator[ServerProcess]:
    with server_process(str(Path(__file__).with_name("serve_fake.py")), json.dumps(options)) as server:
        yield server


def ask(url: str, prompt: str, **fields: object) -> httpx.Response:
    body = {"prompt": prompt, "max_tokens": 40, **fields}
    return httpx.post(f"{url}/v1/completions", json=body, timeout=GUARD_SECONDS)


def wait_until_admitted(server: ServerProcess, num_requests: int) -> None:
    server.wait_until(lambda: server.output.count("admitted") >= num_requests, GUARD_SECONDS)


def wait_until_blocked(server: ServerProcess, port: int | None) -> None:
    """Returns once the kernel holds bytes that the client does not take, and no more are being added."""
    seen = [""]

    def is_blocked() -> bool:
        rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        [queued] = [row[4].split(":")[0] for row in rows if row[1].endswith(f":{port:04X}") and row[3] == "01"]
        seen.append(queued)
        return int(queued, 16) > 0 and len(seen) > 20 and len(set(seen[-20:])) == 1

    server.wait_until(is_blocked, GUARD_SECONDS)


def test_the_address_and_a_command_to_try_are_printed() -> None:
    with serving(server={"served_model_name": ["my model"]}) as server:
        url = server.wait_until_healthy(GUARD_SECONDS)
        server.wait_until(lambda: "curl" in server.output, GUARD_SECONDS)
        [curl] = [line for line in server.lines if "curl" in line]
        address, _, body = curl.strip().removeprefix("curl ").partition(" -d ")
        assert address.startswith(url)
        answer = httpx.post(address, content=body.strip("'"), timeout=GUARD_SECONDS)
        assert answer.json()["model"] == "my model"
        server.signal(signal.SIGTERM)
        assert server.wait(GUARD_SECONDS) == 0


def test_a_unix_socket_is_served_replaces_an_abandoned_one_and_is_gone_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as abandoned:
        abandoned.bind(str(path))
    transport = httpx.HTTPTransport(uds=str(path))
    with (
        serving(server={"uds": str(path)}) as server,
        httpx.Client(transport=transport, base_url="http://localhost", timeout=GUARD_SECONDS) as client,
    ):
        server.wait_until(lambda: "curl" in server.output, GUARD_SECONDS)
        assert client.post("/v1/completions", json={"prompt": "a"}).status_code == 200
        assert f"curl --unix-socket {path} http://localhost/v1" in server.output
        with serving(server={"uds": str(path)}) as second:
            assert second.wait(GUARD_SECONDS) == 1
            assert f"cannot listen on {path}" in second.output
        assert client.get("/health").status_code == 200
        server.signal(signal.SIGTERM)
        assert server.wait(GUARD_SECONDS) == 0
    assert not path.exists()


def test_https_is_spoken_with_a_certificate_and_a_proxys_prefix_is_stripped_by_it_alone() -> None:
    with serving(server={"ssl_certfile": str(CERTIFICATE), "root_path": "/llm"}) as server:
        server.wait_until(lambda: "listening on https://" in server.output, GUARD_SECONDS)
        url = server.output.split("listening on ")[1].split()[0]
        trusted = ssl.create_default_context(cafile=CERTIFICATE)
        with httpx.Client(base_url=url, verify=trusted, timeout=GUARD_SECONDS) as client:
            server.wait_until(lambda: "curl" in server.output, GUARD_SECONDS)
            assert client.post("/v1/completions", json={"prompt": "a"}).status_code == 200
            assert client.get("/llm/health").status_code == 404
        server.signal(signal.SIGTERM)
        assert server.wait(GUARD_SECONDS) == 0


def test_files_that_cannot_be_used_are_told_by_name() -> None:
    with pytest.raises(ConfigError, match="--ssl-certfile /nowhere"):
        ServerConfig(ssl_certfile="/nowhere.pem").tls_options()
    with pytest.raises(ConfigError, match="--ssl-certfile"):
        ServerConfig(ssl_certfile=__file__).tls_options()
    with pytest.raises(ConfigError, match="cannot listen on /nowhere/socket"):
        bind_path("/nowhere/socket")
    with pytest.raises(ConfigError, match="--uds"):
        bind_path(__file__)  # which is no socket, and stays
    assert Path(__file__).exists()


def test_d01_running_and_queued_requests_finish_after_sigterm() -> None:
    with serving(engine={"max_num_seqs": 3}) as server, ThreadPoolExecutor() as pool:
        url = server.wait_until_healthy(GUARD_SECONDS)
        answers = [pool.submit(ask, url, "slow", stream=i < 3) for i in range(5)]
        wait_until_admitted(server, 5)
        server.signal(signal.SIGTERM)
        for answer in answers[:3]:
            assert events(answer.result())[-1]["choices"][0]["finish_reason"] == "stop"
        assert [answer.result().json()["choices"][0]["text"] for answer in answers[3:]] == ["x" * 30] * 2
        assert server.wait(GUARD_SECONDS) == 0


def test_d01_new_requests_are_refused_while_old_ones_finish() -> None:
    with serving() as server, ThreadPoolExecutor() as pool:
        url = server.wait_until_healthy(GUARD_SECONDS)
        answer = pool.submit(ask, url, "slow")
        wait_until_admitted(server, 1)
        server.signal(signal.SIGTERM)
        server.wait_until(lambda: "SIGTERM" in server.output, GUARD_SECONDS)
        assert ask(url, "new").status_code == 503
        assert answer.result().status_code == 200
        assert server.wait(GUARD_SECONDS) == 0


@pytest.mark.parametrize("times", ["once, with little time", "twice, with much time"])
def test_d01_requests_that_do_not_finish_are_ended_with_an_error(times: str) -> None:
    timeout = 0.3 if times.startswith("once") else 3600
    with serving(server={"shutdown_timeout": timeout}) as server, ThreadPoolExecutor() as pool:
        url = server.wait_until_healthy(GUARD_SECONDS)
        stream = pool.submit(ask, url, "stuck", stream=True)
        whole = pool.submit(ask, url, "stuck")
        wait_until_admitted(server, 2)
        server.signal(signal.SIGINT)
        if times.startswith("twice"):
            server.wait_until(lambda: "SIGINT" in server.output, GUARD_SECONDS)
            server.signal(signal.SIGINT)
        assert events(stream.result())[-1]["error"]["code"] == "shutting_down"
        assert whole.result().status_code == 503
        assert server.wait(10) == 0
        assert "Traceback" not in server.output


def test_a_client_that_never_reads_does_not_hold_the_server_up() -> None:
    with serving(server={"shutdown_timeout": 0}, engine={"max_model_len": 10**6}) as server:
        url = httpx.URL(server.wait_until_healthy(GUARD_SECONDS))
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.connect((url.host, url.port))
            body = json.dumps({"prompt": "flood", "max_tokens": 5000, "stream": True, "n": 100}).encode()
            connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body))
            connection.sendall(body)
            assert connection.recv(1)
            wait_until_blocked(server, url.port)
            server.signal(signal.SIGTERM)
            assert server.wait(10) == 0
            assert "Traceback" not in server.output


def test_d02_health_is_503_until_the_model_is_loaded() -> None:
    with serving(engine={"load_seconds": 1.0}) as server:
        url = server.wait_for_url()
        for path in ("/health", "/v1/models"):
            assert httpx.get(url + path).status_code == 503
        assert ask(url, "early").json()["error"]["code"] == "loading"
        server.wait_until_healthy(GUARD_SECONDS)
        assert httpx.get(f"{url}/v1/models").status_code == 200


def test_d02_the_engines_death_ends_open_requests_and_the_server() -> None:
    with serving() as server, ThreadPoolExecutor() as pool:
        url = server.wait_until_healthy(GUARD_SECONDS)
        stream = pool.submit(ask, url, "stuck", stream=True)
        whole = pool.submit(ask, url, "stuck")
        wait_until_admitted(server, 2)
        assert ask(url, "die").json()["error"]["code"] == "engine_dead"
        assert events(stream.result())[-1]["error"]["code"] == "engine_dead"
        assert whole.result().status_code == 503
        assert server.wait(10) == 1
        assert "Traceback" not in server.output


def test_d04_a_taken_port_is_told_at_once_and_by_its_number() -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        with serving(server={"port": port}) as server:
            assert server.wait(GUARD_SECONDS) == 1
            [line] = server.lines
            assert f"127.0.0.1 port {port}" in line
            assert "--port" in line


def test_d04_a_host_that_is_not_ours_is_told_in_one_line() -> None:
    with serving(server={"host": "192.0.2.1"}) as server:
        assert server.wait(GUARD_SECONDS) == 1
        assert len(server.lines) == 1


def test_d04_a_killed_server_can_be_started_again_at_once() -> None:
    with serving() as first, ThreadPoolExecutor() as pool:
        url = first.wait_until_healthy(GUARD_SECONDS)
        open_request = pool.submit(ask, url, "stuck")
        wait_until_admitted(first, 1)
        first.signal(signal.SIGKILL)
        with pytest.raises(httpx.TransportError):
            open_request.result()
        with serving(server={"port": httpx.URL(url).port}) as second:
            assert second.wait_until_healthy(GUARD_SECONDS) == url


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("load_seconds", [0, 3600])
def test_d05_a_signal_ends_an_idle_or_loading_server(number: signal.Signals, load_seconds: float) -> None:
    with serving(engine={"load_seconds": load_seconds}) as server:
        server.wait_for_url() if load_seconds else server.wait_until_healthy(GUARD_SECONDS)
        server.signal(number)
        assert server.wait(10) == 0
        assert "Traceback" not in server.output


def test_a_model_that_cannot_be_loaded_is_told_in_one_line() -> None:
    with serving(load_error="no model at /nowhere: give a folder or a packaged model") as server:
        assert server.wait(GUARD_SECONDS) == 1
        assert "Traceback" not in server.output
        assert sum("no model at /nowhere" in line for line in server.lines) == 1


@pytest.mark.parametrize("mode", ["660", "0600"])
def test_a_unix_socket_has_the_permissions_that_were_asked_for(tmp_path: Path, mode: str) -> None:
    path = tmp_path / "socket"
    with bind_path(str(path), mode):
        assert path.stat().st_mode & 0o777 == int(mode, 8)
    with pytest.raises(ConfigError, match="three octal digits"):
        ServerConfig(uds=str(path), uds_mode="rw")
