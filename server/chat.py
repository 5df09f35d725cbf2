"""POST /v1/chat/completions: a conversation through the model's chat template, with `n` choices."""

from collections.abc import Iterator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from jaxpage.errors import RequestError
from jaxpage.outputs import CompletionOutput
from jaxpage.server.answer import Form, answer
from jaxpage.server.protocol import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatMessage,
    ChatRequest,
)
from jaxpage.server.service import encode, read_request, service_of

RESERVED_TEMPLATE_KWARGS = frozenset(
    {"self", "messages", "tools", "documents", "tokenize", "add_generation_prompt", "chat_template"}
)
"""What the server itself gives to the chat template."""


async def chat_completions(http_request: Request) -> Response:
    """Answers in one piece or, with `stream`, as server-sent events."""
    request, body = await read_request(http_request, ChatRequest)
    engine = service_of(http_request).engine
    params = request.engine_params(max_tokens(request), engine.max_model_len)
    kwargs = template_kwargs(request)
    token_ids = await encode(body, lambda: engine.encode_chat(request.messages, **kwargs))
    return await answer(http_request, request, [token_ids], params, FORM)


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


def _choice(index: int, output: CompletionOutput) -> ChatChoice:
    return ChatChoice(
        index=index,
        message=ChatMessage(content=output.text),
        finish_reason=output.finish_reason,
        stop_reason=output.stop_reason,
    )


def _steps(index: int, output: CompletionOutput, num_sent: int | None) -> Iterator[ChatChunkChoice]:
    """A choice opens with its role, goes on with text, and closes with an empty delta and the finish reason."""
    if num_sent is None:
        yield ChatChunkChoice(index=index, delta=ChatDelta(role="assistant", content=""))
    if text := output.text[num_sent or 0 :]:
        yield ChatChunkChoice(index=index, delta=ChatDelta(content=text))
    if output.finish_reason is not None:
        yield ChatChunkChoice(
            index=index, delta=ChatDelta(), finish_reason=output.finish_reason, stop_reason=output.stop_reason
        )


FORM = Form("chatcmpl", reply=ChatCompletion, chunk=ChatChunk, choice=_choice, steps=_steps)
