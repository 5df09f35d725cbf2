"""POST /v1/chat/completions: a conversation through the model's chat template, with `n` choices."""

from collections.abc import Iterator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from jaxpage.errors import RequestError
from jaxpage.server.answer import Choice, Form, Sent, answer
from jaxpage.server.logprobs import of_prompt
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
    return await answer(http_request, request, [token_ids], params, _form(request))


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


def _form(request: ChatRequest) -> Form:
    num_top = request.top_logprobs or 0

    def whole(choice: Choice) -> ChatChoice:
        return ChatChoice(
            index=choice.index,
            message=ChatMessage(content=choice.text),
            logprobs=None if choice.tokens is None else choice.tokens.of_chat(num_top),
            finish_reason=choice.finish_reason,
            stop_reason=choice.stop_reason,
        )

    def steps(choice: Choice, sent: Sent | None) -> Iterator[ChatChunkChoice]:
        """A choice opens with its role, goes on with text, and closes with an empty delta and the finish reason."""
        if sent is None:
            yield ChatChunkChoice(index=choice.index, delta=ChatDelta(role="assistant", content=""))
        text, tokens = (sent or Sent()).rest_of(choice)
        if text or (tokens is not None and tokens.texts):
            logprobs = None if tokens is None else tokens.of_chat(num_top)
            yield ChatChunkChoice(index=choice.index, delta=ChatDelta(content=text), logprobs=logprobs)
        if choice.finish_reason is not None:
            yield ChatChunkChoice(
                index=choice.index,
                delta=ChatDelta(),
                finish_reason=choice.finish_reason,
                stop_reason=choice.stop_reason,
            )

    def of_reply(choice: Choice) -> dict[str, Any]:
        return {} if choice.prompt_logprobs is None else {"prompt_logprobs": of_prompt(choice.prompt_logprobs)}

    return Form("chatcmpl", reply=ChatCompletion, chunk=ChatChunk, choice=whole, steps=steps, of_reply=of_reply)
