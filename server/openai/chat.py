"""POST /v1/chat/completions: a conversation through the model's chat template, with `n` choices."""

from collections.abc import Iterator
from typing import Any

from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from jaxpage.server.answer import Choice
from jaxpage.server.openai.chat_protocol import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatMessage,
    ChatRequest,
    FunctionCall,
    FunctionDelta,
    ToolCall,
    ToolCallDelta,
)
from jaxpage.server.openai.form import Form, answer
from jaxpage.server.openai.logprobs import of_prompt
from jaxpage.server.parsing.conversation import Conversation, converse
from jaxpage.server.parsing.splitter import CallDelta, Delta, Splitter
from jaxpage.server.service import encode, read_request, service_of


async def chat_completions(http_request: Request) -> Response:
    """Answers in one piece or, with `stream`, as server-sent events."""
    request, body = await read_request(http_request, ChatRequest)
    service = service_of(http_request)
    conversation = await encode(body, lambda: converse(service.engine, service.dialect, request))
    form = _form(conversation, request.top_logprobs or 0)
    return answer(
        http_request,
        request,
        [conversation.token_ids],
        conversation.params,
        form,
        as_client_error=conversation.as_client_error,
    )


def _form(conversation: Conversation, num_top: int) -> Form:
    splitters: dict[int, Splitter] = {}
    """Of the choices that are streamed."""

    def whole(choice: Choice) -> ChatChoice:
        splitter = conversation.splitter()
        return ChatChoice(
            index=choice.index,
            message=message_of(splitter.split(choice.text)),
            logprobs=None if choice.tokens is None else choice.tokens.of_chat(num_top),
            finish_reason=conversation.finish_reason(splitter, choice.finish_reason),
            stop_reason=choice.stop_reason,
        )

    def steps(choice: Choice) -> Iterator[ChatChunkChoice]:
        """A choice opens with its role, goes on with its parts, and closes with an empty delta and the finish reason.

        The log-probabilities of new tokens come with the first of the parts that they belong to, all of them.
        """
        splitter = splitters.setdefault(choice.index, conversation.splitter())
        if choice.is_first:
            yield ChatChunkChoice(index=choice.index, delta=ChatDelta(role="assistant", content=""))
        new = splitter.feed(choice.text)
        if choice.finish_reason is not None:
            new += splitter.finish()
        logprobs = choice.tokens.of_chat(num_top) if choice.tokens is not None and choice.tokens.texts else None
        deltas = list(_deltas(new))
        if not deltas and logprobs is not None:
            deltas = [ChatDelta()]
        for delta in deltas:
            yield ChatChunkChoice(index=choice.index, delta=delta, logprobs=logprobs)
            logprobs = None
        if choice.finish_reason is not None:
            yield ChatChunkChoice(
                index=choice.index,
                delta=ChatDelta(),
                finish_reason=conversation.finish_reason(splitter, choice.finish_reason),
                stop_reason=choice.stop_reason,
            )

    def of_reply(choice: Choice) -> dict[str, Any]:
        return {} if choice.prompt_logprobs is None else {"prompt_logprobs": of_prompt(choice.prompt_logprobs)}

    return Form("chatcmpl", reply=ChatCompletion, chunk=ChatChunk, choice=whole, steps=steps, of_reply=of_reply)


def message_of(whole: Delta) -> ChatMessage:
    """A whole answer as the message it is."""
    calls = [
        ToolCall(id=call.id or "", function=FunctionCall(name=call.name or "", arguments=call.arguments))
        for call in whole.calls
    ]
    has_others = bool(calls or whole.reasoning)
    return ChatMessage(
        content=None if has_others and not whole.content else whole.content,
        reasoning_content=whole.reasoning or UNSET,
        reasoning=whole.reasoning or UNSET,
        tool_calls=calls or UNSET,
    )


def _deltas(new: Delta) -> Iterator[ChatDelta]:
    """What is new of a message, one kind at a time: clients may look at only one of a delta's fields."""
    if new.reasoning:
        yield ChatDelta(reasoning_content=new.reasoning, reasoning=new.reasoning)
    if new.content:
        yield ChatDelta(content=new.content)
    if new.calls:
        yield ChatDelta(tool_calls=[_call_delta(call) for call in new.calls])


def _call_delta(call: CallDelta) -> ToolCallDelta:
    if call.name is None:
        return ToolCallDelta(index=call.index, function=FunctionDelta(arguments=call.arguments))
    return ToolCallDelta(
        index=call.index,
        id=call.id or "",
        type="function",
        function=FunctionDelta(name=call.name, arguments=call.arguments),
    )
