"""Tokens in, text out, while they are generated: no half character is ever shown."""

from collections.abc import Collection, Iterable, Sequence
from functools import partial

from jaxpage.text.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"


class IncrementalDecoder:
    """Decodes tokens as they arrive: what `add` and `finish` return, joined, is the one-shot text after the prompt.

    A character that is not complete yet is held back. Cost per token is constant: only a window of the last tokens is
    decoded, never the whole text.
    """

    _KEEP, _MOST = 8, 16
    """Tokens in the window after and before it is cut. A UTF-8 character ends within 4 tokens, so a window that begins
    inside one agrees with the whole text well before its end."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        skip_special_tokens: bool = True,
        prompt_token_ids: Sequence[int] = (),
        shown_special_tokens: Collection[str] = (),
    ) -> None:
        """`prompt_token_ids`: what stands before; a first word keeps its leading space only after other text.

        `shown_special_tokens` are not skipped.
        """
        self._tokenizer = tokenizer
        self._visible_ids = partial(
            tokenizer.visible_ids, skip_special_tokens=skip_special_tokens, shown=shown_special_tokens
        )
        # Hidden tokens must not stand in the window: with nothing visible before it, a word would lose its space.
        # Some prompts end in many of them, so the tail is searched in growing pieces.
        tail = self._KEEP
        window = self._visible_ids(prompt_token_ids[-tail:])
        while len(window) < self._KEEP and tail < len(prompt_token_ids):
            tail *= 4
            window = self._visible_ids(prompt_token_ids[-tail:])
        self._window = window[-self._KEEP :]
        self._num_sent = len(self._decode())  # characters of the window's text that have been returned

    def add(self, token_ids: Iterable[int]) -> str:
        """Text that these tokens complete; empty while a character is unfinished or only hidden tokens came."""
        new = self._visible_ids(token_ids)
        if not new:
            return ""
        self._window += new
        text = _complete_part(self._decode())
        delta = text[self._num_sent :]
        self._num_sent = max(self._num_sent, len(text))
        if len(self._window) > self._MOST:
            del self._window[: -self._KEEP]
            self._num_sent = len(_complete_part(self._decode()))
        return delta

    def finish(self) -> str:
        """What is still held, with U+FFFD for a character cut off. The decoder is used up after this."""
        return self._decode()[self._num_sent :]

    def _decode(self) -> str:
        return self._tokenizer.decode(self._window, skip_special_tokens=False)


def _complete_part(text: str) -> str:
    # An unfinished character decodes to one U+FFFD at the end, whatever number of its bytes is there.
    return text.removesuffix(_REPLACEMENT)
