"""The blocks of a message of Anthropic's while they grow, and the events that say so: thoughts, text, calls.

In: what is new of an answer. Out: events, and at last the blocks. They come one after the other: the next one begins
where the last one stops. A whole answer is the case of one piece, whose events nobody wants.
"""

from collections.abc import Iterator
from typing import Any

import msgspec

from jaxpage.server.anthropic.protocol import (
    Block,
    BlockDelta,
    BlockStart,
    BlockStop,
    InputDelta,
    TextBlock,
    TextDelta,
    ThinkingBlock,
    ThinkingDelta,
    ToolUseBlock,
)
from jaxpage.server.parsing.splitter import CallDelta, Delta

type Event = BlockStart | BlockDelta | BlockStop


class Blocks:
    """One message's blocks."""

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        """The last one may still grow."""
        self._is_open = False
        self._arguments = ""
        """Of the last call."""

    def take(self, new: Delta) -> Iterator[Event]:
        """What is new."""
        if new.reasoning:
            if not self._grows(ThinkingBlock):
                yield from self._start(ThinkingBlock(thinking=""))
            block = self.blocks[-1]
            assert isinstance(block, ThinkingBlock)
            block.thinking += new.reasoning
            yield self._delta(ThinkingDelta(thinking=new.reasoning))
        if new.content:
            yield from self._add_text(new.content)
        for call in new.calls:
            yield from self._add_to_call(call)

    def finish(self) -> Iterator[Event]:
        """Nothing more comes. An answer of nothing is a block without text."""
        if not self.blocks:
            yield from self._add_text("")
        yield from self._stop()

    def _add_text(self, text: str) -> Iterator[Event]:
        if not self._grows(TextBlock):
            yield from self._start(TextBlock(text=""))
        block = self.blocks[-1]
        assert isinstance(block, TextBlock)
        block.text += text
        if text:
            yield self._delta(TextDelta(text=text))

    def _add_to_call(self, call: CallDelta) -> Iterator[Event]:
        if call.name is not None:
            yield from self._start(ToolUseBlock(id=call.id or "", name=call.name, input={}))
        if call.arguments:
            self._arguments += call.arguments
            yield self._delta(InputDelta(partial_json=call.arguments))

    def _grows(self, kind: type[Block]) -> bool:
        return self._is_open and isinstance(self.blocks[-1], kind)

    def _start(self, block: Block) -> Iterator[Event]:
        yield from self._stop()
        self.blocks.append(block)
        self._is_open = True
        yield BlockStart(index=len(self.blocks) - 1, content_block=block)

    def _stop(self) -> Iterator[Event]:
        if not self._is_open:
            return
        self._is_open = False
        block = self.blocks[-1]
        if isinstance(block, ToolUseBlock):
            block.input, self._arguments = _object(self._arguments), ""
        yield BlockStop(index=len(self.blocks) - 1)

    def _delta(self, delta: TextDelta | ThinkingDelta | InputDelta) -> BlockDelta:
        return BlockDelta(index=len(self.blocks) - 1, delta=delta)


def _object(arguments: str) -> dict[str, Any]:
    """What the arguments say, if they are an object."""
    try:
        found = msgspec.json.decode(arguments)
        msgspec.json.encode(found)  # not all that can be read can be written
    except (msgspec.MsgspecError, ValueError, RecursionError, OverflowError):
        return {}
    return found if isinstance(found, dict) else {}
