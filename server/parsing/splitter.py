"""From an answer's text to its parts: reasoning, content and tool calls.

In: the text in pieces as it is generated. Out: what each piece adds to a message. Whatever the pieces, the joined
additions are the same, and none is ever taken back; a whole answer is the case of one piece.

White space at the edges of reasoning, before a call and between calls belongs to the format, not to the message.
"""

import dataclasses
from collections.abc import Callable, Generator
from dataclasses import dataclass, field

from jaxpage.server.parsing.reader import Reader, Reading


@dataclass(slots=True)
class CallDelta:
    """What is new of one call."""

    index: int
    """Its place among the message's calls."""
    id: str | None = None
    """With `name`, in the call's first delta only."""
    name: str | None = None
    arguments: str = ""
    """JSON text as the model wrote it."""


@dataclass(slots=True)
class Delta:
    """What is new of a message."""

    reasoning: str = ""
    content: str = ""
    calls: list[CallDelta] = field(default_factory=list)
    """At most one per call, in order."""

    def __add__(self, later: "Delta") -> "Delta":
        """Both as one."""
        calls = {call.index: CallDelta(call.index, call.id, call.name, call.arguments) for call in self.calls}
        for call in later.calls:
            if (known := calls.setdefault(call.index, call)) is not call:
                known.arguments += call.arguments
        return Delta(self.reasoning + later.reasoning, self.content + later.content, list(calls.values()))


class Parts:
    """Where parsers put what they have understood; it decides about white space and surplus calls."""

    def __init__(
        self, new_call_id: Callable[[], str], *, max_num_calls: int | None = None, shows_reasoning: bool = True
    ) -> None:
        """`max_num_calls`: later calls are dropped, as is reasoning that is not shown."""
        self._new_call_id = new_call_id
        self._max_num_calls = max_num_calls
        self._shows_reasoning = shows_reasoning
        self._reasoning: list[str] = []
        self._content: list[str] = []
        self._calls: list[tuple[CallDelta, list[str]]] = []
        """New calls, each with the new pieces of its arguments."""
        self._blanks = ""
        """White space of which it is not clear yet whether it is shown."""
        self._has_reasoning = self._has_content = False
        self._num_calls = 0

    @property
    def num_calls(self) -> int:
        """Calls that the message has."""
        return self._num_calls if self._max_num_calls is None else min(self._num_calls, self._max_num_calls)

    def reasoning(self, text: str) -> None:
        """More of what the model says to itself."""
        shown = self._without_last_blanks(text)
        self._reasoning.append(shown if self._has_reasoning else shown.lstrip())
        self._has_reasoning = self._has_reasoning or shown != ""

    def end_reasoning(self) -> None:
        """The answer itself begins."""
        self._blanks = ""
        self._has_reasoning = True

    def content(self, text: str) -> None:
        """More of what the model says to the user."""
        shown = self._without_last_blanks(text)
        is_edge = not self._has_content and (self._has_reasoning or self._num_calls > 0)
        self._content.append(shown.lstrip() if is_edge else shown)
        self._has_content = self._has_content or shown != ""

    def call(self, name: str) -> None:
        """The model calls a function; its arguments follow."""
        self._blanks = ""
        self._num_calls += 1
        if self.num_calls == self._num_calls:
            self._calls.append((CallDelta(self._num_calls - 1, self._new_call_id(), name), []))

    def arguments(self, text: str) -> None:
        """More arguments of the last call."""
        if self.num_calls < self._num_calls:
            return
        if not self._calls:
            self._calls.append((CallDelta(self._num_calls - 1), []))
        self._calls[-1][1].append(text)

    def finish(self) -> None:
        """Nothing more comes."""
        if not self._has_reasoning and not self._num_calls:
            self._content.append(self._blanks)
        self._blanks = ""

    def take(self) -> Delta:
        """What is new since it was last asked for."""
        calls = [dataclasses.replace(call, arguments="".join(pieces)) for call, pieces in self._calls]
        reasoning = "".join(self._reasoning) if self._shows_reasoning else ""
        new = Delta(reasoning, "".join(self._content), calls)
        for pieces in (self._reasoning, self._content, self._calls):
            pieces.clear()
        return new

    def _without_last_blanks(self, text: str) -> str:
        """What was held back and `text`, but for the white space at its end, which is held back."""
        text = self._blanks + text
        shown = text.rstrip()
        self._blanks = text[len(shown) :]
        return shown


class Splitter:
    """The parts of one answer. Feed it every piece of text, then finish it once."""

    def __init__(self, read: Callable[[Reader, Parts], Reading[None]] | None, parts: Parts) -> None:
        """`read` parses the text into `parts`; None: all of it is content."""
        self._parts = parts
        self._parser: Generator[None, str, None] | None = None
        if read is not None:
            self._parser = read(Reader(), parts)
            next(self._parser)

    @property
    def has_calls(self) -> bool:
        """Whether the answer calls a function."""
        return self._parts.num_calls > 0

    def feed(self, text: str) -> Delta:
        """What `text` adds to the message."""
        if self._parser is None:
            return Delta(content=text)
        if text:
            self._parser.send(text)
        return self._parts.take()

    def finish(self) -> Delta:
        """What was held back, now that nothing more comes."""
        if self._parser is not None:
            try:
                self._parser.send("")
            except StopIteration:
                pass
            self._parts.finish()
        return self._parts.take()

    def split(self, text: str) -> Delta:
        """The parts of a whole answer."""
        return self.feed(text) + self.finish()
