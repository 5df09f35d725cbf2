"""The engine in a process of its own, seen by its client: how it is started, talked to, and how its death is noticed.

The client binds a ROUTER socket (requests) and a PULL socket (outputs), both ipc files in a folder that only the user
can open; the engine connects with DEALER and PUSH. The engine is started as `python -m`, so that the caller's script is
never imported again; its side is `engine.main`.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec
import zmq

from jaxpage import wire
from jaxpage.config import EngineConfig
from jaxpage.engine.gpu_memory import share_for_engine
from jaxpage.errors import ConfigError, EngineDeadError

IDENTITY = b"engine"
_SHUTDOWN_SECONDS = 5.0
_MAX_FOLDER_BYTES = 80
"""The address of a Unix socket has at most 107 bytes; those of ours lie in a folder in this one."""


class EngineProcess:
    """A running engine process and the two sockets to it. Made with either kind of ZMQ context."""

    def __init__(self, config: EngineConfig, context: "zmq.Context[zmq.Socket[bytes]]") -> None:
        self._folder = _socket_folder()
        requests, outputs = f"ipc://{self._folder}/requests", f"ipc://{self._folder}/outputs"
        self.requests = context.socket(zmq.ROUTER)
        self.outputs = context.socket(zmq.PULL)
        for socket, address in ((self.requests, requests), (self.outputs, outputs)):
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.RCVHWM, 0)
            socket.setsockopt(zmq.SNDHWM, 0)
            socket.bind(address)
        options = msgspec.json.encode(config).decode()
        command = [sys.executable, "-m", "jaxpage.engine.main", requests, outputs, options]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, env=_environment())

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
        how = f"killed by {_signal_name(-code)}" if code < 0 else f"exit code {code}"
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


def _signal_name(number: int) -> str:
    """Real-time signals have no names."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _socket_folder() -> Path:
    """A folder that only the user can open, whose name is short enough for sockets in it.

    Raises `ConfigError` where neither the temporary folder nor /tmp is.
    """
    for parent in (tempfile.gettempdir(), "/tmp"):
        if len(os.fsencode(parent)) <= _MAX_FOLDER_BYTES:
            with contextlib.suppress(OSError):
                return Path(tempfile.mkdtemp(prefix="jaxpage-", dir=parent))  # mode 0700
    raise ConfigError(
        f"the temporary folder {tempfile.gettempdir()} cannot be written, or its name has more than "
        f"{_MAX_FOLDER_BYTES} bytes, too many for a socket in it, and neither will /tmp do: set TMPDIR"
    )


def _environment() -> dict[str, str]:
    """Ours, with the share of GPUs that an engine takes, and with huge pages for what the C library allocates: a large
    array costs a fault per 2 MiB and not per 4 KiB.

    What the user has set stands. https://www.gnu.org/software/libc/manual/html_node/Memory-Allocation-Tunables.html
    """
    return {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"} | share_for_engine(os.environ) | os.environ


def envelope(message: wire.ToEngine) -> list[bytes]:
    """A message as the ROUTER socket sends it."""
    return [IDENTITY, wire.encode(message)]
