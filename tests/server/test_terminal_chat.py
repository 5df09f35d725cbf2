"""`jaxpage chat` as a process of its own: over HTTP in a terminal, and with an engine in process."""

import asyncio
import contextlib
import io
import os
import pty
import select
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import ready_engine
from fake_engine import FakeEngine, Script
from served import GUARD_SECONDS, served, wait_until

from jaxpage.chat.connection import HttpConnection, served_model
from jaxpage.chat.conversation import Conversation
from jaxpage.chat.terminal import Chat
from jaxpage.errors import ModelLoadError, RequestError
from jaxpage.server.app import build_app
from jaxpage.server.in_process import LocalServer
from jaxpage.server_config import ServerConfig


class Terminal:
    """A `jaxpage chat` whose standard input and output are a terminal."""

    def __init__(self, home: Path, *arguments: str) -> None:
        self._ours, theirs = pty.openpty()
        self.shown = ""
        self.process = subprocess.Popen(
            [sys.executable, "-c", _TAKE_TERMINAL, "-m", "jaxpage", "chat", *arguments],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            env={**os.environ, "XDG_STATE_HOME": str(home), "TERM": "xterm", "INPUTRC": "/dev/null"},
        )
        os.close(theirs)

    def type(self, text: str) -> None:
        """Press these keys."""
        os.write(self._ours, text.encode())

    def wait_for(self, text: str) -> str:
        """What has been shown until `text`, which is taken off. Fails if it never comes."""
        deadline = time.monotonic() + 2 * GUARD_SECONDS
        while text not in self.shown:
            assert time.monotonic() < deadline, f"{text!r} never came: {self.shown!r}"
            if select.select([self._ours], [], [], 0.05)[0]:
                with contextlib.suppress(OSError):  # it is over
                    self.shown += os.read(self._ours, 65536).decode("utf-8", "replace")
        found, _, self.shown = self.shown.partition(text)
        return found

    def close(self) -> None:
        """End it if it has not ended."""
        self.process.kill()
        self.process.wait()
        os.close(self._ours)


_TAKE_TERMINAL = """
import fcntl, os, signal, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
signal.signal(signal.SIGINT, signal.SIG_DFL)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""
"""So that Ctrl-C is a signal, also in a run that was started in the background."""


@pytest.fixture
def terminal(engine: FakeEngine, url: str, tmp_path: Path) -> Iterator[Terminal]:
    """A chat with the shared server."""
    found = Terminal(tmp_path, "--url", url)
    found.wait_for("> ")
    yield found
    found.close()


def test_ctrl_c_stops_an_answer_and_keeps_the_chat(terminal: Terminal, engine: FakeEngine, tmp_path: Path) -> None:
    engine.scripts = {"slow": Script("abcdef", stall_after=3)}
    terminal.type("slow\n")
    terminal.wait_for("abc")
    terminal.type("\x03")
    terminal.wait_for("(stopped)")
    wait_until(lambda: engine.num_open == 0, "the request is aborted")
    engine.scripts = {"slow": Script("again")}
    terminal.type("/retry\n")
    terminal.wait_for("again")
    terminal.wait_for("> ")
    terminal.type("\x04")
    assert terminal.process.wait(GUARD_SECONDS) == 0
    assert (tmp_path / "jaxpage" / "chat_history").read_text().splitlines()[-2:] == ["slow", "/retry"]


def test_an_earlier_line_is_edited_and_sent_again(terminal: Terminal, engine: FakeEngine) -> None:
    engine.scripts = {"first!": Script("edited"), "first": Script("plain")}
    terminal.type("first\n")
    terminal.wait_for("plain")
    terminal.wait_for("> ")
    terminal.type("/reset\n")
    terminal.wait_for("> ")
    terminal.type("\x1b[A\x1b[A!\n")  # twice up
    terminal.wait_for("edited")
    terminal.type("/quit\n")
    assert terminal.process.wait(GUARD_SECONDS) == 0


def test_an_answer_comes_over_http_as_it_is_written(engine: FakeEngine, url: str) -> None:
    engine.scripts = {"stuck": Script("abcdef", stall_after=2)}
    talked = Conversation(HttpConnection(f"{url}/v1", None), "fake", {})
    pieces = talked.ask("stuck")
    came = ""
    while came != "ab":
        came += next(pieces).text
    pieces.close()
    assert [message["content"] for message in talked.messages] == ["stuck", "ab"]


def test_a_server_says_which_model_it_has_and_why_it_refuses(url: str) -> None:
    connection = HttpConnection(url, None)
    assert served_model(connection) == "fake"
    with pytest.raises(RequestError, match=r"^the model 'other' does not exist: .* \(status 404\)$"):
        list(Conversation(connection, "other", {}).ask("x"))
    with pytest.raises(RequestError, match=r"temperature is 3.0.* \(status 400\)$"):
        list(Conversation(connection, "fake", {"temperature": 3.0}).ask("x"))


def test_a_key_opens_a_server_that_wants_one() -> None:
    app = build_app(ready_engine(), ServerConfig(api_key=("secret",)))
    with served(app) as url:
        assert served_model(HttpConnection(url, "secret")) == "fake"
        with pytest.raises(RequestError, match="status 401"):
            served_model(HttpConnection(url, "wrong"))


def test_a_pipe_gets_the_answers_of_an_engine_in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAXPAGE_API_KEY", "for-clients-of-the-server")
    engine = ready_engine()
    engine.scripts = {"one": Script("first"), "stuck": Script("abc", stall_after=1)}
    with LocalServer(lambda: engine, ServerConfig()) as local:
        out = io.StringIO()
        talked = Conversation(local, served_model(local), {})
        assert Chat(talked, out).take("one") == 0
        assert out.getvalue() == "first\n"
        talked.reset()
        pieces = talked.ask("stuck")
        assert next(pieces).text == "a"
        pieces.close()
        wait_until(lambda: engine.num_open == 0, "the request is aborted")
        with pytest.raises(RequestError, match="the model 'other' does not exist"):
            list(Conversation(local, "other", {}).ask("x"))
    assert engine.is_shut_down


def test_an_engine_that_cannot_load_says_why() -> None:
    engine = FakeEngine(load_error=ModelLoadError("no weights"))
    with pytest.raises(ModelLoadError, match="no weights"), LocalServer(lambda: engine, ServerConfig()):  # type: ignore[arg-type, return-value]
        pass
    assert engine.is_shut_down


def test_an_engine_that_is_given_up_while_it_loads_is_shut_down() -> None:
    engine = FakeEngine(load_seconds=600)
    local = LocalServer(lambda: engine, ServerConfig())  # type: ignore[arg-type, return-value]

    def enter() -> None:
        with contextlib.suppress(asyncio.CancelledError):
            local.__enter__()

    entering = threading.Thread(target=enter)
    entering.start()
    local.close()
    entering.join(GUARD_SECONDS)
    assert not entering.is_alive()
    assert engine.is_shut_down
