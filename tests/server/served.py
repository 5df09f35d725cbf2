"""An application behind a real uvicorn, in a thread of the test's own process."""

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator

import uvicorn
from starlette.types import ASGIApp

GUARD_SECONDS = 30.0
"""Only so that a hang fails: nothing here takes a second."""


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Returns once `condition` holds; fails if it never does."""
    deadline = time.monotonic() + GUARD_SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"never happened: {what}"
        time.sleep(0.005)


@contextlib.contextmanager
def served(app: ASGIApp) -> Iterator[str]:
    """The URL under which `app` is served meanwhile."""
    config = uvicorn.Config(
        app, log_config=None, log_level="warning", access_log=False, lifespan="off", timeout_keep_alive=600
    )
    server = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            wait_until(lambda: server.started, "uvicorn started")
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(GUARD_SECONDS)
    assert not thread.is_alive()
