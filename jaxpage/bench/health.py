"""How long /health takes to answer while a server is busy, asked by a process of its own.

In: a server's address. Out: milliseconds of each answer. The clients that keep the server busy would delay a thread of
theirs as much as the server does.
"""

import contextlib
import http.client
import json
import os
import subprocess
import sys
import threading
import time
import urllib.parse
from collections.abc import Iterator

from jaxpage.errors import ConfigError

INTERVAL_SECONDS = 0.02
_PATIENCE_SECONDS = 60.0
_NICENESS = -10


@contextlib.contextmanager
def watched(base_url: str) -> Iterator[list[float]]:
    """Ask every 20 ms meanwhile; the list is filled at the end. Raises `ConfigError` unless all answers are 200."""
    command = [sys.executable, "-m", "jaxpage.bench.health", base_url]
    times: list[float] = []
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdout.readline()  # it has begun
        try:
            yield times
        finally:
            process.stdin.close()
            said = process.stdout.read()  # `communicate` would lose what came with the first line
        try:
            times += json.loads(said)
        except ValueError:
            raise ConfigError(f"{base_url}/health does not answer as it should: {said.strip() or '?'}") from None


def main(base_url: str) -> None:
    """Ask until standard input closes; then print the milliseconds as a JSON list, or what went wrong.

    Where it may, it goes before the clients that share its processors: it is the server that is measured.
    """
    with contextlib.suppress(PermissionError):
        os.nice(_NICENESS)
    over = threading.Event()

    def watch_input() -> None:
        sys.stdin.read()
        over.set()

    threading.Thread(target=watch_input, daemon=True).start()
    parts = urllib.parse.urlsplit(base_url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.hostname or "", parts.port, timeout=_PATIENCE_SECONDS)
    times: list[float] = []
    print("asking", flush=True)
    while not times or not over.wait(INTERVAL_SECONDS):
        started = time.perf_counter()
        try:
            status, said = _ask(connection, parts.path.rstrip("/") + "/health")
        except (OSError, http.client.HTTPException) as error:
            print(f"{type(error).__name__}: {error}")
            return
        if status != 200:
            print(f"{status} {said.decode(errors='replace')}")
            return
        times.append(1e3 * (time.perf_counter() - started))
    print(json.dumps(times))


def _ask(connection: http.client.HTTPConnection, path: str) -> tuple[int, bytes]:
    """Status and body; over a new connection where the server has closed this one, as idle, just before."""
    was_open = connection.sock is not None
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
    except ConnectionError:
        connection.close()
        if not was_open:
            raise
        connection.request("GET", path)
        answer = connection.getresponse()
    return answer.status, answer.read()


if __name__ == "__main__":
    main(sys.argv[1])
