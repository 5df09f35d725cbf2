"""A conversation: its messages, and the request that the next answer is asked for with.

In: what the user says. Out: the answer, piece by piece. A message that gets no answer is not kept, so that one that is
refused does not end the conversation.
"""

import contextlib
import json
import os
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxpage.chat.connection import Connection, answer
from jaxpage.errors import RequestError


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of an answer, as it comes."""

    text: str
    is_reasoning: bool = False


@dataclass(slots=True)
class Conversation:
    """What has been said, and to whom."""

    connection: Connection
    model: str
    options: Mapping[str, Any]
    """Fields of the requests besides model and messages."""
    system: str | None = None
    turns: list[tuple[str, str]] = field(default_factory=list)
    """What the user said, and the answer."""
    finish_reason: str | None = None
    """Why the last answer ended; None if it was stopped."""
    _last: str | None = None
    """The last message."""
    _last_has_turn: bool = False

    @property
    def messages(self) -> list[dict[str, str]]:
        """All that has been said, as OpenAI's protocol has it."""
        found = [] if self.system is None else [{"role": "system", "content": self.system}]
        for asked, answered in self.turns:
            found += [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
        return found

    def ask(self, text: str) -> Generator[Piece, None, None]:
        """The answer to `text`. If it is left early, what has come is kept. Raises `RequestError` if there is none."""
        self._last, self._last_has_turn, self.finish_reason = text, False, None
        body = {
            **self.options,
            "model": self.model,
            "messages": [*self.messages, {"role": "user", "content": text}],
        }
        written: list[str] = []
        try:
            with contextlib.closing(answer(self.connection, body)) as chunks:
                for chunk in chunks:
                    for choice in chunk.get("choices") or ():
                        delta = choice.get("delta") or {}
                        if thought := delta.get("reasoning_content") or delta.get("reasoning"):
                            yield Piece(thought, is_reasoning=True)
                        if content := delta.get("content"):
                            written.append(content)
                            yield Piece(content)
                        self.finish_reason = choice.get("finish_reason") or self.finish_reason
        except RequestError:
            raise
        except BaseException:
            if written:
                self._keep(text, "".join(written))
            raise
        self._keep(text, "".join(written))

    def retry(self) -> Generator[Piece, None, None]:
        """Another answer to the last message. Raises `RequestError` if there is none."""
        if self._last is None:
            raise RequestError("there is no message to answer again")
        if self._last_has_turn:
            self.turns.pop()
        return self.ask(self._last)

    def reset(self) -> None:
        """Forget what has been said; the system message stays."""
        self.turns.clear()
        self._last, self._last_has_turn = None, False

    def save(self, path: str) -> None:
        """Write the conversation to a file, as the body of a request. Raises `RequestError` that names it."""
        body = {**self.options, "model": self.model, "messages": self.messages}
        try:
            with open(os.path.expanduser(path), "w", encoding="utf-8") as file:
                json.dump(body, file, ensure_ascii=False, indent=2)
                file.write("\n")
        except OSError as error:
            raise RequestError(f"cannot write {path}: {error.strerror}") from error

    def _keep(self, asked: str, answered: str) -> None:
        self.turns.append((asked, answered))
        self._last_has_turn = True
