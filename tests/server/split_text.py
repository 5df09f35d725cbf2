"""Answers taken apart as the server does it, whole or in pieces."""

import itertools
from collections.abc import Iterable

from jaxpage.sampling_params import SamplingParams
from jaxpage.server.parsing.conversation import Conversation
from jaxpage.server.parsing.reasoning import REASONING_FORMATS
from jaxpage.server.parsing.splitter import CallDelta, Delta, Splitter
from jaxpage.server.parsing.tools import TOOL_FORMATS

NAMES = frozenset({"f", "get_weather"})


def splitter(
    tools: str | None = None,
    reasoning: str | None = None,
    prompt_end: str = "",
    *,
    max_num_calls: int | None = None,
    shows_reasoning: bool = True,
) -> Splitter:
    """One for the formats of these names; call ids are "0", "1" and so on."""
    conversation = Conversation(
        token_ids=[],
        params=SamplingParams(),
        prompt_end=prompt_end,
        reasoning=REASONING_FORMATS.get(reasoning or ""),
        tools=TOOL_FORMATS.get(tools or ""),
        names=NAMES,
        max_num_calls=max_num_calls,
        enforces_calls=False,
        names_function=False,
        shows_reasoning=shows_reasoning,
    )
    ids = map(str, itertools.count())
    return conversation.splitter(new_call_id=lambda: next(ids))


def in_pieces(one: Splitter, pieces: Iterable[str]) -> list[Delta]:
    """What each piece adds, and the end."""
    return [*(one.feed(piece) for piece in pieces), one.finish()]


def joined(deltas: Iterable[Delta]) -> Delta:
    """The message that the deltas make."""
    return sum(deltas, Delta())


def calls(*found: tuple[str, str]) -> list[CallDelta]:
    """Whole calls of these names and arguments."""
    return [CallDelta(index, str(index), name, arguments) for index, (name, arguments) in enumerate(found)]
