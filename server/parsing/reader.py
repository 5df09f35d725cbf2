"""Text that arrives in pieces, for parsers that are written as if all of it were there.

A parser is a generator that reads through a `Reader`, and waits inside it for the next piece. What it makes of a text
cannot depend on where the text was cut, and what it holds back are its local variables.
"""

from collections.abc import Callable, Generator

type Reading[T] = Generator[None, str, T]
"""A parser, or a part of one, that returns a `T`. Each value sent to it is a piece of text, and "" the end."""


class Reader:
    """The text, with a memory of what was read since `forget`."""

    def __init__(self) -> None:
        self._text = ""
        self._start = self._at = 0
        """Where the memory begins, and where reading goes on."""
        self._ended = False

    @property
    def taken(self) -> str:
        """What was read since `forget`, and not put back."""
        return self._text[self._start : self._at]

    def forget(self) -> None:
        """What was read so far is understood, or shown."""
        self._start = self._at

    def next(self) -> Reading[str]:
        """The next character; "" at the end, as often as it is asked for."""
        if self._at == len(self._text):
            yield from self._more()
        character = self._text[self._at : self._at + 1]
        self._at += len(character)
        return character

    def back(self, text: str) -> None:
        """Put back `text`, which was read last."""
        self._at -= len(text)

    def past_blanks(self) -> Reading[str]:
        """The next character that is no white space."""
        while (character := (yield from self.next())).isspace():
            pass
        return character

    def literal(self, text: str) -> Reading[bool]:
        """Whether `text` comes next; it is read then, and nothing otherwise."""
        while not self._ended and len(self._text) - self._at < len(text) and text.startswith(self._text[self._at :]):
            yield from self._more()
        found = self._text.startswith(text, self._at)
        self._at += len(text) * found
        return found

    def until(self, mark: str, show: Callable[[str], None]) -> Reading[bool]:
        """Show all text before `mark`, which is then read and all that is `taken`. False if it never comes.

        What may become the mark is held back until it is clear.
        """
        while True:
            place = self._text.find(mark, self._at)
            end = place if place >= 0 else len(self._text) - (0 if self._ended else self._num_begun(mark))
            show(self._text[self._at : end])
            self._start = self._at = end
            if place >= 0:
                self._at += len(mark)
                return True
            if self._ended:
                return False
            yield from self._more()

    def rest(self, show: Callable[[str], None]) -> Reading[None]:
        """Show all that comes."""
        while character := (yield from self.next()):
            show(character + self._text[self._at :])
            self._start = self._at = len(self._text)

    def _num_begun(self, mark: str) -> int:
        """Characters at the end of the text that may become `mark`."""
        longest = min(len(mark) - 1, len(self._text) - self._at)
        return next((length for length in range(longest, 0, -1) if self._text.endswith(mark[:length])), 0)

    def _more(self) -> Reading[None]:
        """Wait for a piece, unless the text has ended."""
        if not self._ended:
            piece = yield
            self._ended = not piece
            self._text = self._text[self._start :] + piece
            self._at -= self._start
            self._start = 0
