"""The server's life, from binding the port to the exit code.

In: options. Out: an exit code, 0 after a signal and 1 after a failure. The port is taken before anything is loaded.

    bind ── load ── serve ──┬─ signal ─ refuse new requests ─ wait ─ end open requests ─┬─ stop the engine ─ exit
                            └─ engine dies (it ends the open requests) ─────────────────┘

The first SIGTERM or SIGINT gives running requests `shutdown_timeout` seconds, a second one none. It may come at any
time, also while the model loads.
"""

import asyncio
import contextlib
import functools
import gc
import json
import logging
import os
import signal
import socket
import stat
from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING, cast

import uvicorn
import uvloop

from jaxpage.config import EngineConfig
from jaxpage.errors import ConfigError, JaxpageError
from jaxpage.server.app import build_app
from jaxpage.server.service import Service
from jaxpage.server.turnstile import ConnectionLimits, QueuedProtocol, Turnstile
from jaxpage.server_config import ServerConfig

if TYPE_CHECKING:
    from jaxpage.async_engine import AsyncEngine

logger = logging.getLogger(__name__)

BACKLOG = 2048
"""Connections that may wait to be accepted."""
COLLECTOR_THRESHOLDS = (700, 2, 500)
"""The middle generation is looked through in pieces of 3 ms and not 15, and all of it a fiftieth as often: 500 open
requests take 50 ms and, when they have ended, leave no cycles."""
IDLE_POLL_SECONDS = 0.02
FLUSH_SECONDS = 0.5
"""How long a client may take to read the end of a response that was ended for it."""


def serve(engine_config: EngineConfig, server_config: ServerConfig) -> int:
    """Serve until a signal or a failure; returns the exit code. Failures are logged in one line, never raised."""
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    try:
        with listening(server_config) as listener:
            # Imported only now: it brings the tokenizer's libraries, and a taken port is told at once.
            from jaxpage.async_engine import AsyncEngine

            return asyncio.run(
                run(AsyncEngine(engine_config), listener, server_config), loop_factory=uvloop.new_event_loop
            )
    except JaxpageError as error:
        logger.error("%s", error)
        return 1


@contextlib.contextmanager
def listening(config: ServerConfig) -> Iterator[socket.socket]:
    """A listening socket, gone afterwards. Raises `ConfigError` that names what cannot be had."""
    if config.uds is None:
        with contextlib.closing(bind(config.host, config.port)) as listener:
            yield listener
        return
    with contextlib.closing(bind_path(config.uds, config.uds_mode)) as listener:
        try:
            yield listener
        finally:
            with contextlib.suppress(OSError):
                os.unlink(config.uds)


def bind(host: str, port: int) -> socket.socket:
    """A listening socket. Raises `ConfigError` that names host and port if they cannot be had."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        return socket.create_server(address, family=family, backlog=BACKLOG)  # with SO_REUSEADDR: restarts bind at once
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {host} port {port}: {error.strerror}: free the port or choose another with --port"
        ) from error


def bind_path(path: str, mode: str = "") -> socket.socket:
    """A listening Unix socket, in place of one that a killed server has left; `mode` is octal, '' for the umask's.

    Raises `ConfigError` that names the path.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if is_abandoned(path):
            os.unlink(path)
        listener.bind(path)
        if mode:
            os.chmod(path, int(mode, 8))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen on {path}: {error.strerror or error}: choose another with --uds") from error
    return listener


def is_abandoned(path: str) -> bool:
    """Whether `path` is a Unix socket that nobody listens on."""
    if not os.path.exists(path) or not stat.S_ISSOCK(os.stat(path).st_mode):
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            return True
    return False


async def run(engine: "AsyncEngine", listener: socket.socket, server_config: ServerConfig) -> int:
    """Load `engine`, serve it on `listener`, stop both; returns the exit code."""
    app = build_app(engine, server_config)
    limits = ConnectionLimits(server_config.read_timeout, server_config.write_timeout, server_config.max_connections)
    config = uvicorn.Config(
        app,
        http=cast("type[asyncio.Protocol]", functools.partial(QueuedProtocol, Turnstile(), limits)),
        log_config=None,
        log_level="warning",
        access_log=False,
        lifespan="off",
        backlog=BACKLOG,
        timeout_keep_alive=server_config.keep_alive_timeout,
        ws="none",
        root_path=server_config.root_path,
        **server_config.tls_options(),
    )
    server = Server(config)
    with signals() as signalled:
        try:
            serving = asyncio.create_task(server.serve(sockets=[listener]))
            stopping = asyncio.create_task(signalled.get())
            failing = asyncio.create_task(
                run_engine(app.state.service, url_of(listener, server_config), server_config.uds)
            )
            await asyncio.wait({serving, stopping, failing}, return_when=asyncio.FIRST_COMPLETED)
            if stopping.done():
                logger.info("%s: running requests have %g s", stopping.result(), server_config.shutdown_timeout)
                await stop(server, serving, app.state.service, signalled, server_config.shutdown_timeout)
                return 0
            if serving.done() and (error := serving.exception()) is not None:
                logger.error("the HTTP server failed", exc_info=error)
            await stop(server, serving, app.state.service, signalled, FLUSH_SECONDS)
            return 1
        finally:
            for task in (serving, stopping, failing):
                task.cancel()
            await asyncio.gather(serving, stopping, failing, return_exceptions=True)
            await engine.close()


async def run_engine(service: Service, url: str, uds: str | None) -> None:
    """Load the service's engine and watch it. Returns, having logged why, when it could not start or has died."""
    engine, model_name = service.engine, service.model_name
    where, option = (url, "") if uds is None else (f"{url}, Unix socket {uds}", f"--unix-socket {uds} ")
    print(f"listening on {where} while {model_name} loads", flush=True)
    try:
        await engine.start()
        freeze_gc()
        await engine.wait_ready()
        _ = service.dialect  # it logs what is chosen
    except JaxpageError as error:
        logger.error("cannot serve %s: %s", model_name, error)
        return
    except Exception:
        logger.exception("cannot serve %s", model_name)
        return
    message = json.dumps({"messages": [{"role": "user", "content": "What is a cat?"}], "max_tokens": 32})
    print(f"ready: {model_name} at {url}/v1, at most {engine.max_model_len} tokens per request; try", flush=True)
    print(f"  curl {option}{url}/v1/chat/completions -d '{message}'", flush=True)
    await engine.wait_dead()
    logger.error("the engine died: open requests end with an error, the server stops")


async def stop(
    server: "Server", serving: asyncio.Task[None], service: Service, signalled: asyncio.Queue[str], grace: float
) -> None:
    """Refuse new requests, give the running ones `grace` seconds or until a signal, then end them."""
    service.draining = True
    again = asyncio.create_task(signalled.get())
    idle = asyncio.create_task(_idle(server))
    await asyncio.wait({serving, again, idle}, timeout=grace, return_when=asyncio.FIRST_COMPLETED)
    idle.cancel()
    again.cancel()
    server.should_exit = True
    service.end_open_requests()
    await asyncio.wait({serving}, timeout=FLUSH_SECONDS)
    for connection in tuple(server.server_state.connections):  # of clients that do not read
        connection.transport.abort()
    await asyncio.wait({serving}, timeout=FLUSH_SECONDS)


async def _idle(server: "Server") -> None:
    """Returns once no request is open; until then new connections are taken, and told that the server stops."""
    while server.server_state.tasks:
        await asyncio.sleep(IDLE_POLL_SECONDS)


class Server(uvicorn.Server):
    """uvicorn without signal handling of its own, which would end the process before the engine is stopped."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Leaves signals alone."""
        yield


@contextlib.contextmanager
def signals() -> Iterator[asyncio.Queue[str]]:
    """A queue of the names of the SIGTERMs and SIGINTs that arrive meanwhile."""
    loop = asyncio.get_running_loop()
    queue: asyncio.Queue[str] = asyncio.Queue()
    handled = (signal.SIGTERM, signal.SIGINT)
    for number in handled:
        loop.add_signal_handler(number, queue.put_nowait, number.name)
    try:
        yield queue
    finally:
        for number in handled:
            loop.remove_signal_handler(number)


def url_of(listener: socket.socket, config: ServerConfig) -> str:
    """An address at which `listener` can be reached from this machine, without a proxy's prefix."""
    scheme = "http" if config.ssl_certfile is None else "https"
    if config.uds is not None:
        return f"{scheme}://localhost"
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def freeze_gc() -> None:
    """What is there before serving stays: looking through it for garbage takes a tenth of a second each time.

    What a burst of requests brings is looked through in small pieces.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*COLLECTOR_THRESHOLDS)
