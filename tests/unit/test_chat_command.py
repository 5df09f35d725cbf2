"""`jaxpage chat`: the conversation, its commands, and what pipes and terminals are shown."""

import io
import json
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from jaxpage.chat.connection import HttpConnection, answer, served_model
from jaxpage.chat.conversation import Conversation, Piece
from jaxpage.chat.terminal import Chat, Interrupts, chat, history_file, messages, typed
from jaxpage.cli import main
from jaxpage.errors import RequestError


class ScriptedReply:
    def __init__(self, status: int, pieces: Sequence[bytes]) -> None:
        self.status = status
        self.pieces = pieces
        self.is_closed = False

    def __iter__(self) -> Iterator[bytes]:
        yield from self.pieces

    def close(self) -> None:
        self.is_closed = True


class ScriptedServer:
    """Gives its replies in turn, and keeps what it was asked."""

    def __init__(self, *replies: ScriptedReply) -> None:
        self.replies = list(replies)
        self.given: list[ScriptedReply] = []
        self.bodies: list[dict[str, Any]] = []

    def request(self, method: str, path: str, body: bytes = b"") -> ScriptedReply:
        self.bodies.append(json.loads(body or b"{}"))
        self.given.append(self.replies.pop(0))
        return self.given[-1]


def stream(*texts: str, finish_reason: str = "stop", key: str = "content") -> ScriptedReply:
    deltas: list[Any] = [{"delta": {"role": "assistant"}}, *({"delta": {key: text}} for text in texts)]
    chunks = [{"choices": [delta]} for delta in [*deltas, {"delta": {}, "finish_reason": finish_reason}]]
    lines = [*(f"data: {json.dumps(chunk, ensure_ascii=False)}" for chunk in chunks), "data: [DONE]", ""]
    return ScriptedReply(200, ["\n\n".join(lines).encode()])


def refusal(status: int, message: str) -> ScriptedReply:
    return ScriptedReply(status, [json.dumps({"error": {"message": message}}).encode()])


def conversation(*replies: ScriptedReply, **options: Any) -> tuple[Conversation, ScriptedServer]:
    server = ScriptedServer(*replies)
    return Conversation(server, "a-model", options), server


def said(pieces: Iterator[Piece]) -> str:
    return "".join(piece.text for piece in pieces)


def talk(capsys: pytest.CaptureFixture[str], conversation: Conversation, *lines: str, is_terminal: bool = False) -> Any:
    """What is shown to someone who says `lines`."""
    shown = Chat(conversation, sys.stdout, Interrupts() if is_terminal else None)
    codes = [shown.take(line) for line in lines]
    return codes, capsys.readouterr()


def test_every_turn_is_asked_with_all_that_was_said_before() -> None:
    talked, server = conversation(stream("A", "B"), stream("C"), temperature=0.5)
    talked.system = "Be brief."
    assert said(talked.ask("one")) == "AB"
    assert said(talked.ask("two")) == "C"
    assert [message["content"] for message in server.bodies[1]["messages"]] == ["Be brief.", "one", "AB", "two"]
    assert [message["role"] for message in server.bodies[1]["messages"]] == ["system", "user", "assistant", "user"]
    assert server.bodies[1].items() >= {"model": "a-model", "temperature": 0.5, "stream": True}.items()


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_an_answer_is_the_same_however_its_bytes_are_cut(size: int) -> None:
    (text,) = stream("漢字 ", "🦙").pieces
    text = b": a comment\r\n\r\n" + text
    server = ScriptedServer(ScriptedReply(200, [text[at : at + size] for at in range(0, len(text), size)]))
    assert said(Conversation(server, "m", {}).ask("x")) == "漢字 🦙"


def test_a_message_that_is_refused_is_not_kept_and_can_be_tried_again() -> None:
    talked, server = conversation(stream("A"), refusal(400, "too long"), stream("B"))
    said(talked.ask("one"))
    with pytest.raises(RequestError, match=r"^too long \(status 400\)$"):
        said(talked.ask("two"))
    assert [message["content"] for message in talked.messages] == ["one", "A"]
    assert said(talked.retry()) == "B"
    assert [message["content"] for message in server.bodies[2]["messages"]] == ["one", "A", "two"]


def test_retry_replaces_the_last_answer_alone() -> None:
    talked, server = conversation(stream("A"), stream("B"), stream("C"))
    said(talked.ask("same"))
    said(talked.ask("same"))
    assert said(talked.retry()) == "C"
    assert [message["content"] for message in server.bodies[2]["messages"]] == ["same", "A", "same"]
    assert [message["content"] for message in talked.messages] == ["same", "A", "same", "C"]
    talked.reset()
    with pytest.raises(RequestError, match="no message to answer again"):
        talked.retry()


def test_an_answer_that_is_left_early_hangs_up_and_keeps_what_came() -> None:
    talked, server = conversation(stream("A", "B", "C"))
    pieces = talked.ask("one")
    assert next(pieces).text == "A"
    pieces.close()
    assert server.given[0].is_closed
    assert [message["content"] for message in talked.messages] == ["one", "A"]
    assert talked.finish_reason is None


@pytest.mark.parametrize(
    ("reply", "says"),
    [
        (ScriptedReply(200, [b'data: {"error": {"message": "the engine\\ndied"}}\n\ndata: [DONE]\n\n']), "engine died"),
        (ScriptedReply(200, [b'data: {"choices": []}\n\n']), "the answer broke off"),
        (ScriptedReply(200, [b"data: no JSON\n\n"]), "does not speak OpenAI's protocol"),
        (ScriptedReply(502, [b"<html>bad gateway</html>"]), "bad gateway"),
        (ScriptedReply(503, []), "Service Unavailable (status 503)"),
    ],
)
def test_whatever_goes_wrong_is_one_line(reply: ScriptedReply, says: str) -> None:
    with pytest.raises(RequestError) as raised:
        list(answer(ScriptedServer(reply), {}))
    assert says in str(raised.value)
    assert "\n" not in str(raised.value)
    assert reply.is_closed


def test_a_server_without_models_is_an_error() -> None:
    with pytest.raises(RequestError, match="names no model"):
        served_model(ScriptedServer(ScriptedReply(200, [b'{"data": []}'])))


def test_a_pipe_gets_answers_alone(capsys: pytest.CaptureFixture[str]) -> None:
    talked, _ = conversation(stream("thought", key="reasoning_content"), stream("\x1b[1mA"))
    codes, shown = talk(capsys, talked, "one", "/system be brief", "", "two")
    assert (codes, shown.out, shown.err) == ([0, 0, 0, 0], "\n\x1b[1mA\n", "")
    assert talked.system == "be brief"


def test_a_terminal_is_shown_reasoning_apart_and_no_control_characters_of_the_model(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    thought, answered = stream("hm", key="reasoning"), stream("\x1b[1mA\tB\n", "\x9b1m\x07C", finish_reason="length")
    (first,), (second,) = thought.pieces, answered.pieces
    talked, _ = conversation(ScriptedReply(200, [first.split(b'data: {"choices": [{"delta": {}')[0], second]))
    _, shown = talk(capsys, talked, "one", is_terminal=True)
    assert shown.out.startswith("\x1b[2mhm\x1b[0m\n\n[1mA\tB\n1mC\n\x1b[2m(cut off")


def test_where_there_are_no_colours_nothing_is_styled(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    talked, _ = conversation(stream("hm", key="reasoning"))
    _, shown = talk(capsys, talked, "one", "/reset", is_terminal=True)
    assert shown.out == "hm\n(what has been said is forgotten)\n"


def test_commands_that_cannot_be_done_are_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    talked, _ = conversation()
    lines = ["/nope", "/save", f"/save {tmp_path}/no/folder.json", "/retry"]
    codes, shown = talk(capsys, talked, *lines)
    assert codes == [1] * 4
    errors = shown.err.splitlines()
    assert len(errors) == 4
    wanted = ["no command /nope", "takes the name of a file", "No such file", "answer again"]
    for line, says in zip(errors, wanted, strict=True):
        assert line.startswith("jaxpage: ")
        assert says in line


def test_a_saved_conversation_is_the_body_of_a_request(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    talked, _ = conversation(stream("ü"), top_p=0.5)
    file = tmp_path / "chat.json"
    assert talk(capsys, talked, "one", f"/save {file}")[0] == [0, 0]
    body = {"top_p": 0.5, "model": "a-model", "messages": talked.messages}
    assert json.loads(file.read_text("utf-8")) == body


def test_help_names_every_command_and_quit_ends(capsys: pytest.CaptureFixture[str]) -> None:
    talked, server = conversation()
    _, shown = talk(capsys, talked, "/help", "/quit", "one")
    assert all(f"/{name}" in shown.out for name in ("system", "retry", "reset", "save", "help", "quit"))
    assert server.bodies == []


def test_lines_between_triple_quotes_are_one_message() -> None:
    lines = ["a\n", '"""b\n', "/c\n", ' d"""\r\n', '"""e"""\n', '"""f\n', "g"]
    assert list(messages(iter(lines))) == ["a", "b\n/c\n d", "e", "f\ng"]


@pytest.mark.parametrize(("whole", "asked"), [(False, ["one", "/two"]), (True, ["one\n /two\n\n/three"])])
def test_a_pipe_is_read_by_lines_or_as_a_whole(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, whole: bool, asked: list[str]
) -> None:
    talked, server = conversation(stream("A"), stream("B"))
    monkeypatch.setattr(sys, "stdin", io.StringIO("one\n /two\n\n/three\nfour\n"[: 17 if whole else None]))
    assert chat(talked, whole_input=whole) == (0 if whole else 1), "/three is no command, and ends it"
    assert [body["messages"][-1]["content"] for body in server.bodies] == asked
    capsys.readouterr()


@pytest.mark.parametrize("whole", [False, True])
def test_a_pipe_that_is_no_utf_8_is_one_error(monkeypatch: pytest.MonkeyPatch, whole: bool) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9\n"), "utf-8"))
    with pytest.raises(RequestError, match="the input is no UTF-8"):
        chat(conversation()[0], whole_input=whole)


def test_the_history_is_kept_in_the_folder_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "/state")
    assert str(history_file()) == "/state/jaxpage/chat_history"
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", "/home/me")
    assert str(history_file()) == "/home/me/.local/state/jaxpage/chat_history"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--url", "localhost:8000"], "it must begin with http:// or https://"),
        (["--url", "http://127.0.0.1:1"], "cannot reach http://127.0.0.1:1/v1/models: [Errno 111] Connection refused"),
        (["--url", "http://127.0.0.1:1", "--max-num-seqs", "4"], "--max-num-seqs is for an engine in process"),
        (["no-such-model"], "no-such-model"),
    ],
)
def test_a_chat_that_cannot_begin_is_one_line(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, arguments: list[str], says: str
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n"))
    assert main(["chat", *arguments]) == 1
    error = capfd.readouterr().err
    assert says in error
    assert error.count("jaxpage: ") == 1
    assert "Traceback" not in error


def test_a_url_may_end_in_v1_and_the_key_is_sent() -> None:
    connection = HttpConnection("https://example.com/v1/", "secret")
    assert connection._base == "https://example.com"
    assert connection._headers["Authorization"] == "Bearer secret"


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_at_the_prompt_gives_up_a_line_and_at_other_times_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    presses = iter(["\x03", "hello", "\x04"])

    def pressed(_: str) -> str:
        match next(presses):
            case "\x03":
                signal.raise_signal(signal.SIGINT)
            case "\x04":
                raise EOFError
        return "hello"

    monkeypatch.setattr("builtins.input", pressed)
    interrupts = Interrupts()
    with interrupts.taken():
        lines = typed(interrupts)
        assert next(lines) == "hello"
        assert next(presses) == "\x04"  # the first was given up
        signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
