"""A server in a process of its own, as its tests see it: what it prints, its URL, its descendants, its end."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import httpx


class ServerProcess:
    """`python *arguments` and everything that it has printed so far."""

    def __init__(self, *arguments: str) -> None:
        self.lines: list[str] = []
        self.process = subprocess.Popen(
            [sys.executable, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    @property
    def output(self) -> str:
        """All that has been printed."""
        return "".join(self.lines)

    @property
    def descendants(self) -> set[int]:
        """Process ids of children, their children, and so on."""
        found: set[int] = set()
        parents = [self.process.pid]
        while parents:
            for children in Path(f"/proc/{parents.pop()}/task").glob("*/children"):
                with contextlib.suppress(OSError):
                    new = set(map(int, children.read_text().split())) - found
                    found |= new
                    parents += new
        return found

    def wait_for_url(self, timeout: float = 60.0) -> str:
        """The address that it says it listens on."""
        self.wait_until(lambda: "listening on" in self.output, timeout)
        found = re.search(r"listening on (http://\S+)", self.output)
        assert found is not None, self.output
        return found[1]

    def wait_until_healthy(self, timeout: float) -> str:
        """The address, once a request would be served there."""
        url = self.wait_for_url(timeout)
        self.wait_until(lambda: httpx.get(f"{url}/health", timeout=timeout).status_code == 200, timeout)
        return url

    def wait_until(self, condition: Callable[[], bool], timeout: float) -> None:
        """Returns once `condition` holds; fails, with all output, if it does not or the process ends first."""
        deadline = time.monotonic() + timeout
        while not condition():
            assert time.monotonic() < deadline, f"timed out after {timeout} s:\n{self.output}"
            assert self.process.poll() is None or condition(), f"ended early:\n{self.output}"
            time.sleep(0.02)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the server itself, not to its children."""
        self.process.send_signal(number)

    def kill_descendants(self) -> None:
        """SIGKILL to every child and below; the server itself goes on."""
        for pid in self.descendants:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def wait(self, timeout: float) -> int:
        """The exit code; fails if it does not end in time."""
        try:
            code = self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {timeout} s:\n{self.output}") from None
        self._reader.join(timeout)
        return code

    def close(self) -> None:
        """End it the hard way, whatever state it is in."""
        self.process.kill()
        self.process.wait()
        self._reader.join(5)
        assert self.process.stdout is not None
        self.process.stdout.close()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)


def wait_until_gone(pids: Iterable[int], timeout: float) -> None:
    """Returns once none of `pids` runs; fails if one goes on."""
    deadline = time.monotonic() + timeout
    while running := [pid for pid in pids if is_running(pid)]:
        assert time.monotonic() < deadline, f"still running after {timeout} s: {running}"
        time.sleep(0.02)


def is_running(pid: int) -> bool:
    """Whether `pid` is a process that still runs; a zombie does not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


@contextlib.contextmanager
def server_process(*arguments: str) -> Iterator[ServerProcess]:
    """A `ServerProcess` that is gone at the end, whatever happens."""
    server = ServerProcess(*arguments)
    try:
        yield server
    finally:
        server.close()
