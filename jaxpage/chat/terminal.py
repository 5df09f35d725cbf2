"""The chat as a person sees it: a prompt with line editing and a history, answers as they are written, commands.

In: lines from a terminal or a pipe. Out: answers on standard output, everything else on standard error, and an exit
code. A pipe gets answers alone, without colours; its first failure ends the chat.
"""

import contextlib
import os
import signal
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TextIO

from jaxpage.chat.conversation import Conversation, Piece
from jaxpage.errors import RequestError

HELP = """\
/system TEXT   set the system message; without a text, remove it
/retry         answer the last message again
/reset         forget what has been said; the system message stays
/save FILE     write the conversation to a file, as the body of a request
/help          show this
/quit          end; so does Ctrl-D
Ctrl-C stops an answer. Lines between \"\"\" and \"\"\" are one message; a space before / makes it a message."""
_QUOTES = '"""'
_MAX_HISTORY = 1000
_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"
_CONTROLS = dict.fromkeys([*range(9), *range(11, 32), *range(127, 160)])
"""Characters that could make a terminal do something: all controls but tab and line feed."""


def chat(conversation: Conversation, *, whole_input: bool = False) -> int:
    """Talk until the input ends; returns the exit code: 0, or 1 if a message from a pipe got no answer.

    whole_input: all of the input is one message, and not each line one.
    """
    if whole_input or not (sys.stdin.isatty() and sys.stdout.isatty()):
        shown = Chat(conversation, sys.stdout)
        try:
            if whole_input:
                return shown.take(sys.stdin.read(), as_is=True)
            return next((code for line in messages(sys.stdin) if (code := shown.take(line))), 0)
        except UnicodeDecodeError as error:
            raise RequestError(f"the input is no UTF-8: {error}") from error
    interrupts = Interrupts()
    shown = Chat(conversation, sys.stdout, interrupts)
    with interrupts.taken(), line_editing():
        print(f"{conversation.model} · /help lists the commands, Ctrl-D ends the chat")
        for line in messages(typed(interrupts)):
            shown.take(line)
            if shown.is_over:
                break
    return 0


class Interrupts:
    """Ctrl-C, which stops what is under way, and never the chat."""

    def __init__(self) -> None:
        self.stop_something = False
        """Whether there is anything to stop; the next Ctrl-C raises `KeyboardInterrupt` and sets it back."""

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        """Meanwhile, Ctrl-C does nothing else."""
        before = signal.signal(signal.SIGINT, self._stop)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    def _stop(self, *_: object) -> None:
        if self.stop_something:
            self.stop_something = False
            raise KeyboardInterrupt


class Chat:
    """A conversation and where it is shown."""

    def __init__(self, conversation: Conversation, out: TextIO, interrupts: Interrupts | None = None) -> None:
        """interrupts: Ctrl-C, where that is a terminal."""
        self._conversation = conversation
        self._out = out
        self._interrupts = interrupts
        self._is_terminal = is_terminal = interrupts is not None
        self._has_styles = is_terminal and os.environ.get("TERM") != "dumb" and not os.environ.get("NO_COLOR")
        self._is_dim = False
        self.is_over = False
        """Whether the user has asked to end."""

    def take(self, line: str, *, as_is: bool = False) -> int:
        """Answer a message or do what a command says; returns 1 if that failed. `as_is`: it is no command."""
        if self.is_over or not line.strip():
            return 0
        try:
            if line.startswith("/") and not as_is:
                self._command(*line.rstrip().partition(" ")[::2])
            else:
                self._show(self._conversation.ask(line.strip()))
        except RequestError as error:
            print(f"jaxpage: {error}", file=sys.stderr)
            return 1
        return 0

    def _command(self, name: str, rest: str) -> None:
        conversation, rest = self._conversation, rest.strip()
        match name:
            case "/system":
                conversation.system = rest or None
                self._note("the system message is set" if rest else "there is no system message")
            case "/retry":
                self._show(conversation.retry())
            case "/reset":
                conversation.reset()
                self._note("what has been said is forgotten")
            case "/save":
                if not rest:
                    raise RequestError("/save takes the name of a file: /save chat.json")
                conversation.save(rest)
                self._note(f"saved to {rest}")
            case "/help":
                print(HELP, file=self._out)
            case "/quit" | "/exit":
                self.is_over = True
            case _:
                raise RequestError(f"there is no command {name}: /help lists them")

    def _show(self, pieces: Generator[Piece, None, None]) -> None:
        """Write an answer as it comes. In a terminal, Ctrl-C ends it and not the chat."""
        interrupts, is_stopped = self._interrupts, False
        with contextlib.closing(pieces):
            try:
                if interrupts is not None:
                    interrupts.stop_something = True
                self._write(pieces)
            except KeyboardInterrupt:
                if interrupts is None:
                    raise
                is_stopped = True
            finally:
                if interrupts is not None:
                    interrupts.stop_something = False
                self._dim(False)
                self._out.write("\n")
                self._out.flush()
        if is_stopped:
            self._note("stopped")
        elif self._conversation.finish_reason == "length":
            self._note("cut off: it is as long as --max-tokens or the model's context allows")

    def _write(self, pieces: Iterator[Piece]) -> None:
        was_reasoning = False
        for piece in pieces:
            if piece.is_reasoning and not self._is_terminal:
                continue
            self._dim(piece.is_reasoning)
            if was_reasoning and not piece.is_reasoning:
                self._out.write("\n\n")
            was_reasoning = piece.is_reasoning
            self._out.write(piece.text.translate(_CONTROLS) if self._is_terminal else piece.text)
            self._out.flush()

    def _dim(self, is_dim: bool) -> None:
        """Write in a fainter style from here on, or as usual."""
        if self._has_styles and is_dim != self._is_dim:
            self._is_dim = is_dim
            self._out.write(_DIM if is_dim else _PLAIN)

    def _note(self, text: str) -> None:
        if self._is_terminal:
            self._dim(True)
            self._out.write(f"({text})")
            self._dim(False)
            self._out.write("\n")


def messages(lines: Iterator[str] | TextIO) -> Iterator[str]:
    """Messages and commands: a line each, but for lines between triple quotes, which are one together."""
    quoted: list[str] | None = None
    for line in lines:
        text = line.rstrip("\r\n")
        if quoted is None and not text.startswith(_QUOTES):
            yield text
            continue
        part = text.removeprefix(_QUOTES) if quoted is None else text
        quoted = [] if quoted is None else quoted
        if part.rstrip().endswith(_QUOTES):
            yield "\n".join([*quoted, part.rstrip().removesuffix(_QUOTES)])
            quoted = None
        else:
            quoted.append(part)
    if quoted:
        yield "\n".join(quoted)


def typed(interrupts: Interrupts) -> Iterator[str]:
    """What a person types, until Ctrl-D. Ctrl-C gives up a line."""
    while True:
        try:
            interrupts.stop_something = True
            line = input("> ")
            interrupts.stop_something = False
        except KeyboardInterrupt:
            print()
            continue
        except EOFError:
            interrupts.stop_something = False
            print()
            return
        yield line


@contextlib.contextmanager
def line_editing() -> Iterator[None]:
    """Editing keys and a history, which is kept in the user's state folder; without either where they cannot be had."""
    try:
        import readline
    except ImportError:
        yield
        return
    file = history_file()
    readline.set_history_length(_MAX_HISTORY)
    with contextlib.suppress(OSError):
        readline.read_history_file(file)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            readline.write_history_file(file)


def history_file() -> Path:
    """Where the history is kept. https://specifications.freedesktop.org/basedir-spec/latest/"""
    state = os.environ.get("XDG_STATE_HOME") or os.path.join(os.path.expanduser("~"), ".local", "state")
    return Path(state) / "jaxpage" / "chat_history"
