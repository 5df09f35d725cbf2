"""POST /v1/chat/completions: a conversation through the model's chat template, with `n` choices."""

import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

import msgspec
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from jaxpage.errors import RequestError
from jaxpage.outputs import CompletionOutput
from jaxpage.server.generation import Generation
from jaxpage.server.protocol import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatMessage,
    ChatRequest,
    decode,
)
from jaxpage.server.service import encode, read_body, service_of
from jaxpage.server.sse import event_response, whole_response

RESERVED_TEMPLATE_KWARGS = frozenset(
    {"self", "messages", "tools", "documents", "tokenize", "add_generation_prompt", "chat_template"}
)
"""What the server itself gives to the chat template."""


async def chat_completions(http_request: Request) -> Response:
    """Answers in one piece or, with `stream`, as server-sent events."""
    service = service_of(http_request)
    service.check_available()
    body = await read_body(http_request)
    request = decode(body, ChatRequest)
    service.check_model(request.model)
    params = request.sampling_params(max_tokens(request))
    kwargs = template_kwargs(request)
    token_ids = await encode(body, lambda: service.engine.encode_chat(request.messages, **kwargs))
    request_id, created, model = f"chatcmpl-{uuid.uuid4().hex}", int(time.time()), service.model_name
    generation = service.admit(request_id, [token_ids], params)
    if request.stream:
        chunk = ChatChunk(id=request_id, created=created, model=model, choices=[])
        return await event_response(http_request, generation, _chunks(generation, chunk, request.include_usage))

    def completion(outputs: list[CompletionOutput]) -> ChatCompletion:
        choices = [_choice(index, output) for index, output in enumerate(outputs)]
        return ChatCompletion(id=request_id, created=created, model=model, choices=choices, usage=generation.usage)

    return await whole_response(http_request, generation, completion)


def max_tokens(request: ChatRequest) -> int | None:
    """The cap on generated tokens, None for the rest of the context; `max_completion_tokens` wins over the old name."""
    name, value = "max_tokens", request.max_tokens
    if request.max_completion_tokens is not None:
        name, value = "max_completion_tokens", request.max_completion_tokens
    if value is not None and value < 1:
        raise RequestError(f"{name} is {value}: it must be at least 1, or left out for the rest of the context", name)
    return value


def template_kwargs(request: ChatRequest) -> dict[str, Any]:
    """The client's own variables for the chat template, such as `enable_thinking`."""
    kwargs = request.chat_template_kwargs or {}
    if reserved := sorted(RESERVED_TEMPLATE_KWARGS & kwargs.keys()):
        raise RequestError(f"chat_template_kwargs may not set {', '.join(reserved)}", "chat_template_kwargs")
    return kwargs


async def _chunks(generation: Generation, chunk: ChatChunk, include_usage: bool) -> AsyncIterator[ChatChunk]:
    """A choice opens with its role, goes on with text, and closes with an empty delta and the finish reason."""
    chunk = msgspec.structs.replace(chunk, usage=None if include_usage else UNSET)
    num_sent: list[int | None] = [None] * generation.num_choices  # characters of each choice; None: not even the role
    async for index, output in generation.updates():
        already = num_sent[index]
        if already is None:
            already = 0
            opening = ChatChunkChoice(index=index, delta=ChatDelta(role="assistant", content=""))
            yield msgspec.structs.replace(chunk, choices=[opening])
        if text := output.text[already:]:
            growth = ChatChunkChoice(index=index, delta=ChatDelta(content=text))
            yield msgspec.structs.replace(chunk, choices=[growth])
        num_sent[index] = len(output.text)
        if output.finish_reason is not None:
            closing = ChatChunkChoice(
                index=index, delta=ChatDelta(), finish_reason=output.finish_reason, stop_reason=output.stop_reason
            )
            yield msgspec.structs.replace(chunk, choices=[closing])
    if include_usage:
        yield msgspec.structs.replace(chunk, usage=generation.usage)


def _choice(index: int, output: CompletionOutput) -> ChatChoice:
    return ChatChoice(
        index=index,
        message=ChatMessage(content=output.text),
        finish_reason=output.finish_reason,
        stop_reason=output.stop_reason,
    )
