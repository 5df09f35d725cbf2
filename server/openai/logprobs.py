"""Log-probabilities as OpenAI's clients read them, in the shapes of completions and of chat, and vLLM's of prompts.

In: tokens with their `Logprob`s. Out: structs that are sent as they are. All numbers are finite: they are of the
distribution before any option masks a token.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from jaxpage.outputs import Logprob

Entry = dict[int, Logprob] | None
"""Of one token: its own goes first; None where there is none, at the first token of a prompt."""


class CompletionLogprobs(msgspec.Struct, kw_only=True):
    """Of a completion's tokens, an item each in all lists."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]
    """Where each token would begin if all were written one after the other."""


class TopLogprob(msgspec.Struct, kw_only=True):
    """One of the most probable tokens."""

    token: str
    logprob: float
    bytes: list[int] | None
    """The token in UTF-8; null where it is only a part of a character."""


class ContentLogprob(TopLogprob, kw_only=True):
    """A token of an answer, and the most probable ones in its place."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, kw_only=True):
    """Of an answer's tokens."""

    content: list[ContentLogprob]
    refusal: None = None


class PromptLogprob(msgspec.Struct, kw_only=True):
    """Of one token in the place of a prompt's token."""

    logprob: float
    rank: int
    decoded_token: str


@dataclass(frozen=True, slots=True)
class ScoredTokens:
    """Tokens, their texts and what is known of them."""

    texts: Sequence[str]
    entries: Sequence[Entry]

    def of_completion(self, offset: int) -> CompletionLogprobs:
        """In completions' shape, where the tokens before these have so many characters."""
        offsets = []
        for text in self.texts:
            offsets.append(offset)
            offset += len(text)
        return CompletionLogprobs(
            tokens=list(self.texts),
            token_logprobs=[None if entry is None else _first(entry).logprob for entry in self.entries],
            top_logprobs=[None if entry is None else _by_text(entry.values()) for entry in self.entries],
            text_offset=offsets,
        )

    def of_chat(self, num_top: int) -> ChatLogprobs:
        """In chat's shape, with so many of the most probable tokens, -1 for all."""
        content = []
        for entry in self.entries:
            if entry is not None:
                most_probable = sorted(entry.values(), key=lambda found: found.rank)
                if num_top >= 0:  # the token itself may be less probable than those asked for
                    most_probable = [one for one in most_probable if one.rank <= num_top][:num_top]
                content.append(
                    ContentLogprob(
                        **_fields(_first(entry)), top_logprobs=[TopLogprob(**_fields(one)) for one in most_probable]
                    )
                )
        return ChatLogprobs(content=content)


def of_prompt(entries: Iterable[Entry]) -> list[dict[str, PromptLogprob] | None]:
    """A prompt's in vLLM's shape: by token id."""
    return [
        None
        if entry is None
        else {
            str(token_id): PromptLogprob(logprob=one.logprob, rank=one.rank, decoded_token=one.decoded_token)
            for token_id, one in entry.items()
        }
        for entry in entries
    ]


def _first(entry: dict[int, Logprob]) -> Logprob:
    return next(iter(entry.values()))


def _by_text(found: Iterable[Logprob]) -> dict[str, float]:
    """By text; of several tokens with the same text the first counts: the token itself, then the more probable one."""
    texts: dict[str, float] = {}
    for one in found:
        texts.setdefault(one.decoded_token, one.logprob)
    return texts


def _fields(one: Logprob) -> dict[str, Any]:
    text = one.decoded_token
    return {"token": text, "logprob": one.logprob, "bytes": None if "\ufffd" in text else list(text.encode())}
