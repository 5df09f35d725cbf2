"""/v1/messages: Anthropic's protocol, for clients that speak it."""

import functools
import itertools
from collections.abc import AsyncIterator

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from jaxpage.errors import RequestError
from jaxpage.outputs import SequenceDelta
from jaxpage.sampling_params import SamplingParams
from jaxpage.server.answer import Choice, choice_of, start
from jaxpage.server.anthropic.message_blocks import Blocks
from jaxpage.server.anthropic.protocol import (
    CountTokensRequest,
    Message,
    MessageDelta,
    MessageEvent,
    MessagesRequest,
    MessageStart,
    MessageStop,
    MessageUsage,
    Stop,
    StopReason,
    TokenCount,
)
from jaxpage.server.conversation import converse
from jaxpage.server.errors import AnthropicError, describe_to_anthropic
from jaxpage.server.generation import Generation
from jaxpage.server.parsing.splitter import Splitter
from jaxpage.server.request_log import record_of
from jaxpage.server.service import encode, read_request, service_of
from jaxpage.server.sse import event_response, named_frames, whole_response


async def create_message(http_request: Request) -> Response:
    """POST /v1/messages: whole or, with `stream`, as events."""
    request, body = await read_request(http_request, MessagesRequest)
    service = service_of(http_request)
    chat = request.chat()
    params = request.engine_params(request.max_tokens, service.engine.max_model_len)
    conversation = await encode(body, lambda: converse(service.engine, service.dialect, chat, params))
    try:
        generation = await start(http_request, request, [conversation.token_ids], conversation.params, "msg")
    except RequestError as error:
        raise conversation.as_client_error(error) from error
    splitter = conversation.splitter()
    request_id = record_of(http_request).request_id
    head = Message(
        id=f"msg_{request_id}",
        model=service.model_name,
        content=[],
        stop_reason=None,
        stop_sequence=None,
        usage=_usage(generation),
    )
    if request.stream:
        last_after = functools.partial(_error_event, request_id)
        frames = named_frames(_events(generation, head, request.max_tokens, splitter), last_after)
        return await event_response(http_request, generation, frames)

    def reply(outputs: list[tuple[int, SequenceDelta]]) -> msgspec.Struct:
        [(index, output)] = outputs
        choice, usage = choice_of(generation, index, output), _usage(generation)
        blocks = Blocks()
        for _ in itertools.chain(blocks.take(splitter.split(choice.text)), blocks.finish()):
            pass
        stop = _stop(choice, usage, request.max_tokens, splitter)
        return msgspec.structs.replace(
            head,
            content=blocks.blocks,
            stop_reason=stop.stop_reason,
            stop_sequence=stop.stop_sequence,
            usage=usage,
        )

    return await whole_response(http_request, generation, reply)


async def count_tokens(http_request: Request) -> Response:
    """POST /v1/messages/count_tokens: what the same conversation would have as input tokens."""
    request, body = await read_request(http_request, CountTokensRequest)
    service, chat = service_of(http_request), request.chat()
    conversation = await encode(body, lambda: converse(service.engine, service.dialect, chat, SamplingParams()))
    count = TokenCount(input_tokens=len(conversation.token_ids))
    return Response(msgspec.json.encode(count), media_type="application/json")


async def _events(
    generation: Generation, head: Message, max_tokens: int, splitter: Splitter
) -> AsyncIterator[MessageEvent]:
    yield MessageStart(message=msgspec.structs.replace(head, usage=_usage(generation)))
    blocks = Blocks()
    choice: Choice | None = None
    async for index, output in generation.updates():
        choice = choice_of(generation, index, output)
        for event in blocks.take(splitter.feed(choice.text)):
            yield event
    assert choice is not None, "a generation without updates raises"
    for event in itertools.chain(blocks.take(splitter.finish()), blocks.finish()):
        yield event
    usage = _usage(generation)
    yield MessageDelta(delta=_stop(choice, usage, max_tokens, splitter), usage=usage)
    yield MessageStop()


def _error_event(request_id: str, error: Exception) -> AnthropicError:
    return describe_to_anthropic(error, request_id)[1]


def _usage(generation: Generation) -> MessageUsage:
    usage = generation.usage
    cached = usage.prompt_tokens_details.cached_tokens
    return MessageUsage(
        input_tokens=usage.prompt_tokens - cached,
        cache_read_input_tokens=cached,
        output_tokens=usage.completion_tokens,
    )


def _stop(choice: Choice, usage: MessageUsage, max_tokens: int, splitter: Splitter) -> Stop:
    reason: StopReason = "end_turn"
    sequence = None
    if choice.finish_reason == "length":
        reason = "max_tokens" if usage.output_tokens >= max_tokens else "model_context_window_exceeded"
    elif isinstance(choice.stop_reason, str):
        reason, sequence = "stop_sequence", choice.stop_reason
    elif splitter.has_calls:
        reason = "tool_use"
    return Stop(stop_reason=reason, stop_sequence=sequence)
