"""The engine in a process of its own: how it is started, talked to, and how its death is noticed.

The client binds a ROUTER socket (requests) and a PULL socket (outputs), both ipc files in a folder that only the user can
open; the engine connects with DEALER and PUSH. The engine is started as `python -m`, so that the caller's script is never
imported again. It ends when told to, when its standard input closes (the client is gone, however it went), or when a
step raises, which it reports as `Dead` first.
"""

import contextlib
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import zmq

from jaxpage import wire
from jaxpage.config import EngineConfig
from jaxpage.errors import ConfigError, EngineDeadError, JaxpageError, ModelLoadError

logger = logging.getLogger(__name__)

_IDENTITY = b"engine"
_SHUTDOWN_SECONDS = 5.0


class EngineProcess:
    """A running engine process and the two sockets to it. Made with either kind of ZMQ context."""

    def __init__(self, config: EngineConfig, context: "zmq.Context[zmq.Socket[bytes]]") -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="jaxpage-"))  # mode 0700
        requests, outputs = f"ipc://{self._folder}/requests", f"ipc://{self._folder}/outputs"
        self.requests = context.socket(zmq.ROUTER)
        self.outputs = context.socket(zmq.PULL)
        for socket, address in ((self.requests, requests), (self.outputs, outputs)):
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.RCVHWM, 0)
            socket.setsockopt(zmq.SNDHWM, 0)
            socket.bind(address)
        options = msgspec.json.encode(config).decode()
        command = [sys.executable, "-m", "jaxpage.engine_process", requests, outputs, options]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE)

    @property
    def pid(self) -> int:
        return self._process.pid

    def exit_code(self) -> int | None:
        """None while the process runs."""
        return self._process.poll()

    def death(self) -> EngineDeadError | None:
        """The error to raise if the process has ended without a word."""
        code = self.exit_code()
        if code is None:
            return None
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return EngineDeadError(f"the engine process ended unexpectedly ({how}): see its log above, and start it again")

    def stop(self) -> None:
        """End the process, by force if it does not go; returns when it is gone. Idempotent."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(_SHUTDOWN_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for socket in (self.requests, self.outputs):
            socket.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def envelope(message: wire.ToEngine) -> list[bytes]:
    """A message as the ROUTER socket sends it."""
    return [_IDENTITY, wire.encode(message)]


def error_of(dead: wire.Dead) -> JaxpageError:
    """The exception that a `Dead` message stands for."""
    kinds: dict[str, type[JaxpageError]] = {kind.__name__: kind for kind in (ModelLoadError, ConfigError)}
    return kinds.get(dead.kind, EngineDeadError)(dead.message)


def main(requests: str, outputs: str, options: str) -> int:
    """The engine process. Returns its exit code."""
    logging.basicConfig(level=logging.INFO, format="%(levelname)s engine: %(message)s")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the client decides what it means
    threading.Thread(target=_exit_with_client, name="client watch", daemon=True).start()
    context = zmq.Context()
    inbox, outbox = context.socket(zmq.DEALER), context.socket(zmq.PUSH)
    inbox.setsockopt(zmq.IDENTITY, _IDENTITY)
    outbox.setsockopt(zmq.LINGER, 1000)  # last words
    for socket, address in ((inbox, requests), (outbox, outputs)):
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.connect(address)
    outbox.send(wire.encode(wire.Hello()))
    try:
        _serve(msgspec.json.decode(options, type=EngineConfig), inbox, outbox)
    except JaxpageError as error:
        outbox.send(wire.encode(wire.Dead(type(error).__name__, str(error))))
        return 1
    except Exception as error:
        logger.exception("the engine ends")
        outbox.send(wire.encode(wire.Dead(type(error).__name__, f"the engine failed: {error!r}")))
        return 1
    finally:
        outbox.close()
        context.destroy(linger=1000)
    return 0


def _serve(config: EngineConfig, inbox: "zmq.Socket[bytes]", outbox: "zmq.Socket[bytes]") -> None:
    """Load, say so, and step until told to stop."""
    from jaxpage.engine_core import EngineCore

    core = EngineCore(config, progress=_show_progress)
    outbox.send(wire.encode(core.ready))
    while True:
        aborted = False
        for message in _received(inbox, wait=not core.has_requests):
            match message:
                case wire.AddRequest():
                    core.add(message)
                case wire.AbortRequests():
                    for request_id in message.request_ids:
                        core.abort(request_id)
                    aborted = True
                case wire.Shutdown():
                    return
        outputs = core.step()
        if outputs or aborted:
            outbox.send(wire.encode(wire.Outputs(outputs, core.stats())))


def _received(inbox: "zmq.Socket[bytes]", wait: bool) -> Iterator[wire.ToEngine]:
    """Every message that has arrived; with `wait`, blocks for the first. A request whose abort is here, too, is left out."""
    messages = [wire.decode_to_engine(inbox.recv())] if wait else []
    with contextlib.suppress(zmq.Again):
        while True:
            messages.append(wire.decode_to_engine(inbox.recv(zmq.NOBLOCK)))
    aborted = {i for message in messages if isinstance(message, wire.AbortRequests) for i in message.request_ids}
    for message in messages:
        if not (isinstance(message, wire.AddRequest) and message.request_id in aborted):
            yield message


def _show_progress(done: int, total: int) -> None:
    """One line on a terminal, redrawn; elsewhere a log line when all is done."""
    if sys.stderr.isatty():
        bar = "█" * (30 * done // total)
        print(f"\rpreparing programs {bar:<30} {done}/{total}", end="\n" if done == total else "", file=sys.stderr, flush=True)
    elif done == total:
        logger.info("all %d programs are ready", total)


def _exit_with_client() -> None:
    """The client holds the other end of standard input; when it closes, nobody is left to serve."""
    sys.stdin.buffer.read()
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
