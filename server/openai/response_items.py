"""The items of a response's output while they grow, and the events that say so: reasoning, message, calls.

In: what is new of an answer. Out: events, and at last the items. They come one after the other: the next one begins
where the last one is done. A whole answer is the case of one piece, whose events nobody wants.
"""

import uuid
from collections.abc import Callable, Iterator
from typing import Any

from jaxpage.server.openai.responses_protocol import (
    ArgumentsDeltaEvent,
    ArgumentsDoneEvent,
    FunctionCall,
    ItemEvent,
    OutputItem,
    OutputMessage,
    OutputText,
    PartEvent,
    Reasoning,
    ReasoningDeltaEvent,
    ReasoningDoneEvent,
    ReasoningText,
    Status,
    StreamEvent,
    TextDeltaEvent,
    TextDoneEvent,
    TextLogprob,
)
from jaxpage.server.parsing.splitter import CallDelta, Delta


class OutputItems:
    """One response's items."""

    def __init__(self, next_number: Callable[[], int]) -> None:
        """`next_number` gives each event its number."""
        self.items: list[OutputItem] = []
        """The last one may still grow."""
        self._next = next_number
        self._is_open = False
        self._logprobs: list[TextLogprob] = []
        """Of tokens that no event has carried yet."""

    @property
    def reasoning(self) -> str:
        """All of it."""
        return "".join(part.text for item in self.items if isinstance(item, Reasoning) for part in item.content)

    def take(self, new: Delta, logprobs: list[TextLogprob]) -> Iterator[StreamEvent]:
        """What is new, and the log-probabilities of the tokens that it is made of.

        They come with the next piece of the text, those of reasoning and calls as well.
        """
        self._logprobs += logprobs
        if new.reasoning:
            yield from self._add_reasoning(new.reasoning)
        if new.content or (self._logprobs and self._is_open and isinstance(self.items[-1], OutputMessage)):
            yield from self._add_text(new.content)
        for call in new.calls:
            yield from self._add_to_call(call)

    def finish(self, status: Status) -> Iterator[StreamEvent]:
        """Nothing more comes. An answer of nothing is a message without text."""
        if not self.items:
            yield from self._add_text("")
        yield from self._close(status)

    def as_message(self) -> dict[str, Any]:
        """What the model has said, for the next turn's chat template; without its reasoning."""
        texts = [part.text for item in self.items if isinstance(item, OutputMessage) for part in item.content]
        calls = [
            {"id": item.call_id, "type": "function", "function": {"name": item.name, "arguments": item.arguments}}
            for item in self.items
            if isinstance(item, FunctionCall)
        ]
        message: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
        return message | {"tool_calls": calls} if calls else message

    def _add_reasoning(self, text: str) -> Iterator[StreamEvent]:
        if not (self._is_open and isinstance(self.items[-1], Reasoning)):
            new = Reasoning(id=_new_id("rs"), status="in_progress")
            yield from self._open(new)
            new.content.append(ReasoningText(text=""))
            yield self._part("response.content_part.added", new.content[0])
        item = self.items[-1]
        assert isinstance(item, Reasoning)
        item.content[0].text += text
        yield ReasoningDeltaEvent(
            sequence_number=self._next(), item_id=item.id, output_index=len(self.items) - 1, delta=text
        )

    def _add_text(self, text: str) -> Iterator[StreamEvent]:
        if not (self._is_open and isinstance(self.items[-1], OutputMessage)):
            new = OutputMessage(id=_new_id("msg"), status="in_progress")
            yield from self._open(new)
            new.content.append(OutputText(text=""))
            yield self._part("response.content_part.added", new.content[0])
        item = self.items[-1]
        assert isinstance(item, OutputMessage)
        logprobs, self._logprobs = self._logprobs, []
        item.content[0].text += text
        item.content[0].logprobs += logprobs
        if text or logprobs:
            yield TextDeltaEvent(
                sequence_number=self._next(),
                item_id=item.id,
                output_index=len(self.items) - 1,
                delta=text,
                logprobs=logprobs,
            )

    def _add_to_call(self, new: CallDelta) -> Iterator[StreamEvent]:
        if new.name is not None:
            call_id = new.id or ""
            yield from self._open(
                FunctionCall(id=_new_id("fc"), status="in_progress", call_id=call_id, name=new.name, arguments="")
            )
        item = self.items[-1]
        assert isinstance(item, FunctionCall), "arguments follow their name"
        if new.arguments:
            item.arguments += new.arguments
            yield ArgumentsDeltaEvent(
                sequence_number=self._next(), item_id=item.id, output_index=len(self.items) - 1, delta=new.arguments
            )

    def _open(self, item: OutputItem) -> Iterator[StreamEvent]:
        yield from self._close("completed")
        self.items.append(item)
        self._is_open = True
        yield self._item("response.output_item.added")

    def _close(self, status: Status) -> Iterator[StreamEvent]:
        if not self._is_open:
            return
        self._is_open = False
        item, index = self.items[-1], len(self.items) - 1
        item.status = status
        match item:
            case Reasoning(content=[part]):
                yield ReasoningDoneEvent(
                    sequence_number=self._next(), item_id=item.id, output_index=index, text=part.text
                )
                yield self._part("response.content_part.done", part)
            case OutputMessage(content=[part]):
                yield TextDoneEvent(
                    sequence_number=self._next(),
                    item_id=item.id,
                    output_index=index,
                    text=part.text,
                    logprobs=part.logprobs,
                )
                yield self._part("response.content_part.done", part)
            case FunctionCall():
                yield ArgumentsDoneEvent(
                    sequence_number=self._next(),
                    item_id=item.id,
                    output_index=index,
                    name=item.name,
                    arguments=item.arguments,
                )
        yield self._item("response.output_item.done")

    def _item(self, kind: Any) -> ItemEvent:
        return ItemEvent(type=kind, sequence_number=self._next(), output_index=len(self.items) - 1, item=self.items[-1])

    def _part(self, kind: Any, part: OutputText | ReasoningText) -> PartEvent:
        return PartEvent(
            type=kind,
            sequence_number=self._next(),
            item_id=self.items[-1].id,
            output_index=len(self.items) - 1,
            part=part,
        )


def _new_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"
